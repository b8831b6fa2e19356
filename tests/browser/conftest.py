"""Fixtures of the browser tests: a Chromium, and the two front ends that are tried in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.front_end import FLAGS, NotebookPage, Server, find_chromium
from tests.selection import slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; where there is none that is a failure in CI, a skip elsewhere.

    Ended with each file: while Playwright runs, no other test could have an event loop.
    """
    path = find_chromium()
    if path is None:
        words = "no Chromium on PATH: install it (Debian: apt-get install chromium)"
        pytest.fail(words) if os.environ.get("CI") else pytest.skip(words)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=FLAGS, ignore_default_args=["--hide-scrollbars"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def window(browser: Any) -> Iterator[Any]:
    """What the pages of a file share: they load the front end from the network once."""
    context = browser.new_context(viewport={"width": 1200, "height": 1000})
    yield context
    context.close()


def _server(factory: pytest.TempPathFactory, kind: str) -> Iterator[Server]:
    server = Server(factory.mktemp(kind), kind)
    try:
        yield server.wait_until_up()
    finally:
        server.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A JupyterLab."""
    yield from _server(tmp_path_factory, "lab")


@pytest.fixture(scope="session")
def notebook7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Notebook 7."""
    yield from _server(tmp_path_factory, "notebook")


@pytest.fixture(params=["lab", slow("notebook7")])
def front_end(request: pytest.FixtureRequest) -> Server:
    """Each of the two in turn."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def open_notebook(window: Any, tmp_path: Path) -> Iterator[Callable[..., NotebookPage]]:
    """Open a notebook of a server, by its name there; closed after the test."""
    opened: list[NotebookPage] = []

    def open_it(server: Server, name: str) -> NotebookPage:
        opened.append(NotebookPage(window, server, name))
        return opened[-1]

    yield open_it
    for page in opened:
        page.close()
