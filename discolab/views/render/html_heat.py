"""Draws thumbnails in HTML as data URIs: no file, no script.

The colour maps are built from a few anchor colours that people with any colour vision tell apart:
dark blue over white to dark orange for values of both signs, white to dark blue else. What is not
finite is magenta, which neither map has. Pure.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

from ..parts import Heat

_STEPS = 32  # colours of a map: keeps a thumbnail of 24 x 24 under a kilobyte
NOT_FINITE = 255
_BOTH_SIGNS = ((5, 48, 97), (67, 147, 195), (247, 247, 247), (224, 130, 20), (127, 59, 8))
_ONE_SIGN = ((247, 251, 255), (158, 202, 225), (66, 146, 198), (8, 48, 107))
_LOUD = (255, 0, 200)


def heat_source(heat: Heat) -> str:
    """Give the thumbnail as a data URI of a PNG image, one pixel a cell."""
    rows = b"".join(b"\0" + row.translate(_TO_STEP) for row in heat.levels)
    size = struct.pack(">2I5B", len(heat.levels[0]), len(heat.levels), 8, 3, 0, 0, 0)
    palette = _PALETTES[heat.diverging]
    chunks = (
        (b"IHDR", size),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    )
    image = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)
    return "data:image/png;base64," + b64encode(image).decode("ascii")


def colour_at(level: int, diverging: bool) -> tuple[int, int, int]:
    """Give red, green and blue of one level of a thumbnail, as the terminal needs them."""
    step = _TO_STEP[level]
    red, green, blue = _PALETTES[diverging][3 * step : 3 * step + 3]
    return red, green, blue


def gradient(diverging: bool) -> str:
    """Give a colour map as a CSS gradient, for a legend."""
    anchors = _BOTH_SIGNS if diverging else _ONE_SIGN
    return (
        f"linear-gradient(90deg,{','.join(f'rgb{anchor}'.replace(' ', '') for anchor in anchors)})"
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _palette(anchors: tuple[tuple[int, int, int], ...]) -> bytes:
    colours = bytearray()
    for step in range(_STEPS):
        place = step * (len(anchors) - 1) / (_STEPS - 1)
        first = min(int(place), len(anchors) - 2)
        share = place - first
        pairs = zip(anchors[first], anchors[first + 1], strict=True)
        colours += bytes(round(low + (high - low) * share) for low, high in pairs)
    return bytes(colours) + bytes(_LOUD)


_TO_STEP = bytes(
    _STEPS if level == NOT_FINITE else round(level * (_STEPS - 1) / 254) for level in range(256)
)
_PALETTES = {False: _palette(_ONE_SIGN), True: _palette(_BOTH_SIGNS)}
