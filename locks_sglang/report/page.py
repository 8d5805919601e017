"""The page: sections in order, style and script, all in one file."""

from pathlib import Path

from . import glance, looked, origins, quality, speed, turns
from .data import KINDS, Results
from .html import Markup, tag
from .parts import Sources

HERE = Path(__file__).resolve().parent
NAMES = {
    "speed": "Speed",
    "kernels": "A layer's step",
    "quality": "Quality",
    "memory": "Memory",
    "turns": "First token",
    "map": "Attention map",
    "unmeasured": "Not measured",
    "sources": "Sources",
}


def render(results: Results, *, live: Markup | None = None) -> str:
    """The whole page.

    Args:
        results: what it is drawn from. live: section about a running server.
    """
    files = dict.fromkeys(row.file for kind in KINDS for row in results.of(kind))
    sources = Sources({file: number for number, file in enumerate(files, 1)})
    parts = [
        glance.headline(results, sources),
        *([live] if live is not None else []),
        speed.speed(results, sources),
        speed.kernels(results, sources),
        quality.quality(results, sources),
        quality.memory(results, sources),
        turns.turns(results, sources),
        looked.attention_map(results, sources),
        origins.unmeasured(results, sources),
        origins.footnotes(results, sources),
    ]
    names = ({"server": "Server"} if live is not None else {}) | NAMES
    links = tag("nav", *(tag("a", text, href=f"#{name}") for name, text in names.items()), aria_label="Sections")
    head = tag(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        # Nothing is ever fetched, not even by what a results file might carry.
        Markup(
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        ),
        tag("title", "locks-sglang report"),
        tag("style", Markup((HERE / "style.css").read_text(encoding="utf-8"))),
    )
    script = tag("script", Markup((HERE / "map.js").read_text(encoding="utf-8")))
    body = tag("body", tag("main", parts[0], links, *parts[1:]), script)
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"
