"""What a session shows of itself: idle, busy, with a dead worker, closed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from discolab import Session
from discolab.engines import ProcessSession, ThreadedSession
from discolab.runtime.worker import current_worker
from discolab.views import render_html, render_text, session_parts


def text(session: Session) -> str:
    return session._repr_mimebundle_()["text/plain"]


def test_an_idle_session_says_all_and_always_the_same() -> None:
    with ThreadedSession(4, 2, timeout=30) as session:
        session.init_ccl("local")
        session.mesh(dp=2, tp=2)
        kept = session.call_packed(int)
        session.sync_all()
        drawn = text(session)
        assert drawn.split("\n") == [
            "ThreadedSession · 4 workers on cpu · idle",
            "engine: threads of this process",
            "collectives: local: 4 workers in one process on cpu",
            "groups: 2: 0,1 | 2,3",
            "timeout: 30 s for each wait",
            "  rank   group  device  state",
            "  [0,1]  0      cpu     idle",
            "  [2,3]  1      cpu     idle",
            "mesh dp=2, tp=2 of workers 0-3",
            "  dp  tp=0  tp=1",
            "   0     0     1",
            "   1     2     3",
        ]
        assert text(session) == drawn
        del kept
        assert repr(session) == "<ThreadedSession: 4 workers, 2 groups on cpu>"


def test_a_busy_worker_says_in_what(gate: Any) -> None:
    def wait(opened: Any) -> None:
        if current_worker().worker_id == 1:
            opened.wait(20)

    with ThreadedSession(2) as session:
        session.name = "sess"
        session.call_packed(wait, gate)
        session.sync_worker_0()
        while session.status()[1].state == "idle":
            time.sleep(0.01)
        drawn = text(session)
        gate.set()
        session.sync_all()
    assert drawn.startswith("session sess · 2 workers on cpu · worker 1 busy\n")
    assert re.search(r"\n  1 +cpu +running +.*call of .*wait", drawn)


def test_a_worker_that_died_is_an_error() -> None:
    def leave() -> None:
        if current_worker().worker_id == 1:
            os._exit(3)

    session = ProcessSession(2, devices="cpu", timeout=20)
    try:
        session.call_without_result(leave)
        while all(state.state != "dead" for state in session.status()):
            time.sleep(0.01)
        assert "· worker 1 died" in text(session)
        html = session._repr_mimebundle_()["text/html"]
        assert 'class="e">worker 1 died' in html
    finally:
        session.shutdown(cancel=True)
    assert "closed: make a new one" in text(session)


def test_names_are_escaped() -> None:
    with ThreadedSession(1) as session:
        session.name = "<script>\x1b"
        part = session_parts(session)
        assert "<script" not in render_html(part)
        assert "\x1b" not in render_text(part)


@pytest.mark.conformance
def test_on_every_engine(make: Callable[..., Session], engine: str) -> None:
    drawn = text(make(2))
    assert "2 workers on cpu · idle" in drawn
    assert f"engine: {engine}" in drawn
