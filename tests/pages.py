"""The commands that the documents show, as a reader copies them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, without their indentation."""
    found = []
    for indent, text in re.findall(rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(), re.MULTILINE | re.DOTALL):
        found.append("".join(line.removeprefix(indent) + "\n" for line in text.splitlines()))
    return found


def commands(page: Path) -> list[str]:
    """The commands of a page's `sh` blocks, without comments: one a line, which a backslash continues."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def every_command() -> list[str]:
    """Commands of all pages, each once."""
    return list(dict.fromkeys(command for page in PAGES for command in commands(page)))


def the_command(start: str) -> str:
    """The one command of all pages that begins like this."""
    (command,) = [command for command in every_command() if command.startswith(start)]
    return command


def image() -> tuple[list[str], list[str]]:
    """What `examples/Dockerfile` runs at its build, and what its container starts with."""
    lines = (ROOT / "examples" / "Dockerfile").read_text().splitlines()
    (run,) = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    (entry,) = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT ")]
    words: list[str] = re.findall(r'"([^"]*)"', entry)
    return shlex.split(run), words
