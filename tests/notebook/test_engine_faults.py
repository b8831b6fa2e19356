"""Workers that die or freeze, sessions that start anew, there or elsewhere, kernels that go."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import Kernel

KILL = """
import os, signal, threading, time
def kill(rank, number=signal.SIGKILL):
    os.kill(sess.processes()[rank], number)
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    found = Kernel()
    found.ok("%load_ext discolab")
    found.ok(KILL)
    yield found
    found.close()


@pytest.fixture
def nb(kernel: Any) -> Any:
    """Three workers in processes, in good health, that have an `x`."""
    kernel.ok("%disco_session 3 --devices cpu --engine processes --heartbeat 3", timeout=110)
    kernel.ok("%%disco\nx = torch.ones(3)\nprint('last words of', rank)")
    return kernel


def test_a_worker_that_dies_idle(nb: Any) -> None:
    nb.ok("ref = sess['x']\nkill(2)\ntime.sleep(0.3)")
    drawn = nb.ok("ref")
    assert "worker 2 died" in drawn.text
    assert "was killed by SIGKILL" in drawn.text
    assert "<table" in drawn.data[-1]["text/html"]
    assert drawn.seconds < 1.0
    assert " dead " in nb.ok("%disco_status").stdout
    assert "worker 2 died" in nb.ok("%disco_doctor").text
    for code in ("%%disco\nx", "%disco_pull x", "sess.sync_all()"):
        result = nb.fails(code)
        assert result.seconds < 2
        assert "worker 2 (pid " in result.error["evalue"]
        assert "%disco_restart" in result.error["evalue"]
    assert nb.ok("%disco_restart").stdout.startswith("sess: workers 0-2 on cpu (processes, ")
    assert nb.ok("%%disco\nrank * 0").text == "DRef: 0 on all 3 workers"


def test_one_worker_is_restarted(nb: Any) -> None:
    nb.ok("ref = sess['x']\nkept = 5\n%disco_push kept\nkill(2)\ntime.sleep(0.3)")
    shown = nb.ok("%disco_restart -t 2")
    assert "worker 2 (pid " in shown.text
    assert "variables pushed again: kept" in shown.text
    assert "variables gone: x" in shown.text
    assert "<table" in shown.data[-1]["text/html"]
    assert "[2] lost with the worker" in nb.ok("ref").text
    assert "lost on 2" in nb.ok("%disco_show registers").text
    assert nb.ok("%%disco\nkept").text == "DRef kept: 5 on all 3 workers"
    assert "[2] hello" in nb.ok("%%disco -t 2\nprint('hello')").stdout


def test_a_worker_that_dies_in_a_cell(nb: Any) -> None:
    nb.ok("threading.Timer(0.5, kill, (1,)).start()")
    result = nb.fails("%%disco\nprint('before')\ntime = __import__('time'); time.sleep(60)")
    assert result.seconds < 3
    assert "[0-2] before" in result.stdout
    text = result.error["evalue"]
    assert "was killed by SIGKILL while it ran the cell" in text
    assert "before" in text
    assert "discolab/" not in result.traceback


def test_a_worker_that_ends_itself(nb: Any) -> None:
    result = nb.fails("%%disco\nimport os\nif rank == 1: os._exit(7)\nccl.barrier()")
    assert "worker 1 (pid" in result.error["evalue"]
    assert "exited with status 7" in result.error["evalue"]
    assert result.seconds < 3


def test_a_worker_that_ends_itself_in_a_stepped_cell_is_told_once(nb: Any) -> None:
    result = nb.fails("%%disco --trace\nimport os\nif rank == 1: os._exit(7)\nccl.barrier()")
    assert "exited with status 7" in result.error["evalue"]
    assert "exited" not in result.stderr + nb.ok("1").stderr


def test_a_worker_that_dies_in_the_background(nb: Any) -> None:
    nb.ok("%%disco -a\nimport time; time.sleep(60)")
    first = nb.ok("kill(1)\ntime.sleep(0.4)")
    told = first.stderr + nb.ok("1").stderr
    assert told.startswith("in the background: worker 1 (pid ")
    assert nb.ok("1").stderr == ""


@pytest.mark.slow
def test_a_frozen_worker(nb: Any) -> None:
    nb.ok("ref = sess['x']\nkill(2, signal.SIGSTOP)\ntime.sleep(0.2)")
    drawn = nb.ok("ref")
    assert drawn.seconds < 1.5
    assert "worker 2" in drawn.text
    result = nb.fails("%%disco\nx")
    assert result.seconds < 5
    assert "it is stopped (SIGSTOP)" in result.error["evalue"]
    nb.ok("kill(2, signal.SIGCONT)\ntime.sleep(0.5)")
    assert nb.ok("%%disco\nrank * 0").text == "DRef: 0 on all 3 workers"
    nb.ok("kill(2, signal.SIGSTOP)")
    assert nb.ok("%disco_restart").seconds < 6
    assert nb.ok("%%disco\nrank * 0").text == "DRef: 0 on all 3 workers"


def test_restart_on_another_engine_and_back(nb: Any) -> None:
    assert "(threads, local collectives)" in nb.ok("%disco_restart --engine threads").stdout
    assert "(processes, " in nb.ok("%disco_restart --engine processes").stdout
    assert nb.ok("sess.heartbeat").text == "3.0"
    assert "rocket" in nb.fails("%disco_restart --engine rocket").stderr
    assert nb.ok("%%disco\nrank * 0").text == "DRef: 0 on all 3 workers"


def test_options_that_do_not_fit(nb: Any) -> None:
    for line, word in {
        "2 --engine threads --heartbeat 3": "takes no --heartbeat; processes, sockets",
        "2 --engine processes --nodes 2": "takes no --nodes; sockets",
        "2 --engine processes --heartbeat 0": "heartbeat",
        "2 --engine processes --ccl local": "use 'gloo'",
        "3 --engine sockets --nodes local:2": "3 workers can't be divided",
    }.items():
        assert word in nb.fails(f"%disco_session {line}").stderr, line
    assert nb.ok("%%disco\nx").status == "ok"


def test_stop_while_workers_start(nb: Any) -> None:
    line = "%disco_session 2 --engine sockets --nodes 2 --start-timeout 60 --name other"
    result = nb.fails(line, interrupt_after=1.5)
    assert result.error["ename"] in ("KeyboardInterrupt", "StartInterrupted")
    assert "not started" in result.error["evalue"]
    assert result.seconds < 4
    assert "discolab node --connect tcp://127.0.0.1:" in result.stdout
    assert nb.ok("%%disco\nrank * 0").text == "DRef: 0 on all 3 workers"


@pytest.mark.slow
def test_the_line_while_workers_start_leaves_nothing(nb: Any) -> None:
    line = "%disco_session 2 --engine sockets --nodes 2 --start-timeout 2.5 --name other"
    result = nb.fails(line, watched=True)
    shown = result.stdout.splitlines()[-1] if "\r" not in result.stdout else result.stdout
    assert "\rwaiting for 1 of 2 workers" in shown
    assert result.stdout.rpartition("\n")[2].split("\r")[-2].strip() == ""
    assert "did not come within 2.5 s" in result.traceback + result.stderr
    assert "\r" not in nb.fails(line).stdout


@pytest.mark.slow
def test_what_a_death_has_broken_is_told_once_and_the_new_worker_stops_too(nb: Any) -> None:
    """A death was told; the collective that it had broken was raised again by a later wait."""
    cell = "%%disco\nimport os\nif rank == 2: os._exit(7)\nccl.all_reduce(torch.ones(4))"
    assert "worker 2 (pid" in nb.fails(cell).error["evalue"]
    nb.ok("%disco_restart -t 2")
    stop = nb.ok("%%disco\nif rank == 0: raise OSError('mine')\nbreakpoint()\nc = 3")
    assert "skipped" not in stop.stdout
    assert "1,2 → 3  breakpoint()" in stop.text
    assert "OSError: mine" in nb.fails("%disco_continue").traceback
    nb.ok("sess.sync_all()")


@pytest.mark.parametrize("way", ["kill", "restart"])
def test_a_kernel_that_goes_leaves_no_process(way: str) -> None:
    kernel = Kernel()
    try:
        kernel.ok("%load_ext discolab\n%disco_session 3 --devices cpu --engine processes")
        kernel.ok("from discolab.engines import forkserver\nimport os")
        found = (
            "[os.getpid(), forkserver.the_fork_server().process.pid, *sess.processes().values()]"
        )
        pids = [int(pid) for pid in kernel.ok(found).text.strip("[]").split(",")]
        kernel.client.execute("%%disco\nwhile True: pass")
        time.sleep(0.5)
        if way == "kill":
            os.kill(pids[0], signal.SIGKILL)
        else:
            kernel.manager.restart_kernel(now=True)
        deadline = time.monotonic() + 10
        while left := [pid for pid in pids if _lives(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        kernel.close()


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stop_while_a_frozen_worker_is_left_behind(nb: Any) -> None:
    pid = int(nb.ok("sess.processes()[1]").text)
    nb.ok("kill(1, signal.SIGSTOP)")
    result = nb.fails("%disco_restart", interrupt_after=0.2)
    assert result.traceback == "KeyboardInterrupt: stopped"
    deadline = time.monotonic() + 3
    while _lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert nb.ok("%disco_restart").stdout.startswith("sess: workers 0-2 on cpu (processes, ")
