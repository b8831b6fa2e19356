"""The quickstart in a real browser: live in JupyterLab, and as a saved page without scripts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "01_quickstart.ipynb"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
]  # fmt: skip
KERNEL_IS_READY = """() => {
  const session = jupyterapp.shell.currentWidget?.sessionContext?.session;
  return session?.kernel?.connectionStatus === 'connected' && session.kernel.status === 'idle';
}"""
# not awaited: the command ends when the cells do. The cells tagged as failing end a run-all.
RUN_ABOVE_THE_FAILING_CELLS = """() => {
  const cells = jupyterapp.shell.currentWidget.content;
  cells.deselectAll();
  cells.activeCellIndex = cells.widgets.findIndex(
    cell => cell.model.sharedModel.getSource().startsWith('## When a worker fails'));
  jupyterapp.commands.execute('notebook:run-all-above');
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; where there is none that is a failure in CI, a skip elsewhere."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    path = path or shutil.which("google-chrome")
    if path is None:
        words = "no Chromium on PATH: install it (Debian: apt-get install chromium)"
        pytest.fail(words) if os.environ.get("CI") else pytest.skip(words)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """A JupyterLab of its own, with the quickstart in its folder; gives its address."""
    notebook = json.loads(NOTEBOOK.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []  # what is seen later has been made there
    (tmp_path / "quick.ipynb").write_text(json.dumps(notebook))
    settings = tmp_path / "settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false"}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = dict(
        os.environ,
        HOME=str(tmp_path),
        JUPYTERLAB_SETTINGS_DIR=str(tmp_path / "settings"),
        PYTHONPATH=str(ROOT),
        CUDA_VISIBLE_DEVICES="",
    )
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", "--IdentityProvider.token=tok", "--LabApp.expose_app_in_browser=True",
        f"--ServerApp.root_dir={tmp_path}",
    ]  # fmt: skip
    log = (tmp_path / "lab.log").open("w")
    server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(address, server, tmp_path / "lab.log")
        yield address
    finally:
        server.terminate()
        server.wait(timeout=20)
        log.close()


def _wait_until_up(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{address}/api?token=tok", timeout=2):
                return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(log.read_text())


@pytest.mark.timeout(400)
def test_the_quickstart_runs_in_jupyterlab(browser: Any, lab: str, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 1600})
    page.goto(f"{lab}/lab/tree/quick.ipynb?reset&token=tok", timeout=60_000)
    page.wait_for_function("() => window.jupyterapp", timeout=90_000)
    page.wait_for_selector(".jp-CodeCell", timeout=90_000)
    page.wait_for_function(KERNEL_IS_READY, timeout=90_000)
    page.evaluate(RUN_ABOVE_THE_FAILING_CELLS)
    page.wait_for_function(
        "() => document.body.innerText.includes('differ: A A B A')", timeout=90_000
    )
    text = page.inner_text(".jp-Notebook")
    assert "hello from worker 3" in text
    assert "shards distinct" in text
    table = page.locator(".jp-OutputArea-output table").first.bounding_box()
    assert table is not None
    assert 200 < table["width"] < 1100
    page.screenshot(path=tmp_path / "lab.png")
    page.close()


def test_the_saved_page_shows_every_view_without_scripts(browser: Any, tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable, "-m", "nbconvert", "--log-level", "ERROR", "--to", "html",
            "--output-dir", str(tmp_path), "--output", "page.html", str(NOTEBOOK),
        ],
        check=True,
        timeout=60,
    )  # fmt: skip
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("table").count() >= 5
    assert page.get_by_text("differ: A A B A").first.is_visible()
    assert page.get_by_text("[0-3] one of 4").first.is_visible()
    assert page.get_by_text("worker 1 has had enough").first.is_visible()
    context.close()
