"""`discolab.plot` without a browser: regions as workers read them, and pictures of them."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import discolab
from discolab import ArgumentError, DRef, SessionClosedError, ThreadedSession, current_worker
from discolab.views import render_html, render_text
from discolab.views.dref.summary import LayoutFacts
from discolab.views.plot.picture import NOT_FINITE, Picture, shade
from discolab.views.plot.plot_view import format_point
from discolab.views.plot.plotting import Reader, check_options, parts_of
from discolab.views.plot.regions import lower, read_facts, read_region, read_regions
from discolab.views.plot.sheet import choose_blocks, make_sheet

WHOLE = 0, 0, 10**9, 10**9


@pytest.fixture(scope="module")
def four() -> Iterator[ThreadedSession]:
    with ThreadedSession(4) as session:
        yield session


@pytest.fixture
def meshed() -> Iterator[ThreadedSession]:
    with ThreadedSession(4) as session:
        yield session


def rank() -> int:
    return current_worker().worker_id


def spread(
    session: ThreadedSession, value: torch.Tensor, placements: list[Placement] | None, dim: int = 0
) -> DRef:
    """A DRef of which each worker holds one of four pieces."""

    def piece() -> torch.Tensor:
        return value.tensor_split(4, dim)[rank()].clone()

    ref = session.call_packed(piece)
    ref.placements = placements
    ref.name = "w"
    return ref


def picture_of(ref: DRef, choice: str = "value", pixels: tuple[int, int] = (64, 64)) -> Picture:
    return Reader(ref).look(WHOLE, pixels, choice)


def text_of(ref: DRef, choice: str = "value") -> str:
    reader = Reader(ref)
    return render_text(parts_of(reader.whole(choice), ref.name, "mean", choice))


# -- what a worker reads -----------------------------------------------------------------------


def by_hand(plane: torch.Tensor, first: tuple[int, int], blocks: tuple[int, int]) -> np.ndarray:
    """Mean, lowest, highest and share not finite of each block, the slow way."""
    rows = (torch.arange(plane.shape[0]) + first[0]) // blocks[0]
    columns = (torch.arange(plane.shape[1]) + first[1]) // blocks[1]
    found = np.zeros((4, int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1))
    for i in range(found.shape[1]):
        for j in range(found.shape[2]):
            block = plane[rows == rows[0] + i][:, columns == columns[0] + j].double().flatten()
            finite = block[torch.isfinite(block)]
            found[3, i, j] = 1 - len(finite) / len(block)
            if len(finite):
                found[:3, i, j] = finite.mean(), finite.min(), finite.max()
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("dims", [(0, 2), (2, 0)])
def test_a_region_is_the_mean_lowest_and_highest_of_each_block(
    dtype: str, dims: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    values = (torch.randn(23, 3, 31) * 9).to(getattr(torch, dtype))
    plane = values[:, 1].permute(*((0, 1) if dims == (0, 2) else (1, 0)))
    edges, blocks = (2, 20, 5, 21, 13, 4), (5, 3)
    record: Any = read_region(values, ((-1, 1, -1), dims, edges, blocks))
    expected = by_hand(plane[2:20, 5:21], (2 + 13, 5 + 4), blocks)
    shape = record["rows"], record["columns"]
    assert (record["top"], record["left"]) == (15 // 5, 9 // 3)
    assert shape == expected.shape[1:]
    np.testing.assert_allclose(lower(record["mean"], 3, *shape), expected[0], rtol=1e-4, atol=1e-6)
    for name, wanted in zip(("low", "high"), expected[1:3], strict=True):
        np.testing.assert_allclose(lower(record[name], 2, *shape), wanted, rtol=5e-3, atol=1e-6)


def test_what_is_not_finite_is_counted_and_left_out_of_the_mean() -> None:
    values = torch.ones(8, 8)
    values[0, 0], values[1, 1], values[0, 7] = math.nan, math.inf, -math.inf
    values[4:, 4:] = math.nan
    record: Any = read_region(values, ((-1, -1), (0, 1), (0, 8, 0, 8, 0, 0), (4, 4)))
    assert lower(record["mean"], 3, 2, 2).tolist() == [[1, 1], [1, 0]]
    assert list(record["bad"]) == [math.ceil(255 * 2 / 16), math.ceil(255 / 16), 0, 255]


def test_a_large_mean_does_not_overflow() -> None:
    values = torch.full((64, 64), 3e38)
    record: Any = read_region(values, ((-1, -1), (0, 1), (0, 64, 0, 64, 0, 0), (64, 64)))
    assert lower(record["mean"], 3, 1, 1)[0, 0] == pytest.approx(3e38, rel=1e-4)
    assert record["bad"] == b"\0"


def test_elements_are_read_exactly() -> None:
    values = torch.tensor([[1 / 3, math.nan], [2.0**-140, 1e300]], dtype=torch.float64)
    record: Any = read_region(values, ((-1, -1), (0, 1), (0, 2, 0, 2, 0, 0), (1, 1)))
    found = np.frombuffer(record["values"], record["dtype"]).reshape(2, 2)
    np.testing.assert_array_equal(found, values.numpy())


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(40, 40, requires_grad=True),
        torch.randn(40, 40).to_sparse(),
        torch.randn(40, 40, dtype=torch.complex64).conj(),
        torch.randn(40, 40).numpy()[::-1],
        torch.ones(1, 40).expand(40, 40),
    ],
    ids=["autograd", "sparse", "complex", "numpy", "expanded"],
)
def test_any_kind_of_tensor_is_read(value: Any) -> None:
    record: Any = read_region(value, ((-1, -1), (0, 1), (0, 40, 0, 40, 0, 0), (10, 10)))
    dense = torch.as_tensor(value.copy()) if isinstance(value, np.ndarray) else value.detach()
    dense = dense.to_dense()
    dense = dense.abs() if dense.is_complex() else dense
    expected = dense.reshape(4, 10, 4, 10).mean((1, 3))
    np.testing.assert_allclose(lower(record["mean"], 3, 4, 4), expected, rtol=1e-3, atol=1e-5)


def test_what_cannot_be_read_is_said() -> None:
    meta = torch.empty(4, 4, device="meta")
    record = read_region(meta, ((-1, -1), (0, 1), (0, 4, 0, 4, 0, 0), (2, 2)))
    assert "rror" in str(record["error"])


def test_of_a_large_region_a_sample_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discolab.views.plot.regions._MOST_READ", 10_000)
    monkeypatch.setattr("discolab.views.plot.regions._SAMPLE", 2_000)
    values = torch.arange(400.0).view(-1, 1).expand(400, 300)
    record: Any = read_region(values, ((-1, -1), (0, 1), (0, 400, 0, 300, 0, 0), (40, 30)))
    assert record["every"] >= 10_000 / 2_000
    found = lower(record["mean"], 3, 10, 10)
    np.testing.assert_allclose(found[:, 0], np.arange(10) * 40 + 19.5, atol=20)


def test_no_worker_sends_more_than_a_hundred_kilobytes() -> None:
    for shape in ((3000, 2000), (1, 10**6), (10**6, 1), (7, 10**5), (400, 301)):
        facts = {0: {"kind": "tensor", "shape": list(shape), "dtype": "float32"}}
        sheet = make_sheet(facts, LayoutFacts(num_workers=1))
        blocks = choose_blocks(sheet, sheet.window, (2000, 2000), 12_000)
        cut = sheet.shards[0].cut(sheet.window, blocks)
        assert cut is not None
        record = read_region(torch.zeros(shape), cut)
        size = sum(len(item) for item in record.values() if isinstance(item, bytes))
        assert 8_000 < size < 100_000, (shape, blocks)


# -- pictures of a session ---------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "shape"), [(0, (37, 20)), (1, (20, 37))])
def test_shards_are_put_together(four: ThreadedSession, dim: int, shape: tuple[int, int]) -> None:
    values = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    picture = picture_of(spread(four, values, [Shard(dim)], dim))
    assert picture.exact
    np.testing.assert_array_equal(picture.mean, values)


def test_blocks_across_two_workers_are_the_mean_of_both(four: ThreadedSession) -> None:
    values = torch.randn(42, 30)
    picture = picture_of(spread(four, values, [Shard(0)]), pixels=(5, 6))
    assert picture.blocks == (9, 5)
    expected = [[band.mean() for band in rows.split(5, 1)] for rows in values.split(9)]
    np.testing.assert_allclose(picture.mean, np.array(expected), atol=1e-4)


def test_only_the_region_is_asked_for(four: ThreadedSession) -> None:
    values = torch.arange(4096.0).view(64, 64)
    reader = Reader(spread(four, values, [Shard(0)]))
    picture = reader.look((20, 8, 24, 12), (64, 64), "value")
    np.testing.assert_array_equal(picture.mean, values[20:24, 8:12])
    assert [shard.ranks for shard in picture.shown] == [(1,)]
    assert picture.moved == 16 * 4


def test_a_mesh_and_slices_of_many_dims(meshed: ThreadedSession) -> None:
    values = torch.arange(6 * 8 * 4.0).view(6, 8, 4)

    def piece() -> torch.Tensor:
        row, column = divmod(rank(), 2)
        return values[:, 4 * row : 4 * row + 4, 2 * column : 2 * column + 2].clone()

    ref = meshed.call_packed(piece)
    ref.placements = [Shard(1), Shard(2)]
    meshed.mesh(dp=2, tp=2)
    reader = Reader(ref, index={0: 3})
    assert reader.sheet.dims == (1, 2)
    np.testing.assert_array_equal(reader.look(WHOLE, (64, 64), "value").mean, values[3])
    reader.turn((0, 2), [None, 6, None])
    np.testing.assert_array_equal(reader.look(WHOLE, (64, 64), "value").mean, values[:, 6])
    reader.turn((2, 0), {1: -1})
    np.testing.assert_array_equal(reader.look(WHOLE, (64, 64), "value").mean, values[:, 7].T)
    with pytest.raises(ArgumentError, match="index 6 of dim 0, which has 6"):
        reader.turn((1, 2), {0: 6})
    assert reader.sheet.dims == (2, 0)


def test_replicas_can_be_compared(four: ThreadedSession) -> None:
    def copy() -> torch.Tensor:
        made = torch.arange(2048.0 * 64).view(2048, 64)
        if rank() == 2:
            made[1000, 7] += 0.5
        return made

    ref = four.call_packed(copy)
    ref.placements = [Replicate()]
    reader = Reader(ref)
    assert dict(reader.choices)["copy 1"] == "values of worker 1"
    same = reader.look((990, 0, 1010, 64), (20, 64), "difference 1")
    assert not same.mean.any()
    odd = reader.look((990, 0, 1010, 64), (20, 64), "difference 2")
    assert odd.mean[10, 7] == 0.5
    assert np.count_nonzero(odd.mean) == 1
    with pytest.raises(ArgumentError, match="choice is one of value, copy 1"):
        reader.look(WHOLE, (64, 64), "difference 7")


def test_a_nan_in_one_replica_only_is_a_difference(four: ThreadedSession) -> None:
    ref = four.call_packed(lambda: torch.tensor([1.0, math.nan if rank() == 3 else 2.0]))
    ref.placements = [Replicate()]
    assert picture_of(ref, "difference 3").bad.tolist() == [[0, 1]]
    assert picture_of(ref, "difference 1").bad.tolist() == [[0, 0]]


@pytest.mark.parametrize(("op", "expected"), [("sum", 10.0), ("avg", 2.5)])
def test_terms_are_added_or_shown_one_by_one(
    four: ThreadedSession, op: str, expected: float
) -> None:
    ref = four.call_packed(lambda: torch.full((3, 5), rank() + 1.0))
    ref.placements = [Partial(op)]
    assert (picture_of(ref).mean == expected).all()
    assert (picture_of(ref, "term 2").mean == 3).all()
    assert f"{op} of the terms, taken at the controller" in text_of(ref)


def test_terms_of_a_maximum_are_shown_one_by_one_only(four: ThreadedSession) -> None:
    ref = four.call_packed(lambda: torch.ones(3, 5))
    ref.placements = [Partial("max")]
    assert [key for key, _ in Reader(ref).choices] == ["term 0", "term 1", "term 2", "term 3"]


def test_tensors_of_which_nothing_is_known_stand_apart(four: ThreadedSession) -> None:
    ref = four.call_packed(lambda: torch.full((4, 6), float(rank())))
    text = text_of(ref)
    assert "float32 [4, 6] a worker, not joined" in text
    assert "set .placements" in text
    reader = Reader(ref)
    assert [shard.window for shard in reader.sheet.shards][:2] == [(0, 0, 4, 6), (0, 7, 4, 13)]
    picture = reader.look(WHOLE, (64, 64), "value")
    assert "[1, 2] · worker 1 · 1" in format_point(picture, 1, 9, "value")
    assert format_point(picture, 1, 6, "value") == "between the tensors"


def test_a_picture_in_characters(four: ThreadedSession) -> None:
    values = torch.arange(8.0).view(-1, 1).expand(8, 16).clone()
    values[5, 3] = math.nan
    assert text_of(spread(four, values, [Shard(0)])) == "\n".join(
        [
            "w · float32 [8, 16] Shard(0)",
            "each element · 1 of 128 pixels not finite · 0 to 7",
            "  ································",
            "  ································",
            "  ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░",
            "  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒",
            "  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒",
            "  ▓▓▓▓▓▓!!▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓",
            "  ████████████████████████████████",
            "  ████████████████████████████████",
            "  · 0 to █ 7, ! not finite",
            "  rank  holds     values  not finite",
            "  0     [0:2, :]  0 to 1  0",
            "  1     [2:4, :]  2 to 3  0",
            "  2     [4:6, :]  4 to 5  1 element",
            "  3     [6:8, :]  6 to 7  0",
        ]
    )


def test_a_vector_in_characters(four: ThreadedSession) -> None:
    ref = spread(four, torch.arange(10_000.0), [Shard(0)])
    lines = text_of(ref).splitlines()
    assert lines[2].strip()[0] == "▁"
    assert lines[2].strip()[-1] == "█"
    assert len(lines[2].strip()) == 48


def test_a_saved_picture_of_eight_workers_is_small() -> None:
    with ThreadedSession(8) as session:
        ref = session.call_packed(lambda: torch.randn(300, 1500))
        for placements in ([Shard(0)], [Shard(1)], None, [Replicate()]):
            ref.placements = placements
            reader = Reader(ref)
            html = render_html(parts_of(reader.whole("value"), ref.name))
            assert len(html) <= 20 * 1024
            assert html.count("data:image/png") == len(reader.sheet.shards)
            assert "aria-label=" in html
            assert "dim 1" in html


def test_one_scale_and_loud_pixels(four: ThreadedSession) -> None:
    values = torch.tensor([[-1.0, 0.0, 3.0, math.inf]] * 4)
    picture = picture_of(spread(four, values, [Shard(0)]))
    shades = shade(picture, "mean")
    assert shades.levels[0].tolist() == [85, 127, 254, NOT_FINITE]
    assert (shades.diverging, shades.ends, shades.nonfinite) == (True, ("-3", "3"), 4)
    fixed = shade(picture, "mean", vmin=0, vmax=2)
    assert fixed.levels[0].tolist() == [0, 0, 254, NOT_FINITE]
    counts = shade(picture, "nonfinite")
    assert counts.levels[0].tolist() == [0, 0, 0, 254]


def test_a_busy_worker_is_drawn_as_busy_and_asked_again(four: ThreadedSession) -> None:
    ref = spread(four, torch.ones(8, 8), [Shard(0)])
    four.sync_all()
    reader = Reader(ref)
    gate = four.call_packed(lambda: time.sleep(60) if rank() == 1 else None)
    while four.status()[1].state == "idle":
        time.sleep(0.01)
    picture = reader.look(WHOLE, (8, 8), "value")
    assert [shard.ranks[0] for shard in picture.shown] == [0, 2, 3]
    assert picture.states[1]["kind"] == "pending"
    assert "worker 1 · still busy" in format_point(picture, 3, 3, "value")
    assert not reader.has_news()
    fresh = Reader(ref)  # takes it that worker 1 holds what the others do
    assert fresh.sheet.shape == (8, 8)
    assert "still busy" in render_text(parts_of(fresh.whole("value"), ref.name))
    four.interrupt()
    while not reader.has_news():
        time.sleep(0.01)
    assert len(reader.look(WHOLE, (8, 8), "value").shown) == 4
    del gate


def test_a_failed_worker_is_told_and_the_session_not_disturbed() -> None:
    def made() -> torch.Tensor:
        if rank() == 2:
            raise ValueError("no such luck")
        return torch.ones(8, 8)

    with ThreadedSession(4) as session:
        ref = session.call_packed(made)
        ref.placements = [Shard(0)]
        text = text_of(ref)
        assert "[2] ValueError: no such luck" in text
        assert "2     [16:24, :]  failed" in text
        with pytest.raises(discolab.WorkerError, match="no such luck"):
            session.sync_all()


@pytest.mark.parametrize(
    ("made", "options", "words"),
    [
        (lambda: 3, {}, "plot draws tensors: the workers hold int"),
        (lambda: torch.ones(2, 2), {"dims": (0, 0)}, "two different dims of a tensor with 2"),
        (lambda: torch.ones(2, 2), {"dims": (0, 2)}, "dims are one or two"),
        (lambda: torch.ones(2, 2, 3), {"index": {0: "x"}}, "index gives an int"),
        (lambda: torch.ones(0, 2), {}, "nothing to draw"),
        (lambda: torch.ones(2, 2, device="meta"), {}, "meta tensor: no data"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_of_one_line(
    four: ThreadedSession, made: Callable[[], Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words) as error:
        Reader(four.call_packed(made), **options)
    assert "\n" not in str(error.value)


def test_options_are_checked() -> None:
    with pytest.raises(ArgumentError, match="stat is one of mean, absmax, nonfinite"):
        check_options("median", None, None)
    with pytest.raises(ArgumentError, match="vmin must be below vmax"):
        check_options("mean", 2, 1)
    with pytest.raises(ArgumentError, match="plot draws what a DRef names: got a Tensor"):
        Reader(torch.ones(2))  # type: ignore[arg-type]


def test_a_closed_session_is_said() -> None:
    with ThreadedSession(2) as session:
        ref = session.call_packed(lambda: torch.ones(2))
    with pytest.raises(SessionClosedError, match="was shut down"):
        Reader(ref)


@pytest.mark.conformance
def test_it_works_where_workers_have_processes(pair: Any) -> None:
    ref = pair.call_packed(torch.ones, 30, 20)
    ref.placements = [Shard(0)]
    picture = picture_of(ref)
    assert picture.mean.shape == (60, 20)
    assert (picture.mean == 1).all()


def test_status_says_that_a_picture_is_read() -> None:
    for function in (read_facts, read_regions):
        assert vars(function)["disco_command"] == "reading a picture"


def test_whose_values_are_drawn_where_replicas_differ(four: ThreadedSession) -> None:
    ref = four.call_packed(lambda: torch.full((4, 4), float(rank())))
    ref.placements = [Replicate()]
    text = text_of(ref)
    assert "≠ workers that should hold the same values differ; drawn: values of worker 0" in text
    assert "0 to 0 on worker 0" in text
    assert "2 to 2 on worker 2" in text_of(ref, "copy 2")
    large = four.call_packed(lambda: torch.full((1200, 1000), float(rank())))
    large.placements = [Replicate()]
    assert "0 to 0 on worker 0" in text_of(large)  # not compared: nothing is claimed of the rest
    same = four.call_packed(lambda: torch.full((4, 4), 1.0))
    same.placements = [Replicate()]
    assert "on worker" not in text_of(same)


def test_groups_with_a_tensor_each_are_not_asked_for_placements() -> None:
    with ThreadedSession(4, num_groups=2) as grouped:
        ref = grouped.call_packed(lambda: torch.full((2, 3), float(rank() // 2)))
        ref.placements = [Replicate()]
        text = text_of(ref)
    assert "each of 2 groups has a tensor of its own" in text
    assert "set .placements" not in text


def test_complex_values_and_those_of_nothing_finite(four: ThreadedSession) -> None:
    assert "of complex values their magnitudes" in text_of(
        four.call_packed(lambda: torch.full((2, 2), 3 + 4j))
    )
    text = text_of(four.call_packed(lambda: torch.full((2, 2), math.nan)))
    assert "none finite" in text
    assert "0 to 0" not in text
    assert "█ 0" not in text


def test_options_and_cuts_that_make_no_sense_are_refused(four: ThreadedSession) -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(ArgumentError, match="finite"):
            check_options("mean", bad, None)
    ref = spread(four, torch.ones(8, 4), [Shard(0)])
    for index in ({0: 100}, "x", 3):
        with pytest.raises(ArgumentError, match="index"):
            Reader(ref, index=index)
    uneven = four.call_packed(lambda: torch.ones(2 + rank(), 3 + rank()))
    assert "float32, one tensor per worker, shapes differ, not joined" in text_of(uneven)


def freed() -> torch.Tensor:
    values = torch.ones(4, 4)
    values.untyped_storage().resize_(0)
    return values


def test_a_freed_storage_is_told_not_read(four: ThreadedSession) -> None:
    with pytest.raises(ArgumentError, match="storage freed: no data"):
        discolab.plot(four.call_packed(freed))
