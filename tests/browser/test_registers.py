"""``%disco_registers`` in a browser: what mouse and keyboard do, also while a cell runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser.front_end import NotebookPage, Server

pytestmark = pytest.mark.browser

MAKE = """%load_ext discolab
%disco_session 2 --devices cpu
import torch, time
big = sess.call_packed(torch.zeros, 1000)
many = [sess.call_packed(torch.zeros, 1 + n % 50) for n in range(5000)]
evil = sess.call_packed(str, "<img src=x onerror=window.stung=1>")
evil.name = "<img src=x onerror=window.stung=1>"
sess.sync_all()"""
CELLS = [MAKE, "%disco_registers --sort id", "time.sleep(30)"]


@pytest.fixture(scope="module")
def shown(window: Any, lab: Server) -> Iterator[NotebookPage]:
    """A notebook with the widget open, for all tests of this file in turn."""
    with NotebookPage(window, lab, lab.put("registers.ipynb", CELLS)) as page:
        page.wait_for_kernel()
        for number in (0, 1):
            page.run(number)
            page.wait_done(number)
        page.output(1).locator(".dlr-row:not([hidden])").first.wait_for()
        yield page


def rows(page: NotebookPage) -> list[list[str]]:
    """The visible words of the rows in sight, from top to bottom."""
    found = page.output(1).locator(".dlr-row:not([hidden])").evaluate_all(
        "rows => rows.sort((a, b) => parseFloat(a.style.top) - parseFloat(b.style.top))"
        ".map(row => [...row.querySelectorAll('span')].map(cell => cell.textContent))"
    )  # fmt: skip
    return [list(cells) for cells in found]


def until(page: NotebookPage, what: Callable[[], bool]) -> None:
    """Wait, while the page goes on."""
    for _ in range(500):
        if what():
            return
        page.page.wait_for_timeout(20)
    raise AssertionError(rows(page)[:3])


def search(page: NotebookPage, words: str) -> None:
    page.output(1).locator("input[type=search]").fill(words)


def test_thousands_of_rows_are_scrolled_through(shown: NotebookPage) -> None:
    assert rows(shown)[0][1] == "big"
    body = shown.output(1).locator(".dlr-body")
    for place in (1000, 4000, 2500):
        body.evaluate("(body, top) => { body.scrollTop = top; }", place * 24)
        until(shown, lambda place=place: rows(shown)[0][1] == f"many[{place - 1}]")  # type: ignore[misc]
    assert len(rows(shown)) <= 15  # no more are on the page
    body.press("Home")
    until(shown, lambda: rows(shown)[0][1] == "big")


def test_a_heading_sorts_and_words_filter(shown: NotebookPage) -> None:
    heading = shown.output(1).get_by_role("button", name="total")
    heading.click()
    until(shown, lambda: rows(shown)[0][1] == "big" and rows(shown)[1][2] == "float32[50]")
    heading.click()
    until(shown, lambda: rows(shown)[0][2].startswith("str"))
    before = shown.boxes(1, ".dlr-table")
    search(shown, "many[7]")
    until(shown, lambda: [row[1] for row in rows(shown)] == ["many[7]"])
    assert shown.boxes(1, ".dlr-table") == before  # nothing has moved
    search(shown, "")
    until(shown, lambda: len(rows(shown)) > 5)


def test_keys_choose_open_and_free(shown: NotebookPage) -> None:
    output = shown.output(1)
    search(shown, "many[11")
    until(shown, lambda: rows(shown)[-1][1].startswith("many[11"))
    body = output.locator(".dlr-body")
    body.focus()
    body.press("ArrowDown")
    body.press("ArrowDown")
    chosen = output.locator(".dlr-row[aria-selected=true]")
    name = chosen.locator(".dlr-name").inner_text()
    body.press("Enter")
    output.locator(".dlr-picture .dl-v").wait_for()
    assert name in output.locator(".dlr-view-head").inner_text()
    body.focus()
    body.press("Delete")
    assert f"the notebook's {name} will be unusable" in output.locator(".dlr-ask").inner_text()
    shown.page.keyboard.press("Escape")  # not this time
    assert not output.locator(".dlr-ask").is_visible()
    body.press("Delete")
    output.get_by_role("button", name="Free", exact=True).click()
    until(shown, lambda: all(row[1] != name for row in rows(shown)))
    body.press("Escape")
    assert not output.locator(".dlr-view").is_visible()


def test_buttons_act_while_a_cell_runs(shown: NotebookPage) -> None:
    search(shown, "")
    shown.run(2)
    until(shown, lambda: shown.is_running(2))
    shown.output(1).get_by_role("button", name="reg.").click()
    until(shown, lambda: rows(shown)[0][1] == "big")
    shown.output(1).locator(".dlr-row", has_text="big").get_by_role("button").click()
    shown.output(1).get_by_role("button", name="Free", exact=True).click()
    until(shown, lambda: rows(shown)[0][1] == "many[0]")
    assert shown.is_running(2)
    shown.interrupt()
    shown.wait_done(2)


def test_names_are_text(shown: NotebookPage) -> None:
    search(shown, "img")
    until(shown, lambda: len(rows(shown)) == 1)
    assert rows(shown)[0][1] == "<img src=x onerror=window.stung=1>"
    shown.output(1).locator(".dlr-row:not([hidden])").click()
    shown.output(1).locator(".dlr-picture .dl-v").wait_for()
    assert shown.output(1).locator("img[onerror], script").count() == 0
    assert shown.page.evaluate("() => window.stung") is None
    assert [words for words in shown.complaints if "dlr" in words] == []
