"""Records of values: every dtype and layout, hostile objects, and what must stay untouched."""

import collections
import json
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from discolab.views import describe
from discolab.views.facts.tensors import SMALL_BYTES

# warnings that torch itself raises on making such tensors
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

DTYPES = sorted({item for item in vars(torch).values() if isinstance(item, torch.dtype)}, key=str)


def assert_plain(record: object) -> None:
    if isinstance(record, dict):
        assert all(type(key) is str for key in record)
        record = list(record.values())
    if isinstance(record, list):
        for item in record:
            assert_plain(item)
        return
    assert record is None or type(record) in (bool, int, float, str), record
    if type(record) is int:
        assert -(2**63) <= record < 2**63
    if type(record) is str:
        record.encode()


def zeros(dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.zeros(2, 3, dtype=dtype)
    except (RuntimeError, NotImplementedError):
        return torch.empty(2, 3, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    if str(dtype).startswith(("torch.q", "torch.bits", "torch.int4")) or dtype.itemsize > 16:
        tensor = torch.empty(2, 3, dtype=torch.uint8)
        if dtype is torch.quint8:
            tensor = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, dtype)
    else:
        tensor = torch.empty(2, 3, dtype=dtype)
        if not str(dtype).startswith(("torch.uint", "torch.int", "torch.float4")):
            tensor = tensor.zero_()
    record = describe(tensor)
    assert_plain(record)
    assert "error" not in record
    assert record["dtype"] == str(tensor.dtype).removeprefix("torch.")
    assert record["shape"] == [2, 3]
    assert record["nbytes"] == 6 * tensor.element_size()
    assert len(str(record["digest"])) == 16
    assert "stats" in record or "note" in record


def test_statistics_match_torch() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.uint8):
        tensor = (torch.randn(300, 7) * 50).abs().to(dtype)
        stats: Any = describe(tensor)["stats"]
        wide = tensor.double()
        assert stats["mean"] == pytest.approx(wide.mean().item())
        assert stats["std"] == pytest.approx(wide.std().item())
        assert stats["min"] == tensor.min().item()
        assert stats["max"] == tensor.max().item()


def test_statistics_over_several_chunks() -> None:
    tensor = torch.randn(3, 700_000)
    record: Any = describe(tensor, stats=True)
    assert record["stats"]["mean"] == pytest.approx(tensor.double().mean().item())
    assert record["stats"]["std"] == pytest.approx(tensor.double().std().item())
    other: Any = describe(tensor.t().contiguous().t(), stats=True)
    assert other["digest"] == record["digest"]
    assert "digest" not in describe(tensor)
    assert describe(tensor)["head"] == tensor[0, :4].tolist()


def test_nonfinite_values_are_counted_and_left_out() -> None:
    record: Any = describe(torch.tensor([1.0, float("nan"), 3.0, float("inf"), float("-inf")]))
    assert record["stats"] == {
        "mean": 2.0,
        "std": pytest.approx(2**0.5),
        "min": 1.0,
        "max": 3.0,
        "nonfinite": 3,
    }
    record = describe(torch.full((2,), float("nan")))
    assert record["stats"] == {"mean": None, "std": None, "min": None, "max": None, "nonfinite": 2}


def test_rounding_noise_is_no_deviation() -> None:
    stats: Any = describe(torch.full((1000, 3), 0.1, dtype=torch.float64))["stats"]
    assert stats["std"] == 0.0
    stats = describe(torch.tensor([0.1, -0.3, 0.2], dtype=torch.float64))["stats"]
    assert stats["mean"] == 0.0


@pytest.mark.parametrize("ends", [(1e300, -1e300), (1e300, 0.0)])
def test_a_deviation_past_all_floats_is_infinite_as_in_torch(ends: tuple[float, float]) -> None:
    values = torch.tensor(ends, dtype=torch.float64)
    stats: Any = describe(values)["stats"]
    assert stats["std"] == values.std().item() == float("inf")


def test_of_a_sparse_tensor_entries_of_one_place_are_summed() -> None:
    twice = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True)
    record: Any = describe(twice)
    assert (record["stats"]["min"], record["stats"]["max"], record["head"]) == (3.0, 3.0, [3.0])
    assert record["note"] == "statistics are of the stored entries"
    assert record["digest"] == describe(twice.coalesce())["digest"]
    assert not twice.is_coalesced()


def test_exact_integers_and_complex_magnitudes() -> None:
    stats: Any = describe(torch.tensor([2**53 + 1, 5]))["stats"]
    assert stats["max"] == 2**53 + 1
    stats = describe(torch.tensor([2**64 - 1, 5], dtype=torch.uint64))["stats"]
    assert (stats["min"], stats["max"]) == (5, str(2**64 - 1))  # past what a record may hold
    record: Any = describe(torch.tensor([3 + 4j, 0j]))
    assert record["stats"]["max"] == 5.0
    assert record["stats"]["of"] == "magnitude"
    assert record["head"] == ["(3+4j)", "0j"]


def test_digest_sees_order_bits_and_length() -> None:
    base = torch.arange(6.0)
    digests = [
        describe(tensor)["digest"]
        for tensor in (base, base.flip(0), base[:5], base + 0, base.neg(), base * 1.0000001)
    ]
    assert digests[0] == digests[3]
    assert len(set(digests)) == 5
    zeros_, ones = describe(torch.zeros(8))["digest"], describe(torch.ones(8))["digest"]
    assert zeros_ != ones
    assert describe(torch.zeros(8))["digest"] != describe(torch.zeros(9))["digest"]
    assert describe(np.arange(6, dtype="f4"))["digest"] == digests[0]


def test_digest_has_no_collisions_among_small_changes() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    seen = {describe(base)["digest"]}
    for place in range(64):
        for bit in range(8):
            changed = base.clone()
            changed[place] = 1 << bit
            seen.add(describe(changed)["digest"])
    assert len(seen) == 64 * 8 + 1


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0),
    "no rows": lambda: torch.empty(2, 0, 3),
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "conj": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "expanded": lambda: torch.ones(1).expand(2**40),
    "strided": lambda: torch.ones(4, 4).t()[1:, ::2],
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "with history": lambda: torch.ones(2, requires_grad=True) * 2,
    "meta": lambda: torch.empty(2**40, 2**10, device="meta"),
    "mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
    "per channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.quint8
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("stats", ["auto", False])
def test_unusual_tensors(name: str, stats: Any) -> None:
    record = describe(UNUSUAL[name](), stats)
    assert_plain(record)
    assert record["kind"] == "tensor"
    assert len(json.dumps(record)) < 700
    assert "error" not in record
    if stats is False:
        assert not {"head", "stats", "digest"} & set(record)


def test_what_has_no_plain_shape() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)])
    record = describe(ragged)
    assert_plain(record)
    assert record["kind"] == "tensor"
    assert str(record["error"]).startswith("shape failed: RuntimeError")
    assert describe(torch.nn.parameter.UninitializedParameter())["note"] == "lazy: no data yet"


def test_a_tensor_whose_storage_was_freed_is_not_read() -> None:
    values = [torch.ones(3), torch.ones(8).view(4, 2)[1:, 1], torch.eye(3).to_sparse()]
    assert not any("no data" in str(describe(value)) for value in values)
    stored = (values[0], values[1], values[2]._values())
    for value, part in zip(values, stored, strict=True):
        part.untyped_storage().resize_(0)
        record = describe(value, stats=True)
        assert record["note"] == "storage freed: no data"
        assert "digest" not in record
        inner: Any = describe({"x": value})
        assert inner["items"][0]["value"]["note"] == "storage freed: no data"
    module = torch.nn.Linear(2, 2)
    module.weight.untyped_storage().resize_(12)  # not all of it is gone
    rows: Any = describe(module)["params"]
    assert [row.get("note") for row in rows] == ["storage freed: no data", None]
    assert "digest" in rows[1]


def test_fake_tensor() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        record = describe(torch.empty(2, 2))
    assert record["note"] == "fake tensor: no data"
    assert_plain(describe(torch.ones(2), stats=True))
    del mode


def test_dtensor_is_described_by_its_shard() -> None:
    from torch.distributed.tensor import DTensor, Shard

    class Mesh:
        ndim = 1

    class Fake(DTensor):
        """Looks like a DTensor; needs no process group."""

        _local_tensor = torch.ones(2, 3)
        placements = (Shard(0),)
        shape = torch.Size((4, 3))
        requires_grad = False

    fake = torch.Tensor._make_wrapper_subclass(Fake, (4, 3))  # type: ignore[attr-defined]
    record = describe(fake)
    assert record["shape"] == [2, 3]
    assert record["placements"] == "Shard(0)"
    assert record["logical_shape"] == [4, 3]


def test_nothing_is_disturbed() -> None:
    torch.manual_seed(0)
    tensor = torch.arange(12, dtype=torch.int64).view(3, 4)
    before = tensor.clone()
    leaf = torch.ones(3, requires_grad=True)
    state, python = torch.get_rng_state(), random.getstate()
    version = leaf._version
    for value in (tensor, leaf, torch.randn, torch.nn.Linear, [tensor], {"a": leaf}):
        describe(value, stats=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert torch.is_grad_enabled()
    assert leaf._version == version
    assert torch.equal(tensor, before)
    with torch.inference_mode():
        assert "error" not in describe(torch.ones(3))
    with torch.no_grad():
        describe(leaf)
        assert not torch.is_grad_enabled()


def test_masks_of_numpy_are_a_part_of_what_is_compared() -> None:
    values, records = np.arange(3.0), []
    for mask in ([0, 0, 0], [0, 1, 0], [0, 1, 0]):
        records.append(describe(np.ma.masked_array(values, mask)))  # type: ignore[no-untyped-call]
    digests = [record["digest"] for record in records]
    assert digests[0] != digests[1] == digests[2]
    assert "also of those below the mask" in str(records[0]["note"])


def test_numpy() -> None:
    array = np.arange(6, dtype="f8").reshape(2, 3)
    record: Any = describe(array)
    assert (record["kind"], record["type"], record["dtype"]) == ("tensor", "ndarray", "float64")
    assert record["stats"]["mean"] == 2.5
    readonly = array.copy()
    readonly.flags.writeable = False
    for other in (array[::-1, ::-1], readonly, array.astype(">f8"), np.array(3), array[:0]):
        found = describe(other)
        assert_plain(found)
        assert "error" not in found
    assert describe(readonly)["digest"] == record["digest"]
    for other in (np.array(["a"]), np.array([object()]), np.array(["2020-01-01"], "M8[D]")):
        assert describe(other)["note"] == "no statistics for this dtype"
    big = np.broadcast_to(np.float32(1), (SMALL_BYTES, 2))
    assert "stats" not in describe(big)
    assert describe(np.float32(3)) == {"kind": "object", "type": "float32", "repr": "3.0"}


def test_module() -> None:
    record: Any = describe(torch.nn.Linear(3, 4))
    assert (record["parameters"], record["nbytes"], record["type"]) == (16, 64, "Linear")
    weight = record["params"][0]
    assert len(weight.pop("digest")) == 16
    assert weight == {"name": "weight", "shape": [4, 3], "dtype": "float32", "nbytes": 48}
    many = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(30))
    record = describe(many)
    assert (len(record["params"]), record["more"], len(record["brief"])) == (40, 20, 20)
    assert "error" not in describe(torch.nn.LazyLinear(3))
    assert_plain(describe(torch.nn.BatchNorm1d(3)))


def test_containers() -> None:
    record: Any = describe({"a": torch.ones(2), 3: [1, (2,)]})
    assert (record["kind"], record["length"]) == ("dict", 2)
    assert "stats" not in record["items"][0]["value"]
    assert record["items"][1]["key"] == "3"
    record = describe(list(range(100)))
    assert (len(record["items"]), record["more"]) == (40, 60)
    loop: list[Any] = []
    loop.append(loop)
    assert_plain(describe(loop))
    pair = collections.namedtuple("Pair", "a b")(1, 2)
    assert describe(pair)["type"] == "Pair"
    assert describe({"b", "a", "c"})["repr"] == "{'a', 'b', 'c'}"
    assert describe(set())["repr"] == "set()"


class Loud:
    def __repr__(self) -> str:
        raise RuntimeError("no repr for you")


class Quitting:
    def __repr__(self) -> str:
        sys.exit(3)


class Huge:
    def __repr__(self) -> str:
        return "x" * 10_000_000


class Surrogate:
    def __repr__(self) -> str:
        return "\ud800"


class BadError(Exception):
    def __str__(self) -> str:
        raise ValueError


class Nested:
    def __repr__(self) -> str:
        raise BadError


class Hostile(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError("no items")


class Faceless:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")


@pytest.mark.parametrize("kind", [Loud, Quitting, Huge, Surrogate, Nested, Hostile, Faceless])
def test_hostile_objects(kind: type) -> None:
    for value in (kind(), [kind()], {"k": kind()}):
        record = describe(value)
        assert_plain(record)
        assert len(json.dumps(record)) < 1200


def test_objects() -> None:
    assert describe(None) == {"kind": "none"}
    assert describe(object())["repr"] == "<object object>"
    assert describe(Loud())["repr"] == "<Loud: repr raised RuntimeError: no repr for you>"
    assert len(str(describe(Huge())["repr"])) == 200
    text: Any = describe("é" * 10_000_000)
    assert len(text["repr"]) == 200
    assert text["cut"]
    assert text["length"] == 10_000_000
    assert describe("a" * 300 + "b")["digest"] != describe("a" * 300 + "c")["digest"]
    assert describe(10**5000)["kind"] == "object"
    assert describe(types)["repr"]


def test_opt_in() -> None:
    class Good:
        def __disco_describe__(self) -> dict[str, Any]:
            return {"kind": "plan", "summary": "3 steps", "big": 2**70, 5: (1, object())}

    class Bad:
        def __disco_describe__(self) -> Any:
            return 7

    record = describe(Good())
    assert_plain(record)
    assert record["summary"] == "3 steps"
    assert record["type"] == "Good"
    assert "expected dict" in str(describe(Bad())["error"])
    assert describe(Good)["kind"] == "object"
