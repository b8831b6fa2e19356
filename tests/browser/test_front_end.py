"""What all other tests here lean on: kernels, cells, widgets and pictures, in both front ends.

The widget is as small as one can be, and none of discolab's: if something fails here, it is the
front end, the kernel or `front_end.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.front_end import NotebookPage, Server

pytestmark = pytest.mark.browser

WIDGET = '''\
import threading
import time

import anywidget
import traitlets
from IPython.display import HTML, display


class Ticker(anywidget.AnyWidget):
    _esm = """
    export default { render({ model, el }) {
      const tick = document.createElement("p");
      const button = document.createElement("button");
      button.textContent = "press";
      button.onclick = () => model.send("pressed");
      const show = () => { tick.textContent = `tick ${model.get("tick")}`; };
      model.on("change:tick", show);
      show();
      el.append(tick, button);
    } }
    """
    tick = traitlets.Int(0).tag(sync=True)
    pressed = 0

    def __init__(self):
        super().__init__()
        if hasattr(self.comm, "_reply_subshell_for"):  # ipykernel 7.4, see widgets/base.py
            self.comm._reply_subshell_for = lambda data, default: default
        self.on_msg(self.press)
        threading.Thread(target=self.run, daemon=True).start()

    def press(self, *_):
        self.pressed += 1

    def run(self):
        while True:
            time.sleep(0.1)
            self.tick += 1


def wait(done):
    deadline = time.monotonic() + 30
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


ticker = Ticker()
display(ticker)
'''
CELLS = [
    WIDGET,
    "wait(lambda: ticker.pressed == 2)\nprint('heard')",  # busy until a button is pressed
    "print('pressed', ticker.pressed)",
    "display(HTML('<div style=\"width: 3000px\">very wide</div>'))",
    "table = '<table style=\"margin-top: -20px\"><tr><td>one</td></tr></table>'\n"
    "display(HTML(table + table))",
    "print('asleep')\ntime.sleep(100)",
]


def ticks(page: NotebookPage) -> int:
    """What the widget shows."""
    return int(page.text(0).split()[1])


@pytest.fixture
def page(front_end: Server, open_notebook: Callable[[Server, str], NotebookPage]) -> NotebookPage:
    """The notebook of this file, its first cell run and the widget alive."""
    page = open_notebook(front_end, front_end.put("front_end.ipynb", CELLS)).wait_for_kernel()
    page.run(0)
    page.wait_done(0)
    page.wait_for_text("tick", 0)
    return page


def test_widgets_live_and_hear_while_a_cell_runs_and_between_cells(page: NotebookPage) -> None:
    button = page.output(0).get_by_text("press")
    button.click()
    page.run(1)
    page.wait_until(lambda: page.is_running(1))
    before = ticks(page)
    page.wait_until(lambda: ticks(page) > before + 3)
    assert page.is_running(1)
    button.click()  # ends that cell
    page.wait_done(1)
    assert page.text(1) == "heard\n"
    button.click()
    page.run(2)
    page.wait_done(2)
    assert page.text(2) == "pressed 3\n"
    assert page.complaints == []


def test_cells_are_stopped_kernels_restarted_and_notebooks_saved(
    page: NotebookPage, tmp_path: Path
) -> None:
    page.run(5)
    page.wait_for_text("asleep", 5)  # marked as running it is before it has come to the kernel
    page.interrupt()
    page.wait_done(5)
    assert "KeyboardInterrupt" in page.text(5)
    for number in (3, 4):
        page.run(number)
        page.wait_done(number)
    (wide,) = page.too_wide()
    assert "very wide" in wide
    assert page.overlapping_tables() == ["one / one"]
    saved = page.save()
    assert [bool(cell["outputs"]) for cell in saved["cells"]] == [True, False, False] + [True] * 3
    light, dark = tmp_path / "light.png", tmp_path / "dark.png"
    page.picture(light, 4)
    page.set_dark(True)
    page.picture(dark, 4)
    assert light.read_bytes() != dark.read_bytes()
    page.restart()
    page.run(2)
    page.wait_done(2)
    assert "NameError" in page.text(2)
