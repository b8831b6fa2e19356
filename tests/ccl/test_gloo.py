"""Gloo gives what `local` gives, finds the same mistakes, and can be stopped at any moment."""

import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from discolab import ccl
from discolab.ccl import choose
from discolab.ccl.backends.gloo import GlooBackend
from discolab.ccl.rendezvous import conductor
from discolab.engines import ThreadedSession
from discolab.runtime import Failure, WorkerError, current_worker
from discolab.runtime.interrupts import TICK
from tests.selection import slow

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, *FLOAT8, torch.bool]
SOME = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64]
OPS = ["sum", "prod", "min", "max", "avg", "band", "bor", "bxor"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 4), (2, 0, 3)]


@pytest.fixture
def gloo(start: Any) -> Callable[..., Any]:
    """``gloo(4, 2)``: as `start`, with that backend."""

    class Gloo:
        def __init__(self, *args: int) -> None:
            self._session = start(*args)

        def __enter__(self) -> ThreadedSession:
            sess: ThreadedSession = self._session.__enter__()
            sess.init_ccl("gloo")
            return sess

        def __exit__(self, *exc: Any) -> None:
            self._session.__exit__(*exc)

    return Gloo


def rank() -> int:
    return current_worker().rank


def use(name: str) -> str:
    return choose.init(name, ())


def make(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers that overflow narrow integers when multiplied; a NaN and infinities in floats."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-100, 101, shape, generator=generator)
    if dtype is torch.bool:
        return numbers > 0
    if dtype.is_complex:
        imaginary = torch.randint(-9, 10, shape, generator=generator)
        return torch.complex(numbers.double(), imaginary.double()).to(dtype)
    if not dtype.is_floating_point:
        return (numbers.view(dtype) if dtype is torch.uint64 else numbers.to(dtype)).clone()
    values = (numbers / 16).to(dtype)
    if numbers.numel() > 8 and dtype not in FLOAT8:
        values.view(-1)[seed % 4] = float("nan")
        values.view(-1)[4 + seed % 2] = float("-inf")
        values.view(-1)[6 + seed % 2] = -0.0
    return values


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory that is not contiguous."""
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    wide[..., 0].copy_(tensor)
    return wide[..., 0]


def defined(op: str, dtype: torch.dtype) -> bool:
    if op in ("band", "bor", "bxor"):
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (
        (dtype.is_complex and op in ("min", "max")) or (dtype is torch.bool and op == "avg")
    )


def same(got: torch.Tensor, want: torch.Tensor, note: Any) -> None:
    """Equal in dtype, shape and value; what was computed with floats may differ in a last bit."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), note
    if got.dtype in FLOAT8:
        got, want = got.float(), want.float()
    if got.dtype in INTEGERS:
        assert got.tolist() == want.tolist(), (note, got, want)
        return
    tolerance = 2e-2 if got.dtype in (torch.bfloat16, torch.float16) else 1e-5
    close = torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert close, (note, got, want)


def reductions(dtypes: list[torch.dtype], group: Any) -> Iterator[tuple[Any, Any]]:
    members = ccl.world() if group == "world" else ccl.group() if group is None else group
    n = len(members)
    for dtype, op, shape, sparse in itertools.product(dtypes, OPS, SHAPES, (False, True)):
        if not defined(op, dtype):
            continue
        note = (dtype, op, shape, sparse)
        x = make(rank(), shape, dtype)
        x = strided(x) if sparse else x
        out = strided(torch.zeros_like(x)) if sparse else None
        yield (*note, "all_reduce"), ccl.all_reduce(x, op, group=group, out=out)
        yield (*note, "reduce"), ccl.reduce(x, n - 1, op, group=group)
        parts = make(rank(), (2 * n, *shape), dtype)
        out = strided(torch.zeros((2, *shape), dtype=dtype)) if sparse else None
        yield (*note, "reduce_scatter"), ccl.reduce_scatter(parts, op, group=group, out=out)


def moves(dtypes: list[torch.dtype], group: Any) -> Iterator[tuple[Any, Any]]:
    members = ccl.world() if group == "world" else ccl.group() if group is None else group
    ranks = list(members.ranks if isinstance(members, ccl.Group) else members)
    n, me = len(ranks), ranks.index(rank())
    for dtype, shape, sparse in itertools.product([*dtypes, *FLOAT8], SHAPES, (False, True)):
        note = (dtype, shape, sparse)
        x = make(rank(), shape, dtype)
        x = strided(x) if sparse else x
        yield (*note, "all_gather"), ccl.all_gather(x, group=group)
        yield (*note, "gather"), ccl.gather(x, n - 1, group=group)
        out = strided(torch.zeros_like(x)) if sparse else torch.zeros_like(x)
        given = x if me == n - 1 else None
        yield (*note, "broadcast"), ccl.broadcast(given, n - 1, group=group, out=out)
        parts = make(rank(), (n, *shape), dtype)
        row = strided(torch.zeros((1, *shape), dtype=dtype))
        yield (*note, "scatter"), ccl.scatter(parts if me == 0 else None, group=group, out=row)
        yield (*note, "all_to_all"), ccl.all_to_all(parts, group=group)
        lists = [make(100 * me + i, (1 + (me + i) % 3, *shape), dtype) for i in range(n)]
        outs = [torch.zeros((1 + (i + me) % 3, *shape), dtype=dtype) for i in range(n)]
        yield (*note, "uneven"), torch.cat(ccl.all_to_all(lists, group=group, out=outs))


def lists_of_several(group: Any) -> Iterator[tuple[Any, Any]]:
    """Coalesced: of different dtypes and shapes, so that bytes lie badly for some."""
    n = len(ccl.world() if group == "world" else ccl.group() if group is None else group)
    kinds = [((3,), torch.bool), ((2, 3), torch.float32), ((), torch.int16), ((5,), torch.float64)]
    kinds += [((1,), torch.complex64), ((3,), torch.float16)]
    xs = [make(7 * rank() + k, shape, dtype) for k, (shape, dtype) in enumerate(kinds)]
    whole = [make(7 * rank() + k, (n, *s), d) for k, (s, d) in enumerate(kinds)]
    for op in ("sum", "prod"):
        yield from enumerate(ccl.all_reduce_coalesced(xs, op, group=group))
        yield from enumerate(ccl.reduce_scatter_coalesced(whole, op, group=group))
    yield from enumerate(ccl.all_gather_coalesced(xs, group=group))
    aliased = ccl.all_reduce_coalesced(xs[1:2] * 2, group=group, outs=[xs[1], xs[1].clone()])
    yield from enumerate(aliased)


def compare(dtypes: list[torch.dtype], group: Any) -> int:
    """Do all on `local` and on Gloo; how many results were the same."""
    if isinstance(group, list) and rank() not in group:
        return -1

    def everything() -> list[tuple[Any, Any]]:
        given = [reductions(dtypes, group), moves(dtypes, group), lists_of_several(group)]
        return [pair for results in given for pair in results]

    worker = current_worker()
    gloo = choose.backend_of(worker)
    worker.shared["discolab.ccl"][worker.rank] = worker.shared["discolab.ccl.local"]
    assert ccl.backend_name() == "local"
    expected = everything()
    worker.shared["discolab.ccl"][worker.rank] = gloo
    assert ccl.backend_name() == "gloo"
    results = everything()
    for (note, got), (_, want) in zip(results, expected, strict=True):
        assert (got is None) == (want is None), note
        if got is not None:
            same(got, want, note)
    return len(results)


@pytest.mark.parametrize(
    ("workers", "groups", "group"),
    [
        slow(1, 1, None),
        (2, 1, None),
        slow(4, 1, None),
        slow(4, 2, None),  # every dtype
        (4, 2, "world"),
        (4, 1, [0, 2, 3]),
        slow(4, 1, [3]),
    ],
)
def test_as_local(gloo: Any, workers: int, groups: int, group: Any) -> None:
    dtypes = DTYPES if (workers, groups) == (4, 2) and group is None else SOME
    with gloo(workers, groups) as sess:
        counts = sess.call_packed(compare, dtypes, group).debug_get_from_all()
    assert {count for count in counts if count >= 0} == {max(counts)}
    assert max(counts) > 500


# -- large, in place, asynchronous ----------------------------------------------------------------


def large() -> bool:
    x = torch.full((1 << 20,), rank() + 1.0)
    whole = ccl.all_gather(x)
    right = all(bool((whole[i << 20 : (i + 1) << 20] == i + 1).all()) for i in range(3))
    assert ccl.all_reduce_(x) is x
    return right and bool((x == 6).all())


def test_large_ones(gloo: Any) -> None:
    with gloo(3) as sess:
        assert sess.call_packed(large).debug_get_from_all() == [True] * 3


def several_at_once() -> list[float]:
    """Asynchronous ones in two groups, begun in one order and waited for in another."""
    pair = [rank() // 2 * 2, rank() // 2 * 2 + 1]
    xs = [torch.full((1 << 16,), float(rank() + i)) for i in range(6)]
    works = [
        ccl.all_reduce(x, group=pair if i % 2 else "world", async_op=True) for i, x in enumerate(xs)
    ]
    results = [float(work.wait()[-1]) for work in reversed(works)]
    assert all(work.done() for work in works)
    return results


def goes_on_without_waiting() -> None:
    ccl.all_reduce(torch.ones(1 << 16), async_op=True)


def test_asynchronous_ones(gloo: Any) -> None:
    with gloo(4) as sess:
        for _ in range(5):
            got = sess.call_packed(several_at_once).debug_get_from_all()
            for r, results in enumerate(got):
                pair = 2 * (r // 2 * 2) + 1
                want = [6.0 + 4 * i if i % 2 == 0 else pair + 2.0 * i for i in range(6)]
                assert results == want[::-1]
        for _ in range(3):
            sess.call_packed(goes_on_without_waiting)
        assert sess.call_packed(fine).debug_get_from_all() == [12.0] * 4


def makes_groups(turn: int) -> float:
    """Each worker in several groups, all new, in an order that no two share without collective."""
    n, me = current_worker().num_workers, rank()
    total = 0.0
    for size in (2, 3, n):
        for first in range(0, n - size + 1):
            members = ccl.Group(tuple(range(first, first + size)), tag=f"{turn}")
            if me in members:
                total += float(ccl.all_reduce(torch.tensor(float(me)), group=members))
    return total


def test_new_groups_by_different_workers(gloo: Any) -> None:
    with gloo(4) as sess:
        want = [
            sum(
                float(sum(range(first, first + size)))
                for size in (2, 3, 4)
                for first in range(4 - size + 1)
                if first <= me < first + size
            )
            for me in range(4)
        ]
        for turn in range(4):
            assert sess.call_packed(makes_groups, turn % 3).debug_get_from_all() == want


def messages() -> float:
    me, n = rank(), current_worker().num_workers
    ccl.send(torch.full((3,), float(me)), (me + 1) % n)
    return float(ccl.recv(torch.zeros(3), (me - 1) % n)[2])


def test_messages_and_barriers(gloo: Any) -> None:
    with gloo(3) as sess:
        assert sess.call_packed(messages).debug_get_from_all() == [2.0, 0.0, 1.0]
        sess.call_packed(ccl.barrier).debug_get_from_all()


def test_a_message_outlives_a_change_of_backend(gloo: Any) -> None:
    with gloo(2) as sess:
        ref = sess.call_packed(lambda: ccl.send(torch.ones(2), 1 - rank()))
        ref.debug_get_from_all()
        sess.init_ccl("local")
        got = sess.call_packed(lambda: float(ccl.recv(torch.zeros(2), 1 - rank()).sum()))
        assert got.debug_get_from_all() == [2.0, 2.0]


# -- mistakes -------------------------------------------------------------------------------------


def fine() -> float:
    """A collective that works: the session is usable after what came before."""
    return float(ccl.all_reduce(torch.ones(3), group="world").sum())


def failures_of(sess: ThreadedSession, func: Callable[[], Any]) -> dict[int, Failure]:
    started = time.monotonic()
    ref = sess.call_packed(func)
    with pytest.raises(WorkerError) as caught:
        ref.debug_get_from_all()
    assert time.monotonic() - started < 5.0
    sess.sync_all()
    want = 3.0 * sess.num_workers
    assert sess.call_packed(fine).debug_get_from_all() == [want] * sess.num_workers
    return {failure.rank: failure for failure in caught.value.failures}


def other_shape() -> None:
    ccl.all_reduce(torch.ones(4, 4 + (rank() == 2)))


def other_dtype() -> None:
    ccl.all_gather(torch.ones(4, dtype=torch.float64 if rank() == 0 else torch.float32))


def other_operation() -> None:
    if rank() == 1:
        ccl.broadcast(torch.ones(4))
    else:
        ccl.all_reduce(torch.ones(4))


def other_size() -> None:
    xs = [torch.ones(2 + (rank() == 1)) for _ in range(4)]
    ccl.all_to_all(xs, out=[torch.ones(2) for _ in range(4)])


def raises() -> None:
    if rank() == 2:
        raise ValueError("boom")
    ccl.all_reduce(torch.ones(4))


def returns_early() -> None:
    if rank() != 3:
        ccl.all_gather(torch.ones(4))


def circle() -> None:
    ccl.recv(torch.ones(4), (rank() + 1) % 4)


def gives_up() -> None:
    if rank() == 1:
        time.sleep(0.4)
    ccl.all_reduce(torch.ones(4), timeout=0.1 if rank() == 0 else None)


@pytest.mark.parametrize(
    ("func", "kinds", "words"),
    [
        (other_shape, ["CollectiveError"] * 4, ["disagree", "shape", "worker 2: called"]),
        (other_dtype, ["CollectiveError"] * 4, ["disagree", "dtype", "float64[4]"]),
        (other_operation, ["CollectiveError"] * 4, ["operation", "worker 1: called broadcast"]),
        (other_size, ["CollectiveError"] * 4, ["worker 1 has float32[3]", "room for float32[2]"]),
        (
            raises,
            ["CollectiveAborted", "CollectiveAborted", "ValueError", "CollectiveAborted"],
            ["boom"],
        ),
        (returns_early, ["CollectiveError"] * 3, ["worker 3: finished the call without it"]),
        (circle, ["CollectiveError"] * 4, ["deadlock", "recv of float32[4]"]),
        (gives_up, ["WaitTimeoutError", *["CollectiveAborted"] * 3], ["gave up after 0.1 s"]),
    ],
)
def test_mistakes_are_found_as_on_local(
    gloo: Any, func: Callable[[], None], kinds: list[str], words: list[str]
) -> None:
    with gloo(4) as sess:
        for _ in range(2):
            failures = failures_of(sess, func)
            assert [failures[r].type_name for r in sorted(failures)] == kinds
            for failure in failures.values():
                assert all(word in failure.message for word in words), failure.message


def test_an_error_of_the_library_is_told_by_all(gloo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("no socket left")

    with gloo(3) as sess:
        sess.call_packed(fine).debug_get_from_all()
        monkeypatch.setattr("discolab.ccl.backends.gloo.start", full)
        failures = failures_of(sess, fine)
    assert sorted(failures) == [0, 1, 2]
    for failure in failures.values():
        assert failure.type_name == "CollectiveError"
        words = "all_reduce #1 of float32[3] in workers 0-2 failed in gloo: RuntimeError: no socket"
        assert words in failure.message


def listening() -> set[str]:
    """The sockets of this process that listen on a TCP port."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    all_there = {fields[9] for fields in map(str.split, lines) if fields[3] == "0A"}
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    return all_there & found


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_ports_close_with_the_session(gloo: Any) -> None:
    before = listening()
    with gloo(2) as sess:
        assert sess.call_packed(fine).debug_get_from_all() == [6.0, 6.0]
        assert len(listening() - before) == 1
    deadline = time.monotonic() + 10
    while listening() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not listening() - before


def test_process_groups_that_cant_be_made(gloo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no such interface")

    with gloo(2) as sess, monkeypatch.context() as patch:
        patch.setattr("discolab.ccl.backends.gloo._device", refuse)
        with pytest.raises(WorkerError, match="no such interface"):
            sess.call_packed(fine).debug_get_from_all()
        patch.undo()
        assert sess.call_packed(fine).debug_get_from_all() == [6.0, 6.0]


# -- interrupts -----------------------------------------------------------------------------------


def one_never_comes() -> None:
    if rank() == 0:
        while True:
            time.sleep(1)
    ccl.all_reduce(torch.ones(4))


def huge_ones() -> None:
    x = torch.ones(1 << 24)
    while True:
        ccl.all_reduce(x)


def spins() -> None:
    while True:
        ccl.send(torch.ones(2), (rank() + 1) % 3)
        ccl.recv(torch.zeros(2), (rank() - 1) % 3)
        ccl.all_reduce(torch.ones(16))
        ccl.broadcast(torch.ones(4), 1, group=[0, 1]) if rank() < 2 else None


def stop(sess: ThreadedSession, func: Callable[[], None], after: float) -> None:
    ref = sess.call_packed(func)
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        time.sleep(0.005)
    began = time.monotonic()
    assert sess.interrupt() == []
    assert time.monotonic() - began < 8
    with pytest.raises(WorkerError) as caught:
        ref.debug_get_from_all()
    assert [f for f in caught.value.failures if not f.interrupted] == []
    want = 3.0 * sess.num_workers
    assert sess.call_packed(fine).debug_get_from_all() == [want] * sess.num_workers


def test_interrupt_while_one_never_comes(gloo: Any) -> None:
    with gloo(4) as sess:
        for _ in range(3):
            stop(sess, one_never_comes, 0.05)


def test_interrupt_in_the_middle_of_a_large_one(gloo: Any) -> None:
    with gloo(2) as sess:
        for turn in range(3):
            stop(sess, huge_ones, 0.1 + 0.03 * turn)


# Its exception may land in a callback of the garbage collector or of a weak reference, where Python
# drops it; then it is sent again. It must not land in a thread that a worker starts.
@pytest.mark.usefixtures("drops_exceptions")
def test_interrupt_lands_anywhere(gloo: Any) -> None:
    with gloo(3) as sess:
        for turn in range(15):
            stop(sess, spins, 0.003 * turn)


def leaves_it() -> None:
    """Starts one that nobody waits for, and is interrupted."""
    kept = current_worker().shared.setdefault("test.kept", {})
    kept[rank()] = torch.ones(3)
    ccl.all_reduce(kept[rank()], out=kept[rank()], async_op=True)
    while True:
        time.sleep(1)


def kept() -> list[float]:
    found: list[float] = current_worker().shared["test.kept"][rank()].tolist()
    return found


def test_nothing_is_written_after_an_interrupt(gloo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    performed, go_on = threading.Event(), threading.Event()
    perform = GlooBackend._perform

    def held_back(*args: Any) -> None:
        monkeypatch.undo()
        perform(*args)
        performed.set()
        go_on.wait(20)

    with gloo(3) as sess:
        monkeypatch.setattr(GlooBackend, "_perform", held_back)
        ref = sess.call_packed(leaves_it)
        assert performed.wait(20)
        assert sess.interrupt() == []
        with pytest.raises(WorkerError):
            ref.debug_get_from_all()
        assert sess.call_packed(fine).debug_get_from_all() == [9.0] * 3
        go_on.set()
        deadline = time.monotonic() + 20
        while not conductor.idle() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert sess.call_packed(kept).debug_get_from_all() == [[1.0] * 3] * 3
        assert sess.call_packed(states).debug_get_from_all() == [["failed", "done"]] * 3


def last_one_goes_on() -> float:
    if rank() == 2:
        while len(current_worker().shared["discolab.ccl.local"].rendezvous.board.waiting) < 2:
            time.sleep(0.001)
        ccl.all_reduce(torch.ones(()), async_op=True)
        return 3.0
    return float(ccl.all_reduce(torch.ones(())))


def test_the_last_one_may_leave_while_the_library_works(
    gloo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, perform = threading.Event(), GlooBackend._perform

    def held_back(*args: Any) -> None:
        go_on.wait(20)
        perform(*args)

    monkeypatch.setattr(GlooBackend, "_perform", held_back)
    with gloo(3) as sess:
        ref = sess.call_packed(last_one_goes_on)
        assert ref.debug_get_from_remote(2) == 3.0
        time.sleep(4 * TICK)  # the others look whether they wait in vain
        go_on.set()
        assert ref.debug_get_from_all() == [3.0] * 3


def test_an_interrupt_makes_process_groups_anew(gloo: Any) -> None:
    def made() -> list[int]:
        backend: Any = choose.backend_of(current_worker())
        return [handle.number for handle in backend._handles._kept.values()]

    with gloo(2) as sess:
        seen = []
        for _ in range(2):
            for _ in range(2):
                sess.call_packed(fine).debug_get_from_all()
                seen.append(sess.call_packed(made).debug_get_from_remote(0))
            assert sess.interrupt() == []
        assert len(seen[0]) == 1
        assert seen[0] == seen[1] != seen[2] == seen[3]


def test_one_that_has_begun_is_lost_before_the_last_one_comes(
    gloo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, came = threading.Event(), threading.Event()

    def begin() -> None:
        if rank() == 0:
            go.wait(10)
        try:
            work = ccl.all_reduce(torch.ones(3), async_op=True)
        finally:
            if rank() == 0:
                came.set()
        if rank() == 0:
            work.wait()

    def meanwhile(_rank: int) -> None:
        go.set()
        assert came.wait(10)

    with gloo(3) as sess:
        assert sess.call_packed(fine).debug_get_from_all() == [9.0] * 3
        ref = sess.call_packed(begin)
        for other in (1, 2):
            assert ref.debug_get_from_remote(other) is None
        monkeypatch.setattr(sess, "_prepare", meanwhile)  # when it is gone, and none has its place
        sess.restart_worker(1)
        with pytest.raises(WorkerError, match=r"all_reduce #1 (.|\n)*worker 1 was lost"):
            ref.debug_get_from_remote(0)
        for _ in range(2):
            assert sess.call_packed(fine).debug_get_from_all() == [9.0] * 3


def test_shutdown_in_the_middle(gloo: Any) -> None:
    sess = ThreadedSession(3, devices="cpu", timeout=10)
    sess.init_ccl("gloo")
    sess.call_packed(spins)
    began = time.monotonic()
    sess.shutdown(cancel=True)
    assert time.monotonic() - began < 8


def storm(turns: int) -> float:
    return sum(float(ccl.all_reduce(torch.full((3,), float(turn)))[0]) for turn in range(turns))


def test_two_sessions_at_once(gloo: Any) -> None:
    wrong: list[Any] = []

    def drive(sess: ThreadedSession) -> None:
        for _ in range(5):
            got = sess.call_packed(storm, 5).debug_get_from_all()
            if got != [10.0 * sess.num_workers] * sess.num_workers:
                wrong.append(got)

    with gloo(2) as one, gloo(3) as two:
        threads = [threading.Thread(target=drive, args=(sess,)) for sess in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def states() -> list[str]:
    from discolab.ccl.board.ledger import ledger_of

    return [call.state for call in ledger_of(current_worker()).story(rank())]


def test_the_ledger_knows_how_each_ended(gloo: Any) -> None:
    with gloo(2) as sess:
        sess.call_packed(fine).debug_get_from_all()
        with pytest.raises(WorkerError):
            sess.call_packed(lambda: ccl.all_reduce(torch.ones(2 + rank()))).debug_get_from_all()
        assert sess.call_packed(states).debug_get_from_all() == [["done", "failed"]] * 2


# -- what process groups cost, and when they are freed -------------------------------------------


DEVICE = 4  # files of the port and its thread, which a session takes along


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def settles(count: Callable[[], int], most: int) -> None:
    """Wait until there are no more than that."""
    deadline = time.monotonic() + 20
    while count() > most:
        assert time.monotonic() < deadline, (count(), most)
        time.sleep(0.005)


def connections() -> int:
    backend: Any = choose.backend_of(current_worker())
    return len(backend._handles)


def many_groups(count: int) -> float:
    ccl.all_reduce(torch.ones(()))
    groups = [dist.new_group([0, 1, 2]) for _ in range(count)]
    x = torch.ones(())
    for group in groups:
        dist.all_reduce(x, group=group)
    return float(x)


@pytest.fixture
def warm(gloo: Any) -> int:
    """How many files are open once all is there that stays for good."""
    with gloo(2) as sess:
        sess.call_packed(fine).debug_get_from_all()
    settles(lambda: int(not conductor.idle()), 0)
    return descriptors()


def test_groups_of_the_same_workers_share_sockets(gloo: Any, warm: int) -> None:
    with gloo(3) as sess:
        assert sess.call_packed(many_groups, 10).debug_get_from_all() == [3.0**10] * 3
        assert sess.call_packed(connections).debug_get_from_all() == [1] * 3
        assert descriptors() <= warm + DEVICE + 3 * 2


@pytest.mark.parametrize("end", ["shutdown", "dropped", "in the middle"])
def test_a_session_takes_its_sockets_along(warm: int, end: str) -> None:
    kept = []
    for _ in range(2):
        sess = ThreadedSession(3, devices="cpu", timeout=10)
        sess.init_ccl("gloo")
        if end == "in the middle":
            sess.call_packed(spins)
            sess.shutdown(cancel=True)
        else:
            sess.call_packed(makes_groups, 0).debug_get_from_all()
            assert descriptors() > warm
        if end == "shutdown":
            sess.shutdown()
        if end != "dropped":
            kept.append(sess)  # one that is over holds nothing
        del sess
        gc.collect()
        settles(descriptors, warm)


def test_a_change_of_backend_frees_sockets(gloo: Any, warm: int) -> None:
    with gloo(3) as sess:
        for _ in range(2):
            sess.call_packed(makes_groups, 0).debug_get_from_all()
            assert sess.call_packed(connections).debug_get_from_remote(0) == 3
            sess.init_ccl("local")
            settles(descriptors, warm)
            sess.init_ccl("gloo")


def test_an_interrupt_frees_sockets(gloo: Any, warm: int) -> None:
    with gloo(3) as sess:
        sess.call_packed(makes_groups, 0).debug_get_from_all()
        assert sess.interrupt() == []
        sess.call_packed(fine).debug_get_from_all()
        settles(descriptors, warm + DEVICE + 3 * 2)


def forgets(ranks: list[int], tag: str) -> None:
    worker = current_worker()
    choose.backend_of(worker).forget(worker, ccl.Group(tuple(ranks), tag))


def sums_with(tag: str) -> float:
    return float(ccl.all_reduce(torch.ones(()), group=ccl.Group((0, 1, 2), tag)))


def test_forgotten_groups_free_sockets(gloo: Any, warm: int) -> None:
    with gloo(3) as sess:
        for tag in ("a", "b"):
            assert sess.call_packed(sums_with, tag).debug_get_from_all() == [3.0] * 3
        sess.call_packed(forgets, [0, 1, 2], "a")
        sess.sync_all()
        settles(lambda: int(not conductor.idle()), 0)
        assert sess.call_packed(connections).debug_get_from_remote(0) == 1  # "b" has it
        sess.call_packed(forgets, [0, 1, 2], "b")
        sess.sync_all()
        settles(descriptors, warm)
        assert sess.call_packed(sums_with, "a").debug_get_from_all() == [3.0] * 3


def pairs(turns: int) -> float:
    me = rank()
    for _ in range(turns):
        for group in itertools.combinations(range(4), 2):
            if me in group:
                total = ccl.all_reduce(torch.tensor(float(me)), group=group)
                assert float(total) == sum(group)
    return 1.0


def test_only_so_many_are_kept(gloo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discolab.ccl.board.handles.MOST", 2)
    with gloo(4) as sess:
        assert sess.call_packed(pairs, 3).debug_get_from_all() == [1.0] * 4
        assert sess.call_packed(connections).debug_get_from_remote(0) <= 4  # two in use at once


def test_too_few_files_are_an_error(gloo: Any, warm: int) -> None:
    """And groups that are not in use make room first."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with gloo(4) as sess:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 32 + 9, hard))
            assert sess.call_packed(pairs, 2).debug_get_from_all() == [1.0] * 4
            failures = failures_after(sess, fine)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert sess.call_packed(fine).debug_get_from_all() == [12.0] * 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(failures) == 4
    for failure in failures:
        assert failure.type_name == "CollectiveError"
        for words in ("to connect 4 workers takes 44 file descriptors", "ulimit -n", "'local'"):
            assert words in failure.message


def failures_after(sess: ThreadedSession, func: Callable[[], Any]) -> list[Failure]:
    with pytest.raises(WorkerError) as caught:
        sess.call_packed(func).debug_get_from_all()
    return list(caught.value.failures)
