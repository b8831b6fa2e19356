"""The live views of a session in both front ends: alive, used by hand, and as documents."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.front_end import NotebookPage, Server, notebook_of

pytestmark = pytest.mark.browser

Open = Callable[[Server, str], NotebookPage]

START = "%load_ext discolab\n%disco_session 4"
VIEWS = {  # and what each shows as soon as it is there, and what its static picture shows
    "%disco_registers": "registers of sess",
    "%disco_devices": "sess: 4 workers",
    "%disco_timeline": "sess: 4 workers",
}
MAKE = "%%disco\ny = ccl.all_reduce(torch.ones(64))"
NAME = "made = sess['y'] * 2"
BUSY = "import os, time\nwhile not os.path.exists('gate'):\n    time.sleep(0.02)\nprint('through')"
WIDTHS = (480, 800, 1280)  # of the window: 360 px and more for an output


def wait_until_shown(page: NotebookPage, number: int, live: int, static: int) -> None:
    """Wait until as many live views, and as many static ones, are to be seen in a cell."""

    def count(selector: str) -> int:
        return sum(item.is_visible() for item in page.output(number).locator(selector).all())

    page.wait_until(lambda: (count(".dl-live"), count("[class^=dl-static]")) == (live, static))


@pytest.fixture
def page(front_end: Server, open_notebook: Open) -> NotebookPage:
    """A notebook in which every view is shown, and has come alive."""
    (front_end.notebooks / "gate").unlink(missing_ok=True)
    cells = [START, *VIEWS, MAKE, NAME, BUSY]
    page = open_notebook(front_end, front_end.put("views.ipynb", cells)).wait_for_kernel()
    for number in range(1 + len(VIEWS)):
        page.run(number)
        page.wait_done(number)
    for number, words in enumerate(VIEWS.values(), 1):
        wait_until_shown(page, number, live=1, static=0)
        page.wait_for_text(words, number)
    return page


def run_last(page: NotebookPage, start: int, stop: int) -> None:
    """Run the cells with these numbers after the views, one after the other."""
    for number in range(1 + len(VIEWS) + start, 1 + len(VIEWS) + stop):
        page.run(number)
        page.wait_done(number)


def test_they_follow_are_used_while_a_cell_runs_and_take_keys(
    page: NotebookPage, front_end: Server
) -> None:
    run_last(page, 0, 2)
    registers, busy = 1, 1 + len(VIEWS) + 2
    page.wait_for_text("made", registers)
    for width in WIDTHS:
        page.set_width(width)
        assert page.too_wide() == [], width
    page.run(busy)
    page.wait_until(lambda: page.is_running(busy))
    cells = len(page.save()["cells"])
    page.output(registers).locator(".dlr-body").focus()
    for key in ("ArrowDown", "ArrowUp", "Enter"):
        page.page.keyboard.press(key)
    page.wait_for_text("equal on all workers", registers)
    page.page.keyboard.press("Delete")
    page.output(registers).get_by_text("Free", exact=True).click()
    page.wait_until(lambda: "was freed" in page.text(registers))
    assert page.is_running(busy)
    (front_end.notebooks / "gate").touch()
    page.wait_done(busy)
    assert len(page.save()["cells"]) == cells  # no key went to the notebook
    assert page.complaints == []


def test_without_a_kernel_they_are_documents(
    page: NotebookPage, front_end: Server, open_notebook: Open, browser: Any
) -> None:
    run_last(page, 0, 2)
    page.wait_for_text("made", 1)
    page.restart()
    for number in range(1, 1 + len(VIEWS)):
        page.wait_for_text("the kernel has gone", number)
    page.save()
    page.close()
    again = open_notebook(front_end, "views.ipynb").wait_for_kernel()
    for number, words in enumerate(VIEWS.values(), 1):
        again.wait_for_text(words, number)
        wait_until_shown(again, number, live=0, static=1)
        assert "isplaying widget" not in again.text(number)
        assert "oading widget" not in again.text(number)
    _assert_shown_without_scripts(browser, _html(front_end.notebooks / "views.ipynb"))


def test_where_nobody_watches_they_are_documents(browser: Any, tmp_path: Path) -> None:
    views = [
        f"display(discolab.notebook.{name.removeprefix('%')}())\nprint('after {name}')"
        for name in VIEWS
    ]
    path = tmp_path / "run.ipynb"
    path.write_text(
        json.dumps(notebook_of([START, "import discolab.notebook", MAKE, NAME, *views]))
    )
    saved = _html(path, "--execute")
    _assert_shown_without_scripts(browser, saved, *(f"after {name}" for name in VIEWS))


def _html(path: Path, *options: str) -> Path:
    """The page that nbconvert makes of a notebook."""
    subprocess.run(
        [
            sys.executable, "-m", "nbconvert", "--log-level", "ERROR", "--to", "html",
            *options, str(path),
        ],
        check=True,
        timeout=60,
        cwd=path.parent,
    )  # fmt: skip
    return path.with_suffix(".html")


def _assert_shown_without_scripts(browser: Any, path: Path, *more: str) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(path.as_uri())
    for words in (*VIEWS.values(), *more):
        assert page.locator(".jp-OutputArea").get_by_text(words).first.is_visible(), words
    context.close()
