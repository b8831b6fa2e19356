"""Replicas that differ: where they differ most is found without moving them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from discolab import DRef, Session
from discolab.engines import ThreadedSession
from discolab.runtime.worker import current_worker
from discolab.views import render_text
from discolab.views.dref.differences import (
    describe_blocks,
    pairs_to_compare,
    replica_parts,
    values_of,
)
from discolab.views.parts import VStack

CLASSES = {0: "A", 1: "A", 2: "B", 3: "A"}


@pytest.fixture(scope="module")
def four() -> Iterator[ThreadedSession]:
    with ThreadedSession(4) as session:
        yield session


def replicas(count: int, dtype: torch.dtype, how: str) -> torch.Tensor:
    """The same on all workers but worker 2."""
    values = torch.arange(count).remainder(100).to(dtype).view(-1, 4)
    if current_worker().worker_id == 2:
        if how == "one":
            values[count // 8, 1] += 3
        elif how == "nan":
            values[3, 3] = float("nan")
        elif how == "growing":
            values += torch.linspace(0.25, 0.5, count, dtype=torch.float64).view(-1, 4).to(dtype)
        elif how == "turned":
            return values.t().contiguous().t()
        elif how == "signs":
            values[0, 0] = -0.0
    return values


def look(ref: DRef, **options: Any) -> str:
    parts = replica_parts(ref, CLASSES, 10.0, **options)
    return render_text(VStack(tuple(parts)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
@pytest.mark.parametrize("count", [64, 2**20])
def test_the_one_element_that_differs_is_found(
    four: ThreadedSession, dtype: torch.dtype, count: int
) -> None:
    ref = four.call_packed(replicas, count, dtype, "one")
    drawn = look(ref).split("\n")
    assert drawn[0] == (
        f"largest differences, worker 2 against worker 0: 1 of {count:,} elements differs"
    )
    assert drawn[2].split()[:2] == [f"[{count // 8},", "1]"]
    assert drawn[2].split()[-1] == "3"


def test_a_nan_on_one_of_them_is_the_largest_difference(four: ThreadedSession) -> None:
    drawn = look(four.call_packed(replicas, 64, torch.float32, "nan")).split("\n")
    assert drawn[2].split() == ["[3,", "3]", "15", "nan", "inf"]


def test_where_all_differs_the_largest_is_found_among_a_part(four: ThreadedSession) -> None:
    drawn = look(four.call_packed(replicas, 2**20, torch.float64, "growing"))
    assert "8,192 of the 8,192 elements looked at, of 1,048,576" in drawn
    assert "[262143, 3]" in drawn.split("\n")[2]
    assert drawn.split("\n")[2].endswith(" 0.5")
    assert "and 8,187 more" in drawn


def test_other_strides_do_not_count(four: ThreadedSession) -> None:
    assert look(four.call_packed(replicas, 64, torch.float32, "turned")) == ""


def test_zeros_of_other_signs_are_equal_values(four: ThreadedSession) -> None:
    ref = four.call_packed(replicas, 64, torch.float32, "signs")
    assert "values equal, bits differ" in look(ref)


def large_integers() -> torch.Tensor:
    return torch.tensor([2**62 * (-1 if current_worker().worker_id == 2 else 1), 2**53 + 1])


def test_the_difference_of_large_integers_does_not_wrap(four: ThreadedSession) -> None:
    drawn = look(four.call_packed(large_integers))
    assert "1 of 2 elements differs" in drawn
    assert drawn.endswith("9.223e+18")


def freed() -> torch.Tensor:
    values = torch.ones(3)
    values.untyped_storage().resize_(0)
    return values


def test_a_freed_storage_is_not_read(four: ThreadedSession) -> None:
    assert "storage freed: no data" in look(four.call_packed(freed))


def test_shapes_and_dtypes_that_differ_are_told(four: ThreadedSession) -> None:
    ref = four.call_packed(lambda: torch.ones(2 + current_worker().worker_id))
    assert (
        "worker 2 against worker 0: differences not looked at: float32[4] and float32[2]"
        in look(ref)
    )


def test_values_of_other_kinds_are_not_looked_at(four: ThreadedSession) -> None:
    assert "not a tensor" in look(four.call_packed(str))
    assert "meta tensor: no data" in look(four.call_packed(torch.empty, 3, device="meta"))


def test_what_a_worker_sends_is_bounded(
    four: ThreadedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = four.call_packed(replicas, 2**22, torch.float32, "growing")
    told = four.call_packed(describe_blocks, ref, (0, 2), None).debug_get_from_all()
    assert told[1] is None
    assert len(repr(told[2])) < 40_000
    sent: list[int] = []
    fetched = values_of

    def counting(*arguments: Any) -> Any:
        found = fetched(*arguments)
        sent.append(0 if found is None else found.nbytes)
        return found

    monkeypatch.setattr(
        "discolab.views.dref.differences.values_of", counting
    )  # workers are threads here
    look(ref)
    four.sync_all()  # those that send nothing are not waited for
    assert 0 < max(sent) <= 2**16
    assert sent.count(0) == 2


def test_only_what_must_be_equal_is_compared() -> None:
    assert pairs_to_compare(CLASSES) == [(0, (2,))]
    assert pairs_to_compare({0: "A", 1: "B", 2: "C"}) == []
    assert pairs_to_compare({0: "A", 1: "B", 2: "A", 3: "C"}, [(0, 2), (1, 3)]) == [(1, (3,))]
    assert pairs_to_compare({0: "A", 1: "B"}, [(0, 1)]) == [(0, (1,))]
    assert pairs_to_compare({0: "A", 1: "A", 2: "B", 3: "B", 4: "A"}) == [(0, (2, 3))]


def test_the_picture_of_a_dref_has_them(four: ThreadedSession) -> None:
    ref = four.call_packed(replicas, 64, torch.float32, "one")
    assert "largest differences" in ref._repr_mimebundle_()["text/plain"]
    ref.placements = [Replicate()]
    assert "largest differences" in ref._repr_mimebundle_()["text/plain"]
    ref.placements = [Shard(0)]
    assert "largest differences" not in ref._repr_mimebundle_()["text/plain"]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    if current_worker().worker_id == 1:
        module[0].weight.data[1, 2] += 0.5
        module[1].running_mean[3] = 7.0
    return module


def test_parameters_and_items_that_differ_are_looked_into(four: ThreadedSession) -> None:
    drawn = four.call_packed(network)._repr_mimebundle_()["text/plain"].split("\n")
    at = drawn.index(
        "largest differences, worker 1 against worker 0 in 0.weight: 1 of 16 elements differs"
    )
    assert drawn[at + 2].split()[:2] == ["[1,", "2]"]
    assert drawn[at + 5].split() == ["[3]", "0", "7", "7"]
    batch = four.call_packed(lambda: {"x": [torch.ones(3)], "y": replicas(64, torch.int32, "one")})
    drawn = batch._repr_mimebundle_()["text/plain"].split("\n")
    assert "in 'y': 1 of 64 elements differs" in drawn[-3]


def one_of_many() -> torch.nn.Module:
    module = torch.nn.ParameterList(torch.zeros(3) for _ in range(50))
    module[49].data[1] = current_worker().worker_id
    return module


def test_of_two_workers_the_parameter_that_was_missed_is_looked_into() -> None:
    with ThreadedSession(2) as session:
        drawn = session.call_packed(one_of_many)._repr_mimebundle_()["text/plain"]
    assert "worker 1 against worker 0 in 49: 1 of 3 elements differs" in drawn


def stage() -> torch.nn.Module:
    rank = current_worker().worker_id
    return torch.nn.ModuleDict({f"layer{rank // 2}": torch.nn.Linear(2, 2)})


def test_stages_of_a_pipeline_are_not_compared_with_each_other(four: ThreadedSession) -> None:
    drawn = four.call_packed(stage)._repr_mimebundle_()["text/plain"]
    assert "equal where several have a parameter" in drawn
    assert "against worker" not in drawn


def test_what_can_not_be_read_is_no_failure_of_the_program(four: ThreadedSession) -> None:
    ref = four.call_packed(Unreadable)
    parts = replica_parts(ref, CLASSES, 5.0, path="x")
    assert "RuntimeError: not now" in render_text(VStack(tuple(parts)))
    four.sync_all()


class Unreadable(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("not now")


def test_it_never_waits_longer_than_its_patience(four: ThreadedSession) -> None:
    ref = four.call_packed(torch.ones, 3)
    four.call_packed(time.sleep, 30)
    begun = time.monotonic()
    parts = replica_parts(ref, CLASSES, 0.1)
    assert time.monotonic() - begun < 5
    assert "no answer in time" in render_text(VStack(tuple(parts)))
    four.interrupt()


def test_on_every_engine(sess: Session) -> None:
    ref = sess.call_packed(replicas, 2**16, torch.float32, "one")
    assert "[8192, 1]" in look(ref)
