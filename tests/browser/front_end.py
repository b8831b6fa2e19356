"""JupyterLab and Notebook 7 in a headless Chromium, as somebody sees them who sits before them.

`Server` is one server process with a home and settings of its own; `NotebookPage` is a notebook
that is open in the browser. Nothing here waits by sleeping for a fixed time: every wait asks again
until what it waits for is so, and raises with what it saw when its time is over.

That a cell is done is read from the cell, not from the status of the kernel: while a cell is
running a subshell can be idle, and the front end shows the one that spoke last.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, FloatRect, Locator, Page

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
]  # fmt: skip
TOKEN = "tok"
SECONDS = 40.0  # for one wait, if nothing else is said

# name of the program, the class that is configured, the path of an open notebook
KINDS = {
    "lab": ("jupyterlab", "LabApp", "lab/tree"),
    "notebook": ("notebook", "JupyterNotebookApp", "notebooks"),
}
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # every cell is in the page, also those that are scrolled away
    "notebook-extension/tracker": {"windowingMode": "none"},
    "docmanager-extension/plugin": {"autosave": False},
}
FRONT_END_IS_UP = "() => window.jupyterapp?.shell?.currentWidget?.content?.widgets?.length > 0"
KERNEL = "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel"
KERNEL_IS_READY = f"""async () => {{
  const kernel = {KERNEL};
  if (kernel?.connectionStatus !== 'connected') return false;
  await kernel.info;
  return true;
}}"""
# Not awaited: the command ends when the cell does. Without a count the cell is not done.
RUN = """number => {
  const cells = jupyterapp.shell.currentWidget.content;
  for (const [i, cell] of cells.widgets.entries())
    if (cell.model.type === 'code' && (number === null || i === number))
      cell.model.executionCount = null;
  cells.deselectAll();
  if (number !== null) cells.activeCellIndex = number;
  jupyterapp.commands.execute(
    number === null ? 'notebook:run-all-cells' : 'notebook:run-cell');
}"""
# One cell, or every code cell.
CELLS = """number => jupyterapp.shell.currentWidget.content.widgets
  .filter((cell, i) => number === null ? cell.model.type === 'code' : i === number)
  .map(cell => ({
    count: cell.model.executionCount ?? null,
    prompt: cell.node.querySelector('.jp-InputPrompt')?.innerText ?? '',
    text: cell.outputArea?.node.innerText ?? '',
  }))"""
# What sticks out of its output; what can be scrolled within the output does not.
TOO_WIDE = """() => [...document.querySelectorAll('.jp-OutputArea-output')]
  .filter(output => output.scrollWidth > output.clientWidth + 1)
  .map(output => `${output.scrollWidth} in ${output.clientWidth} px: `
    + output.innerText.slice(0, 60))"""
# Pairs of tables of which neither is inside the other, and which share a place on the screen.
OVERLAPS = """() => {
  const found = [];
  const tables = [...document.querySelectorAll('.jp-OutputArea-output table')]
    .filter(table => table.checkVisibility());
  for (const [i, one] of tables.entries())
    for (const other of tables.slice(i + 1)) {
      if (one.contains(other) || other.contains(one)) continue;
      const [a, b] = [one.getBoundingClientRect(), other.getBoundingClientRect()];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 1)
        found.push(`${one.innerText.slice(0, 30)} / ${other.innerText.slice(0, 30)}`);
    }
  return found;
}"""


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome, if there is one on PATH."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def wait_until(what: Callable[[], Any], words: str, seconds: float = SECONDS) -> Any:
    """Ask `what` until it gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so after {seconds:g} s: {words}")
        time.sleep(0.02)
    return found


def notebook_of(cells: list[str]) -> dict[str, Any]:
    """A notebook of code cells, as nbformat has it."""
    made = [
        {
            "cell_type": "code", "id": f"cell{i}", "source": source, "metadata": {},
            "outputs": [], "execution_count": None,
        }
        for i, source in enumerate(cells)
    ]  # fmt: skip
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {
        "cells": made, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5
    }  # fmt: skip


class Server:
    """A Jupyter server of its own on 127.0.0.1.

    Parameters
    ----------
    folder
        An empty folder: home, settings, log, and the notebooks that it serves.
    kind
        ``lab`` or ``notebook``: which front end it is started as.
    """

    def __init__(self, folder: Path, kind: str = "lab") -> None:
        self.kind = kind
        self.notebooks = folder / "notebooks"
        self._log = folder / "server.log"
        self.notebooks.mkdir(parents=True)
        for name, values in SETTINGS.items():
            path = folder / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        program, config, _ = KINDS[kind]
        command = [
            sys.executable, "-m", program, "--no-browser", "--allow-root", "--ip=127.0.0.1",
            f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}",
            f"--{config}.expose_app_in_browser=True", f"--ServerApp.root_dir={self.notebooks}",
        ]  # fmt: skip
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=self._environment(folder), stdout=log, stderr=log, cwd=folder
            )

    @staticmethod
    def _environment(folder: Path) -> dict[str, str]:
        """Nothing of somebody's own Jupyter is read, and nothing is written there."""
        env = {name: value for name, value in os.environ.items() if name[:8] != "JUPYTER_"}
        if "JUPYTER_PATH" in os.environ:
            env["JUPYTER_PATH"] = os.environ["JUPYTER_PATH"]
        return env | {
            "HOME": str(folder),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def wait_until_up(self) -> Self:
        """Return once it answers."""

        def answers() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            try:
                with urllib.request.urlopen(f"{self.address}/api?token={TOKEN}", timeout=2):
                    return True
            except OSError:
                return False

        wait_until(answers, f"{self.kind} answers at {self.address}")
        return self

    def put(self, name: str, notebook: list[str] | dict[str, Any]) -> str:
        """Write a notebook, as it is or of these code cells; gives its name for `NotebookPage`."""
        if isinstance(notebook, list):
            notebook = notebook_of(notebook)
        (self.notebooks / name).write_text(json.dumps(notebook))
        return name

    def url(self, name: str) -> str:
        """The address of a notebook in this server's front end."""
        return f"{self.address}/{KINDS[self.kind][2]}/{name}?reset&token={TOKEN}"

    def close(self) -> None:
        """End it, and the kernels with it."""
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class NotebookPage:
    """A notebook that is open in a browser.

    Cells are numbered from 0 as they stand in the notebook, Markdown included.
    """

    def __init__(self, context: BrowserContext, server: Server, name: str) -> None:
        self.page: Page = context.new_page()
        self.complaints: list[str] = []  # what the page had to say in the browser's console
        self.page.on("pageerror", lambda error: self.complaints.append(str(error.stack or error)))
        self._file = server.notebooks / name
        self._dark = False
        self.page.goto(server.url(name), timeout=SECONDS * 1000)
        self._wait_for(FRONT_END_IS_UP, "the notebook is shown")
        self.page.evaluate("() => jupyterapp.shell.collapseLeft()")  # the width is the notebook's

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # kernel and cells

    def wait_for_kernel(self) -> Self:
        """Return once the kernel has answered a first question."""
        self._wait_for(KERNEL_IS_READY, "the kernel is connected")
        self.complaints.clear()  # of the front end about itself
        return self

    def run(self, number: int | None = None) -> None:
        """Start cell `number`, or all; returns at once."""
        self.page.evaluate(RUN, number)

    def run_all(self, seconds: float = SECONDS) -> None:
        """Run all cells and wait for the last."""
        self.run()
        self.wait_done(seconds=seconds)

    def wait_done(self, number: int | None = None, seconds: float = SECONDS) -> None:
        """Wait until cell `number`, or every code cell, has run to its end."""
        if not self._poll(lambda: all(map(_is_done, self._cells(number))), seconds):
            raise AssertionError(f"cells not done after {seconds:g} s: {self._cells(number)}")

    def wait_until(self, what: Callable[[], Any], seconds: float = SECONDS) -> None:
        """Wait until `what`, asked again and again, gives something true."""
        if not self._poll(what, seconds):
            raise AssertionError(f"not so after {seconds:g} s; the notebook shows:\n{self.text()}")

    def is_running(self, number: int) -> bool:
        """Whether the cell is marked as started and not ended; the kernel may not have it yet."""
        return "*" in self._cells(number)[0]["prompt"]

    def interrupt(self) -> None:
        """The stop button."""
        self.page.evaluate(f"() => {KERNEL}.interrupt()")

    def restart(self) -> None:
        """Restart the kernel, without a question asked, and wait for it."""
        self.page.evaluate(f"() => {KERNEL}.restart()")
        self.wait_for_kernel()

    def shut_down_kernel(self) -> None:
        """End the kernel and have none."""
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")

    def save(self) -> dict[str, Any]:
        """Save, and give the notebook as it then stands in the file."""
        self.page.evaluate("async () => { await jupyterapp.commands.execute('docmanager:save') }")
        saved: dict[str, Any] = json.loads(self._file.read_text())
        return saved

    # what is on the screen

    def cell(self, number: int) -> Locator:
        """A cell."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def output(self, number: int) -> Locator:
        """All outputs of a cell; look inside it for what to click."""
        return self.cell(number).locator(".jp-Cell-outputArea")

    def text(self, number: int | None = None) -> str:
        """The visible text of a cell's outputs, or of the whole notebook."""
        if number is None:
            return self.page.locator(".jp-Notebook").inner_text()
        return str(self._cells(number)[0]["text"])

    def wait_for_text(self, words: str, number: int, seconds: float = SECONDS) -> None:
        """Wait until the outputs of a cell say `words`."""
        if not self._poll(lambda: words in self.text(number), seconds):
            raise AssertionError(f"no {words!r} after {seconds:g} s in: {self.text(number)!r}")

    def boxes(self, number: int, selector: str) -> list[FloatRect]:
        """Where the things are that `selector` finds in a cell's outputs; hidden ones left out."""
        found = (item.bounding_box() for item in self.output(number).locator(selector).all())
        return [box for box in found if box]

    def too_wide(self) -> list[str]:
        """The outputs of all cells that are wider than the place they have."""
        found: list[str] = self.page.evaluate(TOO_WIDE)
        return found

    def overlapping_tables(self) -> list[str]:
        """Pairs of tables in outputs that lie over each other."""
        found: list[str] = self.page.evaluate(OVERLAPS)
        return found

    def set_width(self, width: int, height: int = 1000) -> None:
        """Give the browser's window another width, in CSS pixels."""
        self.page.set_viewport_size({"width": width, "height": height})

    def set_dark(self, dark: bool) -> None:
        """Switch the theme."""
        if dark != self._dark:
            theme = "JupyterLab Dark" if dark else "JupyterLab Light"
            self.page.evaluate(
                "theme => jupyterapp.commands.execute('apputils:change-theme', { theme })", theme
            )
            light = "false" if dark else "true"
            self._wait_for(f"() => document.body.dataset.jpThemeLight === '{light}'", theme)
            # what covers the page meanwhile would be taken away twice by another switch
            self._wait_for("() => !document.getElementById('jupyterlab-splash')", "it is shown")
            self._dark = dark

    def picture(self, path: Path, number: int | None = None) -> None:
        """Take a picture of a cell's outputs, or of the window, to a PNG file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        of = self.page if number is None else self.output(number)
        of.screenshot(path=path, animations="disabled")

    def close(self) -> None:
        """Close the page and end its kernel; the theme is kept by the server, so it is set back."""
        if self.page.is_closed():
            return
        self.set_dark(False)
        self.shut_down_kernel()
        self.page.close()

    def _cells(self, number: int | None) -> list[dict[str, Any]]:
        cells: list[dict[str, Any]] = self.page.evaluate(CELLS, number)
        return cells

    def _wait_for(self, script: str, words: str) -> None:
        from playwright.sync_api import Error

        def is_so() -> bool:
            # not wait_for_function: it takes the promise of an async function for a yes
            try:
                return bool(self.page.evaluate(script))
            except Error as exc:
                if "context was destroyed" in str(exc):  # JupyterLab goes on to another address
                    return False
                raise

        if not self._poll(is_so, SECONDS):
            text = self.page.locator("body").inner_text()[:2000]
            raise AssertionError(f"not so after {SECONDS:g} s: {words}\n{text}")

    def _poll(self, what: Callable[[], Any], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not what():
            if time.monotonic() > deadline:
                return False
            self.page.wait_for_timeout(40)  # the page goes on meanwhile, events are delivered
        return True


def _is_done(cell: dict[str, Any]) -> bool:
    return cell["count"] is not None and "*" not in cell["prompt"]
