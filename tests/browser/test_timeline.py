"""``%disco_timeline`` as somebody sees and uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.front_end import NotebookPage, Server

pytestmark = pytest.mark.browser

PROGRAM = """%%disco
import time
from discolab import trace
for step in range(12):
    with trace.span("forward"):
        time.sleep(0.2 if rank == 2 else 0.05)
    ccl.all_reduce(torch.ones(4)); None"""
CELLS = ["%load_ext discolab\n%disco_session 3 --devices cpu", "%disco_timeline", PROGRAM]


@pytest.mark.slow
def test_open_run_zoom_and_click(lab: Server, open_notebook: Callable[..., NotebookPage]) -> None:
    page = open_notebook(lab, lab.put("timeline.ipynb", CELLS)).wait_for_kernel()
    for number in range(2):
        page.run(number)
        page.wait_done(number)
    out = page.output(1)
    page.wait_for_text("Nothing recorded yet", 1)
    page.run(2)
    page.wait_until(lambda: out.locator(".dt-sites tbody tr").count() > 0)
    out.locator(".dt-stage").press("n")
    out.locator(".dt-stage").press("Enter")
    page.wait_until(lambda: "Cell In[3]" in out.locator(".dt-details").inner_text())
    assert page.is_running(2)
    page.wait_done(2)
    site = out.locator(".dt-sites tbody tr").first
    page.wait_until(lambda: "12 of 12 times" in site.inner_text())

    # a click on the waiting of worker 0: the first lane, its last row
    out.get_by_role("button", name="fit").click()
    box = out.locator("canvas").bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20 + 4 + 19 + 15 + 9)
    page.wait_until(lambda: "all_reduce" in out.locator(".dt-tip").inner_text())
    page.page.mouse.down()
    page.page.mouse.up()
    details = out.locator(".dt-details")
    page.wait_until(lambda: "◀ last" in details.inner_text())
    last = details.locator("tbody tr").last.inner_text()
    assert last.startswith("2")
    assert "0 ms" in last

    # keys: they are the widget's, not the notebook's
    out.locator(".dt-stage").focus()
    cells = len(page.save()["cells"])
    for key in ("+", "ArrowRight", "b", "x", "n", "p", "Enter"):
        page.page.keyboard.press(key)
    fit = out.get_by_role("button", name="fit")
    page.wait_until(lambda: fit.get_attribute("aria-pressed") == "false")
    assert len(page.save()["cells"]) == cells
    details.get_by_role("button").press("Enter")
    assert not details.is_visible()

    # a canvas keeps its colours: it is drawn anew when the theme changes, though nothing runs
    ink = "canvas => { const c = canvas.getContext('2d'); return c.fillStyle + c.strokeStyle }"
    light = out.locator("canvas").evaluate(ink)
    page.set_dark(True)
    page.wait_until(lambda: out.locator("canvas").evaluate(ink) != light)
    page.set_dark(False)
    page.wait_until(lambda: out.locator("canvas").evaluate(ink) == light)

    out.get_by_role("button", name="export").click()
    page.wait_for_text("timeline-sess.json", 1)
    assert (lab.notebooks / "timeline-sess.json").exists()
    saved = page.save()["cells"][1]["outputs"]
    texts = ["".join(output["data"]["text/plain"]) for output in saved if "data" in output]
    assert any("worker 2, 12 of 12 times" in text for text in texts)
    assert not page.complaints
