"""``%disco_debugger`` in a browser: keys and clicks, between cells and while one waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.front_end import NotebookPage, Server

pytestmark = pytest.mark.browser

PROGRAM = """%%disco --step
def double(value):
    twice = value * 2
    return twice

x = torch.ones(8, 8) * rank
y = double(x)
evil = "<img src=x onerror=window.stung=1>"
total = ccl.all_reduce(y)
import time
while True:
    time.sleep(0.01)"""
CELLS = [
    "%load_ext discolab\n%disco_session 2 --devices cpu",
    "%disco_debugger",
    PROGRAM,
    "%disco_continue",
]


class Panel:
    """What somebody sees of the panel, and presses in it."""

    def __init__(self, page: NotebookPage) -> None:
        self.page, self.shown = page, page.output(1).locator(".dls")

    def state(self) -> str:
        return str(self.shown.get_attribute("data-state"))

    def line(self) -> str:
        """The line that is next."""
        found = self.shown.locator(".dls-here .dls-text")
        return found.inner_text().strip() if found.count() else ""

    def key(self, key: str, line: str) -> None:
        """Press a key, and see the program come to a line."""
        self.page.page.keyboard.press(key)
        self.until(lambda: self.line() == line)

    def click(self, button: str) -> None:
        self.shown.get_by_role("button", name=button, exact=True).click()

    def words(self, of: str) -> list[str]:
        """The values of a variable, or of an expression."""
        row = self.shown.locator("tr", has=self.page.page.get_by_text(of, exact=True))
        return [words.strip() for words in row.first.locator(".dls-words").all_inner_texts()]

    def until(self, what: Callable[[], Any]) -> None:
        self.page.wait_until(what)


def begin(page: NotebookPage) -> Panel:
    """Run the first three cells; the panel shows the program at its first line."""
    page.wait_for_kernel()
    for number in range(3):
        page.run(number)
        page.wait_done(number)
    panel = Panel(page)
    panel.until(lambda: panel.state() == "paused" and panel.line() == "def double(value):")
    return panel


def test_a_program_is_stepped_with_keys_and_clicks(
    front_end: Server, open_notebook: Callable[..., NotebookPage]
) -> None:
    page = open_notebook(front_end, front_end.put("stepper.ipynb", CELLS))
    panel = begin(page)
    panel.shown.locator(".dls-head").click()
    panel.key("n", "x = torch.ones(8, 8) * rank")
    panel.key("n", "y = double(x)")
    panel.until(lambda: panel.words("x") == ["constant 0", "constant 1"])
    panel.key("s", "twice = value * 2")
    assert panel.shown.locator(".dls-function").all_inner_texts() == ["double", "the cell"]
    panel.shown.locator(".dls-frame", has_text="the cell").click()
    panel.until(lambda: panel.line() == "y = double(x)")
    panel.key("o", 'evil = "<img src=x onerror=window.stung=1>"')
    field = panel.shown.get_by_label("expression")
    field.fill("")
    field.press_sequentially("[1, len('snocp')][rank]")
    field.press("Enter")
    panel.until(lambda: panel.words("[1, len('snocp')][rank]") == ["1", "5"])
    assert panel.line().startswith("evil")  # keys that were typed are no commands
    field.press("Escape")
    panel.key("n", "total = ccl.all_reduce(y)")
    panel.until(lambda: panel.words("evil") != [])
    assert page.page.evaluate("() => window.stung") is None

    panel.shown.get_by_label("worker 0", exact=True).click()
    panel.click("next")
    panel.until(lambda: "waits in all_reduce #1" in panel.shown.inner_text())
    panel.shown.get_by_role("button", name="all", exact=True).click()
    panel.shown.get_by_label("breakpoint at line 11", exact=True).click()
    panel.until(lambda: "Cell In[3], line 11" in panel.shown.locator(".dls-breaks").inner_text())
    panel.shown.locator(".dls-head").click()
    page.page.keyboard.press("c")
    panel.until(lambda: panel.line() == "while True:" or panel.line() == "import time")
    for width in (1200, 700, 380):
        page.set_width(width)
        panel.until(lambda: not page.too_wide())
    saved = page.save()["cells"][1]["outputs"][0]["data"]
    assert "Cell In[3] · stop " in "".join(saved["text/plain"])
    assert not page.complaints


def test_it_is_paused_and_aborted_while_a_cell_waits(
    lab: Server, open_notebook: Callable[..., NotebookPage]
) -> None:
    page = open_notebook(lab, lab.put("waits.ipynb", CELLS))
    panel = begin(page)
    page.run(3)
    panel.until(lambda: panel.state() == "running")
    assert page.is_running(3)
    step = panel.shown.get_by_role("button", name="step", exact=True)
    assert step.is_disabled()
    panel.until(lambda: panel.shown.locator(".dls-at-running").count() > 0)
    panel.click("pause")
    panel.until(lambda: panel.state() == "paused")
    page.wait_done(3)
    assert step.is_enabled()
    page.run(3)
    panel.until(lambda: panel.state() == "running")
    panel.click("abort")
    panel.until(lambda: panel.state() == "ended")
    page.wait_done(3)
    panel.until(lambda: "was aborted" in panel.shown.inner_text())
    assert not page.complaints
