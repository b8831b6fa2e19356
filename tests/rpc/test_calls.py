"""Calls: from anywhere to anywhere, of anything, and back."""

import math
import operator
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

import discolab
from discolab import ArgumentError, Session, UnknownFunctionError, rpc
from discolab.rpc import WorkerInfo
from tests.rpc import functions
from tests.rpc.conftest import Caller

EVERYBODY = [-1, 0, 1, 2, 3]


# -- what is called ------------------------------------------------------------------------------


def gives_results(rpc: Any) -> None:
    assert rpc.rpc_sync(2, operator.add, (1, 2)) == 3
    assert rpc.rpc_sync(2, operator.add, args=(1, 2), timeout=30) == 3
    assert rpc.rpc_sync(2, functions.add, [1]) == 11, "a list of arguments is as good"
    assert rpc.rpc_sync(2, functions.add, (1, 2, 3, 4)) == 10
    assert rpc.rpc_sync(2, functions.add, (1,), {"b": 5, "factor": 2}) == 12
    assert rpc.rpc_sync(2, functions.add, kwargs={"a": 1}) == 11
    assert rpc.rpc_sync(2, dict) == {}
    assert rpc.rpc_sync(2, functions.double, ("ab",)) == "abab"
    assert rpc.rpc_sync(2, str.upper, ("ab",)) == "AB"
    assert rpc.rpc_sync(2, "ab".join, (["1", "2"],)) == "1ab2"


@pytest.mark.conformance
def test_results_and_arguments(caller: Caller) -> None:
    caller(gives_results)


VALUES = [
    *(None, True, 7, -(2**80), 1.5, math.inf, 2j, "é \U0001f600 \ud800", b"\x00\xff"),
    *(bytearray(b"ab"), b"x" * 100_000, "y" * 100_000),
    *((), (1, (2,)), [], [[], [1]], {}, {"a": {1: (2, 3)}}, {1, 2}, frozenset({3})),
    *(OrderedDict(b=1, a=2), range(3), slice(1, 2), Ellipsis, int, operator.add, Path("a/b")),
    *(WorkerInfo("worker2", 2), functions.Parcel("p", 1, [2, 3])),
]  # fmt: skip


def gives_back(rpc: Any, values: list[Any]) -> None:
    for to in (2, 0, rpc.get_worker_info().id):
        for value in values:
            found = rpc.rpc_sync(to, functions.same, (value,))
            assert found == value, (to, value, found)
            assert type(found) is type(value), (to, value, found)
        assert rpc.rpc_sync(to, functions.same, (values,)) == values
    circle: list[Any] = []
    circle.append(circle)
    found = rpc.rpc_sync(2, functions.same, (circle,))
    assert found[0] is found


@pytest.mark.conformance
def test_values_come_back_as_they_went(caller: Caller) -> None:
    caller(gives_back, VALUES)


def test_functions_of_cells_go_with_what_they_hold(caller: Caller) -> None:
    factor = 3

    class Scale:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, x: int) -> int:
            return x * self.by * factor

    def scenario(rpc: Any) -> None:
        assert rpc.rpc_sync(2, lambda x: x * factor, (5,)) == 15
        assert rpc.rpc_sync(2, Scale(2), (5,)) == 30
        assert rpc.rpc_sync(2, Scale(2).__call__, (5,)) == 30
        there = rpc.rpc_sync(2, Scale, (4,))
        assert there(1) == 12
        assert rpc.rpc_sync(2, lambda: lambda: factor)() == 3

    caller(scenario)


def names_functions(rpc: Any) -> None:
    assert rpc.rpc_sync(2, "tests.rpc.double", (21,)) == 42
    with pytest.raises(UnknownFunctionError, match=r"tests\.rpc\.dooble.*tests\.rpc\.double"):
        rpc.rpc_sync(2, "tests.rpc.dooble", (21,))
    with pytest.raises(LookupError):
        rpc.rpc_async(2, "tests.rpc.dooble", (21,)).wait()


def test_functions_by_name(caller: Caller) -> None:
    caller(names_functions)


# -- who is called -------------------------------------------------------------------------------


def calls_everybody(rpc: Any) -> None:
    for rank in EVERYBODY:
        name = "controller" if rank < 0 else f"worker{rank}"
        for to in (rank, name, rpc.get_worker_info(rank), WorkerInfo(name, rank)):
            assert rpc.rpc_sync(to, functions.my_rank) == rank
            assert rpc.rpc_async(to, functions.my_rank).wait() == rank


def test_everybody_can_be_called_and_knows_who_it_is(caller: Caller) -> None:
    caller(calls_everybody)


def knows_who(rpc: Any, me: int) -> None:
    mine = rpc.get_worker_info()
    assert (mine.name, mine.id) == ("controller" if me < 0 else f"worker{me}", me)
    assert isinstance(mine, WorkerInfo)
    assert rpc.get_worker_info(2) == rpc.get_worker_info("worker2") == ("worker2", 2)
    assert rpc.get_worker_info("controller") == rpc.get_worker_info(-1) == ("controller", -1)
    assert rpc.get_worker_info(mine) == mine
    with pytest.raises(ArgumentError, match="no worker"):
        rpc.get_worker_info(4)


def test_worker_info(caller: Caller) -> None:
    caller(knows_who, caller.rank)


def test_a_callee_knows_itself(sess: Session) -> None:
    for rank in EVERYBODY:
        assert sess.rpc.rpc_sync(rank, _info_of_callee) == rank


def _info_of_callee() -> int:
    return int(rpc.get_worker_info().id)


def refuses(rpc: Any) -> None:
    for to in (4, -2, 100, "worker4", "worker-1", "worker", "nobody", "", None, 1.5, [1], "2"):
        for ask in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.stream):
            with pytest.raises(ArgumentError):
                ask(to, functions.my_rank)
    with pytest.raises(ArgumentError, match=r"0 to 3"):
        rpc.rpc_sync(4, functions.my_rank)
    for ask in (rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.stream):
        for fn in (3, None, [functions.my_rank]):
            with pytest.raises(ArgumentError, match=r"function|callable"):
                ask(2, fn)
        for timeout in (-2, "3", math.nan, [1]):
            with pytest.raises(ArgumentError, match="timeout"):
                ask(2, functions.my_rank, timeout=timeout)
        for args in (5, "ab"):
            with pytest.raises(ArgumentError, match="args"):
                ask(2, functions.same, args)
        for kwargs in (5, [1]):
            with pytest.raises(ArgumentError, match="kwargs"):
                ask(2, functions.same, (), kwargs)
    for buffer in (0, -1, "a", 1.5):
        with pytest.raises(ArgumentError, match="buffer"):
            rpc.stream(2, functions.numbers, (3,), buffer=buffer)
    with pytest.raises(TypeError):  # the callee's own
        rpc.rpc_sync(2, functions.my_rank, (1, 2))


def test_what_makes_no_sense_is_refused_at_the_caller(caller: Caller) -> None:
    caller(refuses)


def may_last(rpc: Any) -> None:
    for timeout in (None, -1, 0, math.inf, 30, 30.5, 1e9):
        assert rpc.rpc_sync(2, functions.my_rank, timeout=timeout) == 2


def test_no_deadline_is_0_or_inf(caller: Caller) -> None:
    assert rpc.DEFAULT_TIMEOUT == 60
    caller(may_last)


# -- calls within calls --------------------------------------------------------------------------


def goes_round(rpc: Any, me: int) -> None:
    assert rpc.rpc_sync(me, functions.my_rank) == me, "oneself"
    assert rpc.rpc_sync(me, functions.bounce, ([me], 5)) == [me] * 6
    assert rpc.rpc_sync(2, functions.bounce, ([me], 1)) == [2, me], "A -> B -> A"
    assert rpc.rpc_sync(2, functions.bounce, ([me, 2], 19)) == [2, me] * 10
    everybody = [*EVERYBODY]
    assert rpc.rpc_sync(-1, functions.bounce, ([*everybody[1:], -1], 19)) == everybody * 4


@pytest.mark.conformance
def test_calls_back_to_the_caller_twenty_deep(caller: Caller) -> None:
    caller(goes_round, caller.rank)


def test_a_tree_of_calls(sess: Session) -> None:
    """As many threads as there are calls that wait."""
    assert sess.rpc.rpc_sync(0, functions.fibonacci, (9,)) == 34


def test_calls_are_served_beside_the_workers_own_commands(sess: Session, tmp_path: Path) -> None:
    file = str(tmp_path / "go")
    busy = sess.call_packed(lambda: functions.await_file(file))
    try:
        for rank in range(4):
            assert sess.rpc.rpc_sync(rank, functions.my_rank) == rank
            assert sess.rpc.rpc_sync(rank, functions.call_on, (-1, functions.my_rank)) == -1
    finally:
        functions.touch(file)
    assert busy.debug_get_from_all() == [True] * 4


def test_calls_to_one_worker_run_side_by_side(sess: Session, tmp_path: Path) -> None:
    """The first ones wait for what only the last one does."""
    file = str(tmp_path / "go")
    first = [sess.rpc.rpc_async(2, functions.await_file, (file,)) for _ in range(8)]
    assert sess.rpc.rpc_sync(2, functions.touch, (file,)) is None
    assert sess.rpc.wait_all(first) == [True] * 8


def test_all_workers_call_all_workers_at_once(sess: Session) -> None:
    def everybody() -> list[list[int]]:
        return [
            [rpc.rpc_sync(to, functions.add, (to, n)) for to in range(-1, 4)] for n in range(20)
        ]

    right = [[to + n for to in range(-1, 4)] for n in range(20)]
    assert sess.call_packed(everybody).debug_get_from_all() == [right] * 4


def test_many_threads_of_the_controller_call_at_once(sess: Session) -> None:
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = [sess.rpc.rpc_sync(n % 4, functions.add, (n, number)) for n in range(40)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [n + number for n in range(40)] for number in range(6)}


def test_results_of_commands_can_be_of_calls(sess: Session) -> None:
    """A function of a `call_packed` uses its result with others."""
    ring = sess.call_packed(lambda: rpc.rpc_sync((functions.my_rank() + 1) % 4, functions.my_rank))
    assert (ring * 10).debug_get_from_all() == [10, 20, 30, 0]


# -- by reference and by value -------------------------------------------------------------------


def test_within_an_address_space_the_very_objects_go(sess: Session, engine: str) -> None:
    mine = [object()]
    near = [0, -1] if engine == "processes" else [-1]
    for to in EVERYBODY if engine == "threads" else near:
        assert sess.rpc.rpc_sync(to, functions.same, (mine,)) is mine
        sess.rpc.rpc_sync(to, list.append, (mine, to))
        assert mine.pop() == to


def test_elsewhere_there_is_a_copy(sess: Session, engine: str) -> None:
    if engine == "threads":
        pytest.skip("everybody shares one address space")
    mine = [[1]]
    found = sess.rpc.rpc_sync(2, functions.same, (mine,))
    assert found == mine
    assert found[0] is not mine[0]
    sess.rpc.rpc_sync(2, list.append, (mine, 2))
    assert mine == [[1]]


def test_arguments_are_as_they_were_at_the_call(sess: Session, engine: str, tmp_path: Path) -> None:
    if engine == "threads":
        pytest.skip("by reference: what is changed is seen")
    file = str(tmp_path / "go")
    numbers = [1]
    future = sess.rpc.rpc_async(2, functions.wait_then_add, (file, numbers, [2]))
    numbers.append(7)
    functions.touch(file)
    assert future.wait() == [1, 2]


# -- on the controller by the module, and without a session --------------------------------------


def test_the_module_calls_for_the_one_open_session(sess: Session) -> None:
    assert rpc.rpc_sync(2, functions.my_rank) == 2
    assert rpc.rpc_async(3, functions.my_rank).wait() == 3
    assert rpc.get_worker_info().id == rpc.CONTROLLER == -1
    assert rpc.remote(1, functions.add, (1, 2)).to_here() == 3


def test_without_a_session_it_is_said(fresh: Any, engine: str) -> None:
    session = fresh(2)
    assert session.rpc.rpc_sync(1, functions.my_rank) == 1
    mine = session.rpc
    session.shutdown()
    for ask in (
        lambda: mine.rpc_sync(1, functions.my_rank),
        lambda: mine.remote(1, functions.my_rank),
        lambda: mine.RRef(1),
        lambda: session.rpc.rpc_sync(1, functions.my_rank),
    ):
        with pytest.raises(discolab.SessionClosedError):
            ask()
    with pytest.raises(discolab.SessionError, match="session"):
        rpc.rpc_sync(1, functions.my_rank)


def test_two_sessions_side_by_side(fresh: Any) -> None:
    one, two = fresh(2), fresh(3)
    assert one.rpc.rpc_sync(1, functions.call_on, (0, functions.my_rank)) == 0
    assert two.rpc.rpc_sync(2, functions.call_on, (1, functions.my_rank)) == 1
    with pytest.raises(ArgumentError):
        one.rpc.rpc_sync(2, functions.my_rank)
    ref = two.rpc.remote(2, functions.my_rank)
    assert ref.to_here() == 2
    one.shutdown()
    assert two.rpc.rpc_sync(2, functions.take, (ref,)) == 2


def test_a_session_of_one_worker(fresh: Any) -> None:
    session = fresh(1)
    assert session.rpc.rpc_sync(0, functions.bounce, ([-1, 0], 6)) == [0, -1, 0, -1, 0, -1, 0]
    assert session.rpc.remote(0, functions.add, (1, 2)).to_here() == 3
