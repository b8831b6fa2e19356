"""Tensors and arrays on the wire: what they keep, and that nothing large is copied."""

import gc
import runpy
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from discolab.runtime import ArgumentError
from discolab.runtime.arguments import Pickled
from discolab.runtime.serialize import LazyPickle, ProtocolError, decode, encode, open_all

helpers = runpy.run_path(str(Path(__file__).with_name("same_values.py")))
same = helpers["same"]
bits = helpers["bits"]

NOT_PLAIN = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
DTYPES = [
    d
    for d in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    if str(d).removeprefix("torch.") not in NOT_PLAIN
]


def there_and_back(value: Any) -> Any:
    return decode(*encode(value))


def some_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of bits as they come; of bools, of zeros and ones."""
    flat = torch.arange(int(np.prod(shape)) * dtype.itemsize) % (2 if dtype is torch.bool else 251)
    return flat.to(torch.uint8).view(dtype).reshape(shape)


@pytest.fixture(autouse=True)
def _no_warning_of_half_precision_complex() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support")
        yield


# -- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0,), (0, 5), (2, 0, 3), (1,) * 64])
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some_bits(shape, dtype)
    got = there_and_back(tensor)
    assert type(got) is torch.Tensor
    assert (got.dtype, got.shape, got.device.type) == (dtype, tensor.shape, "cpu")
    if tensor.numel():
        assert torch.equal(bits(got), bits(tensor))


SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@given(SHAPES, st.sampled_from(["float32", "int16", "bool", "bfloat16", "complex64"]), st.data())
def test_any_strides(shape: tuple[int, ...], dtype: str, data: st.DataObject) -> None:
    tensor = some_bits(shape, getattr(torch, dtype))
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        start, step = data.draw(st.tuples(st.integers(0, 2), st.integers(1, 3)))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    assert same(there_and_back(tensor), tensor)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_stays_one_and_leaves_of_a_graph_are_leaves(requires_grad: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad)
    got, leaf, product, empty = there_and_back(
        (
            parameter,
            torch.ones(2).requires_grad_(requires_grad),
            torch.ones(2, requires_grad=True) * 2,
            torch.nn.Parameter(torch.ones(0, 2), requires_grad),
        )
    )
    assert type(got) is type(empty) is torch.nn.Parameter
    assert type(leaf) is torch.Tensor
    assert got.requires_grad == leaf.requires_grad == empty.requires_grad == requires_grad
    assert product.requires_grad
    assert product.is_leaf
    assert torch.equal(product, torch.full((2,), 2.0))


def test_lazy_bits_are_kept() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (tensor.conj(), tensor.conj().imag, torch._neg_view(torch.ones(2))):
        assert lazy.is_conj() or lazy.is_neg()
        assert same(there_and_back(lazy), lazy)


def test_tensors_that_overlap_and_one_that_comes_twice() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    leaf = torch.ones(2, requires_grad=True)
    got = there_and_back({"a": base, "b": [base.t(), (base[1:], base)], "c": [leaf, leaf]})
    got["a"][2, 3] = 50
    turned, (rows, again) = got["b"]
    assert turned[3, 2] == rows[1, 3] == 50
    assert again is got["a"]
    assert got["c"][0] is got["c"][1]
    (got["c"][0] * got["c"][1]).sum().backward()
    assert got["c"][0].grad.tolist() == [2, 2]


def test_neither_an_expansion_nor_the_rest_of_a_storage_is_sent() -> None:
    wide = torch.tensor([3.0]).expand(2**40)  # 4 TiB, were it written out
    table = torch.zeros(1000, 1000)
    column = table[:, :2]
    message = encode([wide, column, table.t()[:3].t()[:5]])
    assert sum(memoryview(frame).nbytes for frame in message.frames) <= 4 + table.nbytes
    got = decode(*message)
    assert (got[0].shape, got[0].stride(), got[0][-1].item()) == (wide.shape, (0,), 3)
    alone = encode(column)
    assert [memoryview(frame).nbytes for frame in alone.frames] == [column.nbytes]
    assert decode(*alone).stride() == column.clone().stride()


def test_tensors_of_inference_mode_and_under_a_default_device() -> None:
    with torch.inference_mode():
        message = encode(torch.ones(2))
        inside = decode(*message)
    assert torch.equal(decode(*message), inside.clone())
    message = encode([torch.ones(2), torch.ones(0)])
    with torch.device("meta"):
        got = decode(*message)
    assert [t.device.type for t in got] == ["cpu", "cpu"]


def test_a_tensor_of_another_kind_is_pickled() -> None:
    class Mine(torch.Tensor):
        pass

    values = [
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2).as_subclass(Mine),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    ]
    for value in values:
        shut = there_and_back(value)
        assert type(shut) is LazyPickle
        got = shut.open()
        assert (got.dtype, got.layout, got.device) == (value.dtype, value.layout, value.device)


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
@pytest.mark.parametrize("needs", [False, True])
def test_a_sparse_leaf_is_still_one(kind: type[torch.Tensor], needs: bool) -> None:
    value = torch.eye(2).to_sparse()
    if kind is torch.nn.Parameter:
        value = torch.nn.Parameter(value)
    got = there_and_back(value.requires_grad_(needs)).open()
    assert (type(got), got.is_leaf, got.requires_grad) == (kind, True, needs)
    assert torch.equal(got.detach().to_dense(), torch.eye(2))


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage|deprecated).*")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.eye(2).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.eye(4).to_sparse_bsc((2, 2)),
        lambda: torch.ones(2, 3).to_mkldnn(),
        lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 3, torch.quint8).t(),
        lambda: torch.ones(2, 3, device="meta").t(),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc", "mkldnn", "quantized", "meta", "nested"],
)
def test_two_tensors_of_which_one_is_of_another_kind(make: Any) -> None:
    value, beside = make(), torch.ones(3)
    for whole in ([value, beside], Pickled([value, beside])):
        got, other = open_all(there_and_back(whole))
        assert torch.equal(other, beside)
        assert (got.dtype, got.layout, got.is_meta) == (value.dtype, value.layout, value.is_meta)
        assert got.is_quantized == value.is_quantized
        if value.is_meta or value.is_quantized:
            assert got.stride() == value.stride()
        if value.is_nested:
            assert [torch.equal(a, b) for a, b in zip(got, value, strict=True)] == [True, True]
        elif value.is_quantized:
            assert torch.equal(got, value)
        elif not value.is_meta:
            assert torch.equal(got.to_dense(), value.to_dense())


def test_a_storage() -> None:
    data = torch.arange(5, dtype=torch.int16)
    for value in (data.untyped_storage(), data[3:].untyped_storage(), torch.UntypedStorage(0)):
        got = there_and_back(value).open()
        assert type(got) is torch.UntypedStorage
        assert got.tolist() == value.tolist()


def test_a_tensor_that_has_no_memory_to_show_is_refused() -> None:
    def send(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ArgumentError, match="a Tensor can't be sent to another process"):
            encode(x)
        return x

    torch.vmap(send)(torch.ones(2, 3))


def test_place_puts_tensors_where_they_were() -> None:
    placed = []

    def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        placed.append(device)
        return tensor.to("meta")

    value = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
    on_cpu = encode(value)
    with helpers["as_if_on"]("cuda:1"):
        moved = encode(value).body
    assert [t.device.type for t in decode(on_cpu.body, on_cpu.frames, place=place)] == ["cpu"] * 2
    assert [t.device.type for t in decode(moved, on_cpu.frames)] == ["cpu"] * 2
    assert placed == []
    first, second = decode(moved, on_cpu.frames, place=place)
    assert placed == [torch.device("cuda:1")] * 2
    assert first.device.type == second.device.type == "meta"
    assert type(second) is torch.nn.Parameter
    assert second.requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_a_gpu() -> None:
    tensor = torch.arange(6.0, device="cuda:0").reshape(2, 3).t()
    message = encode([tensor, torch.nn.Linear(2, 2, device="cuda:0")])
    there, module = decode(*message)
    assert there.device.type == "cpu"
    assert torch.equal(there, tensor.cpu())
    assert module.open().weight.device.type == "cpu"
    back = decode(*message, place=lambda t, device: t.to(device))[0]
    assert back.device == tensor.device
    assert torch.equal(back, tensor)
    module = module.open(place=lambda t, device: t.to(device))
    assert {p.device for p in module.parameters()} == {tensor.device}
    assert type(module.weight) is torch.nn.Parameter


# -- arrays -------------------------------------------------------------------------------------

ARRAYS = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.unsigned_integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
        hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    ),
    SHAPES,
)


@given(ARRAYS, st.data())
def test_any_plain_array(array: Any, data: st.DataObject) -> None:
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    if array.ndim and data.draw(st.booleans()):
        array = array[:: data.draw(st.sampled_from([-1, 2]))]
    got = there_and_back(array)
    assert same(got, array)
    assert got.flags.writeable
    assert got.flags.aligned
    if array.flags.f_contiguous:
        assert got.flags.f_contiguous
    if array.flags.c_contiguous:
        assert got.flags.c_contiguous


@given(
    hnp.arrays(
        hnp.array_dtypes()
        | hnp.datetime64_dtypes(endianness="=")  # numpy pickles the other order wrongly
        | hnp.unicode_string_dtypes(),
        3,
    )
)
def test_another_array_is_pickled(array: Any) -> None:
    got = open_all(there_and_back(array))
    assert got.dtype == array.dtype
    assert got.tobytes() == array.tobytes()
    assert got.flags.writeable


def test_subclasses_of_arrays_and_arrays_of_objects() -> None:
    for array in (
        np.ma.masked_array([1, 2], [True, False]),
        np.array([1, "a", None], object),
        np.array([1.0], np.longdouble),
        np.array([1], np.dtype("<i4", metadata={"a": 1})),
    ):
        got = open_all(there_and_back(array))
        assert type(got) is type(array)
        assert repr(got) == repr(array)


# -- copies -------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(16 * MIB),
        torch.zeros(4 * MIB, 4).t()[1:2].t(),
        np.zeros(8 * MIB),
        np.zeros((MIB, 8)).T,
        [torch.nn.Parameter(torch.zeros(16 * MIB))],
    ],
    ids=["tensor", "strided tensor", "array", "array in Fortran's order", "parameter"],
)
def test_nothing_large_is_copied(value: Any) -> None:
    contiguous = not (isinstance(value, torch.Tensor) and not value.is_contiguous())
    item = value[0] if isinstance(value, list) else value
    address = item.data_ptr() if isinstance(item, torch.Tensor) else item.ctypes.data
    gc.collect()
    tracemalloc.start()
    try:
        message = encode(value)
        got = decode(*message)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB
    assert len(message.body) < 200
    got = got[0] if isinstance(got, list) else got
    there = got.data_ptr() if isinstance(got, torch.Tensor) else got.ctypes.data
    assert (there == address) == contiguous


@pytest.mark.parametrize("pickled", [False, True], ids=["plain", "in a pickle"])
@pytest.mark.parametrize("value", [torch.arange(8.0), np.arange(8.0)], ids=["tensor", "array"])
def test_what_arrives_can_be_written_without_harm(value: Any, pickled: bool) -> None:
    message = encode(Values(value) if pickled else value)
    frozen = [bytes(frame) for frame in message.frames]
    before = [bytes(frame) for frame in frozen]
    odd = bytearray(1 + len(frozen[0]))
    odd[1:] = frozen[0]
    for frames in (frozen, [memoryview(odd)[1:]], [bytearray(frozen[0])]):
        got = decode(message.body, frames)
        got = got.open().value if pickled else got
        assert same(got, value)
        got += 1
        assert got[7] == 8
        if isinstance(got, torch.Tensor):
            assert got.data_ptr() % got.itemsize == 0
    assert frozen == before


class Values:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    "frame",
    [
        np.frombuffer(b"\0\0\x80?" * 4, np.uint8),
        np.frombuffer(b"\0\0\x80?" * 4, np.float32),
        np.frombuffer(b"\0\0\x80?" * 4, np.int8).reshape(4, 4),
        memoryview(b"\0\0\x80?" * 4).cast("i"),
    ],
    ids=["bytes", "floats", "two dimensions", "memoryview"],
)
def test_a_frame_is_any_contiguous_buffer(frame: Any) -> None:
    body = encode(torch.ones(4)).body
    assert torch.equal(decode(body, [frame]), torch.ones(4))


@pytest.mark.parametrize(
    "frame", [None, 3, "text", np.zeros(32, np.uint8)[::2], np.zeros((2, 16), np.uint8).T]
)
def test_what_is_no_frame(frame: Any) -> None:
    body = encode(torch.ones(4)).body
    with pytest.raises(ProtocolError, match="frame 0 is no contiguous buffer"):
        decode(body, [frame])
