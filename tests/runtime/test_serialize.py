"""Messages: values that go through unchanged, what is refused, user types."""

import collections
import enum
import math
import runpy
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from discolab.runtime import ArgumentError, DiscoAction, Mesh, serialize
from discolab.runtime.arguments import Pickled, Register
from discolab.runtime.serialize import (
    LazyPickle,
    Message,
    ProtocolError,
    decode,
    encode,
    open_all,
    register_type,
)

helpers = runpy.run_path(str(Path(__file__).with_name("same_values.py")))
same = helpers["same"]


def there_and_back(value: Any) -> Any:
    return decode(*encode(value))


@pytest.fixture
def user_types() -> Iterator[None]:
    """Forget afterwards what the test has registered."""
    by_class, by_name = dict(serialize.USER_BY_CLASS), dict(serialize.USER_BY_NAME)
    yield
    for table, before in (
        (serialize.USER_BY_CLASS, by_class),
        (serialize.USER_BY_NAME, by_name),
    ):
        table.clear()
        table.update(before)


# -- values -------------------------------------------------------------------------------------

DTYPES = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]
PLAIN = [
    None,
    True,
    False,
    0,
    255,
    256,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**63) - 1,
    10**4000,
    -(256**300),
    0.0,
    -0.0,
    float("inf"),
    float("nan"),
    5e-324,
    complex(-0.0, float("nan")),
    "",
    "a\0b",
    "ä€😀",
    "\ud800 half of a pair",
    "\ud83d\ude00",
    "x" * 254,
    "x" * 255,
    "ü" * 200,
    b"",
    b"\xff" * 254,
    b"\xff" * 255,
    bytearray(b"ab"),
    (),
    (None,),
    tuple(range(254)),
    tuple(range(255)),
    [],
    [[], [()]],
    list(range(1000)),
    {},
    {"a": 1, None: 2, (1, "b"): [3]},
    {i: -i for i in range(500)},
    set(),
    {1, "a", None, (2, 3)},
    set(range(1000)),
    frozenset(),
    frozenset({frozenset({1}), "a"}),
    slice(None),
    slice(1, -2, 3),
    slice("a", [1], None),
    range(0),
    range(10, -5, -3),
    range(-(10**30), 10**30, 10**29),
    ...,
    Register(0),
    Register(17),
    Register(-1),
    torch.Size([]),
    torch.Size([2, 0, 2**62]),
    torch.device("cpu"),
    torch.device("cuda"),
    torch.device("cuda:7"),
    torch.device("meta"),
    torch.strided,
    torch.sparse_csr,
    torch.jagged,
    torch.contiguous_format,
    torch.channels_last,
    torch.preserve_format,
    *DTYPES,
]


def name_of(value: object) -> str:
    """The same in every process, unlike an address and the order of a set."""
    text = repr(value)
    differs = isinstance(value, set | frozenset) or " at 0x" in text
    return type(value).__name__ if differs else text[:30]


@pytest.mark.parametrize("value", PLAIN, ids=name_of)
def test_a_value_of_each_type_arrives_as_it_is_and_open(value: Any) -> None:
    message = encode(value)
    assert type(message) is Message
    assert type(message.body) is bytes
    assert message.frames == []
    assert same(decode(*message), value)


@pytest.mark.parametrize("dtype", sorted({*np.sctypeDict.values()} - {np.object_}, key=str))
def test_numpy_scalars(dtype: Any) -> None:
    value = np.zeros(1, dtype)[0]
    got = open_all(there_and_back(value))
    assert isinstance(got, np.generic)
    assert got.dtype == value.dtype  # numpy's long and long long are one dtype
    assert got == value


def test_singletons_stay_what_they_are() -> None:
    for value in (None, True, False, ..., torch.float32, torch.strided, torch.channels_last):
        assert there_and_back(value) is value


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 300),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None, categories=None)),
    st.binary(),
    st.integers(0, 2**63 - 1).map(Register),
    st.sampled_from([..., torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), range(3)]),
    st.builds(range, st.integers(), st.integers(), st.integers().filter(bool)),
)
HASHABLE = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple), st.frozensets(inner, max_size=4)
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.sets(HASHABLE, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=20,
)


@given(VALUES)
@example({True: 1, 0: 2})
def test_any_plain_value_arrives_as_it_is(value: Any) -> None:
    message = encode(value)
    assert message.frames == []
    got = decode(*message)
    assert same(got, value)
    assert encode(list(value) if isinstance(value, tuple) else value).frames == []


@given(VALUES, st.sampled_from([bytes, bytearray, memoryview]))
def test_a_body_is_any_buffer(value: Any, kind: Any) -> None:
    assert same(decode(kind(encode(value).body)), value)


def test_a_command_and_a_reply() -> None:
    command = (3, 17, Register(5), (), {}, 1, ("Cell In[3]", 4))
    reply = (12345, 2, [])
    for value, most in ((command, 100), (reply, 30)):
        message = encode(value)
        assert len(message.body) <= most
        assert same(decode(*message), value)


def test_several_threads_encode_and_decode() -> None:
    failures: list[Any] = []

    def work(seed: int) -> None:
        value = [(seed, i, str(i) * seed, {"a": torch.full((3,), seed)}) for i in range(50)]
        for _ in range(20):
            if not same(there_and_back(value), value):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- what has no type of its own ----------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


class Text(str):
    pass


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        Point(1, (2,)),
        Text("a"),
        Colour.RED,
        DiscoAction.SHUTDOWN,
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, 2]),
        Mesh(("dp",), (2,), (0, 1)),
        len,
        torch.relu,
        torch.nn.functional.relu,
        dict,
        torch.Tensor,
        ValueError,
        NotImplemented,
    ],
    ids=name_of,
)
def test_another_object_arrives_shut_and_opens_to_itself(value: Any) -> None:
    shut = there_and_back(value)
    assert type(shut) is LazyPickle
    got = shut.open()
    assert type(got) is type(value)
    assert got == value


@pytest.mark.parametrize("module", [torch.backends.cudnn, torch.ops, math], ids=name_of)
def test_modules_arrive_by_name_be_they_of_a_class_of_their_own(module: Any) -> None:
    assert there_and_back(module).open() is module


def test_a_function_of_a_notebook_may_name_such_modules() -> None:
    scope: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec("def switch():\n    return torch.backends.cudnn.enabled, torch.backends", scope)
    assert there_and_back(scope["switch"]).open()() == scope["switch"]()


def test_shut_values_are_found_in_all_containers() -> None:
    value = [(Point(1, 2),), {"a": Pickled([3])}, {len}, slice(len, None), frozenset({len})]
    shut = there_and_back(value)
    assert type(shut[0][0]) is LazyPickle
    assert open_all(shut) == [(Point(1, 2),), {"a": [3]}, {len}, slice(len, None), frozenset({len})]


# -- what is refused ------------------------------------------------------------------------------


def test_a_container_that_holds_itself_arrives_so() -> None:
    ring: list[Any] = [Point(1, 2)]
    loop: dict[str, Any] = {"ring": ring}
    loop["self"] = loop
    ring.append((loop,))
    got = open_all(there_and_back(loop))
    assert got["self"] is got
    assert got["ring"][1][0] is got
    assert got["ring"][0] == Point(1, 2)


def test_objects_that_come_twice_are_one_again() -> None:
    item, point = [1], Point(1, [2])
    got = open_all(there_and_back([item, item, {"a": (point, item), "b": point}]))
    assert got[0] is got[1] is got[2]["a"][1]
    assert got[2]["a"][0] is got[2]["b"]


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}])
def test_what_is_nested_too_deep_is_refused(wrap: Any) -> None:
    value: Any = 1
    for _ in range(64):
        value = wrap(value)
    assert same(open_all(there_and_back(value)), value)
    for _ in range(200_000):
        value = wrap(value)
    try:
        with pytest.raises(ArgumentError, match="nested too deep"):
            encode(value)
    finally:
        while value != 1:  # freed one by one: the interpreter's own stack is not endless either
            (value,) = value.values() if isinstance(value, dict) else value


# -- user types ---------------------------------------------------------------------------------


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def register_money(**changes: Any) -> None:
    functions: dict[str, Any] = {
        "size": lambda money: 8,
        "write": lambda money, buffer: struct.pack_into("<q", buffer, 0, money.cents),
        "read": lambda buffer: Money(struct.unpack("<q", buffer)[0]),
    }
    register_type(Money, "test.Money", **(functions | changes))


@pytest.mark.usefixtures("user_types")
def test_a_user_type_travels_without_pickle() -> None:
    register_money()
    message = encode([Money(5), {"a": Money(-7)}])
    first, rest = decode(*message)
    assert type(first) is Money
    assert (first.cents, rest["a"].cents) == (5, -7)

    class Euro(Money):
        pass

    assert type(there_and_back(Euro(1))) is LazyPickle


@pytest.mark.usefixtures("user_types")
def test_a_user_type_that_only_one_side_knows() -> None:
    register_money()
    message = encode(Money(5))
    serialize.USER_BY_NAME.clear()
    with pytest.raises(
        ProtocolError, match=r"'test.Money', .* is not registered .* call .*register_"
    ):
        decode(*message)


@pytest.mark.usefixtures("user_types")
@pytest.mark.parametrize(
    "changes",
    [
        {"size": lambda money: 1 / 0},
        {"size": lambda money: -1},
        {"size": lambda money: "8"},
        {"size": lambda money: 2**62},
        {"write": lambda money, buffer: 1 / 0},
        {"size": lambda money: 4},
    ],
    ids=["size raises", "negative", "no int", "huge", "write raises", "too small"],
)
def test_what_the_functions_of_a_user_type_raise_when_it_is_written(changes: Any) -> None:
    register_money(**changes)
    with pytest.raises(ArgumentError, match=r"a Money can't be sent: .*'test.Money'"):
        encode(Money(5))


@pytest.mark.usefixtures("user_types")
def test_what_the_function_that_reads_a_user_type_raises() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError

    def read(buffer: Any) -> Any:
        raise OddError

    register_money(read=read)
    with pytest.raises(ProtocolError, match=r"reads the user type 'test.Money' raised OddError"):
        decode(*encode(Money(5)))


@pytest.mark.usefixtures("user_types")
def test_a_class_that_a_cell_defines_anew_replaces_the_old_one() -> None:
    def define() -> type:
        class Thing:
            pass

        return Thing

    classes = [define(), define()]
    for cls in classes:
        register_type(cls, "test.Thing", lambda v: 0, lambda v, b: None, lambda b, cls=cls: cls())
    assert type(there_and_back(classes[1]())) is classes[1]
    assert classes[0] not in serialize.USER_BY_CLASS
    register_type(classes[1], "other name", lambda v: 0, lambda v, b: None, lambda b: None)
    assert "test.Thing" not in serialize.USER_BY_NAME


@pytest.mark.usefixtures("user_types")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((int, "a", len, len, len), "int has a type on the wire already"),
        ((torch.Tensor, "a", len, len, len), "Tensor has a type on the wire already"),
        ((3, "a", len, len, len), "a class is needed"),
        ((Money, "", len, len, len), "a name of 1 to 200 bytes"),
        ((Money, "ä" * 101, len, len, len), "a name of 1 to 200 bytes"),
        ((Money, 3, len, len, len), "a name of 1 to 200 bytes"),
        ((Money, "\ud800", len, len, len), "no name in Unicode"),
        ((Money, "a", 8, len, len), "size must be a function"),
        ((Money, "a", len, len, None), "read must be a function"),
    ],
)
def test_a_wrong_registration_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        register_type(*arguments)


@pytest.mark.usefixtures("user_types")
def test_a_name_belongs_to_one_class() -> None:
    register_money()
    with pytest.raises(ArgumentError, match=r"'test.Money' is the name of Money already"):
        register_type(Point, "test.Money", len, len, len)
