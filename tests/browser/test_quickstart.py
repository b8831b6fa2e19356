"""The quickstart in a browser: live in both front ends, and as a saved page without scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.front_end import ROOT, NotebookPage, Server

pytestmark = pytest.mark.browser

NOTEBOOK = ROOT / "notebooks" / "01_quickstart.ipynb"
WIDTHS = (400, 800, 1280)


def quickstart(server: Server) -> str:
    """Put it there without outputs: what is seen later has been made there."""
    notebook = json.loads(NOTEBOOK.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return server.put("quick.ipynb", notebook)


def test_it_runs_to_its_end(
    front_end: Server, open_notebook: Callable[[Server, str], NotebookPage]
) -> None:
    page = open_notebook(front_end, quickstart(front_end)).wait_for_kernel()
    page.run_all()
    text = page.text()
    for words in (
        "[0-3] one of 4",
        "hello from worker 3",
        "4 different values: shards",
        "equal on all workers",
        "differ: A A B A",
        "worker 1 has had enough",
        "hi from 3 of 4",
        "sess: shut down",
    ):
        assert words in text, words
    assert page.page.locator(".jp-OutputArea-output table").count() >= 5
    for width in WIDTHS:
        page.set_width(width)
        assert page.too_wide() == [], width
        assert page.overlapping_tables() == [], width
    assert page.complaints == []


@pytest.fixture(scope="module")
def saved_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What nbconvert makes of the notebook as it is committed."""
    folder = tmp_path_factory.mktemp("saved")
    subprocess.run(
        [
            sys.executable, "-m", "nbconvert", "--log-level", "ERROR", "--to", "html",
            "--output-dir", str(folder), "--output", "page.html", str(NOTEBOOK),
        ],
        check=True,
        timeout=60,
    )  # fmt: skip
    return folder / "page.html"


def test_the_saved_page_shows_every_view_without_scripts(browser: Any, saved_page: Path) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(saved_page.as_uri())
    assert page.locator("table").count() >= 5
    assert page.get_by_text("differ: A A B A").first.is_visible()
    assert page.get_by_text("[0-3] one of 4").first.is_visible()
    assert page.get_by_text("worker 1 has had enough").first.is_visible()
    context.close()
