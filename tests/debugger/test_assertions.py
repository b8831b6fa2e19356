"""`disco_assert`: what holds costs one collective; what does not is told on all workers alike."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from discolab import ProcessSession, Session, ThreadedSession, WorkerError, ccl, current_worker
from discolab.ccl.board.ledger import ledger_of
from discolab.debugger import debugger_of
from discolab.debugger.assertions import disco_assert


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    """Four worker threads; no test leaves anything there."""
    session = ThreadedSession(4, devices="cpu", timeout=20)
    yield session
    session.shutdown()


@pytest.fixture(scope="module")
def processes() -> Iterator[Session]:
    """Two worker processes."""
    session = ProcessSession(2, devices="cpu", timeout=60)
    yield session
    session.shutdown()


def run(session: Session, func: Callable[..., Any], *args: Any) -> None:
    """Run it on all workers, and wait for what goes wrong."""
    session.call_packed(func, *args)
    session.sync_all()


def failing(session: Session, func: Callable[..., Any], *args: Any) -> str:
    """The text with which an assertion fails, the same on all workers."""
    with pytest.raises(WorkerError) as caught:
        run(session, func, *args)
    failures = caught.value.failures
    assert {f.type_name for f in failures} == {"DiscoAssertionError"}
    assert len(failures) == session.num_workers
    assert len({f.message for f in failures}) == 1
    return failures[0].message


def test_what_holds_passes_and_costs_one_collective(four: Session) -> None:
    """Every kind, and the number of collectives that the ledger has of it."""

    def holds() -> int:
        worker = current_worker()
        rank = worker.rank
        before = len(ledger_of(worker).story(rank))
        disco_assert(torch.arange(6.0).view(2, 3), "replicated")
        disco_assert({"w": torch.ones(2), "n": [1, 2.5, "a"]}, "replicated")
        disco_assert(nn.Linear(2, 2).requires_grad_(False).weight.abs() * 0, "replicated")
        disco_assert(torch.full((2, rank + 1), float(rank)), "sharded", dim=1)
        disco_assert(torch.full((2, rank + 1), float(rank)), "sharded", dim=-1)
        disco_assert(torch.arange(3) + rank, "sharded")
        disco_assert(torch.zeros(4), "sharded", dim=0)
        disco_assert(torch.arange(3.0) * rank, "partial")
        disco_assert(rank, "distinct")
        disco_assert(torch.full((3,), rank), "same shape")
        disco_assert([torch.ones(2), 3.0], "finite")
        disco_assert(torch.tensor([1, 2]), "finite")
        disco_assert(rank < 4)
        disco_assert(torch.ones(3) > 0)
        disco_assert(torch.ones(3) * (rank // 2), "replicated", group=[rank // 2 * 2, rank | 1])
        return len(ledger_of(worker).story(rank)) - before

    ref = four.call_packed(holds)
    assert list(four.peek(ref).values()) == [15] * 4


def test_a_replica_that_differs_is_named_with_the_place_and_both_numbers(four: Session) -> None:
    """The worker that differs most, where, and the two numbers."""

    def differs() -> None:
        rank = current_worker().rank
        h = torch.zeros(4, 4)
        h[2, 3] = 0.5 * (rank >= 2)
        disco_assert(h, "replicated")

    assert failing(four, differs) == (
        "disco_assert(h, 'replicated'): workers 0-1 hold one value, workers 2-3 another; largest "
        "difference 0.5 at [2, 3] (0 on worker 0, 0.5 on worker 2), 1 of 16 elements there"
    )


def test_each_another_value_and_two_numbers_that_print_alike(four: Session) -> None:
    """As many digits as it takes."""

    def differs() -> None:
        x = torch.tensor(1.0, dtype=torch.float64) + 1e-12 * current_worker().rank
        disco_assert(x, "replicated", message="after the all-reduce")

    text = failing(four, differs)
    assert text.startswith("after the all-reduce: disco_assert(x, 'replicated'): each of workers ")
    assert re.search(r"\(1\.0 on worker 0, 1\.000000000003\d* on worker 3\)", text)


def test_of_containers_and_modules_the_part_that_differs_is_named(four: Session) -> None:
    """The first one: by its key, index or name; also where a member has no such part."""

    def differs(kind: str) -> None:
        rank = current_worker().rank
        x = torch.arange(3.0)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        if rank == 3:
            with torch.no_grad():
                model[1].running_var += 1
                model[0].bias += 1
        values = {
            "number": {"w": x, "n": [1, (2.5, rank // 3)]},
            "tensor": {"w": x, "n": [x, x + rank // 2]},
            "key": {"w": x} if rank == 1 else {"w": x, "b": x},
            "order": {"a": 1, "b": 2} if rank else {"b": 2, "a": 1},
            "module": model,
            "long": [x] * 60 + [x + rank // 3],
            "plain": [*range(100), rank // 3],
        }
        disco_assert(values[kind], "replicated")

    told = {kind: failing(four, differs, kind) for kind in ("number", "tensor", "key", "order")}
    one = "workers 0-2 hold one value, worker 3 another"
    assert told["number"].endswith(f"{one}; they differ at ['n'][1][1]: 0 on workers 0-2, 1 on "
                                   "worker 3")  # fmt: skip
    assert told["tensor"].endswith("; they differ at ['n'][1], float32[3]")
    assert told["key"].endswith("; worker 1 has no ['b']")
    assert told["order"].endswith("; the order of the items differs")
    text = failing(four, differs, "module")
    assert text.endswith(f"{one}; they differ at 0.bias, float32[2]; and at 1 more place")
    assert failing(four, differs, "long").endswith("they differ at [60], float32[3]")
    assert failing(four, differs, "plain").endswith(one)


def test_a_tolerance_is_measured_from_the_first_worker(four: Session) -> None:
    """Within it nothing is raised; beyond it those that are too far are named."""

    def near(atol: float) -> None:
        x = torch.ones(3, dtype=torch.bfloat16) + 0.5 * (current_worker().rank == 1)
        disco_assert(x, "replicated", atol=atol)

    run(four, near, 0.5)
    text = failing(four, near, 0.25)
    assert "worker 1 is too far from worker 0; largest difference 0.5 at [0]" in text
    assert "3 of 3 elements" in text


def test_zeros_of_either_sign_and_nan_are_what_they_are_elsewhere(four: Session) -> None:
    """-0.0 is 0.0, and NaN is the same as NaN; NaN beside a number is not."""

    def same() -> None:
        rank = current_worker().rank
        disco_assert(torch.tensor([-0.0 if rank else 0.0, float("nan")]), "replicated")

    def nan() -> None:
        value = torch.tensor([1.0, float("nan") if current_worker().rank == 3 else 2.0])
        disco_assert(value, "replicated")

    run(four, same)
    assert "they differ at [1] (2 on worker 0, nan on worker 3)" in failing(four, nan)


def test_a_value_of_many_chunks_is_compared_to_its_end(
    four: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest difference, not the first; a view with gaps; large integers."""
    monkeypatch.setattr("discolab.debugger.assertions._CHUNK", 7)

    def differs() -> None:
        x = torch.full((5, 6), 2**60).t()
        if current_worker().rank == 2:
            x[0, 1] += 1
            x[5, 4] -= 3
        disco_assert(x, "replicated")

    text = failing(four, differs)
    assert "largest difference 3 at [5, 4]" in text
    assert "2 of 30 elements" in text


def test_shapes_and_dtypes_are_told_of_each_worker(four: Session) -> None:
    """And the rule, where the shapes of shards are concerned."""

    def shapes(kind: str, dim: int | None) -> None:
        rank = current_worker().rank
        disco_assert(torch.ones(4 + (rank == 2), 4 + 4 * (rank > 0)), kind, dim=dim)

    def dtypes() -> None:
        disco_assert(torch.ones(2).to(torch.int32 if current_worker().rank else None), "partial")

    told = "worker 0 holds float32[4, 4], workers 1, 3 float32[4, 8], worker 2 float32[5, 8]"
    assert failing(four, shapes, "same shape", None).endswith(told)
    text = failing(four, shapes, "sharded", 1)
    assert text.endswith(f"{told}; the shapes of shards differ in dimension 1 alone")
    assert "in one dimension alone" in failing(four, shapes, "sharded", None)
    assert failing(four, dtypes).endswith("worker 0 holds float32[2], workers 1-3 int32[2]")


@pytest.mark.parametrize("kind", ["sharded", "partial", "distinct"])
def test_equal_values_are_no_shards_and_no_parts(four: Session, kind: str) -> None:
    """All equal: for shards and parts of all workers; for distinct ones of any two."""

    def equal(kind: str) -> None:
        rank = current_worker().rank
        disco_assert(torch.arange(4) + (rank % 3 if kind == "distinct" else 0), kind)

    whose = "workers 0, 3" if kind == "distinct" else "workers 0-3"
    assert failing(four, equal, kind).endswith(f"{whose} hold the same value")


def test_conditions_and_what_is_not_finite_name_the_workers(four: Session) -> None:
    """How many elements, and where the first is."""

    def condition() -> None:
        disco_assert(current_worker().rank != 2)

    def elements() -> None:
        disco_assert(torch.arange(4) > current_worker().rank - 2)

    def finite() -> None:
        x = torch.ones(2, 3)
        if current_worker().rank == 1:
            x[1] = torch.tensor([1.0, float("inf"), float("nan")])
        disco_assert(x * 1, "finite")

    text = "disco_assert(current_worker().rank != 2): false on worker 2"
    assert failing(four, condition) == text
    assert failing(four, elements).endswith(
        "false in 1 of 4 elements on worker 2; false in 2 of 4 elements on worker 3"
    )
    assert failing(four, finite) == (
        "disco_assert(x * 1, 'finite'): worker 1 holds 1 NaN and 1 inf in float32[2, 3], the first "
        "at [1, 1]"
    )


def test_it_is_an_assertion_error_that_a_program_may_catch(four: Session) -> None:
    """All workers go on together after it."""

    def caught() -> str:
        with pytest.raises(AssertionError, match="false on workers 1-3"):
            disco_assert(current_worker().rank == 0)
        return str(ccl.all_reduce(torch.ones(1)).item())

    ref = four.call_packed(caught)
    assert list(four.peek(ref).values()) == ["4.0"] * 4


def test_a_member_that_does_not_come_or_asserts_otherwise_is_named(four: Session) -> None:
    """The usual errors of a collective, with the places in the user's code."""

    def absent() -> None:
        if current_worker().rank != 3:
            disco_assert(1, "replicated")

    def other() -> None:
        disco_assert(torch.ones(2), "partial" if current_worker().rank else "replicated")

    with pytest.raises(WorkerError) as caught:
        run(four, absent)
    text = caught.value.failures[0].message
    assert "disco_assert('replicated') #1" in text
    assert "worker 3: finished the call without it" in text
    assert re.search(r"test_assertions\.py:\d+, in absent", text)
    with pytest.raises(WorkerError) as caught:
        run(four, other)
    text = caught.value.failures[0].message
    assert "members disagree on the operation" in text
    assert "worker 0: called disco_assert('replicated') at" in text


def bad_arguments() -> list[tuple[tuple[Any, ...], dict[str, Any], str]]:
    """Arguments, and what is said of them."""
    one = torch.ones(1)
    return [
        ((one, "replicate"), {}, "there is no kind 'replicate'; kinds are 'replicated', "),
        ((one,), {}, "without a kind the value is a condition"),
        ((one, "partial"), {"dim": 0}, "dim=0; dim is the number of the dimension"),
        ((one, "finite"), {"rtol": 0.1}, "rtol is for 'replicated' alone"),
        ((one, "replicated"), {"atol": -1}, "atol is a number, 0 or more"),
        (("text", "sharded"), {}, "'sharded' is said of a tensor, got 'text'"),
        ((object(), "replicated"), {}, "can't be compared between workers"),
        (("text", "finite"), {}, "has no numbers to be finite"),
        ((torch.ones(1, device="meta"), "replicated"), {}, "meta tensor: no data"),
        ((one, "replicated"), {"group": "tp"}, "this session has no mesh"),
    ]


def test_wrong_arguments_are_said_where_they_are(four: Session) -> None:
    """Each is an ArgumentError, on the worker itself."""
    for args, kwargs, text in bad_arguments():
        with pytest.raises(WorkerError, match=re.escape(text)) as caught:
            run(four, lambda given: disco_assert(*given.args, **given.kwargs), Given(args, kwargs))
        assert {f.type_name for f in caught.value.failures} == {"ArgumentError"}


class Given:
    """Carries arguments to workers as they are."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def __call__(self) -> "Given":
        return self


@pytest.mark.parametrize("dim", [7, 1, -2])
def test_a_dimension_that_is_not_there_is_said(four: Session, dim: int) -> None:
    """Also of values that are one number, which may be equal."""
    with pytest.raises(WorkerError, match=rf"dim={dim}, and the value has dimensions 0 to 0"):
        run(four, lambda: disco_assert(torch.ones(3), "sharded", dim=dim))


def test_a_tolerance_is_for_tensors_and_numbers(four: Session) -> None:
    """Of a number it counts; of a container it would not, so it is refused."""

    def check(value: Any) -> None:
        far = 1e-3 * current_worker().rank
        disco_assert(1.0 + far if value is None else value, "replicated", atol=0.01)

    run(four, check, None)
    with pytest.raises(WorkerError, match="rtol and atol are for a tensor or a number, got list"):
        run(four, check, [1.0])


def test_of_a_dtensor_the_local_shard_is_looked_at(four: Session) -> None:
    """Replicated as a whole, and cut as it says."""

    def check() -> None:
        from torch.distributed import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (4,))
        whole = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
        disco_assert(whole, "sharded", dim=0)
        disco_assert(whole.redistribute(mesh, [Replicate()]), "replicated")
        disco_assert(whole, "replicated")

    text = failing(four, check)
    assert "workers 0-2 hold float32[3], worker 3 float32[1]" in text


def fails_in_processes(how: str) -> None:
    """A worker function that is found by its name."""
    rank = current_worker().rank
    h = torch.arange(3.0) + (rank if how == "values" else 0)
    disco_assert(torch.arange(6.0), "replicated", timeout=30)
    disco_assert(h if how == "values" else h.repeat(rank + 1), "replicated")


def test_between_processes_it_is_the_same(processes: Session) -> None:
    """Digests, words and values go through the engine's own collectives."""
    text = failing(processes, fails_in_processes, "values")
    assert "worker 0 holds one value, worker 1 another; largest difference 1 at [0]" in text
    text = failing(processes, fails_in_processes, "shapes")
    assert "worker 0 holds float32[3], worker 1 float32[6]" in text


def test_a_failed_assertion_stops_there_and_is_raised_when_told_to_go_on(four: Session) -> None:
    """With a debugger all workers stand in the user's frame; its variables are at hand."""

    def program() -> None:
        h = torch.full((2,), float(current_worker().rank // 2))
        ccl.barrier()
        disco_assert(h, "replicated", message="after the layer")

    dbg = debugger_of(four)
    try:
        stop = dbg.run(program, step=False)
        text = "disco_assert(h, 'replicated'): workers 0-1 hold one value, workers 2-3 another"
        assert not stop.finished
        assert stop.groups == ((0, 1, 2, 3),)
        for worker in dbg.where().workers:
            assert worker.stack[-1].function == "program"
            assert f"after the layer: {text}" in worker.note
            assert worker.variables["h"]["head"] == [float(worker.rank // 2)] * 2
        assert dbg.continue_().finished
        with pytest.raises(WorkerError) as caught:
            dbg.program.result()
        assert {f.type_name for f in caught.value.failures} == {"DiscoAssertionError"}
        assert caught.value.failures[0].frames[-1][2] == "program"
    finally:
        if dbg.is_active:
            dbg.abort()
