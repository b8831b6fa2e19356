"""Bytes that are no message: always a `ProtocolError`, soon, and without much memory.

`check`, of the fuzzer beside this file, asserts what must hold of any bytes at all.
"""

import json
import random
import runpy
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from discolab.runtime import wire_types as wire
from discolab.runtime.arguments import Pickled, Register
from discolab.runtime.protocol import ProtocolError, decode, encode

HERE = Path(__file__).parent


fuzzer = SimpleNamespace(**runpy.run_path(str(HERE / "fuzz_protocol.py")))
VECTORS = json.loads((HERE / "protocol_vectors.json").read_text("utf-8"))
MESSAGES = [
    (bytes.fromhex(v["body"]), [bytes.fromhex(f) for f in v["frames"]]) for v in VECTORS["messages"]
]
BARE = wire.HEADER.pack(wire.MAGIC, wire.VERSION, 0)


@pytest.fixture
def traced() -> Iterator[None]:
    """Let `check` look at the memory that decoding takes."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


# -- torn and changed messages --------------------------------------------------------------------


@pytest.mark.parametrize(("body", "frames"), MESSAGES)
def test_a_message_cut_short_anywhere(body: bytes, frames: list[bytes]) -> None:
    for end in range(len(body)):
        with pytest.raises(ProtocolError):
            decode(body[:end], frames)
    with pytest.raises(ProtocolError, match=r"1 bytes behind its end|is not registered"):
        decode(body + b"\0", frames)


@pytest.mark.parametrize(("body", "frames"), MESSAGES)
def test_a_message_with_other_frames(body: bytes, frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match=r"frames by its header, \d+ came"):
        decode(body, [*frames, b""])
    if frames:
        with pytest.raises(ProtocolError, match=r"frames by its header, \d+ came"):
            decode(body, frames[1:])
        if body[10] in (wire.TENSOR, wire.ARRAY):
            for other in (b"", frames[0] + b"\0", frames[0][1:]):
                with pytest.raises(ProtocolError, match="frame 0 has"):
                    decode(body, [other, *frames[1:]])


@pytest.mark.parametrize(("body", "frames"), MESSAGES)
def test_a_message_with_one_byte_changed_anywhere(body: bytes, frames: list[bytes]) -> None:
    for at in range(min(len(body), 120)):
        for value in {*fuzzer.ODD_BYTES, body[at] ^ 1, (body[at] + 1) % 256}:
            changed = body[:at] + bytes((value,)) + body[at + 1 :]
            fuzzer.check(fuzzer.join(changed, frames))


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes(data: bytes, header: bool) -> None:
    fuzzer.check(b"\0" + (BARE if header else b"") + data)


@given(st.sampled_from(MESSAGES), st.integers(0, 2**32), st.integers(1, 20))
def test_messages_changed_in_several_places(message: Any, seed: int, times: int) -> None:
    rng = random.Random(seed)
    others = [fuzzer.join(*m) for m in MESSAGES]
    data = fuzzer.join(*message)
    for _ in range(times):
        fuzzer.check(fuzzer.mutate(data, others, rng))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("path", sorted((HERE / "protocol_corpus").iterdir()), ids=lambda p: p.name)
def test_the_corpus_of_the_fuzzer(path: Path) -> None:
    fuzzer.check(path.read_bytes())


def test_the_corpus_is_small_and_reaches_every_type() -> None:
    inputs = fuzzer.read_corpus()
    assert len(inputs) < 200
    assert sum(map(len, inputs)) < 200_000
    met = {fuzzer.split(data)[0][10] for data in inputs if fuzzer.check(data) == "value"}
    assert met >= {body[10] for body, _ in MESSAGES}


# -- lengths and numbers that are too large -------------------------------------------------------

HUGE = [b"\xff" + struct.pack("<Q", n) for n in (255, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("length", [b"\x02", b"\xfe", *HUGE])
@pytest.mark.parametrize(
    "kind",
    [
        wire.BIG,
        wire.STR,
        wire.BYTES,
        wire.TUPLE,
        wire.LIST,
        wire.DICT,
        wire.SET,
        wire.FROZENSET,
        wire.SIZE,
        wire.USER,
        wire.PICKLED,
    ],
)
def test_a_length_beyond_the_message_allocates_nothing(kind: int, length: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"length of|bytes|it ends after|left"):
        decode(BARE + bytes((kind,)) + length + b"\0")
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    with pytest.raises(ProtocolError):
        decode(BARE + bytes((kind,)) + length + b"\0")
    assert tracemalloc.get_traced_memory()[1] - before < 20_000


SIZES = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2, 2**31, 2**32, 2**62, 2**63])


@given(
    st.sampled_from([wire.TENSOR, wire.ARRAY]),
    st.lists(SIZES, max_size=66),
    st.integers(0, 60),
    st.sampled_from([0, 1, wire.NO_FRAME]),
    st.integers(0, 64),
)
def test_any_shape_with_any_frame(
    kind: int, shape: list[int], code: int, number: int, nbytes: int
) -> None:
    device = b"\x03cpu" if kind == wire.TENSOR else b""
    record = bytes((kind, code, 0)) + device + bytes((len(shape),))
    record += struct.pack(f"<{len(shape)}QI", *shape, number)
    header = wire.HEADER.pack(wire.MAGIC, wire.VERSION, 1)
    for frames in ([], [bytes(nbytes)]):
        header = wire.HEADER.pack(wire.MAGIC, wire.VERSION, len(frames))
        try:
            value = decode(header + record, frames)
        except ProtocolError:
            continue
        assert list(value.shape) == shape
        assert value.nbytes == sum(map(len, frames))


@given(
    st.lists(st.tuples(SIZES | st.integers(1, 4), SIZES | st.integers(0, 4)), max_size=4),
    st.integers(0, 40) | SIZES,
    st.sampled_from([0, 1, wire.NO_FRAME]),
)
def test_an_alias_never_leaves_its_frame(dims: Any, offset: int, number: int) -> None:
    n = len(dims)
    record = bytes((wire.ALIAS, wire.DTYPE_CODE[torch.int16], 0)) + b"\x03cpu" + bytes((n,))
    record += struct.pack(f"<{2 * n}Q", *(d[0] for d in dims), *(d[1] for d in dims))
    record += struct.pack("<QI", offset, number)
    table = b"\x01" + record
    data = b"\x80\x05cdiscolab.runtime.sealed\ncarried\nK\0\x85R."
    body = wire.HEADER.pack(wire.MAGIC, wire.VERSION, 1) + bytes((wire.PICKLED, 0, 1))
    body += wire.length(len(table)) + table + wire.length(len(data)) + data
    frame = bytearray(32)
    try:
        shut = decode(body, [frame])
    except ProtocolError:
        return
    assert number == 0
    last = sum((size - 1) * step for size, step in dims)
    assert offset + 2 * (last + 1) <= 32
    try:
        value = shut.open()
    except ProtocolError:  # torch can't have it
        assert max(step for _, step in dims) >= 2**31
        return
    assert value.data_ptr() - torch.frombuffer(frame, dtype=torch.uint8).data_ptr() == offset


def test_values_nested_without_end() -> None:
    for kind in (wire.TUPLE, wire.LIST, wire.SET):
        with pytest.raises(ProtocolError, match="nested more than 72 deep"):
            decode(BARE + bytes((kind, 1)) * 500_000 + b"\0")
    with pytest.raises(ProtocolError, match="nested more than 72 deep"):
        decode(BARE + bytes((wire.SLICE,)) * 500_000 + b"\0")


# -- keys -----------------------------------------------------------------------------------------


def keyed(kind: int, keys: list[Any]) -> bytes:
    """A message of a set or dict that no Python could have held."""
    items = keys if kind != wire.DICT else [x for key in keys for x in (key, None)]
    body = encode(items).body
    assert body[10] == wire.LIST
    return (
        BARE
        + bytes((kind,))
        + wire.length(len(keys))
        + body[10 + 1 + len(wire.length(len(items))) :]
    )


KINDS = [wire.SET, wire.FROZENSET, wire.DICT]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_made_to_collide_are_refused_soon(kind: int) -> None:
    flood = [2**61 - 1 + i * (2**61 - 1) for i in range(20_000)]
    body = keyed(kind, flood)
    start = time.perf_counter()
    with pytest.raises(ProtocolError, match="20000 keys with the same hash, 256 are possible"):
        decode(body)
    assert time.perf_counter() - start < 2
    assert len(decode(keyed(kind, flood[:200]))) == 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [[1, 1], [1, True], ["a", "b", "a"], [0.0, 0], [Register(1), 1]])
def test_a_key_that_comes_twice(kind: int, keys: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="are different"):
        decode(keyed(kind, keys))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [[], {}, set(), np.ones(2), ([],), slice(None)], ids=str)
def test_what_can_be_no_key(kind: int, key: Any) -> None:
    message = encode([key])
    head = wire.HEADER.pack(wire.MAGIC, wire.VERSION, len(message.frames))
    with pytest.raises(ProtocolError, match="what can't be a key"):
        decode(
            head + bytes((kind, 1)) + message.body[12:] + b"\0" * (kind == wire.DICT), message[1]
        )


def test_many_keys_that_are_none_of_this() -> None:
    for value in (
        set(range(100_000)),
        {str(i): i for i in range(10_000)},
        {float(i) for i in range(10_000)},
        {(i, -i) for i in range(10_000)},
        {-(2**70) * i for i in range(5_000)},
    ):
        assert decode(encode(value).body) == value


# -- what is given to decode ----------------------------------------------------------------------


@pytest.mark.parametrize("body", [None, 3, "text", [], np.zeros(30, np.uint8)[::2], object()])
def test_what_is_no_body(body: Any) -> None:
    with pytest.raises(ProtocolError, match="the body of a message is no contiguous buffer"):
        decode(body)


def test_a_pickle_is_never_opened_by_decode() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return exec, ("raise AssertionError('unpickled')",)

    message = encode([Pickled(Trap()), {"a": Pickled((Trap(),))}])
    shut = decode(*message)
    with pytest.raises(AssertionError, match="unpickled"):
        shut[0].open()
    with pytest.raises(ProtocolError, match="not accepted from this peer"):
        decode(*message, trusted=False)
