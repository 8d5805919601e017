"""Charts as inline SVG. Lines differ in dash, weight and marker, never in hue alone; colours are the page's own."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from .data import Figure
from .html import Markup, tag, traced

STYLE = Path(__file__).resolve().parent / "style.css"
STYLED = (".chart .", ".chart t", ".grid", ".axis", ".level", ".below", ".leader", ".line", ".mark")
"""What rules of the page's style a chart needs begin with, apart from its colours and its place on the page."""

WIDTH, HEIGHT = 400, 250
TOP, BOTTOM, LEFT = 14, 40, 42
CHARACTER = 7.3
"""Mean width of a character of the charts' font where it is largest and bold, in units of the drawing."""
LONGEST_NAME = 22
"""Characters of a line of a name."""
LINE = 15
"""Height of a line of text."""
LEADER = 14
"""Room for the lines that lead from the ends of lines to their names."""
KEY = 12
"""Room for a line's marker before its name."""
BETWEEN = 6
"""Distance of two labels of the horizontal axis."""

STYLES = ("locks", "dense-0", "dense-1", "dense-2", "dense-3", "other-0", "other-1", "other-2", "none", "published")


@dataclass(frozen=True)
class Series:
    """One line.

    Args:
        label: at its end. style: one of `STYLES`. points: (x, y), ascending in x.
    """

    label: str
    style: str
    points: Sequence[tuple[Figure, Figure]]


@dataclass(frozen=True)
class Axis:
    """What a value is drawn at.

    Args:
        low, high: ends. log: whether distances are those of logarithms.
        ticks: values with a label; figures where they are values of a file.
        text: label of a value.
    """

    low: float
    high: float
    ticks: Sequence[float | Figure]
    text: Callable[[float], str]
    log: bool = False

    def at(self, value: float) -> float:
        """Share of the way from low to high."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        if low == high:
            return 0.5
        return ((math.log(value) if self.log else value) - low) / (high - low)


def nice_axis(values: Sequence[float], text: Callable[[float], str], low: float | None = 0.0) -> Axis:
    """A linear axis with four to seven round ticks over all values, from `low` or, if None, from a round number below them."""
    most, least = max(values), min(values) if low is None else low
    rough = max((most - least) / 5, 1e-12)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    ticks = [step * n for n in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks, text)


def log_axis(values: Sequence[Figure], text: Callable[[float], str]) -> Axis:
    """A logarithmic axis whose ticks are the values themselves."""
    unique = sorted({figure.value: figure for figure in values}.values(), key=lambda figure: figure.value)
    return Axis(unique[0].value, unique[-1].value, unique, text, log=True)


@dataclass
class Drawing:
    """A chart under way: the plot's rectangle and what is in it."""

    x: Axis
    y: Axis
    right: float
    parts: list[Markup] = field(default_factory=list)

    def across(self, value: float) -> float:
        """Horizontal place of a value."""
        return round(LEFT + self.x.at(value) * (self.right - LEFT), 2)

    def up(self, value: float) -> float:
        """Vertical place of a value."""
        return round(HEIGHT - BOTTOM - self.y.at(value) * (HEIGHT - BOTTOM - TOP), 2)


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    title: str,
    x_title: str,
    text: Callable[[float], str],
    level: float | None = None,
    below: str = "",
) -> Markup:
    """Lines over a common axis, each named at its end.

    Args:
        title: what is shown, for those who do not see it. x_title: below the axis.
        text: value of a point in words. level: a horizontal line to compare with. below: what is below it.
    """
    longest = max(len(part) for line in series for part in _name_lines(line.label))
    drawing = Drawing(x, y, WIDTH - LEADER - KEY - longest * CHARACTER)
    _scales(drawing, x_title)
    if level is not None and y.low < level < y.high:
        _level(drawing, level, below)
    for line in series:
        _line(drawing, line, text)
    _names(drawing, series)
    return tag("svg", tag("title", title), *drawing.parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="chart")


def standalone(chart: Markup) -> str:
    """A chart as a file of its own, with the colours and rules of the page."""
    text = STYLE.read_text(encoding="utf-8")
    rules = [line for line in text.splitlines() if line.startswith(STYLED)]
    colours = text[: text.index("* {")]
    style = f'{colours}svg {{ font-family: system-ui, "Liberation Sans", Arial, sans-serif; }}\n' + "\n".join(rules)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{2 * HEIGHT}" '
    opened = chart.removeprefix("<svg ")
    end = opened.index(">") + 1
    return f"{head}{opened[:end]}<style>\n{style}\n</style>{opened[end:]}\n"


def _scales(drawing: Drawing, x_title: str) -> None:
    base = HEIGHT - BOTTOM
    for tick in drawing.y.ticks:
        value = tick.value if isinstance(tick, Figure) else tick
        at = drawing.up(value)
        drawing.parts.append(tag("line", x1=LEFT, x2=drawing.right, y1=at, y2=at, class_="grid"))
        drawing.parts.append(tag("text", drawing.y.text(value), x=LEFT - 7, y=at + 4, class_="scale end"))
    free = math.inf
    for tick in reversed(drawing.x.ticks):
        value = tick.value if isinstance(tick, Figure) else tick
        at, half = drawing.across(value), len(drawing.x.text(value)) * CHARACTER / 2
        if at + half > free:
            continue
        free = at - half - BETWEEN
        where = traced(tick) if isinstance(tick, Figure) else {}
        drawing.parts.append(tag("line", x1=at, x2=at, y1=base, y2=base + 4, class_="axis"))
        drawing.parts.append(tag("text", drawing.x.text(value), x=at, y=base + 16, class_="scale middle", **where))
    drawing.parts.append(tag("line", x1=LEFT, x2=drawing.right, y1=base, y2=base, class_="axis"))
    middle = (LEFT + drawing.right) / 2
    drawing.parts.append(tag("text", x_title, x=middle, y=base + 33, class_="scale middle"))


def _level(drawing: Drawing, level: float, below: str) -> None:
    at, base = drawing.up(level), HEIGHT - BOTTOM
    height = round(base - at, 2)
    drawing.parts.append(tag("rect", x=LEFT, y=at, width=drawing.right - LEFT, height=height, class_="below"))
    drawing.parts.append(tag("line", x1=LEFT, x2=drawing.right, y1=at, y2=at, class_="level"))
    if below and height > LINE + 4:
        drawing.parts.append(tag("text", below, x=drawing.right - 6, y=base - 6, class_="scale end"))


def _line(drawing: Drawing, line: Series, text: Callable[[float], str]) -> None:
    places = [(drawing.across(px.value), drawing.up(py.value)) for px, py in line.points]
    path = f"M{places[0][0]} {places[0][1]}"
    path += "".join(f"L{px} {py}" for px, py in places[1:])
    drawing.parts.append(tag("path", d=path, class_=f"line {line.style}"))
    for (px, py), (at, value) in zip(places, line.points, strict=True):
        told = f"{line.label}, {drawing.x.text(at.value)}: {text(value.value)}"
        drawing.parts.append(
            tag("path", tag("title", told), d=_marker(line.style, px, py), class_=f"mark {line.style}", **traced(value))
        )


def _marker(style: str, x: float, y: float) -> str:
    """A closed path around a point: circle, square, triangle, diamond or cross."""
    r = 3.6

    def polygon(*corners: tuple[float, float]) -> str:
        return "M" + "L".join(f"{x + r * dx:.2f} {y + r * dy:.2f}" for dx, dy in corners) + "Z"

    if style in ("dense-0", "other-0"):
        return polygon((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9))
    if style in ("dense-1", "other-1"):
        return polygon((0, -1.2), (1.1, 0.9), (-1.1, 0.9))
    if style in ("dense-2", "other-2"):
        return polygon((0, 1.2), (1.1, -0.9), (-1.1, -0.9))
    if style in ("dense-3", "published"):
        return polygon((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0))
    if style == "none":
        return polygon((-0.3, -1), (0.3, -1), (0.3, 1), (-0.3, 1))
    return f"M{x - r:.2f} {y}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"


def _name_lines(label: str) -> list[str]:
    """A name broken at its commas, and where it is long at its spaces."""
    return [line for part in label.split(", ") for line in textwrap.wrap(part, LONGEST_NAME)]


def _names(drawing: Drawing, series: Sequence[Series]) -> None:
    """Names at the ends of lines, each behind its line's marker; moved apart where lines end close together, as little as can
    be."""
    ends = sorted(((drawing.up(line.points[-1][1].value), line) for line in series), key=lambda end: end[0])
    blocks = [_name_lines(line.label) for _, line in ends]
    tops = _apart([at for at, _ in ends], [LINE * len(block) for block in blocks], HEIGHT - BOTTOM + LINE)
    near = drawing.right + LEADER
    for (at, line), top, block in zip(ends, tops, blocks, strict=True):
        end = drawing.across(line.points[-1][0].value)
        drawing.parts.append(tag("path", d=f"M{end + 5} {at}L{near - 2} {top}", class_="leader"))
        drawing.parts.append(tag("path", d=_marker(line.style, near + KEY / 2 - 2, top), class_=f"mark {line.style}"))
        drawing.parts += [
            tag("text", text, x=near + KEY, y=top + 4 + LINE * n, class_=f"name {line.style}") for n, text in enumerate(block)
        ]


def _apart(wanted: Sequence[float], heights: Sequence[float], lowest: float) -> list[float]:
    """Places of blocks one below the other, as near as can be to those wanted, which ascend, between `TOP` and `lowest`."""
    # Less the heights above them, places must not descend: where wishes do, those blocks touch, at the mean of their wishes.
    offsets = list(accumulate(heights, initial=0.0))[:-1]
    runs: list[list[float]] = []
    for at, offset in zip(wanted, offsets, strict=True):
        runs.append([at - offset])
        while len(runs) > 1 and fmean(runs[-2]) > fmean(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    begins = [fmean(run) for run in runs for _ in run]
    room = lowest - sum(heights)
    return [round(min(max(begin, TOP), room) + offset, 2) for begin, offset in zip(begins, offsets, strict=True)]


def stacked_bars(rows: Sequence[tuple[Sequence[object], Mapping[str, Figure], Figure]], text: Callable[[float], str]) -> Markup:
    """Horizontal bars of parts, as HTML so that their labels keep the size of text.

    Args:
        rows: what stands before the bar, its parts by name, and their sum.
        text: a value in words.
    """
    names = list(dict.fromkeys(name for _, parts, _ in rows for name in parts))
    most = max(total.value for *_, total in rows)
    key = [tag("span", tag("i", class_=f"swatch part-{n}"), name) for n, name in enumerate(names)]
    lines = []
    for head, parts, total in rows:
        bars = [
            tag(
                "i",
                class_=f"part-{names.index(name)}",
                style=f"width:{100 * figure.value / most:.3f}%",
                title=f"{name}: {text(figure.value)}",
                **traced(figure),
            )
            for name, figure in parts.items()
        ]
        end = tag("data", text(total.value), **traced(total), title=total.at)
        lines.append(tag("div", tag("span", *head, class_="bar-name"), tag("span", *bars, class_="bar"), end, class_="bar-row"))
    return tag("div", tag("p", *key, class_="key"), *lines, class_="bars")
