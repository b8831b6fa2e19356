"""encode on the controller and bind on the worker, without a session."""

import collections
import copy
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from discolab import ArgumentError, Pickled
from discolab.runtime.arguments import (
    Register,
    as_tensor,
    bind,
    encode,
    parse_device,
    parse_dtype,
    parse_shape,
    private_copy,
)


class Point(NamedTuple):
    x: Any
    y: Any


class Handle:
    """Stands for a DRef."""

    def __init__(self, reg: int) -> None:
        self.reg = reg


def register_of(value: Any) -> Register | None:
    return Register(value.reg) if isinstance(value, Handle) else None


def round_trip(value: Any) -> Any:
    return bind(encode(value, register_of), lambda reg: f"value of {int(reg)}")


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3]), ..., range(3), len]),
)
NESTED = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(slice, inner, inner),
    ),
    max_leaves=8,
)


@given(NESTED)
def test_what_is_sent_is_what_arrives(value: Any) -> None:
    got = round_trip(value)
    assert got == value
    assert type(got) is type(value)


@given(st.frozensets(st.integers()), st.sets(st.text()))
def test_sets_arrive_as_they_are(frozen: frozenset[int], plain: set[str]) -> None:
    assert round_trip([frozen, plain]) == [frozen, plain]


def test_handles_are_replaced_however_deep_they_are() -> None:
    value = {"a": [Handle(3), (1, Point(Handle(4), slice(Handle(5), None)))]}
    got = round_trip(value)
    assert got == {"a": ["value of 3", (1, Point("value of 4", slice("value of 5", None, None)))]}


def test_each_bind_gives_a_tensor_of_its_own() -> None:
    mine = torch.ones(3)
    sent = encode([mine], register_of)
    first, second = bind(sent, int)[0], bind(sent, int)[0]
    first += 1
    assert mine.tolist() == second.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), np.ones(2), [torch.ones(2)], Pickled([1.0]), Pickled({"a": torch.ones(2)})],
    ids=["tensor", "array", "list", "pickled list", "pickled tensor"],
)
def test_what_the_caller_does_to_an_argument_after_the_call_is_not_seen(value: Any) -> None:
    inner: Any = value.value if isinstance(value, Pickled) else value
    before = copy.deepcopy(inner)
    sent = encode(value, register_of)
    if isinstance(inner, dict):
        inner["a"] += 1
    else:
        inner[0] += 1
    assert str(bind(sent, int)) == str(before)


def test_a_parameter_stays_one_and_a_tensor_keeps_requires_grad() -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    leaf = torch.ones(2, requires_grad=True)
    got, got_leaf, product = round_trip((parameter, leaf, leaf * 2))
    assert isinstance(got, torch.nn.Parameter)
    assert not got.requires_grad
    assert got_leaf.requires_grad
    assert product.is_leaf


def test_numpy_scalars_arrive_as_python_numbers() -> None:
    got = round_trip([np.float32(0.5), np.int64(3), np.bool_(True)])
    assert got == [0.5, 3, True]
    assert [type(v) for v in got] == [float, int, bool]


@pytest.mark.parametrize("value", [object(), Exception("x"), iter([]), {"a": [object()]}])
def test_another_type_is_refused_with_the_way_out(value: object) -> None:
    with pytest.raises(ArgumentError, match="Pickled"):
        encode(value, register_of)


def test_a_container_that_holds_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    loop: dict[str, Any] = {}
    loop["self"] = loop
    for value in (ring, loop):
        with pytest.raises(ArgumentError, match="does a list hold itself"):
            encode(value, register_of)


def test_private_copy_keeps_the_type_of_containers_and_shares_no_memory() -> None:
    tensor = torch.ones(2)
    values: list[Any] = [
        [tensor],
        (tensor,),
        Point(tensor, 1),
        {"a": tensor},
        collections.OrderedDict(a=tensor),
        collections.defaultdict(list, a=tensor),
        torch.max(torch.ones(2, 2), 0),
    ]
    for value in values:
        got = private_copy(value)
        assert type(got) is type(value)
        theirs = next(iter(value.values() if isinstance(value, dict) else value))
        mine = next(iter(got.values() if isinstance(got, dict) else got))
        assert mine.data_ptr() != theirs.data_ptr()
    assert isinstance(private_copy(time.gmtime(0)), time.struct_time)


@pytest.mark.parametrize(
    "name", ["float32", "torch.float32", torch.float32, np.float32, np.dtype("float32")]
)
def test_a_dtype_by_any_of_its_names(name: object) -> None:
    assert parse_dtype(name) is torch.float32


@pytest.mark.parametrize("name", ["float33", "", "nn", "Tensor", None, 3])
def test_a_bad_dtype_is_refused(name: object) -> None:
    with pytest.raises(ArgumentError, match="unknown dtype"):
        parse_dtype(name)


def test_shapes() -> None:
    assert parse_shape(3) == (3,)
    assert parse_shape([np.int64(2), 0]) == (2, 0)
    assert parse_shape(torch.Size([2, 3])) == (2, 3)
    assert parse_shape(()) == ()


@pytest.mark.parametrize("shape", [(2, -1), -1, (2, 1.5), 2.0, "ab", None, [[1]]])
def test_a_bad_shape_is_refused(shape: object) -> None:
    with pytest.raises(ArgumentError, match="a shape"):
        parse_shape(shape)


def test_devices() -> None:
    assert parse_device(None) is None
    assert parse_device("cpu") == torch.device("cpu")
    for bad in ("cpuu", "cuda:x", object(), [], 1.5):
        with pytest.raises(ArgumentError, match="is not a device"):
            parse_device(bad)


def test_a_host_array_shares_memory_unless_it_is_read_only() -> None:
    array = np.zeros(3)
    as_tensor(array, "it")[0] = 1
    assert array[0] == 1
    array.flags.writeable = False
    as_tensor(array, "it")[0] = 2
    assert array[0] == 1


@pytest.mark.parametrize("array", [[1, 2], 3, None, np.array(["a"]), np.zeros(3)[::-1]])
def test_what_torch_cannot_share_is_refused(array: object) -> None:
    with pytest.raises(ArgumentError, match=r"^it"):
        as_tensor(array, "it")
