"""Nothing that a view or a widget shows is out of sight without a visible way to it.

All of `gallery` is run in one notebook, then measured at three widths, light and dark. Nothing
scrolls sideways: on some systems scrollbars are seen only while one scrolls. What is shortened ends
with … and says the whole when the mouse is over it. With DISCOLAB_GALLERY=FOLDER each picture is
written there, to be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.front_end import NotebookPage, Server
from tests.browser.gallery import GALLERY, SETUP

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

WIDTHS = (480, 800, 1280)  # of the window, in CSS pixels
FAILED = ".jp-RenderedText[data-mime-type$='.error']"

# What is wider than its place, in one cell's output.
OUT_OF_SIGHT = """area => {
  const found = [];
  const say = (node, why) => found.push(`${why}: <${node.tagName} class="${node.className}"> `
    + `${node.scrollWidth} in ${node.clientWidth} px: ${node.innerText?.trim().slice(0, 60)}`);
  for (const node of [area, ...area.querySelectorAll('*')]) {
    if (!node.checkVisibility() || !node.clientWidth || node.closest('svg')) continue;
    if (node.scrollWidth <= node.clientWidth + 1) continue;
    const style = getComputedStyle(node);
    if (style.overflowX === 'visible') continue;  // what holds it back is looked at, too
    if (style.textOverflow === 'ellipsis' && node.closest('[title]')) continue;
    say(node, style.overflowX === 'hidden' ? 'cut off' : 'scrolls');
  }
  const place = area.getBoundingClientRect();
  for (const node of area.querySelectorAll('td, th, .p, .hd, button, input, img')) {
    const box = node.getBoundingClientRect();
    if (node.checkVisibility() && box.width && box.right > place.right + 1) say(node, 'sticks out');
  }
  for (const node of area.querySelectorAll('.s > div table')) {
    const own = node.closest('.s > div').getBoundingClientRect();
    if (node.getBoundingClientRect().right > own.right + 1) say(node, 'lies over its neighbour');
  }
  return found;
}"""


@pytest.fixture(scope="module")
def gallery(window: object, lab: Server) -> Iterator[tuple[NotebookPage, dict[str, int]]]:
    """A notebook in which all is shown, and the number of each entry's cell."""
    cells = [*SETUP]
    numbers = {}
    for name, sources in GALLERY.items():
        cells += sources
        numbers[name] = len(cells) - 1
    page = NotebookPage(window, lab, lab.put("gallery.ipynb", cells)).wait_for_kernel()
    for number in range(len(cells)):
        page.run(number)
        page.wait_done(number)
    yield page, numbers
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_out_of_sight(gallery: tuple[NotebookPage, dict[str, int]], width: int) -> None:
    page, numbers = gallery
    folder = os.environ.get("DISCOLAB_GALLERY")
    page.set_width(width, 1000)
    found: dict[str, list[str]] = {}
    for dark in (False, True):
        page.set_dark(dark)
        page.page.wait_for_timeout(500)  # widgets draw anew for a new width
        page.page.evaluate("document.querySelectorAll('.dl-v details').forEach(d => d.open = true)")
        for name, number in numbers.items():
            complaints = page.output(number).evaluate(OUT_OF_SIGHT)
            if complaints:
                found[f"{name} {'dark' if dark else 'light'}"] = complaints
            if folder:
                theme = "dark" if dark else "light"
                page.picture(Path(folder) / f"{width}_{theme}" / f"{name}.png", number)
    page.set_dark(False)
    assert not found, "\n".join(f"{k}: {v}" for k, vs in found.items() for v in vs)
