"""Calls that wait for each other: named within a second, and nobody waits on."""

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from discolab import DiscoError, Session, SessionError, WaitTimeoutError, WorkerError, rpc
from tests.rpc import functions
from tests.rpc.functions import KEPT, eventually

pytestmark = [pytest.mark.timeout(60), pytest.mark.one_process]

SOON = 10.0  # seconds; the deadline of a call is 60


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    KEPT.clear()
    yield
    KEPT.clear()


def value_of(name: str, timeout: float | None = None) -> Any:
    """The value of a reference that is there only once this call has begun."""
    eventually(lambda: name in KEPT)
    return KEPT[name].to_here(timeout)


def test_a_call_that_waits_for_its_own_value(sess: Session) -> None:
    began = time.monotonic()
    KEPT["mine"] = sess.rpc.remote(1, value_of, ("mine",))
    with pytest.raises(WorkerError) as info:
        KEPT["mine"].to_here()
    assert re.search(
        r"deadlock: these calls wait for ever\n"
        r"  the rpc of 'value_of' on worker 1 \(called at .*_deadlocks.py:\d+\) waits for itself",
        str(info.value),
    )
    assert time.monotonic() - began < SOON


def test_values_that_wait_for_each_other(sess: Session) -> None:
    began = time.monotonic()
    ranks = (1, 2, 2)
    made = [sess.rpc.remote(rank, value_of, (f"r{n}",)) for n, rank in enumerate(ranks)]
    for n, ref in enumerate(made):
        KEPT[f"r{(n + 1) % len(made)}"] = ref
    for ref in made:
        with pytest.raises(DiscoError, match="deadlock: these calls wait for ever"):
            ref.to_here()
    assert time.monotonic() - began < SOON


def ask_back(name: str) -> Any:
    return rpc.rpc_sync(2, value_of, (name,))


def test_a_call_within_a_call_that_waits_for_it(sess: Session) -> None:
    KEPT["outer"] = sess.rpc.remote(1, ask_back, ("outer",))
    with pytest.raises(WorkerError) as info:
        KEPT["outer"].to_here()
    inner, outer = "the rpc of 'value_of' on worker 2 ", "the rpc of 'ask_back' on worker 1 "
    for one, other in ((inner, outer), (outer, inner)):
        assert re.search(f"\n  {one}.* waits for {other}", str(info.value))


def tries(name: str) -> str:
    with pytest.raises(WaitTimeoutError, match="gave up after 1 s"):
        value_of(name, 1)
    return "went on"


def test_who_has_set_a_deadline_goes_on_after_it(sess: Session) -> None:
    KEPT["tried"] = sess.rpc.remote(1, tries, ("tried",))
    assert KEPT["tried"].to_here() == "went on"
    KEPT["b"] = sess.rpc.remote(1, tries, ("a",))
    KEPT["a"] = sess.rpc.remote(2, value_of, ("b",))
    assert KEPT["a"].to_here() == "went on"


def back_and_forth(depth: int) -> int:
    time.sleep(0.15)
    if not depth:
        time.sleep(1)
        return 0
    here = rpc.get_worker_info().id
    return 1 + int(rpc.rpc_sync(3 - here, back_and_forth, (depth - 1,)))


def test_calls_back_and_forth_are_none(sess: Session) -> None:
    assert sess.rpc.rpc_sync(1, back_and_forth, (4,)) == 4


def fetch(session: Session) -> Any:
    return session.call_packed(functions.my_rank).debug_get_from_all()


def asks_the_controller(name: str) -> Any:
    worker = rpc.get_worker_info().id
    return rpc.rpc_sync("controller", fetch, (KEPT[name],)) if worker == 1 else None


def test_the_controller_is_asked_for_what_its_asker_is_to_do(sess: Session) -> None:
    began = time.monotonic()
    KEPT["session"] = sess
    with pytest.raises(WorkerError) as info:
        sess.call_packed(asks_the_controller, "session").debug_get_from_all()
    assert re.search(
        r"SessionError: deadlock: worker 1 waits for the answer of the controller to the rpc of "
        r"'fetch', and the rpc of 'fetch' on the controller .* for register \d+ of worker 1, which "
        "comes only after .* return a DRef",
        str(info.value),
    )
    assert issubclass(type(info.value.failures[0].exception), SessionError)
    assert time.monotonic() - began < SOON
    assert fetch(sess) == [0, 1, 2, 3]
