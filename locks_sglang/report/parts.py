"""What sections are made of. Each says what it shows, shows it, and names its sources or the command that makes them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .data import KINDS
from .html import Markup, joined, tag

DIMS = (128, 64)
"""Usual head dimensions."""


@dataclass(frozen=True)
class Sources:
    """Numbers of the files on the page."""

    numbers: Mapping[str, int]

    def refs(self, files: Iterable[str]) -> Markup:
        """Marks that lead to the footnotes of these files."""
        found = sorted({self.numbers[file] for file in files})
        return joined(tag("a", f"[{n}]", href=f"#source-{n}", class_="ref") for n in found)


def section(name: str, title: str, *children: object) -> Markup:
    """A part of the page with a heading."""
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def missing(kind: str, what: str) -> Markup:
    """In place of a section without results: how to make them. No number is invented."""
    command = tag("code", KINDS[kind].made_by)
    return tag("p", tag("strong", "Not measured. "), f"{what} ", command, " makes these results.", class_="missing")


def figure(chart: Markup, *caption: object) -> Markup:
    """A chart with what it says above it."""
    return tag("figure", tag("figcaption", *caption), chart)
