"""Entry point of SGLang's plugin framework (group `sglang.srt.plugins`).

SGLang logs and swallows whatever an entry function raises, so this one only registers names and hooks; everything that
can fail is checked when the arguments are resolved and when the backend is built.
"""


def register() -> None:
    """Make `--attention-backend locks` known in this process. Called by SGLang in every process; safe to call again."""
    from importlib.metadata import version

    from .seams import register_seams

    register_seams(version("sglang"))
