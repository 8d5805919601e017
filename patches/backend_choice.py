"""`locks` is a known attention backend: on the command line and in SGLang's registry."""

from ..packages import missing_package
from ..seams import BACKEND, Seam
from ..support import UnsupportedError


def add_backend() -> None:
    """Add the name to the choices (argparse reads that list by reference) and the factory to the registry, once."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if BACKEND not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([BACKEND])
    if BACKEND not in ATTENTION_BACKENDS:
        register_attention_backend(BACKEND)(_create)


def _create(runner: object) -> object:
    """Factory that SGLang calls once the KV pool exists. Heavy imports wait until here, so that the name is always known.

    Raises:
        UnsupportedError: a package that the backend needs does not import; `locks-sglang doctor` says the same.
    """
    try:
        from ..backend import create_backend

        return create_backend(runner)
    except ImportError as error:
        what, fix = missing_package(error)
        raise UnsupportedError(f"locks cannot start: {what}. {fix}") from error


def backend_is_known() -> bool:
    """Whether choices and registry hold the name, the choices exactly once."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return server_args.ATTENTION_BACKEND_CHOICES.count(BACKEND) == 1 and BACKEND in ATTENTION_BACKENDS


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.server_args.add_attention_backend_choices",
        "call",
        add_backend,
        "adds locks to the choices of --attention-backend and to the registry of backends",
        probe=backend_is_known,
    ),
)
