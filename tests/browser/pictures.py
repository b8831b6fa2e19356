"""Take the pictures for README and docs: ``make pictures``, or one with ``ONLY=registers``.

A notebook is made of all cells below and run in Notebook 7, which draws cells as JupyterLab does
and little around them. Of each entry its cells, input and output, are written to
docs/pictures/NAME.png and NAME_dark.png. A new picture is a new entry in `PICTURES`. A cell that
fails ends it all, so that no picture shows an error unmeant.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser.front_end import FLAGS, ROOT, NotebookPage, Server, find_chromium

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect

FOLDER = ROOT / "docs" / "pictures"
AROUND = 60  # CSS pixels that the page has left and right of the cells


@dataclass(frozen=True)
class Picture:
    """What is in one picture.

    Attributes
    ----------
    name
        Of the files.
    cells
        Run one after the other, and shown one under the other.
    before
        Cells that are run first and not shown.
    width
        Of a cell, in CSS pixels.
    meanwhile
        A cell that is started then, runs while the picture is taken, and is stopped.
    seconds
        How long what is shown lives until then.
    output_only
        Leave the source of the cells out.
    """

    name: str
    cells: tuple[str, ...]
    before: tuple[str, ...] = ()
    width: int = 760
    meanwhile: str = ""
    seconds: float = 0.5
    output_only: bool = False


START = ("%load_ext discolab", "%disco_session 4")
WAVES = """\
%%disco
rows = torch.arange(rank * 16, rank * 16 + 16.0)[:, None] / 8
w = torch.sin(rows) * torch.cos(torch.arange(96.0) / 8)
bias = torch.linspace(-1, 1, 1024).view(32, 32).clone()"""
MODEL = """\
%%disco
from discolab.trace import span
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(rows):
    with span("forward"):
        batch = torch.randn(rows, 256)
        loss = (model(batch) - batch).square().mean()
    with span("backward"):
        loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    ccl.all_reduce_coalesced(grads, "avg", outs=grads)
    optimizer.step()
    optimizer.zero_grad()


step(2000)"""
TRAIN = "%%disco\nfor _ in range(3):\n    step(rows=6000 if rank == 1 else 2000)"
UNEVEN = """\
%%disco
def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(256, 256) @ torch.randn(256, 256)


import time

spin((rank + 1) * 1.2)
ccl.all_reduce(torch.ones(4))
spin(30 if rank == 1 else 0)
ccl.barrier()"""
STEPPED = """\
%%disco -b 4
def linear(x, weight):
    y = x @ weight.T
    if rank == 2:
        y = y.relu()
    return ccl.all_reduce(y)


torch.manual_seed(rank)
weight = torch.randn(16, 16) / 8
x = torch.ones(16, 16)
for layer in range(3):
    x = linear(x, weight)"""
PICTURES = (
    Picture(
        "dref",
        (
            'from torch.distributed.tensor import Shard\n\nw = sess["w"]\n'
            "w.placements = [Shard(0)]\nw",
            "%%disco\nif rank == 2:\n    bias[20, 5] -= 0.7\nbias",
        ),
        before=(WAVES,),
    ),
    Picture("timeline", (TRAIN, "%disco_timeline"), (MODEL, "%disco_timeline --on"), width=960),
    Picture(
        "registers",
        ("%disco_registers",),
        (
            "import torch",
            'x = sess["w"]\nhidden = torch.relu(x - 1)\nscores = [hidden * i for i in range(3)]',
            "part = sess.scatter(torch.randn(4, 512, 512))\nlogits = part @ part",
        ),
        width=960,
        seconds=2,
    ),
    Picture("devices", ("%disco_devices",), meanwhile=UNEVEN, seconds=6),
    # the last: it leaves a program that is paused
    Picture("debugger", ("%disco_debugger",), (STEPPED, "%disco_continue 2", "%disco_next"), 960),
)

# The cell that is active is drawn with a frame and tools.
PLAIN = ".jp-toolbar-overlap, .jp-cell-toolbar { display: none !important }"
FAILED = ".jp-RenderedText:is([data-mime-type$='.stderr'], [data-mime-type$='.error'])"
LAST_CELL_IS_ACTIVE = """() => {
  const cells = jupyterapp.shell.currentWidget.content;
  cells.deselectAll();
  cells.activeCellIndex = cells.widgets.length - 1;
}"""


def cells_of(picture: Picture) -> list[str]:
    """All its cells, in the order in which they run."""
    return [*picture.before, *picture.cells, *filter(None, [picture.meanwhile])]


def take(page: NotebookPage, picture: Picture, first: int) -> None:
    """Run the cells of a picture, of which cell number `first` is the first, and take it."""
    shown = range(first + len(picture.before), first + len(picture.before) + len(picture.cells))
    for number in range(first, shown.stop):
        page.run(number)
        page.wait_done(number)
        if page.output(number).locator(FAILED).count():
            raise RuntimeError(f"{picture.name}: {page.text(number)}")
    if picture.meanwhile:
        page.run(shown.stop)
    page.page.evaluate(LAST_CELL_IS_ACTIVE)
    page.set_width(picture.width + AROUND, 4000)
    page.page.wait_for_timeout(1000 * picture.seconds)
    for dark in (False, True):
        page.set_dark(dark)
        clip = _around(page, shown, picture.output_only)
        path = FOLDER / f"{picture.name}{'_dark' if dark else ''}.png"
        page.page.screenshot(path=path, clip=clip)
        print(path.relative_to(ROOT))
    page.set_dark(False)
    if picture.meanwhile:
        page.interrupt()
        page.wait_done(shown.stop)


def _around(page: NotebookPage, shown: range, output_only: bool) -> FloatRect:
    """The part of the page on which cells stand, or their outputs."""
    places = [page.output(n) if output_only else page.cell(n) for n in shown]
    boxes = [box for place in places if (box := place.bounding_box())]
    left, top = min(box["x"] for box in boxes), min(box["y"] for box in boxes)
    right = max(box["x"] + box["width"] for box in boxes)
    bottom = max(box["y"] + box["height"] for box in boxes)
    return {"x": left, "y": top, "width": right - left, "height": bottom - top}


def main() -> None:
    """Take all, or those that are named."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these (default: all)")
    names = parser.parse_args().names
    unknown = set(names) - {picture.name for picture in PICTURES}
    if unknown:
        parser.error(f"no picture {', '.join(sorted(unknown))}")
    wanted = [picture for picture in PICTURES if not names or picture.name in names]
    chromium = find_chromium()
    if chromium is None:
        parser.error("no Chromium on PATH: install it (Debian: apt-get install chromium)")
    cells = [*START]
    for picture in wanted:
        cells += cells_of(picture)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = Server(Path(folder), "notebook")
        try:
            name = server.wait_until_up().put("pictures.ipynb", [*cells, ""])
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            context = browser.new_context(device_scale_factor=2)
            with NotebookPage(context, server, name) as page:
                page.wait_for_kernel()
                page.page.add_style_tag(content=PLAIN)
                number = len(START)
                for index in range(number):
                    page.run(index)
                    page.wait_done(index)
                for picture in wanted:
                    take(page, picture, number)
                    number += len(cells_of(picture))
            browser.close()
        finally:
            server.close()


if __name__ == "__main__":
    main()
