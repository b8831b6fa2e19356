"""What members do over a process group, without one: their programs against `local`'s work.

Pure: a step of all members is done by copying between their tensors.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from discolab.ccl.backends import exchanges, remote_gloo
from discolab.ccl.backends.steps import AllReduce, Await, Broadcast, Exchange
from discolab.ccl.groups import Group
from discolab.ccl.pattern import CROSSWISE, LIKE_BY_LIKE, PART_BY_PART, TO_ALL, Pattern
from discolab.ccl.reductions import combine

Tensor = torch.Tensor


def exchange(steps: Sequence[Exchange]) -> None:
    """All is read before anything is written."""
    takes: dict[tuple[int, int], list[Tensor]] = {}
    for me, step in enumerate(steps):
        for of, room in step.takes:
            takes.setdefault((of, me), []).append(room)
    sent = [(me, to, data.clone()) for me, step in enumerate(steps) for to, data in step.gives]
    for me, to, data in sent:
        room = takes[me, to].pop(0)
        assert room.dtype is data.dtype is torch.uint8
        assert room.shape == data.shape
        assert room.is_contiguous()
        room.copy_(data)
    assert not any(takes.values())


def play(steps: Sequence[Any], at_once: bool) -> None:
    """Do the steps of all members, what is begun at once or when it is waited for.

    All must be of one kind.
    """
    assert len({(type(step), getattr(step, "later", None)) for step in steps}) == 1
    if isinstance(steps[0], Exchange):
        if at_once or not steps[0].later:
            exchange(steps)
    elif isinstance(steps[0], Await):
        if not at_once:
            exchange([step.exchange for step in steps])
    elif isinstance(steps[0], Broadcast):
        roots = {step.root for step in steps}
        assert len(roots) == 1
        source = steps[roots.pop()].data.clone()
        for step in steps:
            step.data.copy_(source)
    else:
        assert isinstance(steps[0], AllReduce)
        total = combine([step.data for step in steps], steps[0].op)
        for step in steps:
            step.data.copy_(total)


def run(
    pattern: Pattern, srcs: list[list[Tensor]], outs: list[list[Tensor]], at_once: bool = True
) -> None:
    members = [exchanges.program(pattern, me, srcs[me], outs[me]) for me in range(pattern.members)]
    while True:
        steps, finishes = [], []
        for member in members:
            try:
                steps.append(next(member))
            except StopIteration as end:
                finishes.append(end.value)
        if finishes:
            assert not steps
            for finish in finishes:
                finish()
            return
        play(steps, at_once)


def expected(pattern: Pattern, srcs: list[list[Tensor]]) -> dict[tuple[int, int], Tensor]:
    """What each output, by member and place, must be."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    for giver in pattern.givers:
        for to in pattern.takers:
            for src, out in zip(pattern.gives[to], pattern.takes[giver], strict=True):
                found.setdefault((to, out), []).append(srcs[giver][src])
    return {
        key: parts[0].clone() if pattern.reduction is None else combine(parts, pattern.reduction)
        for key, parts in found.items()
    }


def numbers(seed: int, size: int, dtype: torch.dtype, sparse: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(2 * size if sparse else size, generator=generator) * 7
    made = made.to(dtype)
    return made[::2] if sparse else made


PATTERNS = [
    lambda n, k: Pattern(LIKE_BY_LIKE, n, k, reduction="sum"),
    lambda n, k: Pattern(LIKE_BY_LIKE, n, k, reduction="avg"),
    lambda n, k: Pattern(LIKE_BY_LIKE, n, k, None, n - 1, "max"),
    lambda n, k: Pattern(PART_BY_PART, n, k, reduction="prod"),
    lambda n, k: Pattern(TO_ALL, n, k),
    lambda n, k: Pattern(TO_ALL, n, 1, None, n - 1),
    lambda n, k: Pattern(LIKE_BY_LIKE, n, k, n - 1),
    lambda n, k: Pattern(PART_BY_PART, n, 1, 0),
    lambda n, k: Pattern(CROSSWISE, n, 1),
]


def tensors(
    pattern: Pattern, size: int, dtype: torch.dtype, sparse: bool
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Sources and outputs of all members; each member's k-th have sizes of their own."""
    n, k = pattern.members, pattern.count
    counts = {LIKE_BY_LIKE: (k, k), TO_ALL: (k, k * n), PART_BY_PART: (k * n, k), CROSSWISE: (n, n)}
    given, taken = counts[pattern.kind]

    def length(place: int) -> int:
        row = place if pattern.kind == LIKE_BY_LIKE else place // n
        return size + (0 if pattern.kind == CROSSWISE else row)

    def lengths(count: int, few: bool) -> list[int]:
        return [length(place * n if few else place) for place in range(count)]

    srcs = [
        [
            numbers(100 * me + place, size_, dtype, sparse)
            for place, size_ in enumerate(lengths(given, pattern.kind == TO_ALL))
        ]
        if pattern.giver in (None, me)
        else []
        for me in range(n)
    ]
    outs = [
        [numbers(9, size_, dtype, sparse) for size_ in lengths(taken, pattern.kind == PART_BY_PART)]
        if pattern.taker in (None, me)
        else []
        for me in range(n)
    ]
    return srcs, outs


def check(
    pattern: Pattern, srcs: list[list[Tensor]], outs: list[list[Tensor]], at_once: bool = True
) -> None:
    """The results are those of `local`, bit by bit; the sources are as before."""
    want = expected(pattern, srcs)
    before = [[src.clone() for src in mine] for mine in srcs]
    run(pattern, srcs, outs, at_once)
    for (member, place), tensor in want.items():
        assert torch.equal(outs[member][place], tensor), (pattern, member, place)
    for mine, was in zip(srcs, before, strict=True):
        for src, copy in zip(mine, was, strict=True):
            assert torch.equal(src, copy)


@pytest.mark.parametrize("make", PATTERNS)
@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize("sparse", [False, True])
def test_as_local_does_it(make: Any, members: int, sparse: bool) -> None:
    for size in (0, 1, 7, 130):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if members == 1 and make(1, 1).giver is not None and size > 100:
                continue
            pattern = make(members, 2)
            check(pattern, *tensors(pattern, size, dtype, sparse))


@pytest.mark.parametrize("make", PATTERNS)
@pytest.mark.parametrize("at_once", [True, False])
def test_block_by_block(make: Any, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "PART", 64)
    monkeypatch.setattr(exchanges, "SMALL", 16)
    monkeypatch.setattr(exchanges, "SPREAD", 16)
    for members in (2, 3, 4):
        for size in (1, 3, 15, 16, 17, 100, 333):
            for dtype in (torch.float32, torch.bfloat16):
                pattern = make(members, 1)
                check(pattern, *tensors(pattern, size, dtype, False), at_once)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    members=st.integers(2, 5),
    size=st.integers(0, 200),
    part=st.sampled_from([4, 12, 64]),
    at_once=st.booleans(),
)
def test_in_place(members: int, size: int, part: int, at_once: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "PART", part)
        patch.setattr(exchanges, "SMALL", 8)
        pattern = Pattern(LIKE_BY_LIKE, members, 1, reduction="sum")
        srcs = [[numbers(me, size, torch.float32, False)] for me in range(members)]
        want = combine([mine[0] for mine in srcs], "sum")
        run(pattern, srcs, srcs, at_once)
        assert all(torch.equal(mine[0], want) for mine in srcs)
        whole = [numbers(me, members * size, torch.float32, False) for me in range(members)]
        rows = [list(one.view(members, -1).unbind(0)) for one in whole]
        want_rows = [combine([row[me] for row in rows], "sum") for me in range(members)]
        outs = [[rows[me][me]] for me in range(members)]  # each its own part of its source
        run(Pattern(PART_BY_PART, members, 1, reduction="sum"), rows, outs, at_once)
        assert all(torch.equal(outs[me][0], want_rows[me]) for me in range(members))


def test_what_overlaps_is_read_before_it_is_written() -> None:
    memory = [torch.arange(12.0) + 100 * me for me in range(3)]
    srcs = [list(one[:9].view(3, 3).unbind(0)) for one in memory]
    outs = [list(one[3:].view(3, 3).unbind(0)) for one in memory]
    want = [[srcs[i][j].clone() for i in range(3)] for j in range(3)]
    run(Pattern(CROSSWISE, 3, 1), srcs, outs)
    assert all(torch.equal(outs[j][i], want[j][i]) for i in range(3) for j in range(3))


def host_work(pattern: Pattern, me: int, srcs: Any, outs: Any = ()) -> remote_gloo.HostWork:
    """A member's part of a collective, of which nobody is told."""
    client = SimpleNamespace(enter=lambda _: 1)
    backend: Any = SimpleNamespace(client=client, conductor=None, connect=None)
    call: Any = SimpleNamespace(group=Group(tuple(range(pattern.members))), rank=me)
    return remote_gloo.HostWork(backend, call, pattern, srcs, outs)


@pytest.mark.parametrize("make", PATTERNS)
def test_what_goes_through_the_coordinator(make: Any) -> None:
    for members in (2, 3, 4):
        for size in (0, 1, 33):
            for dtype in (torch.float32, torch.float16, torch.uint8, torch.complex64, torch.bool):
                pattern = make(members, 1)
                if pattern.reduction is not None and dtype in (torch.complex64, torch.bool):
                    continue
                srcs, outs = tensors(pattern, size, dtype, True)
                want = expected(pattern, srcs)
                works = [host_work(pattern, me, srcs[me], outs[me]) for me in range(members)]
                given = [work.given() for work in works]
                for me, work in enumerate(works):
                    mine: list[Any] = [one[me] if type(one) is tuple else one for one in given]
                    work.absorb(mine)
                for (member, place), tensor in want.items():
                    assert torch.equal(outs[member][place], tensor)


def test_what_is_large_does_not_go_through_the_coordinator() -> None:
    pattern, most = Pattern(LIKE_BY_LIKE, 2, 1, reduction="sum"), remote_gloo.LARGEST // 8
    assert host_work(pattern, 0, [torch.ones(most)]).given() is not None
    assert host_work(pattern, 0, [torch.ones(most + 1)]).given() is None
