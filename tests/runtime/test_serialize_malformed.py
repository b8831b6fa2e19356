"""Bytes that are no message: always a `ProtocolError`, before memory is taken for them."""

import os
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from discolab.runtime import serialize
from discolab.runtime.arguments import Pickled, Register
from discolab.runtime.serialize import ProtocolError, decode, encode

BASE = torch.arange(12, dtype=torch.int16)
VALUES = [
    (3, 17, Register(5), (), {}, 1, ("Cell In[3]", 4)),
    [torch.ones(3), np.ones((2, 3)), np.float32(1)],
    {"shared": BASE, "part": BASE[2:7]},
    (torch.add, Pickled({"a": torch.ones(2)})),
]


@pytest.mark.parametrize("value", VALUES, ids=["command", "tensors", "shared", "pickles"])
def test_a_message_cut_short_or_with_something_behind_it(value: Any) -> None:
    body, frames = encode(value)
    for end in range(len(body)):
        with pytest.raises(ProtocolError, match="malformed message"):
            decode(body[:end], frames)
    with pytest.raises(ProtocolError, match="1 bytes behind its end"):
        decode(body + b"\0", frames)


@pytest.mark.parametrize("value", VALUES, ids=["command", "tensors", "shared", "pickles"])
def test_a_message_with_other_frames(value: Any) -> None:
    body, frames = encode(value)
    with pytest.raises(ProtocolError, match="of which it does not use all"):
        decode(body, [*frames, b""])
    if frames:
        with pytest.raises(ProtocolError):
            decode(body, frames[1:])


@pytest.mark.parametrize("value", [torch.ones(4), np.ones(4)], ids=["tensor", "array"])
def test_a_frame_of_another_size(value: Any) -> None:
    body, (frame,) = encode(value)
    for other in (b"", bytes(frame) + b"\0", bytes(frame)[1:]):
        with pytest.raises(ProtocolError, match=rf"a frame has {len(other)} bytes where"):
            decode(body, [other])


SIZES = st.integers(-3, 2**64 - 1) | st.sampled_from([0, 1, 2, 2**31, 2**32, 2**62, 2**63])


class _Made:
    """Pickled as a call of one of the functions that a message may call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduction = function, arguments

    def __reduce__(self) -> Any:
        return self.reduction


def made(function: Any, *arguments: Any) -> bytes:
    """The body of a message that calls a function, which no `encode` would have written."""
    return pickle.dumps(_Made(function, *arguments), 5, buffer_callback=lambda _: None)


@given(
    st.sampled_from([serialize.build_tensor, serialize.build_array]),
    st.lists(SIZES, max_size=66),
    st.sampled_from(["float32", "uint8", "qint8", "<f4", "|O", "nonsense", ""]),
    st.none() | st.integers(0, 64),
)
def test_any_shape_with_any_frame(function: Any, shape: Any, name: str, nbytes: Any) -> None:
    data = None if nbytes is None else serialize._BYTES
    frames = [] if nbytes is None else [bytes(nbytes)]
    extra = ("C",) if function is serialize.build_array else ()
    body = made(function, data, name, tuple(shape), *extra)
    tracemalloc.start()
    try:
        value = decode(body, frames)
    except ProtocolError:
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 200_000
    assert list(value.shape) == shape
    assert value.nbytes == (nbytes or 0)


@given(
    st.lists(st.tuples(SIZES | st.integers(1, 4), SIZES | st.integers(0, 4)), max_size=4),
    st.integers(-3, 40) | SIZES,
)
def test_a_tensor_never_leaves_the_frame_that_it_shares(dims: Any, offset: int) -> None:
    shape, strides = tuple(d[0] for d in dims), tuple(d[1] for d in dims)
    head = pickle.dumps({0: (0, offset, strides)}, 5)
    body = serialize._SHARED.pack(b"S", len(head)) + head
    body += made(serialize.build_tensor, serialize._BYTES, "int16", shape)
    frame = bytearray(32)
    try:
        value = decode(body, [frame])
    except ProtocolError:
        return
    last = sum((size - 1) * step for size, step in dims)
    assert offset >= 0
    assert offset + 2 * (last + 1) <= 32
    assert value.data_ptr() - torch.frombuffer(frame, dtype=torch.uint8).data_ptr() == offset


@pytest.mark.parametrize(
    "value", [os.system, Pickled, torch.load, pickle.loads], ids=lambda function: function.__name__
)
def test_a_message_calls_nothing_but_what_makes_plain_values(value: Any) -> None:
    with pytest.raises(ProtocolError, match="it asks for"):
        decode(pickle.dumps(value, 5))
    with pytest.raises(ProtocolError, match="it asks for"):
        decode(made(value, "echo no"))


@pytest.mark.parametrize("body", [None, 3, "text", [], np.zeros(30, np.uint8)[::2], object()])
def test_what_is_no_body(body: Any) -> None:
    with pytest.raises(ProtocolError, match="the body of a message is no contiguous buffer"):
        decode(body)


def test_a_lazy_pickle_is_never_opened_by_decode() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return exec, ("raise AssertionError('unpickled')",)

    shut = decode(*encode([Pickled(Trap()), {"a": Pickled((Trap(),))}]))
    with pytest.raises(AssertionError, match="unpickled"):
        shut[0].open()
