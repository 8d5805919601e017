"""`--locks-*` flags on SGLang's own command line."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from ..config import NAMES, LocksConfig, flag_name, forget_flags, nearest, store_flag
from ..seams import Seam

_DEST = "locks_"


class _StoreFlag(argparse._StoreAction):
    """Keep the value for `load_config` and leave no trace in SGLang's own namespace.

    A store action by type, because SGLang 0.5.17 lets its `--config` file set nothing else.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        store_flag(self.dest.removeprefix(_DEST), values)


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """After SGLang has added its own flags. Values are validated when the backend is chosen, with those of variables."""
    if any(action.dest == _DEST + "config" for action in parser._actions):
        return
    parser.error = _hinting(parser.error)  # type: ignore[assignment,method-assign]
    parser.parse_known_args = _afresh(parser.parse_known_args)  # type: ignore[method-assign]
    group = parser.add_argument_group("locks", "settings of --attention-backend locks")
    for spec in dataclasses.fields(LocksConfig):
        text = f"{spec.metadata['help']}; {spec.metadata['allowed']} (default {spec.default})"
        _add(group, spec.name, text)
    _add(group, "config", "TOML or JSON file with any of these settings")


def _add(group: Any, name: str, text: str) -> None:
    group.add_argument(flag_name(name), action=_StoreFlag, dest=_DEST + name, default=argparse.SUPPRESS, help=text)


def _afresh(parse: Callable[..., Any]) -> Callable[..., Any]:
    """argparse's parsing, which first forgets the flags of an earlier command line."""

    def parse_afresh(*args: Any, **kwargs: Any) -> Any:
        forget_flags()
        return parse(*args, **kwargs)

    return parse_afresh


def _hinting(error: Callable[[str], NoReturn]) -> Callable[[str], NoReturn]:
    """argparse's `error`, which names the nearest flag for an unknown one that begins like ours."""
    known = [flag_name(name) for name in (*NAMES, "config")]

    def hinted(message: str) -> NoReturn:
        for word in message.split():
            flag = word.split("=")[0]
            if flag.startswith("--locks-") and flag not in known:
                message += nearest(flag, known)
        error(message)

    return hinted


SEAMS: tuple[Seam, ...] = (
    Seam(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "after",
        add_flags,
        "adds the --locks-* flags",
    ),
)
