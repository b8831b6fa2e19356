"""The DRef view: golden texts for what a user meets, and that text and HTML agree."""

import re
import warnings
from collections.abc import Iterable
from html import unescape
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from discolab.views import describe, dref_parts, render_html, render_text

FAILED = {"kind": "failure", "message": "RuntimeError: boom\n  File cell 3, line 2"}
PENDING = {"kind": "pending", "message": "in all_reduce, 3 of 4 arrived"}


def records(values: Iterable[object]) -> dict[int, Any]:
    return {rank: describe(value) for rank, value in enumerate(values)}


def text(values: Iterable[object] | dict[int, Any], name: str | None = "w", **options: Any) -> str:
    held = values if isinstance(values, dict) else records(values)
    options = {"num_workers": len(held)} | options
    return render_text(dref_parts(held, name=name, **options))


def golden(drawn: str, *lines: str) -> None:
    assert drawn.split("\n") == list(lines)


def test_short_lines() -> None:
    golden(text([3] * 4, "x"), "DRef x: 3 on all 4 workers")
    golden(text(["a\nb"] * 2), r"DRef w: 'a\nb' on all 2 workers")
    golden(text([None] * 2, None), "DRef: None on all 2 workers")
    golden(text([[1, (2,)]] * 2), "DRef w: [1, (2,)] on all 2 workers")
    golden(text([3]), "DRef w: 3 on 1 worker")
    golden(text([torch.tensor(0.25)] * 4, "loss"), "DRef loss: 0.25 (float32) on all 4 workers")
    golden(
        text({0: describe(3), 1: FAILED | {"message": "E"}, 2: describe(3)}),
        "DRef w: 3 on workers 0,2 · worker 1 failed",
        "[1] E",
    )


def test_sharded() -> None:
    golden(
        text(torch.arange(12.0).view(4, 3).chunk(2), placements=[Shard(0)]),
        "DRef w · float32[4, 3] Shard(0) on 2 workers · shards distinct",
        "  Shard(0) of [4, 3]",
        "    [0:2, :]  worker 0",
        "    [2:4, :]  worker 1",
        "  rank  digest  device  shape   bytes  mean    std  min  max  nonfinite",
        "  0     A       cpu     [2, 3]   24 B   2.5  1.871    0    5          0",
        "  1     B       cpu     [2, 3]   24 B   8.5  1.871    6   11          0",
    )


def test_equal_and_inferred() -> None:
    golden(
        text([torch.eye(3)] * 4),
        "DRef w · float32[3, 3] on 4 workers · ✓ equal on all workers",
        "  replicated (inferred), [3, 3]: workers 0-3",
        "  rank   digest  device  shape   bytes    mean  std  min  max  nonfinite",
        "  [0-3]  A       cpu     [3, 3]   36 B  0.3333  0.5    0    1          0",
    )


def test_one_differs() -> None:
    values = [torch.zeros(8, dtype=torch.int32) for _ in range(4)]
    values[2] = values[2] + 1
    golden(
        text(values, "bias"),
        "DRef bias · int32[8] on 4 workers · ≠ differ: A A B A (worker 2)",
        "  rank     digest  device  shape  bytes  mean  std  min  max",
        "  [0,1,3]  A       cpu     [8]     32 B     0    0    0    0",
        "  2        B       cpu     [8]     32 B     1    0    1    1",
    )
    first = text(values, placements=[Replicate()]).split("\n")[0]
    assert first.endswith(
        "int32[8] Replicate() on 4 workers · ≠ replicas differ: A A B A (worker 2)"
    )


def test_poisoned_and_pending() -> None:
    shards = records(torch.arange(16.0).chunk(4))
    golden(
        text(shards | {1: PENDING, 2: FAILED}, placements=[Shard(0)]),
        "DRef w · float32[4] on 4 workers · all distinct · worker 1 still busy · worker 2 failed",
        "layout not drawn: no value from workers 1, 2",
        "  rank  digest  state       device  shape  bytes  mean    std  min  max  nonfinite"
        "  values",
        "  0     A                   cpu     [4]     16 B   1.5  1.291    0    3          0"
        "  [0, 1, 2, 3]",
        "  1             still busy",
        "  2             failed",
        "  3     B                   cpu     [4]     16 B  13.5  1.291   12   15          0"
        "  [12, 13, 14, 15]",
        "[2] RuntimeError: boom",
        "[2] whole message",
        "  RuntimeError: boom",
        "    File cell 3, line 2",
        "[1] in all_reduce, 3 of 4 arrived",
    )
    golden(
        text({rank: {"kind": "failure", "message": "E: x"} for rank in range(3)}),
        "DRef w · all 3 workers failed",
        "[0-2] E: x",
    )
    golden(
        text({0: describe(1)}, num_workers=3), "DRef w: 1 on worker 0 · workers 1,2 gave no answer"
    )
    assert "all 2 workers still busy" in text({0: PENDING, 1: PENDING})


def test_containers_and_modules() -> None:
    golden(
        text([{"a": torch.ones(2, 3), "b": 3}] * 2, "batch"),
        "DRef batch: {'a': float32[2, 3], 'b': 3} on all 2 workers",
        "items: 2, all equal",
        "    key  value          device  bytes  workers",
        "    'a'  float32[2, 3]  cpu      24 B  equal",
        "    'b'  3                             equal",
    )
    assert text([torch.nn.Linear(3, 4)] * 2, "net").split("\n")[0] == (
        "DRef net: Linear (16 parameters, 64 B) on all 2 workers"
    )


def test_values_that_differ() -> None:
    golden(
        text(range(3), "r"),
        "DRef r · int on 3 workers · all distinct",
        "  rank  digest  value",
        "  0     A       0",
        "  1     B       1",
        "  2     C       2",
    )
    assert "differ: A A B A (worker 2)" in text([3, 3, 4, 3])
    assert text([torch.ones(4), None, None]).startswith(
        "DRef w · float32[4] on worker 0, None on workers 1,2\n"
    )
    assert "float32, shapes differ, on 2 workers" in text([torch.ones(2, 3), torch.ones(3, 2)])
    sparse = [torch.eye(size).to_sparse() for size in (2, 3)]
    assert "float32 sparse_coo, shapes differ, on 2 workers" in text(sparse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: in beta state
        layouts = text([torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()])
    assert "float32[3, 3] sparse_coo on worker 0, float32[3, 3] sparse_csr on worker 1" in layouts
    assert "equal within each of 2 groups" in text([1, 1, 2, 2], num_groups=2)
    odd = text([7 if rank == 20 else 1 for rank in range(32)])
    assert "differ: 2 classes (worker 20)" in odd
    assert "[0-19,21-31]" in odd


def test_large_and_meta() -> None:
    big = torch.zeros(2**21)
    drawn = text([big] * 2)
    assert "contents not compared" in drawn
    assert "discolab.view(w, stats=True)" in drawn
    assert "discolab.view(ref, stats=True)" in text([big] * 2, "not a name")
    assert "8 MiB" in drawn
    drawn = text([torch.empty(10**9, 10**5, device="meta")] * 4, placements=[Shard(0)])
    assert "float32[4000000000, 100000] Shard(0)" in drawn
    assert "363.8 TiB" in drawn
    assert "meta tensor: no data" in drawn


def test_nonfinite_is_marked() -> None:
    drawn = records([torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])])
    html = render_html(dref_parts(drawn, name="w", num_workers=2))
    assert '<span class="w">1</span>' in html
    assert "not finite" in html
    assert "of the finite values" in text(drawn)
    assert "\n[0] nan at [1]\n" in text(drawn)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (torch.randn(64, 8).chunk(4), {"placements": [Shard(0)]}),
        (torch.randn(64, 8).chunk(8), {}),
        ([torch.randn(5, 5) for _ in range(4)], {"placements": [Partial()]}),
        ([torch.full((3,), float("inf"))] * 4, {"placements": [Replicate()]}),
        ([torch.arange(3), None, "s", 4.5], {}),
        ([{"a": torch.ones(2)}] * 4, {}),
        ([torch.nn.Linear(2, 2)] * 4, {}),
    ],
)
def test_text_and_html_hold_the_same_numbers(values: Any, options: Any) -> None:
    part = dref_parts(records(values), name="w", num_workers=len(values), **options)
    html = re.sub(r"<style>.*?</style>", "", render_html(part))
    titles = " ".join(re.findall(r'title="([^"]*)"', html))
    words = unescape(re.sub(r"<[^>]*>", " ", html) + " " + titles)
    pattern = r"-?\d+\.?\d*(?:e[-+]\d+)?|inf|nan"
    told = re.sub(r"^  \[[\d,-]+\]|workers [\d,-]+", "", render_text(part), flags=re.M)
    in_text = set(re.findall(pattern, told))
    assert in_text <= set(re.findall(pattern, words))


def test_sizes_and_determinism() -> None:
    for count in (4, 8):
        shards = records(torch.randn(1024, 256).chunk(count))
        part = dref_parts(shards, name="W", num_workers=count, placements=[Shard(0)])
        html = render_html(part)
        assert len(html.encode()) < (14_000 if count == 4 else 24_000)
        assert html == render_html(
            dref_parts(shards, name="W", num_workers=count, placements=[Shard(0)])
        )
        assert "<script" not in html
        assert "http" not in html
    long = {rank: {"kind": "failure", "message": "line\n" * 10**6 + str(rank)} for rank in range(8)}
    assert len(render_html(dref_parts(long, name="w", num_workers=8)).encode()) < 50_000


def test_hostile_names_and_values() -> None:
    evil = '<img src=x onerror="alert(1)">\x1b[31m\u202e'
    held = records([evil, {evil: evil}, [evil], type(evil, (), {})()])
    held[4] = {"kind": "failure", "message": evil}
    held[5] = {"kind": evil, "type": evil, "summary": evil}
    held[6] = {"kind": "tensor", "dtype": evil, "device": evil, "shape": [evil], "note": evil}
    part = dref_parts(held, name=evil, num_workers=7)
    html, drawn = render_html(part), render_text(part)
    assert "<img" not in html
    assert "alert(1)" in html
    for mark in ("\x1b", "\u202e"):
        assert mark not in html
        assert mark not in drawn
    assert all(line == line.rstrip() for line in drawn.split("\n"))


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"kind": 3},
        {"kind": "tensor"},
        {"kind": "tensor", "shape": "x", "stats": 3, "digest": [1], "head": 4, "nbytes": "many"},
        {"kind": "list", "items": [3]},
        {"kind": "dict", "items": 3},
        {"kind": "module", "params": 3, "parameters": "x"},
        {"kind": "failure", "message": 3},
        {"kind": "object", "repr": 3, "type": 4},
    ],
)
def test_malformed_records_never_raise(record: Any) -> None:
    for held in ({0: record, 1: record}, {0: record, 1: describe(torch.ones(2))}):
        for placements in (None, [Shard(0)], [3], 7):
            part = dref_parts(held, name="w", num_workers=2, placements=placements)
            assert render_text(part).startswith("DRef w")
            assert render_html(part).startswith("<div")


def test_renderers_never_raise() -> None:
    for render in (render_text, render_html):
        assert "could not be drawn" in render(object())  # type: ignore[arg-type]
