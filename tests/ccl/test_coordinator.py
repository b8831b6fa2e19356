"""The coordinator as pure state: it is handed what workers say, and what it says is looked at."""

import random
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from discolab.ccl.board.peers import RemotePeer
from discolab.ccl.call import Signature
from discolab.ccl.coordinator import protocol
from discolab.ccl.coordinator.coordinator import Coordinator
from discolab.ccl.groups import Group
from discolab.runtime import Failure, Worker, sources
from discolab.runtime.services import WorkerState

F32 = ((torch.float32, (4,)),)


class Lines:
    """What a coordinator needs of a session's lines; what it says is kept."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.said: dict[int, list[Any]] = {rank: [] for rank in range(num_workers)}
        self.asked: list[int] = []
        self.sent = dict.fromkeys(range(num_workers), 1)
        self.lost: dict[int, str] = {}

    def workers_here(self) -> dict[int, Worker]:
        return {}

    def tell(self, rank: int, service: str, value: Any) -> None:
        assert service == "ccl"
        self.said[rank].append(value)

    def ask_states(self, ranks: list[int]) -> None:
        self.asked += ranks


class Town:
    """A coordinator and its workers, who say what the test has them say."""

    def __init__(self, num_workers: int) -> None:
        self.lines = Lines(num_workers)
        self.coordinator = Coordinator(self.lines)
        self.at = dict.fromkeys(range(num_workers), 0)  # the ordinal of each worker's command
        self.cut = 0

    def say(self, rank: int, word: str, *rest: Any) -> None:
        self.coordinator.receive(rank, (word, self.at[rank], self.cut, *rest))

    def join(self, rank: int, seq: int, number: int = 0, **given: Any) -> None:
        ranks = given.pop("ranks", tuple(range(self.lines.num_workers)))
        op, kinds = given.pop("op", "all_reduce"), given.pop("kinds", F32)
        asynchronous, data = given.pop("asynchronous", False), given.pop("data", bytes([rank] * 4))
        signature = Signature(op, "sum", None, kinds, "cpu")
        site = protocol.Place("program.py", "step"), 10 + rank
        assert not given
        call = self.call(rank, signature, ranks, number, site, asynchronous)
        self.say(rank, protocol.JOIN, seq, *call, None, data)

    def send(self, rank: int, number: int, peer: int, data: bytes | None = b"x" * 16) -> None:
        call = self.message("send", rank, peer, F32)
        self.say(rank, protocol.SEND, number, call, peer, "", False, data)

    def recv(self, rank: int, seq: int, peer: int | None, kinds: Any = F32) -> None:
        self.say(rank, protocol.RECV, seq, self.message("recv", rank, peer, kinds), peer, "")
        self.say(rank, protocol.TAKE, seq, False)

    def message(self, op: str, rank: int, peer: int | None, kinds: Any) -> Any:
        signature = Signature(op, None, peer, kinds, "cpu")
        return self.call(rank, signature, tuple(self.at), -1, None, False)

    def call(
        self, rank: int, signature: Signature, ranks: Any, number: int, site: Any, is_async: bool
    ) -> protocol.WireCall:
        call: Any = SimpleNamespace(
            name=signature.op, ordinal=self.at[rank], number=number, group=Group(ranks),
            signature=signature, site=site, timeout=None, asynchronous=is_async, patient=False,
        )  # fmt: skip
        return protocol.call_out(call)

    def state(self, rank: int, *, failed: bool = False, busy: bool = True, **more: Any) -> None:
        failure = Failure(rank, "call of 'f'", "", "ValueError", "boom")
        calls = ((self.at[rank] - 1, failure),) if failed else ()
        fields = {
            "rank": rank, "executed": self.at[rank], "sat_out": -1, "resumed_at": self.cut,
            "ended": False, "interrupts": 0, "received": 1, "busy": busy, "state": "running",
            "detail": "call of 'f'", "seconds": 0.1, "failed_calls": calls, **more,
        }  # fmt: skip
        self.coordinator.state(rank, WorkerState(**fields))

    def look(self, seconds: float = 0.3) -> None:
        """Let the coordinator look while so much time passes; workers answer as they last did."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            due = self.coordinator.next_look()
            if due is not None and due <= time.monotonic():
                self.coordinator.look()
            for rank in self.lines.asked:
                if rank not in self.lines.lost:
                    self.state(rank, busy=True)
            self.lines.asked.clear()
            time.sleep(0.002)

    def heard(self, rank: int, *words: str) -> list[Any]:
        """What a worker was told since it was last asked for, the named words only."""
        found = [value for value in self.lines.said[rank] if not words or value[0] in words]
        self.lines.said[rank] = []
        return found

    def is_empty(self) -> bool:
        board, coordinator = self.coordinator.board, self.coordinator
        board.sweep(coordinator.peers)
        return not (
            board.open or board.failed or board.waiting or len(board.messages) or
            coordinator._collectives._of or coordinator._collectives._handle_of or
            coordinator._messages._calls or coordinator._messages._fetching
        )  # fmt: skip


def test_what_is_small_comes_with_the_word_to_go_on() -> None:
    town = Town(3)
    for rank in (2, 0):
        town.join(rank, seq=5 + rank)
    assert town.heard(0) == []
    town.join(1, seq=6)
    given = tuple(bytes([rank] * 4) for rank in range(3))
    for rank in range(3):
        assert town.heard(rank) == [(protocol.GO, 5 + rank, *given)]
    assert town.is_empty()
    assert [call.state for call in town.coordinator.ledger.story(2)] == ["done"]


def test_parts_go_to_whom_they_are_for() -> None:
    town = Town(2)
    town.join(0, 1, op="reduce_scatter", data=(b"a", b"b"))
    town.join(1, 2, op="reduce_scatter", data=(b"c", b"d"))
    assert town.heard(0) == [(protocol.GO, 1, b"a", b"c")]
    assert town.heard(1) == [(protocol.GO, 2, b"b", b"d")]


def test_what_is_large_is_done_over_one_lane() -> None:
    town = Town(2)
    for turn in range(3):
        for rank in range(2):
            town.join(rank, seq=turn + 1, number=turn, data=None if rank else b"")
        numbers = {town.heard(rank)[0] for rank in range(2)}
        assert numbers == {(protocol.RUN, turn + 1, 1)}  # the same process group each time
        assert not town.is_empty()
        for rank in range(2):
            town.say(rank, protocol.OVER, turn + 1)
        assert town.is_empty()
    town.say(0, protocol.FORGET, (0, 1), "")
    assert [town.heard(rank) for rank in range(2)] == [[(protocol.CLOSE, 0, (0, 1), 1)]] * 2


def test_members_disagree() -> None:
    town = Town(2)
    town.join(0, 1)
    town.join(1, 1, kinds=((torch.float32, (5,)),))
    for rank in range(2):
        word, seq, aborted, text = town.heard(rank)[0]
        assert (word, seq, aborted) == (protocol.FAIL, 1, False)
        assert "members disagree on the shape" in text
        assert "worker 1: called all_reduce(sum) of float32[5] at program.py:11, in step" in text
    assert town.is_empty()


def test_a_member_has_failed() -> None:
    town = Town(2)
    town.state(1)
    town.join(0, 1)
    town.look(0.02)
    assert not town.heard(0, protocol.FAIL)
    town.at[1] = 1
    town.state(1, failed=True)
    end = time.monotonic() + 1
    told: list[Any] = []
    while not told and time.monotonic() < end:
        town.coordinator.look()
        if town.lines.asked:
            town.lines.asked.clear()
            town.state(1, failed=True)
        told = town.heard(0, protocol.FAIL)
    assert "worker 1: failed: ValueError: boom" in told[0][3]
    assert told[0][2]  # aborted: the cause is another one's
    assert town.is_empty()


def test_two_wait_for_each_other() -> None:
    town = Town(2)
    town.recv(0, 1, 1)
    town.recv(1, 1, 0)
    town.look(0.3)
    for rank in range(2):
        told = town.heard(rank, protocol.FAIL)
        assert "deadlock: these workers wait for each other for ever" in told[0][3]
    assert town.is_empty()


@pytest.mark.parametrize("running", [False, True])
def test_a_member_dies(running: bool) -> None:
    town = Town(3)
    for rank in range(3 if running else 2):
        town.join(rank, 1, data=None)
        if not running:
            town.state(2)
    for rank in range(3):
        town.heard(rank)
    town.lines.lost[2] = "was killed by SIGKILL"
    town.coordinator.lost(2)
    for rank in range(2):
        told = town.heard(rank, protocol.FAIL)
        assert "can't complete" in told[0][3]
        assert "has died" in told[0][3]
    town.look(0.1)
    assert town.is_empty()
    town.join(0, 2, number=1)  # and from now on it is told at once
    town.join(1, 2, number=1)
    town.look(0.2)
    assert "worker 2: has died" in town.heard(0, protocol.FAIL)[0][3]


def test_an_interrupt_voids_what_is_from_before() -> None:
    town = Town(2)
    for rank in range(2):
        town.join(rank, 1, data=None)
    assert town.heard(0)[0] == (protocol.RUN, 1, 1)
    town.send(0, 2, 1)
    town.at, town.cut = {0: 5, 1: 5}, 5
    town.join(0, 3, data=None)
    town.at[1] = 3
    town.cut = 0
    town.join(1, 2)  # late, from before
    assert any("ended by an interrupt" in str(value) for value in town.heard(1, protocol.FAIL))
    town.at[1], town.cut = 5, 5
    town.join(1, 4, data=None)
    assert town.heard(1)[-1] == (protocol.RUN, 4, 2)  # over a new process group
    for rank, seq in ((0, 3), (1, 4)):
        town.say(rank, protocol.OVER, seq)
    assert town.is_empty()


def test_what_is_known_of_an_interrupt_is_asked_anew() -> None:
    town = Town(2)
    town.state(0, interrupts=1)  # told in the midst of it; nobody asked since
    town.join(0, 1, data=None)
    town.at[1] = 1
    town.look(0.3)
    assert "worker 1: finished the call without it" in town.heard(0, protocol.FAIL)[0][3]


def test_messages_come_in_order_to_who_waits() -> None:
    town = Town(2)
    town.recv(1, 1, 0)
    town.send(0, 1, 1, b"a" * 16)
    town.send(0, 2, 1, b"b" * 16)
    town.recv(1, 2, None)
    told = town.heard(1, protocol.MESSAGE)
    assert [(value[1], value[2], value[5]) for value in told] == [
        (1, 0, b"a" * 16), (2, 0, b"b" * 16),
    ]  # fmt: skip
    assert town.is_empty()


def test_a_large_message_stays_with_its_sender_until_it_is_received() -> None:
    town = Town(3)
    town.send(0, 9, 2, None)
    town.recv(2, 1, 0)
    assert town.heard(0) == [(protocol.GIVE, 0, 9, 2, 1)]
    assert town.heard(2)[0][:3] == (protocol.FETCH, 1, 0)
    town.say(2, protocol.OVER, 1)
    assert town.is_empty()
    town.send(0, 10, 2, None)
    town.recv(2, 2, 0, kinds=((torch.float32, (5,)),))
    assert town.heard(0) == [(protocol.DROP, 0, 10)]  # it does not fit
    assert town.heard(2)[0][0] == protocol.MESSAGE


def test_a_message_of_a_failed_call_is_void() -> None:
    town = Town(2)
    town.send(0, 1, 1, None)
    town.at[0] = 1
    town.state(0, failed=True)
    town.at[1] = 1
    town.recv(1, 1, 0)
    town.state(0, failed=True)
    assert town.heard(0, protocol.DROP) == [(protocol.DROP, 0, 1)]
    assert not town.heard(1, protocol.MESSAGE)
    town.send(0, 2, 1)
    assert town.heard(1, protocol.MESSAGE)[0][1] == 1


def test_who_gives_up_is_told_who_is_missing() -> None:
    town = Town(2)
    town.join(0, 1)
    town.say(0, protocol.LATE, 1, 0.1)
    assert town.lines.asked == [1]
    town.state(1)
    _, seq, text = town.heard(0, protocol.LATE)[0]
    assert seq == 1
    assert "gave up after 0.1 s waiting for all_reduce #1" in text
    assert "worker 1: has not come to it yet: running call of 'f'" in text
    town.join(1, 1)
    assert "worker 0 gave up after 0.1 s" in town.heard(1, protocol.FAIL)[0][3]


def test_the_store_answers_when_the_key_is_there() -> None:
    town = Town(2)
    town.say(0, protocol.STORE, 7, 0, "store", "get", ["a", "b"])
    town.say(1, protocol.STORE, 1, 0, "store", "set", ["a"], [b"1"])
    assert town.heard(0) == []
    town.say(1, protocol.STORE, 2, 0, "store", "add", ["b"], 5)
    assert town.heard(0) == [(protocol.ANSWER, 7, [b"1", b"5"])]
    assert town.heard(1) == [(protocol.ANSWER, 1, None), (protocol.ANSWER, 2, 5)]
    town.say(0, protocol.STORE, 8, 0, "store", "wait", ["never"])
    town.at[1] = 1
    town.state(1)
    town.look(0.2)
    assert (protocol.ANSWER, 8, None) in town.lines.said[0]


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(seed=st.integers(0, 10_000), workers=st.integers(2, 4))
def test_in_any_order_in_which_it_may_come(seed: int, workers: int) -> None:
    """Each worker's words come in order, those of several in any; all hear of all in one order."""
    choose = random.Random(seed)
    town = Town(workers)
    groups = [tuple(range(workers)), (0, 1), tuple(range(1, workers))]
    plan = [
        (choose.choice(groups), choose.random() < 0.3, choose.random() < 0.3) for _ in range(12)
    ]
    todo: dict[int, deque[Any]] = {rank: deque() for rank in range(workers)}
    for turn, (ranks, large, asynchronous) in enumerate(plan):
        number = sum(1 for other, *_ in plan[:turn] if other == ranks)
        for rank in ranks:
            todo[rank].append((turn, ranks, number, large, asynchronous))
    waits: dict[int, int | None] = dict.fromkeys(todo)
    order: dict[int, list[int]] = {rank: [] for rank in todo}
    while any(todo.values()) or any(turn is not None for turn in waits.values()):
        able = [rank for rank, line in todo.items() if line and waits[rank] is None]
        assert able, "all wait"
        rank = choose.choice(able)
        turn, ranks, number, large, asynchronous = todo[rank].popleft()
        data = None if large else b"data"
        town.join(rank, turn + 1, number, ranks=ranks, asynchronous=asynchronous, data=data)
        waits[rank] = None if asynchronous else turn
        for other in todo:
            for word, seq, *_ in town.heard(other):
                assert word in (protocol.GO, protocol.RUN)
                order[other].append(seq - 1)
                if waits[other] == seq - 1:
                    waits[other] = None
                if word == protocol.RUN:
                    town.say(other, protocol.OVER, seq)
    assert town.is_empty()
    places = {turn: place for place, turn in enumerate(order[0] + order[workers - 1])}
    for rank, line in order.items():
        assert sorted(line) == [t for t, (ranks, *_) in enumerate(plan) if rank in ranks]
    for a in order:
        for b in order:
            shared = [turn for turn in order[a] if turn in set(order[b])]
            assert shared == [turn for turn in order[b] if turn in set(order[a])]
    assert places
    town.coordinator.ledger.validate()


def test_a_mirror_keeps_as_many_failed_calls_as_a_worker() -> None:
    from discolab.runtime.channel import ThreadChannel

    cpu = torch.device("cpu")
    worker = Worker(0, 1, 1, cpu, ThreadChannel(), shared={}, worker_zero_data={})
    assert RemotePeer(0, {}, int).failed_calls.maxlen == worker.failed_calls.maxlen


def test_each_call_has_its_own_place_though_the_text_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def place(file: str) -> str:
        site = compile("step()", file, "exec"), 1  # equal code objects, whatever the file
        call = Town(2).call(0, Signature("barrier"), (0, 1), 0, site, False)
        seen = protocol.alike_in(call[2])[3]
        assert seen is not None
        return str(getattr(seen[0], "co_filename", seen[0]))

    assert [place("a.py"), place("b.py"), place("a.py")] == ["a.py", "b.py", "a.py"]
    monkeypatch.setattr(sources, "namers", [lambda file: "Cell In[2]" if file == "a.py" else None])
    assert place("a.py") == "Cell In[2]"  # a cell that has run once more
