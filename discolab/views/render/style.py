"""What pictures look like: the colours of workers and of values, and the style sheet of all views.

The style sheet takes JupyterLab's theme variables with fallbacks of the page's own; every rule
starts with ``.dl-v``. What must survive where styles are stripped is plain markup, and nothing is
told by colour alone.

The colour maps of thumbnails are built from a few anchor colours that people with any colour vision
tell apart: dark blue over white to dark orange for values of both signs, white to dark blue else.
What is not finite is magenta, which neither map has. A thumbnail is a data URI: no file, no script.
Pure.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

from ..parts import Heat

# Okabe-Ito, black replaced by grey so that it shows on a dark page.
RANK_COLOURS = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#D55E00",
    "#0072B2",
    "#CC79A7",
    "#F0E442",
    "#999999",
)
_MOST_STRIPES = 16

_STEPS = 32  # colours of a map: keeps a thumbnail of 24 x 24 under a kilobyte
NOT_FINITE = 255
_BOTH_SIGNS = ((5, 48, 97), (67, 147, 195), (247, 247, 247), (224, 130, 20), (127, 59, 8))
_ONE_SIGN = ((247, 251, 255), (158, 202, 225), (66, 146, 198), (8, 48, 107))
_LOUD = (255, 0, 200)


def rank_colour(rank: int) -> str:
    """Give the colour of a worker, as ``#rrggbb``; the same wherever a worker is drawn."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def rank_fill(owners: tuple[int, ...]) -> str:
    """Give the owner's colour, thinned so that text shows on it; several owners as stripes."""
    colours = [rank_colour(rank) + "66" for rank in owners[:_MOST_STRIPES]]
    if len(colours) == 1:
        return colours[0]
    step = 100 / len(colours)
    stops = (f"{c} {i * step:.4g}% {(i + 1) * step:.4g}%" for i, c in enumerate(colours))
    return f"linear-gradient(90deg,{','.join(stops)})"


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


# -- the style sheet -------------------------------------------------------------------------------

_RULES = (
    "{font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif);"
    "color:var(--jp-ui-font-color1,inherit);font-variant-numeric:tabular-nums;overflow-x:auto;"
    "container-type:inline-size;overflow-wrap:break-word}",
    " .t{font-weight:600}",
    " div+.p.t,&table+.p.t{margin-top:8px}",
    " .m{opacity:.75}",
    " .w,&.e,&.ok{border-radius:3px;padding:0 4px;border:1px solid transparent}",
    " .w{background:rgba(230,159,0,.28);border-color:rgba(230,159,0,.7)}",
    " .e{background:rgba(213,60,0,.22);border-color:rgba(213,60,0,.7)}",
    " .ok{background:rgba(0,158,115,.16)}",
    " td .w,&td .e{font-weight:600}",
    " .p{white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0;width:fit-content;"
    "max-width:100%;box-sizing:border-box}",
    " .c{border:1px solid var(--jp-border-color2,rgba(128,128,128,.4));border-radius:6px;"
    "padding:6px 10px 7px;width:fit-content;max-width:100%;box-sizing:border-box}",
    " .c>.hd{overflow-wrap:anywhere;margin-bottom:4px}",
    " .s{display:flex;flex-wrap:wrap;gap:4px 22px;align-items:flex-start}",
    " .s>div{max-width:100%}",
    " .s>div:first-child:not(:has(.g)){max-width:min(100%,480px)}",
    " .s>div:first-child>.m{max-width:420px}",
    " table{margin:4px 0;width:auto;border-collapse:collapse;font-size:inherit;table-layout:auto}",
    " table.d th,&table.d td{padding:2px 6px;text-align:left;border:0;"
    "white-space:nowrap;font-weight:400;vertical-align:middle}",
    " table.d thead th{font-weight:600;"
    "border-bottom:1px solid var(--jp-border-color1,rgba(128,128,128,.5))}",
    " table.d .r{text-align:right}",
    " table.d td.u{padding:4px 6px;white-space:normal}",
    " table.d td.lg{white-space:normal;overflow-wrap:anywhere;max-width:560px}",
    " table.g{border-collapse:separate;border-spacing:2px}",
    " table.g tr{background:none!important}",
    " table.g td{padding:0;text-align:center;vertical-align:middle;font-size:11px;"
    "line-height:1.2;white-space:nowrap;overflow:hidden;position:relative;box-sizing:border-box}",
    " .z{font-size:11px;max-width:340px}",
    " table.g td{width:calc(var(--u)*var(--w));min-width:calc(var(--u)*var(--w));"
    "max-width:calc(var(--u)*var(--w));height:max(20px,calc(var(--u)*var(--h)))}",
    " table.g.a{border-spacing:8px 8px;margin-left:-8px}",
    " table.g td.v{overflow:visible}",
    " .h{image-rendering:pixelated;margin:0;max-width:none}",
    " .g .h{position:absolute;left:0;top:0;width:100%!important;height:100%!important}",
    " .y{position:absolute;z-index:1;left:2px;top:2px;text-align:left;"
    "border-radius:3px;padding:0 4px;"
    "background:var(--jp-layout-color0,Canvas);color:var(--jp-ui-font-color1,CanvasText)}",
    " .y.f{top:auto;bottom:2px}",
    " .b{display:inline-block;min-width:2.4em;margin:1px;padding:1px 5px;border-radius:3px;"
    "text-align:center}",
    " .k{display:inline-block;padding:0 6px 0 5px;"
    "border:1px solid var(--jp-border-color1,rgba(128,128,128,.5));border-radius:3px;"
    "font-weight:600;line-height:1.3}",
    " .k.o{border-style:dashed;background:rgba(230,159,0,.28)}",
    " .n{font:15px/1 var(--jp-code-font-family,monospace);letter-spacing:-.5px;opacity:.8}",
    " .j{font-size:12px;margin:2px 0}",
    " .l{display:inline-block;width:96px;height:10px;margin:0 3px;vertical-align:-1px;"
    "border:1px solid rgba(128,128,128,.5)}",
    " .x{background:#ff00c8;color:#000;padding:0 3px;margin-left:8px;font-weight:600}",
    " summary{cursor:pointer;width:fit-content}",
    " summary:focus-visible{outline:2px solid currentColor;outline-offset:-2px}",
    " details{margin:3px 0;max-width:100%}",
)

_PROGRAM_RULES = (
    " pre.q{font:12.5px/1.5 var(--jp-code-font-family,ui-monospace,monospace);margin:2px 0;"
    "padding:4px 0;max-width:100%;background:none;border:0;color:inherit;"
    "white-space:pre-wrap;overflow-wrap:anywhere}",
    " .q .ln{display:block;padding-left:var(--n);text-indent:calc(-1*var(--n))}",
    " .q .at{background:rgba(128,128,128,.2)}",
    " .q .by{background:rgba(128,128,128,.08)}",
    " .q b,&.o b{font-weight:600;border-radius:3px}",
    " .o b{padding:0 4px}",
    " .o{max-width:100%}",
    " .o table.d td{white-space:normal;overflow-wrap:anywhere}",
    " .o table.d tbody th{white-space:normal;overflow-wrap:break-word;max-width:260px}",
    " .o .h{vertical-align:middle;display:inline-block}",
    " .o .i{font-family:var(--jp-code-font-family,ui-monospace,monospace)}",
    " .o td.f{background:rgba(128,128,128,.1)}",
    " .o .ch{color:var(--jp-brand-color1,#1976d2);font-weight:700}",
    " .c:has(.q)>div:has(>.t:first-child):not(.hd),&.c:has(.q)>.s{margin-top:7px}",
    " .s>div:first-child:has(.q){max-width:100%}",
    " .o td.ab{min-width:84px;max-width:210px}",
    " .o td.ls{min-width:150px}",
    " .o .v{display:inline-block;margin-right:14px}",
)

_PRINT = (
    "@media print{.dl-v *{-webkit-print-color-adjust:exact;print-color-adjust:exact}"
    ".dl-v .m{opacity:1}.dl-v{overflow:visible}"
    ".dl-v details::details-content{content-visibility:visible;display:block}}"
)

# A table that would be wider than its place has each row as a paragraph, with the heads as words.
_STACKED = (
    " thead{display:none}",
    " tr{display:flex;flex-wrap:wrap;gap:0 12px;padding:2px 0;"
    "border-top:1px solid rgba(128,128,128,.2)}",
    " td, th{display:block!important;padding:1px 0!important;white-space:normal!important;"
    "overflow-wrap:anywhere!important;max-width:100%!important;min-width:0!important;"
    "text-align:left!important}",
    " th[scope=row]{padding-left:6px!important}",
    " td:empty{display:none!important}",
    " td[data-h]::before{content:attr(data-h) ' ';opacity:.7}",
    " td[style]{border-left:4px solid var(--r)!important;padding-left:5px!important}",
)


def _sheet(rules: tuple[str, ...]) -> str:
    return "".join(f".dl-v{rule.replace('&', '.dl-v ')}" for rule in rules)


STYLE = _sheet(_RULES) + _PRINT
PROGRAM_STYLE = _sheet(_PROGRAM_RULES)  # where there are excerpts, or values side by side


def stacked_style(widths: set[int]) -> str:
    """The rules by which tables of these classes (``w420``) are stacked where they are too wide."""
    style = ""
    for width in sorted(widths):
        rules = "".join(_of_table(rule, width) for rule in _STACKED)
        style += f"@container(max-width:{width - 1}px){{{rules}}}"
    return style


def _of_table(rule: str, width: int) -> str:
    heads, _, body = rule.partition("{")
    where = ",".join(f".dl-v table.w{width} {head.strip()}" for head in heads.split(","))
    return f"{where}{{{body}"
