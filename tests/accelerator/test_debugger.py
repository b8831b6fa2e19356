"""Programs that are stopped while their devices work on: nobody waits who does not look."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from discolab import Session, ccl, current_worker, make_session
from discolab.debugger import Debugger, debugger_of
from discolab.debugger.fingerprints import note_cell
from tests.accelerator import sim
from tests.accelerator.test_device_library import DEVICES
from tests.debugger.conftest import lines_of, load

pytestmark = pytest.mark.accelerator

RANKS, BUSY = 4, 2.5  # seconds for which a device has work when the program stops
SOURCE = f"""
    import time, torch
    from tests.accelerator import sim
    from discolab import ccl, current_worker
    def program(where):
        device = current_worker().device
        x = torch.full((4,), float(current_worker().rank), device=device)
        stream = torch.Stream(device) if where == "aside" else sim.current_stream(device)
        x[0].item()
        with stream: sim.sleep({BUSY})
        y = ccl.all_reduce(x + 1)
        z = y * 2
        while where == "long": time.sleep(0.01)
        return z
"""
LAST = 14


@pytest.fixture(scope="module", params=["local", sim.COLLECTIVES])
def sess(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Workers with a device each."""
    with make_session(RANKS, "threads", devices=DEVICES, timeout=30) as session:
        session.init_ccl(request.param)
        session.call_packed(warm).debug_get_from_all()
        yield session


def warm() -> float:
    """The first collective."""
    return float(ccl.all_reduce(torch.ones(4, device=current_worker().device))[0])


@pytest.fixture
def dbg(sess: Session) -> Iterator[Debugger]:
    """Its debugger."""
    debugger = debugger_of(sess)
    yield debugger
    if debugger.is_active:
        debugger.abort()


def values(stop: object, name: str) -> str:
    """How a variable is shown."""
    lines = [line for line in str(stop).splitlines() if f" {name} " in line and "float32" in line]
    return lines[-1] if lines else ""


def to_last(dbg: Debugger, where: str) -> float:
    """Step to the last line; in how many seconds, with the device at work."""
    stop = dbg.run(load(SOURCE), where)
    began = time.monotonic()
    while lines_of(stop)[0] != LAST:
        stop = dbg.next()
    return time.monotonic() - began


def test_stepping_waits_for_no_device(dbg: Debugger) -> None:
    """A collective and what follows are passed while all of it is still to be done."""
    assert to_last(dbg, "before") < BUSY / 2
    dbg.continue_()
    assert [z.tolist() for z in dbg.program.result().debug_get_from_all()] == [[20.0] * 4] * RANKS


def test_values_are_read_while_another_stream_works(dbg: Debugger) -> None:
    """Whoever looks waits for the stream of the value, never for the whole device."""
    began = time.monotonic()
    to_last(dbg, "aside")
    shown = values(dbg.where(), "z")
    assert "all: [20, 20, 20, 20]" in shown
    assert time.monotonic() - began < BUSY


def test_pause_with_work_in_flight(dbg: Debugger) -> None:
    """The program stands at once; what is looked at comes when the device has done it."""
    dbg.start(load(SOURCE), "long", step=False)
    time.sleep(0.5)
    began = time.monotonic()
    stop = dbg.pause()
    assert time.monotonic() - began < 1.0
    assert not stop.finished
    assert "all: [20, 20, 20, 20]" in values(dbg.where(), "z")
    assert "80.0" in repr(dbg.eval("z.sum().item()"))
    assert not dbg.abort()


def noted() -> float:
    """A cell ends while its device works: how long what it has changed takes to note."""
    worker = current_worker()
    worker.namespace["x"] = torch.ones(4, device=worker.device)
    sim.sleep(0.5)
    began = time.monotonic()
    note_cell(worker, "cell.py")
    return time.monotonic() - began


def test_the_end_of_a_cell_waits_for_no_device(sess: Session) -> None:
    """What variables hold there is not read for the record of cells."""
    assert max(sess.call_packed(noted).debug_get_from_all()) < 0.3
