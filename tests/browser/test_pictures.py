"""Pictures of DRefs in a browser: hostile contents stay text, nothing is wider than the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from discolab.views import describe, dref_parts, render_html

pytestmark = pytest.mark.browser

EVIL = (
    "<img src=x onerror=window.ran=1><script>window.ran=2</script>"
    "\"><svg onload='window.ran=3'>\x1b[31m\u202e</div></details></table>"
    "'onmouseover='window.ran=4' javascript:window.ran=5 {{7*7}} \x00\ud800"
)
ALLOWED = {
    *("HTML", "HEAD", "META", "BODY", "DIV", "PRE", "SPAN", "STYLE", "DETAILS", "SUMMARY", "BR"),
    *("TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "IMG"),
}


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError(EVIL)


class Long:
    def __repr__(self) -> str:
        return EVIL + "<b>x</b>" * 1_250_000


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": 800, "height": 600})
    yield opened
    opened.close()


def shown(page: Any, html: str) -> None:
    page.set_content(f'<!DOCTYPE html><html><meta charset="utf-8"><body>{html}</body></html>')


def test_hostile_contents_are_text(page: Any) -> None:
    dialogs: list[object] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog))
    values: list[object] = [EVIL, {EVIL: [EVIL]}, type(EVIL[:-2], (), {})()]
    values += [Silent(), Long(), {"layer": torch.ones(2), EVIL: Silent()}]
    records: dict[int, Any] = {rank: describe(value) for rank, value in enumerate(values)}
    records[6] = {"kind": "failure", "message": EVIL + "\n" + EVIL, "traceback": EVIL}
    records[7] = {"kind": "tensor", "dtype": EVIL, "device": EVIL, "shape": [4], "note": EVIL}
    tensors = {rank: describe(torch.randn(8, 8)) for rank in range(2)}
    tensors[0] |= {"device": EVIL, "dtype": EVIL, "places": [[EVIL, [EVIL]]], "error": EVIL}
    pictures = [dref_parts(records, name=EVIL, num_workers=8)]
    pictures += [dref_parts({0: r, 1: r}, name=EVIL, num_workers=2) for r in records.values()]
    pictures.append(dref_parts(tensors, name=EVIL, num_workers=2, placements=[Shard(0)]))
    html = "".join(map(render_html, pictures))
    assert len(html.encode()) < 200_000
    shown(page, html)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.mouse.move(100, 40)
    page.wait_for_timeout(50)
    assert page.evaluate("window.ran") is None
    assert not dialogs
    assert set(page.evaluate("[...document.querySelectorAll('*')].map(e => e.tagName)")) <= ALLOWED
    attributes = page.evaluate(
        "[...document.querySelectorAll('.dl-v *')].flatMap(e => e.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on")]
    assert all(
        source.startswith("data:image/png;base64,")
        for source in page.evaluate("[...document.images].map(i => i.src)")
    )
    text = page.inner_text("body")
    assert "<script>window.ran=2</script>" in text
    assert "repr raised RuntimeError" in text
    assert "\u202e" not in text


def test_every_width_and_theme(page: Any) -> None:
    values = torch.randn(64, 64).chunk(8)
    records = {rank: describe(value) for rank, value in enumerate(values)}
    html = render_html(
        dref_parts(records, name="w", num_workers=8, placements=[Shard(0)])
    ) + render_html(dref_parts(records, name="weight" * 12, num_workers=8))
    shown(page, html)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    for width in (400, 800, 1280):
        page.set_viewport_size({"width": width, "height": 600})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        over = "e => [...e].filter(c => c.getBoundingClientRect().right > innerWidth).length"
        assert page.eval_on_selector_all(".dl-v .c, .dl-v .hd", over) == 0
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")


def test_details_open_by_keyboard_and_in_print(page: Any) -> None:
    records = {rank: describe(torch.randn(8, 8)) for rank in range(2)}
    shown(page, render_html(dref_parts(records, name="w", num_workers=2)))
    hidden = page.get_by_text("first values")
    assert not hidden.is_visible()
    page.emulate_media(media="print")
    assert hidden.is_visible()
    page.emulate_media(media="screen")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert hidden.is_visible()
