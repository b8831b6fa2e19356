"""`discolab.plot` as somebody uses it in JupyterLab: wheel, drag, keys, and what is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.front_end import NotebookPage, Server

pytestmark = pytest.mark.browser

CELLS = [
    "%load_ext discolab\nimport discolab\nfrom torch.distributed.tensor import Shard\n"
    "%disco_session 4 --devices cpu",
    "%%disco\nw = torch.arange(300.).view(-1, 1) - torch.arange(800.) + 300. * rank\n"
    "if rank == 2: w[150, 400] = float('nan')\nt = torch.ones(4, 5, 6) * rank",
    "w = sess['w']; w.placements = [Shard(0)]\ndiscolab.plot(w)",
    "t = sess['t']; t.placements = [Shard(2)]\ndiscolab.plot(t, dims=(1, 2))",
]
PLOT = 2
# The colours in a plot, as #rrggbb.
COLOURS = """canvas => {
  const context = canvas.getContext('2d');
  const {width, height} = canvas;
  const data = context.getImageData(0, 0, width, height).data;
  const found = new Set();
  for (let i = 0; i < data.length; i += 4)
    found.add('#' + [...data.slice(i, i + 3)].map(v => v.toString(16).padStart(2, '0')).join(''));
  return [...found];
}"""


@pytest.fixture(scope="module")
def opened(lab: Server, window: Any) -> Iterator[NotebookPage]:
    """One notebook for all tests of this file."""
    with NotebookPage(window, lab, lab.put("plot.ipynb", CELLS)) as page:
        page.wait_for_kernel().run_all()
        yield page


@pytest.fixture
def page(opened: NotebookPage) -> NotebookPage:
    """All of the tensor is shown."""
    opened.output(PLOT).get_by_label("show all (0)").click()
    opened.wait_for_text("means of", PLOT)
    return opened


@pytest.fixture
def canvas(page: NotebookPage) -> Iterator[Any]:
    found = page.output(PLOT).locator("canvas").first
    found.scroll_into_view_if_needed()
    yield found
    assert page.complaints == []


def test_a_plot_is_zoomed_dragged_and_read_by_hand(page: NotebookPage, canvas: Any) -> None:
    box = canvas.bounding_box()
    mouse = page.page.mouse
    page.wait_for_text("1 pixel not finite", PLOT)
    assert "#ff00c8" in canvas.evaluate(COLOURS)  # and it is seen
    mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
    page.wait_for_text("· worker 1 · mean", PLOT)
    for _ in range(20):
        mouse.wheel(0, -400)
    page.wait_for_text("each element", PLOT)
    before = page.output(PLOT).locator(".dl-plot-readout").inner_text()
    mouse.down()
    mouse.move(box["x"] + box["width"] / 2 + 150, box["y"] + box["height"] / 3 + 70, steps=5)
    mouse.up()
    mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
    page.page.wait_for_function(
        "([node, before]) => node.innerText !== before && !node.innerText.includes('…')",
        arg=[page.output(PLOT).locator(".dl-plot-readout").element_handle(), before],
    )


def test_a_plot_is_used_with_keys_alone(page: NotebookPage, canvas: Any) -> None:
    readout = page.output(PLOT).locator(".dl-plot-readout")
    canvas.focus()
    cells = page.page.locator(".jp-Notebook .jp-Cell").count()
    for key in ("ArrowRight", "ArrowDown", *["+"] * 12):
        page.page.keyboard.press(key)
    page.wait_for_text("each element", PLOT)
    at = readout.inner_text().partition("]")[0]
    page.page.keyboard.press("ArrowRight")
    assert readout.inner_text().partition("]")[0] != at
    page.page.keyboard.press("0")
    page.wait_for_text("means of", PLOT)
    assert page.page.locator(".jp-Notebook .jp-Cell").count() == cells  # no key of the notebook's
    assert "float32 [1200, 800] Shard(0): means of" in canvas.get_attribute("aria-label")


def test_options_and_other_dims(page: NotebookPage, canvas: Any) -> None:
    page.output(PLOT).get_by_text("histogram", exact=True).click()
    page.wait_for_text("histogram of the region", PLOT)
    page.output(PLOT).get_by_label("what a pixel stands for").select_option("nonfinite")
    page.wait_for_text("numbers of non-finite values", PLOT)
    page.output(PLOT).get_by_label("what a pixel stands for").select_option("mean")
    sliced = page.output(PLOT + 1)
    sliced.get_by_label("index of dim 0, as a number").fill("3")
    sliced.get_by_label("index of dim 0, as a number").press("Enter")
    sliced.locator("canvas").first.focus()
    page.page.keyboard.press("ArrowRight")
    page.wait_for_text("[3, ", PLOT + 1)


def test_a_plot_fits_its_page(page: NotebookPage, canvas: Any) -> None:
    def fits(number: int) -> bool:
        output = page.output(number).bounding_box() or {"x": 0, "width": 0}
        right = output["x"] + output["width"] + 1
        return all(box["x"] + box["width"] <= right for box in page.boxes(number, "canvas"))

    for width in (1280, 800, 480):
        page.set_width(width)
        page.wait_until(lambda: fits(PLOT) and fits(PLOT + 1))
    assert canvas.bounding_box()["width"] > 160
