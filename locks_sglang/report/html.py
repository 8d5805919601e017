"""Markup that escapes what it is given, and numbers that say where they stand."""

import html
import re
from collections.abc import Iterable, Sequence

from .data import Figure

UNIT_K, UNIT_M = 1 << 10, 1 << 20


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(child: object) -> str:
    """HTML of a child: markup as it is, anything else as text."""
    return child if isinstance(child, Markup) else html.escape(str(child))


def joined(children: Iterable[object], between: str = "") -> Markup:
    """Children one after the other."""
    return Markup(html.escape(between).join(map(escaped, children)))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """One element. `class_` is class, other underscores are hyphens; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{joined(children)}</{name}>")


def traced(figure: Figure) -> dict[str, object]:
    """Attributes of an element that shows a value: its exact value and where it stands."""
    return {"data_value": figure.value, "data_at": figure.at}


def shown(figure: Figure, text: str | None = None) -> Markup:
    """A value as `text`, or as it is; a pointer that rests on it tells where it stands."""
    return tag("data", figure.value if text is None else text, **traced(figure), title=figure.at)


def plain(child: object) -> str:
    """Text of a child without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", child)) if isinstance(child, Markup) else str(child)


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """A table whose first column names the rows."""
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    # On a narrow screen the head is not shown, and every cell says itself what column it is of.
    names = [plain(cell) for cell in head]
    body = []
    for first, *cells in rows:
        named = (tag("td", cell, data_name=name) for name, cell in zip(names[1:], cells, strict=True))
        body.append(tag("tr", tag("th", first, scope="row"), *named))
    return tag("table", top, tag("tbody", *body))


# --- numbers as text --------------------------------------------------------------------------------------------------------


def tokens(number: float) -> str:
    """1048576 as 1M, 16384 as 16K, anything else in full."""
    for unit, letter in ((UNIT_M, "M"), (UNIT_K, "K")):
        if number >= unit and number % unit == 0:
            return f"{int(number) // unit}{letter}"
    return count(number)


def count(number: float) -> str:
    """1234567 as 1,234,567."""
    return f"{number:,.0f}"


def times(ratio: float) -> str:
    """2.219 as 2.22 with a multiplication sign."""
    return f"{ratio:.2f}×"  # noqa: RUF001


def percent(share: float) -> str:
    """0.1172 as 11.7 %; a small share keeps two digits."""
    return f"{100 * share:.{1 if share >= 0.01 else 2}f} %"


def milliseconds(number: float) -> str:
    """Two digits below a hundred, none above."""
    return f"{number:.2f}" if number < 100 else count(number)


def gibibytes(number: float) -> str:
    """Bytes as GiB."""
    return f"{number / 2**30:.2f} GiB"
