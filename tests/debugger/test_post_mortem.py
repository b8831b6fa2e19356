"""After a cell has failed: the frames and variables of each worker at the raise."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import ArgumentError, ProcessSession, Session, current_worker
from discolab.debugger.debugger import DebuggerError
from discolab.debugger.post_mortem import evaluate_at_raise, forget_all, post_mortem, who_raised
from discolab.notebook.cell import run_cell
from discolab.notebook.script import run_script
from discolab.runtime.failures import Failure
from discolab.views.summary import summarize

FAILS = """\
def inner(x):
    factor = 10 * rank
    if rank % 2:
        raise ValueError(f"odd {rank}")
    return x * factor
def outer(x):
    doubled = x * 2
    return inner(doubled)
x = torch.ones(3)
outer(x)
"""


def run(session: Session, source: str, file: str = "Cell In[7]") -> dict[int, Any]:
    """A cell, as the notebook has workers run it; its values and failures by rank."""
    return told(session, session.call_packed(run_cell, source, file, None))


def told(session: Session, ref: Any) -> dict[int, Any]:
    """What a call gave; nobody needs to be told of its failures."""
    found = session.peek(ref, tell=True)
    session.report([v for v in found.values() if isinstance(v, Failure)] or [_NOTHING])
    return found


_NOTHING = Failure(0, "", "", "", "")


def shown(stop: Any, rank: int) -> dict[str, str]:
    """The variables of a worker, in words."""
    return {name: summarize(record) for name, record in stop.workers[rank].variables.items()}


def values(found: Any) -> dict[int, str]:
    """What an expression was, in words."""
    return {
        rank: summarize(value) if kind == "value" else value
        for rank, (kind, value) in found.values.items()
    }


@pytest.fixture(scope="module")
def processes() -> Iterator[Session]:
    """Two workers in processes of their own."""
    with ProcessSession(2, devices="cpu", timeout=30) as session:
        yield session


def test_each_worker_is_shown_where_it_failed(sess: Session) -> None:
    run(sess, FAILS)
    stop = post_mortem(sess)
    assert [worker.state for worker in stop.workers] == ["done", "error", "done", "error"]
    assert stop.name == "Cell In[7]"
    assert "workers 1, 3" not in stop.reason  # they say different things
    assert "worker 1 raised ValueError: odd 1" in stop.reason
    assert "1 more raised something else" in stop.reason
    assert [(spot.function, spot.line) for spot in stop.workers[3].stack] == [
        ("<module>", 10),
        ("outer", 8),
        ("inner", 4),
    ]
    assert stop.workers[3].note == "ValueError: odd 3"
    assert shown(stop, 3)["factor"] == "30"
    assert shown(stop, 3)["x"] == "float32[3]"
    assert stop.sources["Cell In[7]"][3].strip() == 'raise ValueError(f"odd {rank}")'
    assert stop.groups == ((1, 3),)
    assert "odd 3" in repr(stop)


def test_callers_are_frames_too(sess: Session) -> None:
    run(sess, FAILS)
    assert set(shown(post_mortem(sess, [1], frame=1), 1)) == {"x", "doubled"}
    assert "x" in shown(post_mortem(sess, [1], frame=2), 1)
    other = post_mortem(sess, [1]).workers[3]
    assert (other.state, other.variables, other.note) == ("error", None, "ValueError: odd 3")


def test_expressions_in_the_frames_that_raised(sess: Session) -> None:
    run(sess, FAILS)
    assert values(evaluate_at_raise(sess, "factor + 1")) == {1: "11", 3: "31"}
    assert values(evaluate_at_raise(sess, "doubled.sum().item()", [3], frame=1)) == {3: "6.0"}
    gone = values(evaluate_at_raise(sess, "nothing_of_that_name", [3]))
    assert gone[3].startswith("NameError")
    with pytest.raises(ArgumentError, match="no expression"):
        evaluate_at_raise(sess, "x = 3")


def test_an_expression_can_not_wait_for_workers_that_do_not_come(sess: Session) -> None:
    run(sess, FAILS)
    found = values(evaluate_at_raise(sess, "ccl.all_reduce(x)"))
    assert set(found) == {1, 3}
    assert "Error" in found[1]
    assert sess.call_packed(lambda: current_worker().alone).debug_get_from_all() == [""] * 4


def test_those_that_failed_because_of_another_are_not_the_cause(sess: Session) -> None:
    source = "x = torch.ones(2) * rank\nif rank == 2: raise KeyError('w')\nx = ccl.all_reduce(x)"
    run(sess, source)
    stop = post_mortem(sess)
    assert "worker 2 raised KeyError: 'w' at Cell In[7]:2" in stop.reason
    assert "more" not in stop.reason
    assert stop.workers[0].stack[-1].line == 3
    assert stop.groups == ((0, 1, 3), (2,))


def test_frames_of_libraries_are_left_out(sess: Session) -> None:
    run(sess, "import json\ntext = '{'\njson.loads(text)")
    assert [spot.line for spot in post_mortem(sess).workers[0].stack] == [3]
    run(sess, "m = torch.nn.Sequential(torch.nn.Linear(2, 2))\nm(torch.ones(3))")
    stack = post_mortem(sess).workers[0].stack
    assert [(spot.file, spot.line) for spot in stack] == [("Cell In[7]", 2)]


def test_an_endless_recursion_is_cut(sess: Session) -> None:
    run(sess, "def f(n): return f(n + 1)\nf(0)")
    stack = post_mortem(sess).workers[0].stack
    assert 10 < len(stack) <= 60


@pytest.fixture
def seen() -> Iterator[list[Any]]:
    """What cells of worker threads have noted: weak references to their tensors."""
    noted: list[Any] = []
    torch.seen_by_test = lambda tensor: noted.append(weakref.ref(tensor))  # type: ignore[attr-defined]
    yield noted
    del torch.seen_by_test  # type: ignore[attr-defined]


HOLDS = """\
def f():
    big = torch.ones(1000)
    torch.seen_by_test(big)
    raise {}
f()
"""


def alive(noted: list[Any]) -> int:
    gc.collect()
    return sum(ref() is not None for ref in noted)


def test_the_frames_stay_until_the_next_cell(sess: Session, seen: list[Any]) -> None:
    run(sess, HOLDS.format("ValueError('x')"))
    assert alive(seen) == 4
    assert shown(post_mortem(sess), 0)["big"] == "float32[1000]"
    run(sess, "1")
    assert alive(seen) == 0
    with pytest.raises(DebuggerError, match="no cell has failed"):
        post_mortem(sess)


def test_frames_can_be_let_go(sess: Session, seen: list[Any]) -> None:
    run(sess, HOLDS.format("ValueError('x')"))
    forget_all(sess)
    sess.sync_all()
    assert alive(seen) == 0
    assert who_raised(sess) == {}


@pytest.mark.parametrize(
    "error",
    ["MemoryError()", "torch.OutOfMemoryError('CUDA out of memory')",
     "RuntimeError('x') from MemoryError()"],
)  # fmt: skip
def test_no_frame_is_kept_when_memory_ran_out(sess: Session, seen: list[Any], error: str) -> None:
    run(sess, HOLDS.format(error))
    assert alive(seen) == 0
    stop = post_mortem(sess)
    assert shown(stop, 3)["big"] == "float32[1000]"
    assert stop.workers[3].stack[-1].line == 4
    assert "memory ran out" in values(evaluate_at_raise(sess, "big.sum()"))[0]


def test_of_a_cell_that_was_stopped_nothing_is_kept(sess: Session, seen: list[Any]) -> None:
    run(sess, HOLDS.format("KeyboardInterrupt"))
    assert alive(seen) == 0
    assert who_raised(sess) == {}


def test_the_end_of_the_workers_lets_frames_go(seen: list[Any]) -> None:
    from discolab import ThreadedSession

    with ThreadedSession(2, timeout=20) as session:
        run(session, HOLDS.format("ValueError('x')"))
        assert alive(seen) == 2
    assert alive(seen) == 0


def is_in(sess: Session, state: str) -> list[bool]:
    return [status.state == state for status in sess.status()]


def test_one_that_hangs_is_not_waited_for(sess: Session) -> None:
    source = "import time\nif rank == 1: raise ValueError('early')\nwhile True: time.sleep(0.01)"
    ref = sess.call_packed(run_cell, source, "Cell In[7]", None)
    while list(who_raised(sess)) != [1] or sum(is_in(sess, "waiting")) < 3:
        pass  # others may have raised in the cell before, or not have begun this one
    stop = post_mortem(sess)
    assert stop.workers[1].stack[-1].line == 2
    assert stop.workers[0].state == "running"
    assert values(evaluate_at_raise(sess, "rank")) == {1: "1"}
    sess.interrupt()
    assert all(isinstance(value, Failure) for value in told(sess, ref).values())


def test_a_rank_that_did_not_fail_is_told(sess: Session) -> None:
    run(sess, FAILS)
    with pytest.raises(DebuggerError, match=r"nothing has failed on worker 0.*workers 1, 3"):
        post_mortem(sess, [0])


def test_a_script(sess: Session, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    source = "import sys\nstep = 4\nsys.exit(step)\n"
    path.write_text(source)
    told(sess, sess.call_packed(run_script, str(path), source, []))
    stop = post_mortem(sess)
    assert stop.workers[0].note == "SystemExit: 4"
    assert shown(stop, 0)["step"] == "4"


def test_on_workers_in_other_processes(processes: Session) -> None:
    run(processes, FAILS)
    stop = post_mortem(processes)
    assert [worker.state for worker in stop.workers] == ["done", "error"]
    assert shown(stop, 1)["factor"] == "10"
    assert values(evaluate_at_raise(processes, "factor", frame=0)) == {1: "10"}
    assert values(evaluate_at_raise(processes, "doubled", frame=1)) == {1: "float32[3]"}
    forget_all(processes)
    processes.sync_all()
    with pytest.raises(DebuggerError):
        post_mortem(processes)
