"""HTML of tensors: thumbnails that decode, facts that survive without styles, sizes."""

from __future__ import annotations

import re
import struct
import zlib
from base64 import b64decode
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from discolab.views import Bars, Heat, describe, dref_parts, render_html, render_text
from discolab.views.parts import Column, Row, Table, Text
from discolab.views.render.markup import Html, joined, tag


def drawn(values: Any, **options: Any) -> str:
    records = {rank: describe(value) for rank, value in enumerate(values)}
    return render_html(dref_parts(records, name="w", num_workers=len(records), **options))


def pixels(html: str) -> list[list[tuple[int, ...]]]:
    """Decode the first thumbnail: rows of colours."""
    image = b64decode(re.search(r'src="data:image/png;base64,([^"]+)"', html)[1])
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(image):
        (size,) = struct.unpack(">I", image[at : at + 4])
        kind, data = image[at + 4 : at + 8], image[at + 8 : at + 8 + size]
        assert struct.unpack(">I", image[at + 8 + size : at + 12 + size])[0] == zlib.crc32(
            kind + data
        )
        chunks[kind] = data
        at += 12 + size
    width, height = struct.unpack(">2I", chunks[b"IHDR"][:8])
    raw, palette = zlib.decompress(chunks[b"IDAT"]), chunks[b"PLTE"]
    lines = [raw[line * (width + 1) + 1 : (line + 1) * (width + 1)] for line in range(height)]
    return [[tuple(palette[3 * p : 3 * p + 3]) for p in line] for line in lines]


def test_colours_tell_low_from_high_and_not_finite() -> None:
    found = pixels(render_html(Heat((bytes([0, 127, 254]), bytes([255, 0, 254])), "a", True)))
    low, middle, high = found[0]
    assert low[2] > low[0]  # blue
    assert high[0] > high[2]  # orange
    assert min(middle) > 200  # nearly white
    assert found[1][0] == (255, 0, 200)
    light, dark = pixels(render_html(Heat((bytes([0, 254]),), "a")))[0]
    assert sum(light) > 600 > 200 > sum(dark)


def test_workers_are_joined_on_one_scale() -> None:
    html = drawn([torch.zeros(2, 2), torch.full((2, 2), 9.0)], placements=[Shard(0)])
    assert html.count("<img") == 2
    assert pixels(html)[0][0] != pixels(html.partition("</td>")[2])[0][0]
    assert re.search(r">0 <span[^>]*></span> to 9<span", html)


def test_words_do_not_hide_what_is_not_finite() -> None:
    first, last = torch.randn(24, 24), torch.randn(24, 24)
    first[1, 1] = last[23, 1] = float("nan")
    html = drawn([first, last])
    assert '<span class="y f">0<' in html
    assert '<span class="y">1<' in html


def test_terms_of_a_sum_stand_apart() -> None:
    html = drawn([torch.randn(4, 4) for _ in range(3)], placements=[Partial()])
    assert html.count(">+</td>") == 2
    assert html.count("dashed #") == 3
    assert ">+</td>" not in drawn([torch.randn(4, 4)] * 2, placements=[Partial("max")])


def test_replicas_that_differ_are_drawn_by_class() -> None:
    html = drawn([torch.eye(4) + (rank == 2) for rank in range(4)], placements=[Replicate()])
    assert html.count("<img") == 2
    assert "B ≠" in html
    assert "≠ replicas differ: A A B A (worker 2)" in html


def test_constant_values_have_no_thumbnail() -> None:
    assert "<img" not in drawn([torch.ones(4, 4)] * 2)


def test_slices_that_do_not_fit_are_listed() -> None:
    html = drawn(torch.randn(4, 4).chunk(4, 1), placements=[Shard(1)])
    assert "3:&nbsp;[:,&nbsp;3:4]" in html
    assert "title=" not in html  # nothing is told to those alone who point at it


def test_facts_survive_without_styles_and_images() -> None:
    values = [torch.randn(64, 64) for _ in range(4)]
    values[1][2, 3] = float("nan")
    html = drawn(values)
    for image in re.findall(r"<img[^>]*>", html):
        assert re.search(r'alt="worker \d: 24 x 24 means of blocks, -\d', image)
    for head in re.findall(r"<th\b[^>]*>", html):
        assert 'scope="' in head
    bare = re.sub(r"<style>.*?</style>", "", html)
    bare = re.sub(r"<[^>]*>", " ", bare)
    assert "[1] nan at [2, 3]" in bare
    assert bare.count("[64, 64]") >= 4


def test_bars_are_the_same_in_text_and_html() -> None:
    bars = Bars((0.0, 0.5, 1.0), "3 bins")
    table = Table((Column("spread"),), (Row((bars,), (0,)), Row((Text(""),), (1,))))
    assert "▁▅█" in render_html(table)
    assert 'aria-label="3 bins"' in render_html(table)
    assert "▁▅█" in render_text(table)


def test_an_empty_cell_is_left_out_where_rows_are_stacked() -> None:
    cells = (Text("a"), Text("", "muted"))
    html = render_html(Table((Column("name"), Column("why")), (Row(cells),)))
    assert '<td data-h="why"></td>' in html  # whose heading would stand there alone
    assert "td:empty{display:none" in html


def test_a_traceback_is_in_letters_of_one_width() -> None:
    trace = "  ----> 3 raise ValueError\n        4 x"
    record = {"kind": "failure", "message": "ValueError", "traceback": trace}
    part = dref_parts({0: describe(1), 1: record}, name="x", num_workers=2)
    assert f'<pre class="q">{trace.replace(">", "&gt;")}</pre>' in render_html(part)
    assert "pre.q{" in render_html(part)
    assert "  ----> 3 raise ValueError" in render_text(part)


def test_sizes() -> None:
    many = [torch.randn(64, 64, dtype=torch.float64) * 1e-200 for _ in range(8)]
    for values in many:
        values[::7, 5] = float("nan")
    for options in ({}, {"placements": [Shard(0)]}, {"placements": [Partial()]}):
        html = drawn(many, **options)
        assert html.count("<img") == 8
        assert len(html.encode()) < 24_000
    assert "<img" not in drawn([torch.randn(8, 8) for _ in range(17)])
    assert len(drawn([torch.randn(64, 64) for _ in range(64)]).encode()) < 60_000


def test_what_is_not_html_is_escaped_wherever_it_stands() -> None:
    evil = "<b a='\"'>&\x1b"
    safe = "&lt;b a=&#x27;&quot;&#x27;&gt;&amp;\\x1b"
    assert tag("i", evil, tag("br"), title=evil, class_=None) == (
        f'<i title="{safe}">{safe}<br></i>'
    )
    br = tag("br")
    for html in (br + evil, evil + br, br.join(["", evil]), Html("{}").format(evil)):
        assert isinstance(html, Html)
        assert html.replace("<br>", "") == safe
    assert joined([evil, br]) == f"{safe}<br>"
