"""Real text that every machine has: CPython's own documentation and sources."""

import importlib.util
from pathlib import Path

CODE_MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "difflib",
    "doctest",
    "enum",
    "fractions",
    "ftplib",
    "functools",
    "inspect",
    "mailbox",
    "optparse",
    "pickle",
    "pickletools",
    "plistlib",
    "shutil",
    "smtplib",
    "socket",
    "statistics",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "traceback",
    "turtle",
    "typing",
    "uuid",
    "zipfile",
)
"""Modules whose sources, joined in this order, are the text "code"."""


class TextError(ValueError):
    """A text that cannot be read or is too short."""


def load_text(name: str) -> tuple[str, str]:
    """A text, and one line saying what it is.

    Args:
        name: "prose", "code" or the path of a UTF-8 file.

    Raises:
        TextError: a file or a module's source that cannot be read.
    """
    if name == "prose":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics)), "CPython's pydoc_data.topics, sorted by topic"
    if name == "code":
        return "\n\n".join(map(_source, CODE_MODULES)), f"sources of CPython's {', '.join(CODE_MODULES)}, in this order"
    try:
        return Path(name).read_text(encoding="utf-8"), f"file {name}"
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"cannot read the text {name!r} (prose, code or a UTF-8 file): {error}") from None


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise TextError(f'this Python has no source of the module {module}; use --text prose, or a file, instead of "code"')
    return Path(spec.origin).read_text(encoding="utf-8")
