"""Each collective on anything: drawn by hypothesis, against float64 and Python's own integers.

An example is one call of the session: `exercise` makes the worker's input, calls the collective
and hands back the result; what it must be is computed here, by other means. Every example runs
twice: results must be the same bits in each run and, where all get the same, on each worker.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from discolab import ccl
from discolab.ccl.backends import jobs
from discolab.engines import ThreadedSession
from discolab.runtime import current_worker

from .plain_reference import (
    ARITHMETIC,
    BITWISE,
    DTYPES,
    FORMS,
    MOVED,
    MOVING,
    OUTS,
    REDUCING,
    ROOTED,
    SAME_ON_ALL,
    WITHOUT_OUT,
    Case,
    bits,
    check_reduced,
    defined,
    given,
    members,
    moved,
    rows,
)

CHECK = hypothesis.settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    # without shrinking: it would take minutes where a failing call waits for its peers
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 2), (8, 2)]
SMALL_BLOCK = 64  # bytes


# -- inputs -----------------------------------------------------------------------------------


def formed(values: torch.Tensor, form: str) -> torch.Tensor:
    """The same values in new memory of a certain form."""
    if form == "expanded" and values.dim() and values.numel():
        return values[:1].clone().expand(values.shape)
    if form == "transposed":
        order = tuple(reversed(range(values.dim())))
        return values.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
    if form == "strided" and values.dim():
        wide = torch.zeros([2 * size + 1 for size in values.shape], dtype=values.dtype)
        view = wide[tuple(slice(1, 2 * size + 1, 2) for size in values.shape)]
        return view.copy_(values)
    return values.clone(memory_format=torch.contiguous_format)


def arranged(case: Case, values: torch.Tensor, n: int, me: int) -> tuple[Any, Any]:
    """The input of the calling worker and its output, which may share memory with it."""
    shape, kind = case.result_shape(n), values.dtype
    if case.op in WITHOUT_OUT or case.out == "new":
        return formed(values, case.form), None
    if case.out == "overlap":
        size = max(values.numel(), int(torch.Size(shape).numel()))
        memory = torch.zeros(size + 2, dtype=kind)
        mine = memory[: values.numel()].view(values.shape).copy_(values)
        return mine, memory[2 : 2 + torch.Size(shape).numel()].view(shape)
    if case.out == "alias" and case.form != "expanded":
        if case.op in ("all_gather", "gather"):
            whole = formed(torch.zeros(shape, dtype=kind), case.form)
            parts = whole.unbind(0) if not values.dim() else whole.chunk(n) if len(whole) else ()
            return (parts[me].copy_(values), whole) if parts else (values.clone(), whole)
        mine = formed(values, case.form)
        if case.op in ("reduce_scatter", "scatter"):
            return mine, mine.narrow(0, me * shape[0], shape[0])
        return mine, mine
    form = "strided" if case.out == "strided" else "contiguous"
    return formed(values, case.form), formed(torch.zeros(shape, dtype=kind), form)


# -- on the worker ----------------------------------------------------------------------------


def exercise(case: Case) -> tuple[Any, list[str]]:
    """Do one call; its result, and what was wrong with the tensors."""
    worker = current_worker()
    ranks = members(case, worker.rank, worker.num_workers, worker.num_groups)
    n, me = len(ranks), ranks.index(worker.rank)
    values = given(case, worker.rank, n)
    mine, out = arranged(case, values, n, me)
    how: dict[str, Any] = {"group": {"own": None, "world": "world"}.get(case.group, ranks)}
    if case.op == "ring":
        ccl.send(mine, ranks[(me + 1) % n], tag=1) if n > 1 else None
        out = formed(torch.zeros_like(values), "strided")
        return (ccl.recv(out, ranks[me - 1], tag=1) if n > 1 else mine), []
    root = case.root % n
    at_root = case.op not in ("reduce", "gather") or me == root
    if out is not None:
        how["out"] = out
    elif case.op == "scatter" and me != root:
        out = how["out"] = torch.zeros(case.result_shape(n), dtype=values.dtype)
    arguments = [root] if case.op in ROOTED else []
    if case.op in REDUCING:
        arguments.append(case.reduction)
    if case.op.endswith("_") and case.form == "expanded":
        mine = mine.clone()
    result = getattr(ccl, case.op)(mine, *arguments, **how)
    wrong = []
    if out is not None and at_root and result is not out:
        wrong.append("the result is not `out`")
    if case.op.endswith("_"):
        wrong += ["the result is not the tensor"] * (result is not mine)
    elif case.out not in ("alias", "overlap") and bits(mine) != bits(values):
        wrong.append("the input has changed")
    return result, wrong


# -- comparing --------------------------------------------------------------------------------


def check(sess: ThreadedSession, case: Case) -> None:
    """Run a case twice and compare all results with what they must be."""
    workers, groups = sess.num_workers, sess.num_groups
    first, second = (
        sess.call_packed(functools.partial(exercise, case)).debug_get_from_all() for _ in range(2)
    )
    for rank, (found, wrong) in enumerate(first):
        assert wrong == [], (case, rank)
        ranks = members(case, rank, workers, groups)
        me, n = ranks.index(rank), len(ranks)
        inputs = [given(case, other, n) for other in ranks]
        again = second[rank][0]
        if found is None:
            assert again is None
            assert case.op in ("reduce", "gather")
            assert me != case.root % n
            continue
        assert case.op not in ("reduce", "gather") or me == case.root % n
        results = found if isinstance(found, list) else [found]
        repeated = again if isinstance(again, list) else [again]
        assert list(map(bits, results)) == list(map(bits, repeated)), (case, "another run")
        if case.op in SAME_ON_ALL and me > 0:
            assert bits(found) == bits(first[ranks[0]][0]), (case, "another worker")
        elif case.op not in REDUCING:
            want = moved(case, inputs, me)
            wants = want if isinstance(want, list) else [want]
            assert list(map(bits, results)) == list(map(bits, wants)), (case, rank)
        else:
            if case.op == "reduce_scatter":
                inputs = [rows(x, n)[me] for x in inputs]
            check_reduced(case, inputs, found)


# -- the tests --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[1]}")
def lab(request: pytest.FixtureRequest) -> Iterator[ThreadedSession]:
    """One session for all examples of a layout."""
    sess = ThreadedSession(*request.param, devices="cpu", timeout=20)
    yield sess
    sess.shutdown(cancel=True)


SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=4).map(tuple)


@st.composite
def cases(draw: st.DrawFn, ops: tuple[str, ...]) -> Case:
    """Any call that is defined."""
    dtype = draw(st.sampled_from(DTYPES if ops is REDUCING else MOVED))
    words = [word for word in (*ARITHMETIC, *BITWISE) if defined(word, dtype)]
    return Case(
        op=draw(st.sampled_from(ops)),
        dtype=dtype,
        rest=draw(SHAPES),
        form=draw(st.sampled_from(FORMS)),
        out=draw(st.sampled_from(OUTS)),
        reduction=draw(st.sampled_from(words)),
        group=draw(st.sampled_from(["own", "world", "list"])),
        root=draw(st.integers(0, 7)),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("block", [SMALL_BLOCK, jobs.BLOCK], ids=["blocks", "whole"])
@pytest.mark.parametrize("ops", [REDUCING, MOVING], ids=["reducing", "moving"])
def test_any_call(
    lab: ThreadedSession, ops: tuple[str, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BLOCK", block)

    @CHECK
    @hypothesis.given(case=cases(ops))
    def run(case: Case) -> None:
        check(lab, case)

    run()


def test_every_dtype_of_every_collective(lab: ThreadedSession) -> None:
    """What random draws may have missed: each op, dtype and reduction once."""
    turns = itertools.cycle(itertools.product(OUTS, FORMS, ["own", "world", "list"]))
    reductions, moves = itertools.product(REDUCING, DTYPES), itertools.product(MOVING, MOVED)
    for op, dtype in (*reductions, *moves):
        words = (*ARITHMETIC, *BITWISE) if op in REDUCING else ("sum",)
        for word in words:
            if op not in REDUCING or defined(word, dtype):
                out, form, group = next(turns)
                check(lab, Case(op, dtype, (2, 3), form, out, word, group, seed=len(op)))


def negatives() -> None:
    """Lazily negated memory, and that memory itself as output."""
    memory = torch.full((64,), 2.0)
    negative = torch._neg_view(memory)
    assert (
        float(ccl.all_reduce(negative, group="world").sum())
        == -128.0 * current_worker().num_workers
    )
    ccl.broadcast(negative, out=memory)
    assert memory.tolist() == [-2.0] * 64


@pytest.mark.parametrize("block", [SMALL_BLOCK, jobs.BLOCK], ids=["blocks", "whole"])
def test_negative_views(lab: ThreadedSession, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BLOCK", block)
    lab.call_packed(negatives).debug_get_from_all()


LARGE = [
    Case("all_reduce", "float32", (3, 100_003)),
    Case("all_reduce_", "float64", (150_001,)),
    Case("all_reduce", "bfloat16", (600_001,), out="alias"),
    Case("all_reduce", "float32", (300_000,), out="overlap", group="world"),
    Case("reduce_scatter", "float32", (70_001,), reduction="avg", out="alias"),
    Case("reduce", "float16", (3, 200_001), form="transposed", reduction="max", root=1),
    Case("all_gather", "float32", (90_001,), out="alias"),
    Case("broadcast", "complex64", (400, 401), root=1),
    Case("all_to_all", "float64", (50_001,)),
    Case("scatter", "uint8", (400_001,), form="strided"),
]


@pytest.mark.parametrize("layout", [(3, 1), (4, 2)], ids=lambda layout: f"{layout[0]}-{layout[1]}")
def test_more_than_a_megabyte(layout: tuple[int, int]) -> None:
    with ThreadedSession(*layout, devices="cpu", timeout=20) as sess:
        for case in LARGE:
            check(sess, case)
