"""Which boxes of a parameter each worker holds, beside torch's own ways of cutting."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from discolab import ArgumentError, Session
from discolab.layouts.layout import REPLICATE, Layout, Workers, chunk, cut
from discolab.layouts.text import parse_layout
from tests.loader.plans import held, numbered

quick = settings(deadline=None, max_examples=100)
sizes_of_meshes = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)
shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


def everywhere(layout: Layout, whole: torch.Tensor, workers: Workers) -> list[torch.Tensor | None]:
    """What each worker holds."""
    cuts = [cut(layout, tuple(whole.shape), workers, rank) for rank in range(workers.count)]
    return [None if found is None else held(whole, found) for found in cuts]


def holders(whole: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """How many workers hold each element."""
    count = torch.zeros(whole.numel() + 1, dtype=torch.int)
    for part in parts:
        if part is not None:
            count += torch.bincount(part.flatten(), minlength=whole.numel() + 1)
    return count[1:].reshape(whole.shape)


def chunk_of(tensor: torch.Tensor, parts: int, dim: int, index: int) -> torch.Tensor:
    """As `torch.chunk`, which gives fewer than `parts` where they don't suffice: empty then."""
    found = tensor.chunk(parts, dim)
    return found[index] if index < len(found) else tensor.narrow(dim, 0, 0)


# -- one axis, several axes ------------------------------------------------------------------------


@quick
@given(st.integers(0, 40), st.integers(1, 12))
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    row = torch.arange(size)
    for index in range(parts):
        start, length = chunk(size, parts, index)
        assert row[start : start + length].equal(chunk_of(row, parts, 0, index))


@quick
@given(st.data(), shapes, sizes_of_meshes)
def test_a_mesh_cuts_as_dtensor_does(
    data: st.DataObject, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    one = st.none() | st.integers(-len(shape), len(shape) - 1)
    dims = tuple(data.draw(st.lists(one, min_size=1, max_size=len(sizes))))
    workers = Workers(sizes)
    layout, whole = Layout(dims), numbered(shape)
    full = (None,) * (len(sizes) - len(dims)) + dims
    parts = everywhere(layout, whole, workers)
    placements = layout.placements(len(sizes))
    assert placements is not None
    assert [getattr(p, "dim", None) for p in placements] == list(full)
    placements = parse_layout([REPLICATE if d is None else Layout((d % len(shape),)) for d in full])
    for rank, part in enumerate(parts):
        place = workers.coordinate(rank)
        expected = whole
        for dim, size, index in zip(full, sizes, place, strict=True):
            if dim is not None:
                expected = chunk_of(expected, size, dim, index)
        assert part is not None
        assert part.equal(expected)
        shape_there, offset = _compute_local_shape_and_global_offset(
            shape, sizes, list(place), placements.placements(len(sizes)) or ()
        )
        assert tuple(part.shape) == shape_there
        if part.numel():
            assert part.flatten()[0] == whole[tuple(offset)]
    copies_of_all = math.prod(size for dim, size in zip(full, sizes, strict=True) if dim is None)
    assert (holders(whole, parts) == copies_of_all).all()


def _distributed(shape: tuple[int, ...], dims: tuple[int | None, ...]) -> torch.Tensor:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return distribute_tensor(whole, mesh, placements).to_local().contiguous()


@pytest.mark.one_process
@pytest.mark.parametrize("dims", list(itertools.product((None, 0, 1), repeat=2)))
def test_workers_hold_what_distribute_tensor_gives_them(
    sess: Session, dims: tuple[int | None, ...]
) -> None:
    shape = (5, 7)
    mine = everywhere(Layout(dims), numbered(shape), Workers((2, 2)))
    given_by_torch = sess.call_packed(_distributed, shape, dims)
    for rank in range(4):
        assert torch.as_tensor(given_by_torch.debug_get_from_remote(rank)).equal(mine[rank])


def test_a_scalar_is_held_whole() -> None:
    assert [p.tolist() for p in everywhere(REPLICATE, numbered(()), Workers((3,)))] == [1, 1, 1]
    with pytest.raises(ArgumentError, match="has none"):
        cut(Layout((0,)), (), Workers((2,)), 0)


# -- segments and heads ----------------------------------------------------------------------------


@st.composite
def fused(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...], int]:
    """A layout with segments (and heads), a shape that it fits, and a number of workers."""
    workers = draw(st.integers(1, 8))
    few = st.sampled_from([n for n in range(1, workers + 1) if workers % n == 0])
    count = draw(st.integers(1, 3))
    with_heads = draw(st.booleans())
    heads, segments = [], []
    for _ in range(count):
        heads.append(draw(few | st.integers(workers, 2 * workers + 1)))
        segments.append(
            heads[-1] * draw(st.integers(1, 3)) if with_heads else draw(st.integers(1, 9))
        )
    other = draw(st.lists(st.integers(1, 3), max_size=2))
    dim = draw(st.integers(0, len(other)))
    shape = (*other[:dim], sum(segments), *other[dim:])
    written = dim - len(shape) if draw(st.booleans()) else dim
    if len(segments) == 1:  # one number is a count of segments; one segment is none
        segments = []
    layout = Layout((written,), tuple(segments), tuple(heads) if with_heads else ())
    return layout, shape, workers


@quick
@given(fused())
def test_each_segment_is_cut_by_itself(case: tuple[Layout, tuple[int, ...], int]) -> None:
    layout, shape, workers = case
    whole = numbered(shape)
    dim = layout.dims[0] or 0
    lengths = list(layout.segments) or [shape[dim]]
    heads = list(layout.heads) or lengths
    expected: list[list[torch.Tensor]] = [[] for _ in range(workers)]
    times = []
    for segment, number in zip(whole.split(lengths, dim), heads, strict=True):
        # a head is never cut: the workers share the heads out, or several hold the same one
        each = segment.split(segment.shape[dim] // number, dim)
        again = workers // number if layout.heads and number < workers else 1
        ranks = [index for index in range(number) for _ in range(again)]
        per_worker = math.ceil(len(ranks) / workers)
        for rank in range(workers):
            own = ranks[rank * per_worker : (rank + 1) * per_worker]
            empty = segment.narrow(dim, 0, 0)
            expected[rank].append(torch.cat([empty, *(each[index] for index in own)], dim))
        times.append(torch.full_like(segment, again))
    parts = everywhere(layout, whole, Workers((workers,)))
    for part, pieces in zip(parts, expected, strict=True):
        assert part is not None
        assert part.equal(torch.cat(pieces, dim))
    assert holders(whole, parts).equal(torch.cat(times, dim).int())


@quick
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_equal_segments_are_the_strided_shard_of_torch(
    count: int, workers: int, each: int, last: bool
) -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    size = count * workers * each
    whole = numbered((2, size) if last else (size, 2))
    strided = _StridedShard(int(last), split_factor=count)
    theirs, _ = strided._split_tensor(whole, workers, with_padding=False)
    mine = everywhere(parse_layout(strided), whole, Workers((workers,)))
    for a, b in zip(mine, theirs, strict=True):
        assert a is not None
        assert a.equal(b)


def test_one_number_is_a_count_of_segments_whatever_the_size() -> None:
    gate_up = numbered((2,))
    parts = everywhere(Layout((0,), segments=(2,)), gate_up, Workers((2,)))
    assert [part.tolist() for part in parts if part is not None] == [[1, 2], []]


def test_grouped_query_attention_with_fewer_kv_heads_than_workers() -> None:
    q, k, v = torch.arange(8), torch.arange(10, 12), torch.arange(20, 22)
    layout = parse_layout("shard(0, segments=[8, 2, 2], heads=[8, 2, 2])")
    parts = everywhere(layout, torch.cat([q, k, v]), Workers((4,)))
    assert [part.tolist() for part in parts if part is not None] == [
        [0, 1, 10, 20], [2, 3, 10, 20], [4, 5, 11, 21], [6, 7, 11, 21],
    ]  # fmt: skip


# -- padding, stages -------------------------------------------------------------------------------


@quick
@given(st.integers(0, 40), st.integers(1, 16), st.integers(1, 6), st.booleans())
def test_a_padded_vocabulary_is_filled_up_with_zeros(
    size: int, pad_to: int, workers: int, last: bool
) -> None:
    whole = numbered((2, size) if last else (size, 2))
    dim = int(last)
    full = -(-size // pad_to) * pad_to
    padded = torch.zeros((2, full) if last else (full, 2), dtype=whole.dtype)
    padded.narrow(dim, 0, size).copy_(whole)
    parts = everywhere(Layout((dim,), pad_to=pad_to), whole, Workers((workers,)))
    for rank, part in enumerate(parts):
        assert part is not None
        assert part.equal(chunk_of(padded, workers, dim, rank))
    assert (holders(whole, parts) == 1).all()


@quick
@given(st.sampled_from([(4, 2), (6, 3), (8, 4), (3, 1), (4, 4)]), st.integers(0, 9), st.data())
def test_a_stage_holds_all_of_it_and_no_other_any(
    sizes: tuple[int, int], length: int, data: st.DataObject
) -> None:
    count, groups = sizes
    stage = data.draw(st.integers(0, groups - 1))
    whole, workers = numbered((length,)), Workers.of(count, groups)
    each = count // groups
    for layout, times in ((Layout((0,), stage=stage), 1), (Layout(stage=stage), each)):
        parts = everywhere(layout, whole, workers)
        assert [part is not None for part in parts] == [r // each == stage for r in range(count)]
        assert (holders(whole, parts) == times).all()
    if groups > 1:
        # without a stage, each group has the whole of it
        assert (holders(whole, everywhere(Layout((0,)), whole, workers)) == groups).all()


@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        (Layout((0,), stage=0), Workers((4,), 2)),
        (Layout((0, None), stage=0), Workers((2, 2), 2)),
        (Layout((0, 1), stage=1), Workers((2, 2), 2)),
        (Layout((0,), stage=0), Workers((3, 4), 6)),
    ],
)
def test_a_stage_is_not_cut_along_an_axis_that_leaves_it(layout: Layout, workers: Workers) -> None:
    # the other groups would have parts that nobody of the stage has
    with pytest.raises(ArgumentError, match="several groups"):
        cut(layout, (8, 8), workers, 0)


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape", "says"),
    [
        ("shard(2)", (4, 4), "splits dimension 2, and the shape"),
        ("shard(-3)", (4, 4), "splits dimension -3"),
        ("[shard(0), shard(1)]", (4, 4), "2 mesh axes, and the workers have 1"),
        ("shard(0, stage=1)", (4,), "in 1 group,"),
        ("shard(0, segments=[4, 2])", (8,), "add up to 6"),
        ("shard(0, segments=3)", (8,), "not 3 equal segments"),
        ("shard(0, segments=[4, 4], heads=[2])", (8,), "1 numbers of heads for 2 segments"),
        ("shard(0, heads=[3])", (8,), "not 3 equal heads"),
        ("shard(0, heads=[3])", (9,), "3 heads for 4 workers"),
        ("shard(0, segments=2, pad_to=8)", (8,), "can't be padded"),
        (Layout((0,), segments=(-4, 12)), (8,), "of 1 at least"),
        (Layout((0,), pad_to=-4), (8,), "of 1 at least"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    text: str, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ArgumentError, match=says):
        cut(parse_layout(text) if isinstance(text, str) else text, shape, Workers((4,)), 0)


def test_two_axes_that_cut_take_no_segments() -> None:
    with pytest.raises(ArgumentError, match="need one axis"):
        cut(
            parse_layout("[shard(0, segments=2), shard(1, segments=2)]"), (4, 4), Workers((2, 2)), 0
        )


@pytest.mark.parametrize(("count", "groups"), [(4, 3), (2, 4), (0, 1), (4, 0)])
def test_groups_must_divide_the_workers(count: int, groups: int) -> None:
    with pytest.raises(ArgumentError, match="equal groups"):
        Workers.of(count, groups)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_worker_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(ArgumentError, match="there are 4"):
        cut(Layout((0,), stage=0), (8,), Workers((4,)), rank)
