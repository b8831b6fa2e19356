"""Where another thread stands."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from discolab.runtime.frames import frame_of
from tests.alone import output_of

BUSY = """
import gc, sys, threading, time
from discolab.runtime.frames import frame_of

gc.callbacks.append(lambda phase, info: [None for _ in range(20)])
gc.set_threshold(1)
sys.setswitchinterval(1e-5)
end = time.monotonic() + 3

def nest(depth=10):
    return depth and nest(depth - 1)

def look():
    while time.monotonic() < end:
        frame_of(threading.main_thread().ident)

def work():
    while time.monotonic() < end:
        nest()

def start():
    while time.monotonic() < end:
        thread = threading.Thread(target=nest)
        thread.start()
        thread.join()

threads = [threading.Thread(target=f, daemon=True) for f in (look, work, work, work, start, start)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all ended", gc.isenabled())
"""


@pytest.fixture(params=[True, False])
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    """With the garbage collector on, and off."""
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


def test_it_is_the_innermost_frame_and_the_collector_stays_as_it_was(collecting: bool) -> None:
    go = threading.Event()

    def stands_here() -> None:
        go.wait()

    thread = threading.Thread(target=stands_here)
    thread.start()
    try:
        frame, names = frame_of(thread.ident or 0), []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        assert "stands_here" in names
        assert gc.isenabled() is collecting
    finally:
        go.set()
        thread.join()
    assert frame_of(thread.ident or 0) is None


@pytest.mark.slow
def test_collections_and_new_threads_do_not_stop_the_process() -> None:
    assert output_of(BUSY) == "all ended True\n"
