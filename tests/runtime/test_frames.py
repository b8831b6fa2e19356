"""Where another thread stands."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from discolab.runtime.frames import frame_of, outwards
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

RUNS_ON = """
import gc, random, threading, time
from discolab.debugger.code_objects import scope_of
from discolab.runtime.frames import frame_of, outwards

functions = []
for count in range(3, 27, 3):
    body = "".join(f"    v{i} = (str, len, [n])[{i % 3}]\\n" for i in range(count))
    exec(f"def f(n):\\n{body}    return random.choice(functions)(n - 1) if n > 0 else n")
    functions.append(f)

class LetsGo:  # in a cycle, so that the collector finds it
    dropped = 0
    def __init__(self):
        self.me = self
    def __del__(self):
        LetsGo.dropped += 1
        time.sleep(0.00005)

def work():
    while time.monotonic() < end:
        random.choice(functions)(random.randrange(30))

end = time.monotonic() + SECONDS
thread = threading.Thread(target=work)
thread.start()
gc.collect()
gc.freeze()
gc.set_threshold(20, 1000, 1000)
made = 0
while thread.is_alive():
    gc.disable()
    if LetsGo.dropped == made:
        made += 1
        LetsGo()
        some = [[] for _ in range(random.randrange(20))]  # the collector runs after as many more
    gc.enable()
    frame = frame_of(thread.ident)
    for one in outwards(frame):
        assert one.f_code.co_filename
        if one is frame:
            dict(scope_of(one))
thread.join()
print("all frames")
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
        names = [frame.f_code.co_name for frame in outwards(frame_of(thread.ident or 0))]
        assert "stands_here" in names
        assert names[-1] == "_bootstrap"
        assert gc.isenabled() is collecting
    finally:
        go.set()
        thread.join()
    assert frame_of(thread.ident or 0) is None


@pytest.mark.slow
def test_collections_and_new_threads_do_not_stop_the_process() -> None:
    assert output_of(BUSY) == "all ended True\n"


def test_a_collection_does_not_have_frames_looked_for_where_they_were() -> None:
    assert output_of(RUNS_ON.replace("SECONDS", "2")) == "all frames\n"
