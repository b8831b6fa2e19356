"""``%disco_devices`` as somebody sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.front_end import NotebookPage, Server

pytestmark = pytest.mark.browser

CELLS = [
    "%load_ext discolab\n%disco_session 3 --devices cpu",
    "%disco_devices",
    "%%disco -a\nimport time\nif rank == 1: time.sleep(60)\nccl.barrier()",
    "import time; time.sleep(3)",
    "%disco_shutdown",
]


def _fits(page: NotebookPage) -> bool:
    area = page.boxes(1, ".dl-live")[0]
    parts = page.boxes(1, ".dd tbody tr, .dd tbody th, .dd tbody td, .dd-meter")
    return all(part["x"] + part["width"] <= area["x"] + area["width"] + 1 for part in parts)


def test_who_waits_for_whom_is_seen_while_cells_run(
    lab: Server, open_notebook: Callable[..., NotebookPage]
) -> None:
    page = open_notebook(lab, lab.put("devices.ipynb", CELLS)).wait_for_kernel()
    for number in range(3):
        page.run(number)
        page.wait_done(number)
    states = page.output(1).locator(".dd-word")
    page.wait_until(lambda: states.all_inner_texts() == ["waiting"] * 3)
    page.run(3)  # an ordinary cell
    doing = page.output(1).locator(".dd-words")
    page.wait_until(lambda: "for worker 1 in barrier" in doing.nth(0).inner_text())
    page.wait_until(lambda: "workers 02 wait for it" in doing.nth(1).inner_text())
    page.wait_done(3)
    for width in (1200, 600, 380):
        page.set_width(width)
        page.wait_until(lambda: _fits(page))
    page.run(4)
    page.wait_for_text("shut down: %disco_restart", 1)
    assert states.all_inner_texts() == ["ended"] * 3
    saved = page.save()["cells"][1]["outputs"][0]["data"]
    assert "ended" in "".join(saved["text/plain"])
    assert not page.complaints
