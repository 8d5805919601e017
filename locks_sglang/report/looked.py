"""Where one request looked: the attention map."""

import itertools

from . import views
from .data import Results, Row
from .heatmap import DARK, LIGHT, picture, script_data
from .html import Markup, count, percent, shown, tag
from .parts import Sources, missing, section

MOST_READ = 5
LOWEST, HIGHEST = 120, 640
"""Pixels of a map."""


def attention_map(results: Results, sources: Sources) -> Markup:
    """Where one request looked."""
    title = "Where one request looked"
    if not results.of("map"):
        return section("map", title, missing("map", "Which pages every KV head read while one real request was answered."))
    maps = [_map(row, sources) for row in results.last("map", "model.name", "text", "question", "settings")]
    return section("map", title, *maps)


def _map(row: Row, sources: Sources) -> Markup:
    sums = views.totals(row)
    steps, prompt = row.figure("steps"), row.figure("prompt_tokens")
    lead = tag(
        "p",
        f"{row.model} answers one request: ",
        shown(prompt, count(prompt.value)),
        " tokens of prompt, ",
        shown(steps),
        " decode steps. In each of them every KV head read ",
        shown(sums.budget, count(sums.budget.value)),
        " of ",
        shown(sums.pages, count(sums.pages.value)),
        " pages. Over all steps the heads together read ",
        shown(sums.ever, count(sums.ever.value)),
        " different pages, a single one in the median ",
        shown(sums.by_head, count(sums.by_head.value)),
        ". ",
        shown(sums.beyond, percent(sums.beyond.value)),
        " of all reads went to pages that a sliding window of the same budget would have missed. ",
        sources.refs((row.file,)),
    )
    asked = []
    if row.get("question"):
        asked.append(tag("p", tag("b", "Asked "), row.get("question"), class_="said"))
    if row.get("answer"):
        asked.append(tag("p", tag("b", "Answered "), row.get("answer"), class_="said"))
    buttons = [
        tag("button", sign, type="button", data_key=key, aria_label=label)
        for sign, key, label in (
            ("←", "ArrowLeft", "page before"),
            ("→", "ArrowRight", "next page"),
            ("↑", "ArrowUp", "KV head before"),
            ("↓", "ArrowDown", "next KV head"),
        )
    ]
    key = tag(
        "p",
        tag("span", "never read"),
        tag("i", class_="ramp", aria_hidden="true"),
        tag("span", "read in every step"),
        tag("span", *buttons, class_="buttons"),
        class_="map-key",
    )
    hint = "Point at the map, tap it, or focus it and use the arrow keys to read a page."
    readout = tag("div", tag("p", hint), class_="readout", aria_live="polite")
    data = tag("script", Markup(script_data(row)), type="application/json")
    drawn = tag("div", key, _plot(row, sums), readout, data, _most_read(row), class_="map")
    return tag("div", lead, *asked, drawn, class_="case")


def _plot(row: Row, sums: views.MapTotals) -> Markup:
    """The profile of all heads above the picture, layers at its left, pages below."""
    pages, layers = len(row.get("pages")), row.get("layers")
    highest = max(sums.share) or 1.0
    path = "".join(f"M{page + 0.5} 100V{100 - 100 * share / highest:.1f}" for page, share in enumerate(sums.share))
    profile = tag(
        "svg",
        tag("title", "Mean share of steps in which a page was read, over all layers and KV heads"),
        tag("path", d=path, class_="profile"),
        viewBox=f"0 0 {pages} 100",
        preserveAspectRatio="none",
        role="img",
        class_="profile-box",
    )
    image = tag(
        "picture",
        Markup(f'<source media="(prefers-color-scheme: dark)" srcset="{picture(row, DARK)}">'),
        Markup(f'<img src="{picture(row, LIGHT)}" alt="Reads by page (across) and by layer and KV head (down)">'),
    )
    lines = [tag("i", class_="across"), tag("i", class_="down")]
    cells = tag(
        "div",
        image,
        *lines,
        class_="cells",
        tabindex="0",
        role="application",
        aria_label="Attention map. Arrow keys go from page to page and from KV head to KV head.",
        style=f"height:{min(max(4 * len(layers) * row.get('kv_heads'), LOWEST), HIGHEST)}px",
    )
    every = max(1, -(-len(layers) // 6))
    marks = [
        tag("span", f"{layer}", style=f"top:{100 * (n + 0.5) / len(layers):.2f}%", class_="scale")
        for n, layer in enumerate(layers)
        if n % every == 0
    ]
    step = next(step for power in itertools.count() for step in (10**power, 2 * 10**power, 5 * 10**power) if pages / step <= 6)
    below = [
        tag("span", f"{page}", style=f"left:{100 * (page + 0.5) / pages:.2f}%", class_="scale")
        for page in range(0, pages, step)
    ]
    return tag(
        "div",
        tag("span", "all", class_="side"),
        profile,
        tag("span", tag("span", "layer", class_="turned"), *marks, class_="side layers"),
        cells,
        tag("span", "page", class_="side"),
        tag("span", *below, class_="pages"),
        class_="plot",
    )


def _most_read(row: Row) -> Markup:
    """What the model came back to, in words."""
    items = []
    for page, share in views.most_read(row, MOST_READ):
        number = tag("button", f"page {page}", type="button", data_page=page)
        items.append(tag("li", number, " ", shown(share, percent(share.value)), tag("q", row.get(f"pages.{page}"))))
    note = "Read most of all that such a window would miss: share of the steps, over all layers and heads."
    return tag("div", tag("p", note), tag("ol", *items), class_="most-read") if items else Markup("")
