"""The wire protocol: values that go through it unchanged, what is refused, user types, vectors."""

import collections
import enum
import json
import re
import runpy
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from discolab.runtime import ArgumentError, DiscoAction, Mesh, wire_types
from discolab.runtime.arguments import Pickled, Register
from discolab.runtime.protocol import (
    VERSION,
    Message,
    ProtocolError,
    Sealed,
    decode,
    encode,
    open_all,
    register_type,
)

helpers = runpy.run_path(str(Path(__file__).with_name("fuzz_protocol.py")))
same = helpers["same"]


def there_and_back(value: Any) -> Any:
    return decode(*encode(value))


@pytest.fixture
def user_types() -> Iterator[None]:
    """Forget afterwards what the test has registered."""
    by_class, by_name = dict(wire_types.USER_BY_CLASS), dict(wire_types.USER_BY_NAME)
    yield
    for table, before in (
        (wire_types.USER_BY_CLASS, by_class),
        (wire_types.USER_BY_NAME, by_name),
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


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:30])
def test_a_value_of_each_type_arrives_as_it_is_without_pickle(value: Any) -> None:
    message = encode(value, pickled=False)
    assert type(message) is Message
    assert type(message.body) is bytes
    assert message.frames == []
    assert same(decode(*message, trusted=False), value)


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
    message = encode(value, pickled=False)
    assert message.frames == []
    got = decode(*message, trusted=False)
    assert same(got, value)
    assert encode(list(value) if isinstance(value, tuple) else value).frames == []


@given(VALUES, st.sampled_from([bytes, bytearray, memoryview]))
def test_a_body_is_any_buffer(value: Any, kind: Any) -> None:
    assert same(decode(kind(encode(value).body)), value)


def test_a_command_and_a_reply() -> None:
    command = (3, 17, Register(5), (), {}, 1, ("Cell In[3]", 4))
    reply = (12345, 2, [])
    for value, most in ((command, 50), (reply, 30)):
        message = encode(value, pickled=False)
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
        bytearray(b"ab"),
        Mesh(("dp",), (2,), (0, 1)),
        len,
        torch.relu,
        torch.nn.functional.relu,
        dict,
        torch.Tensor,
        ValueError,
        NotImplemented,
    ],
    ids=lambda value: repr(value)[:30],
)
def test_another_object_is_sealed_and_opens_to_itself(value: Any) -> None:
    sealed = there_and_back(value)
    assert type(sealed) is Sealed
    got = sealed.open()
    assert type(got) is type(value)
    assert got == value
    with pytest.raises(ArgumentError, match="pickled"):
        encode(value, pickled=False)
    with pytest.raises(ProtocolError, match="a pickle, which is not accepted"):
        decode(*encode(value), trusted=False)


def test_sealed_values_are_found_in_all_containers() -> None:
    value = [(Point(1, 2),), {"a": Pickled([3])}, {len}, slice(len, None), frozenset({len})]
    shut = there_and_back(value)
    assert type(shut[0][0]) is Sealed
    assert open_all(shut) == [(Point(1, 2),), {"a": [3]}, {len}, slice(len, None), frozenset({len})]


# -- what is refused ------------------------------------------------------------------------------


def test_a_container_that_holds_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    loop: dict[str, Any] = {}
    loop["self"] = loop
    for value in (ring, loop, (ring,), slice(ring, None)):
        with pytest.raises(ArgumentError, match="does a list hold itself"):
            encode(value)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, slice])
def test_depth_is_bounded_alike_on_both_sides(wrap: Any) -> None:
    value: Any = 1
    for _ in range(wire_types.DEEPEST):
        value = wrap(value)
    body, _ = encode(value)
    assert encode(decode(body)).body == body
    with pytest.raises(ArgumentError, match="nested more than 72 deep"):
        encode(wrap(value))
    deeper = body[:10] + encode(wrap(1)).body[10:-2] + body[10:]
    if wrap is not slice:
        with pytest.raises(ProtocolError, match="nested more than 72 deep"):
            decode(deeper)


def test_a_register_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ArgumentError, match="64 bits"):
        encode(Register(10**5000))


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
    message = encode([Money(5), {"a": Money(-7)}], pickled=False)
    first, rest = decode(*message, trusted=False)
    assert type(first) is Money
    assert (first.cents, rest["a"].cents) == (5, -7)

    class Euro(Money):
        pass

    assert type(there_and_back(Euro(1))) is Sealed


@pytest.mark.usefixtures("user_types")
def test_a_user_type_that_only_one_side_knows() -> None:
    register_money()
    message = encode(Money(5))
    wire_types.USER_BY_NAME.clear()
    with pytest.raises(
        ProtocolError, match=r"'test.Money', at offset 11 .* is not registered .* call .*register_"
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
    assert classes[0] not in wire_types.USER_BY_CLASS
    register_type(classes[1], "other name", lambda v: 0, lambda v, b: None, lambda b: None)
    assert "test.Thing" not in wire_types.USER_BY_NAME


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


# -- other versions -----------------------------------------------------------------------------


def test_another_version_is_named_with_the_way_out() -> None:
    body = bytearray(encode(1).body)
    body[4] = VERSION + 1
    with pytest.raises(
        ProtocolError, match=rf"version {VERSION + 1} .* version {VERSION} .*instal"
    ):
        decode(body)


# -- test vectors -------------------------------------------------------------------------------

VECTORS = json.loads(Path(__file__).with_name("protocol_vectors.json").read_text("utf-8"))


def build(words: Any) -> Any:
    """The value of a vector: JSON where that has the type, else one {type: content}."""
    if words is None or isinstance(words, bool | int | str):
        return words
    if isinstance(words, list):
        return [build(item) for item in words]
    ((kind, content),) = words.items()
    match kind:
        case "int":
            return int(content)
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(*map(float.fromhex, content))
        case "bytes":
            return bytes.fromhex(content)
        case "tuple" | "set" | "frozenset":
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](build(content))
        case "dict":
            return {build(key): build(value) for key, value in content}
        case "slice" | "range":
            return {"slice": slice, "range": range}[kind](*build(content))
        case "ellipsis":
            return ...
        case "Register" | "Size" | "device":
            make = {"Register": Register, "Size": torch.Size, "device": torch.device}[kind]
            return make(content)
        case "dtype" | "layout" | "memory_format":
            return getattr(torch, content)
        case "tensor" | "parameter":
            data = torch.tensor(content["data"], dtype=getattr(torch, content["dtype"]))
            data = data.reshape(content["shape"])
            if kind == "parameter":
                return torch.nn.Parameter(data, content["requires_grad"])
            return data.requires_grad_(content["requires_grad"])
        case "strided":
            data = torch.tensor(content["data"], dtype=torch.float32)
            if content["dtype"] == "complex64":
                data = torch.view_as_complex(data)
            views = {"": data, "t": data.t(), "same": data, "conj": data.conj()}
            made = [views[name] for name in content["views"]]
            return made if len(made) > 1 else made[0]
        case "array":
            data = np.array(content["data"], content["dtype"]).reshape(content["shape"])
            return np.asarray(data, order=content["order"])
        case "scalar":
            return np.dtype(content["dtype"]).type(content["value"])
        case "user":
            return Money(content)
        case "sealed":
            frames = tuple(memoryview(bytes.fromhex(frame)) for frame in content["frames"])
            data, table = bytes.fromhex(content["data"]), bytes.fromhex(content["table"])
            return Sealed(content["what"], data, table, frames)
    raise AssertionError(kind)


@pytest.mark.usefixtures("user_types")
@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda vector: vector["name"])
def test_vectors_both_ways(vector: Any) -> None:
    register_money()
    value = build(vector["value"])
    message = encode(value)
    assert message.body.hex() == vector["body"].replace(" ", "")
    assert [bytes(frame).hex() for frame in message.frames] == vector["frames"]
    got = decode(bytes.fromhex(vector["body"]), [bytes.fromhex(f) for f in vector["frames"]])
    if isinstance(value, Money):
        assert got.cents == value.cents
    else:
        assert same(got, value)
    if isinstance(value, Sealed):
        assert same(got.open(), build(vector["opens to"]))


@pytest.mark.parametrize("vector", VECTORS["malformed"], ids=lambda vector: vector["name"])
def test_malformed_vectors(vector: Any) -> None:
    body, frames = bytes.fromhex(vector["body"]), [bytes.fromhex(f) for f in vector["frames"]]
    with pytest.raises(ProtocolError) as raised:
        decode(body, frames)
    assert str(raised.value) == vector["error"]


def test_every_type_index_has_a_vector() -> None:
    met = {bytes.fromhex(vector["body"])[10] for vector in VECTORS["messages"]}
    met.add(wire_types.AGAIN)  # which no message begins with
    assert met == {
        number
        for name, number in vars(wire_types).items()
        if name.isupper()
        and type(number) is int
        and name not in ("VERSION", "DEEPEST", "MOST_DIMS", "NO_FRAME", "LONG", "BUFFER")
    }


def test_the_examples_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")
    call, mixed, frame = (
        bytes.fromhex("".join(line[:32].strip() for line in block.splitlines()))
        for block in re.findall(r"```\n(.*?)```", text.split("## Two messages")[1], re.DOTALL)
    )
    command = (3, 17, Register(5), (), {}, 1, ("Cell In[3]", 4))
    assert encode(command).body == call
    assert same(decode(call), command)
    tensor = torch.tensor([[1.0, 2.0, 3.0]])
    message = encode([tensor, len])
    assert message.body == mixed
    assert list(map(bytes, message.frames)) == [frame]
    got = decode(mixed, [frame])
    assert torch.equal(got[0], tensor)
    assert got[1].open() is len


def test_the_fuzzer_is_no_test() -> None:
    assert "atheris" not in sys.modules
