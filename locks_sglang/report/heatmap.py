"""The attention map's picture: a PNG with one pixel a page and KV head, and its data for the page's script."""

import base64
import json
import struct
import zlib
from collections.abc import Sequence

from .data import Row

LEVELS = 32
"""Shades. More are not told apart, and fewer make a smaller file."""

Colour = tuple[int, int, int]
LIGHT: tuple[Colour, ...] = ((243, 244, 242), (143, 178, 199), (22, 84, 128), (6, 29, 54))
DARK: tuple[Colour, ...] = ((27, 31, 36), (33, 86, 120), (110, 176, 214), (241, 249, 255))
"""Ramps from never to always, of one hue and ever darker, or on a dark page ever lighter: they say the same in grey."""


def ramp(stops: Sequence[Colour]) -> list[Colour]:
    """`LEVELS` colours along the stops."""
    colours = []
    for level in range(LEVELS):
        at = level / (LEVELS - 1) * (len(stops) - 1)
        lower = min(int(at), len(stops) - 2)
        pairs = zip(stops[lower], stops[lower + 1], strict=True)
        red, green, blue = (round(low + (high - low) * (at - lower)) for low, high in pairs)
        colours.append((red, green, blue))
    return colours


def level(count: float, held: float) -> int:
    """Shade of a page that was read in `count` of `held` steps: 0 only for never, the last only for always."""
    if count <= 0:
        return 0
    return LEVELS - 1 if count >= held else 1 + int((LEVELS - 2) * count / held)


def picture(row: Row, stops: Sequence[Colour]) -> str:
    """The map as a data URI: KV heads from top to bottom, layer by layer, pages from left to right."""
    held = row.get("held")
    lines = [
        bytes([0, *(level(count, most) for count, most in zip(head, held, strict=True))])
        for layer in row.get("reads")
        for head in layer
    ]
    palette = b"".join(bytes(colour) for colour in ramp(stops))
    header = struct.pack(">IIBBBBB", len(held), len(lines), 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(b"".join(lines), 9)), (b"IEND", b""))
    chunks = [struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts]
    encoded = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
    return f"data:image/png;base64,{encoded}"


def script_data(row: Row) -> str:
    """JSON for the page's script, safe within a script element: counts as base64 of 16-bit numbers, lowest byte first."""
    counts = [int(count) for layer in row.get("reads") for head in layer for count in head]
    packed = base64.b64encode(struct.pack(f"<{len(counts)}H", *counts)).decode()
    data = {
        "layers": row.get("layers"),
        "heads": row.get("kv_heads"),
        "pages": row.get("pages"),
        "held": row.get("held"),
        "tokens": row.get("page_tokens"),
        "reads": packed,
    }
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
