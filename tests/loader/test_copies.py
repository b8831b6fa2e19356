"""Which bytes of a file land where in a worker's tensor."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from discolab.layouts.layout import REPLICATE, Layout, Workers, cut
from discolab.loader.catalog import Entry, Piece, c_strides, copies
from tests.loader.plans import held, numbered

quick = settings(deadline=None, max_examples=100)


@st.composite
def stored(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Entry, torch.Tensor]:
    """A parameter in pieces, with gaps between them and strides of any order; and its file."""
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    grid = itertools.product(*(list(itertools.pairwise(e)) for e in edges))
    whole, pieces, end = numbered(shape).int(), [], draw(st.integers(0, 3))
    file = torch.full((4 * whole.numel() + 40,), -1, dtype=torch.int32)
    for spans in grid:
        start = tuple(a for a, _ in spans)
        size = tuple(b - a for a, b in spans)
        order = draw(st.permutations(range(len(shape))))
        packed = c_strides(tuple(size[i] for i in order))
        strides = tuple(packed[order.index(i)] for i in range(len(shape)))
        part = whole[tuple(slice(a, b) for a, b in spans)]
        file.as_strided(size, strides, end).copy_(part)
        plain = strides == c_strides(size) and draw(st.booleans())
        pieces.append(Piece(0, 4 * end, start, size, None if plain else strides))
        end += part.numel() + draw(st.integers(0, 1))
    return Entry("w", shape, torch.int32, torch.int32, tuple(pieces)), file


@quick
@given(st.data(), st.lists(st.integers(0, 6), max_size=3).map(tuple))
def test_copies_bring_each_worker_its_own(data: st.DataObject, shape: tuple[int, ...]) -> None:
    entry, file = data.draw(stored(shape))
    whole, workers = numbered(shape).int(), Workers((data.draw(st.integers(1, 4)),))
    options = [REPLICATE]
    for dim, size in enumerate(shape):
        options += [Layout((dim,)), Layout((dim,), pad_to=4)]
        options += [Layout((dim,), segments=(2,))] if size % 2 == 0 else []
    layout = data.draw(st.sampled_from(options))
    for rank in range(workers.count):
        found = cut(layout, shape, workers, rank)
        assert found is not None
        local = torch.zeros(found.shape, dtype=torch.int32)
        written = torch.zeros(found.shape, dtype=torch.int32)
        for copy in copies(entry, found):
            assert copy.offset % 4 == 0
            source = file.as_strided(copy.shape, copy.strides, copy.offset // 4)
            assert copy.contiguous == source.is_contiguous()
            there = tuple(slice(a, a + n) for a, n in zip(copy.at, copy.shape, strict=True))
            local[there] = source
            written[there] += 1
        assert not (written > 1).any()
        assert local.equal(held(whole, found))
