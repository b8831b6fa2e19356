"""JupyterLab's own debugger panel: breakpoints in a ``%%disco`` cell, workers in its call stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.front_end import NotebookPage, Server

pytestmark = pytest.mark.browser

PROGRAM = """%%disco
def double(value):
    twice = value * 2
    return twice

x = torch.ones(2) * rank
y = double(x)
z = y + 1
z"""
CELLS = [
    "%load_ext discolab\n%disco_session 2 --devices cpu\n%disco_dap --jupyterlab",
    PROGRAM,
    "%disco_continue",
]


class Panel:
    """What somebody sees of JupyterLab's debugger, and presses in it."""

    def __init__(self, page: NotebookPage) -> None:
        self.page = page

    def command(self, name: str) -> None:
        script = "name => { jupyterapp.commands.execute('debugger:' + name) }"
        self.page.page.evaluate(script, name)

    def stack(self) -> list[tuple[str, str]]:
        """Name and line of each frame."""
        frames = self.page.page.locator(".jp-DebuggerCallstackFrame").all()
        return [
            (
                frame.locator(".jp-DebuggerCallstackFrame-name").inner_text(),
                frame.locator(".jp-DebuggerCallstackFrame-location").inner_text().split(":")[-1],
            )
            for frame in frames
        ]

    def variables(self) -> str:
        return self.page.page.locator(".jp-DebuggerVariables-body").first.inner_text()

    def until(self, what: Callable[[], Any]) -> None:
        self.page.wait_until(what)


def test_the_debugger_of_jupyterlab_steps_through_a_cell(
    lab: Server, open_notebook: Callable[..., NotebookPage]
) -> None:
    page = open_notebook(lab, lab.put("debugger.ipynb", CELLS))
    page.set_width(1500)
    page.wait_for_kernel()
    page.run(0)
    page.wait_done(0)
    panel = Panel(page)
    page.page.locator(".jp-DebuggerBugButton").first.click()
    page.wait_until(lambda: page.page.locator(".cm-breakpoint-gutter").count() >= 3)
    panel.command("show-panel")
    # the first is a spacer
    page.cell(1).locator(".cm-breakpoint-gutter .cm-gutterElement").nth(7).click()
    page.page.wait_for_timeout(3000)
    panel.until(lambda: page.page.locator(".jp-DebuggerBreakpoint").count() == 1)
    page.run(1)
    panel.until(lambda: panel.stack())
    assert panel.stack() == [("worker 0 · <module>", "7"), ("worker 1 · <module>", "7")]
    assert page.cell(1).locator(".jp-DebuggerEditor-highlight").inner_text() == "y = double(x)"
    panel.until(lambda: "float32[2]" in panel.variables())
    panel.command("stepIn")
    panel.until(lambda: len(panel.stack()) == 4)
    assert panel.stack()[0] == ("worker 0 · double", "3")
    page.page.locator(".jp-DebuggerCallstackFrame").nth(2).click()
    panel.until(lambda: "mean 1, 1 to 1" in panel.variables())
    panel.command("next")
    panel.until(lambda: panel.stack()[:1] == [("worker 0 · double", "4")])
    panel.until(lambda: "twice" in panel.variables())
    panel.command("continue")
    panel.until(lambda: not panel.stack())
    page.run(2)
    page.wait_for_text("DRef", 2)
    page.page.locator(".jp-DebuggerBugButton").first.click()
    assert not page.complaints
