"""Change what the decode steps of a running server read: `Evaluation.switch`, from outside."""

from ..admin import AdminError, change
from ..config import ConfigError
from .served import to_numbers


class SwitchError(RuntimeError):
    """A server that did not change what decode reads."""


def switch(
    url: str,
    *,
    selector: str = "locks",
    budget_tokens: int | None = None,
    tail_correction: str | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Have a server that was started with `--locks-evaluation on` choose pages otherwise, until the next call.

    Args:
        url: address of the server.
        selector: one of `served.SELECTORS`.
        budget_tokens, tail_correction: as in `LocksConfig`; None for what the server was started with, and for no tail
            correction where another selector than "locks" is named.
        timeout_s: seconds.

    Raises:
        SwitchError: the server cannot be asked, is not in evaluation, refuses the settings or has requests under way.
    """
    settings = {"budget_tokens": budget_tokens, "tail_correction": tail_correction}
    try:
        wanted = to_numbers(selector, {name: value for name, value in settings.items() if value is not None})
        done = change(url.rstrip("/"), timeout_s, wanted)
    except (AdminError, ConfigError) as error:
        raise SwitchError(str(error)) from None
    if not done:
        raise SwitchError(
            f"{url} did not switch to {selector}; its log says why: start it with --locks-evaluation on, and switch it "
            "while it is idle"
        )
