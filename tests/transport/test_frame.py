"""Frames: what was packed is what comes out; what nobody has packed is refused, whatever it is."""

import os
import random
import struct

import pytest

from discolab.transport import frame
from discolab.transport.frame import BufferPool, Frame, FrameError, bundle, pack, unbundle, unpack
from tests.transport.fuzz_frames import run


def arrived(sent: Frame) -> tuple[bytes, list[bytes]]:
    """A frame after its travel."""
    fd = None if sent.buffer is None else os.dup(sent.buffer.fd)
    body, parts = unpack(sent.data, fd)
    return bytes(body), [bytes(part) for part in parts]


@pytest.fixture(params=[False, True], ids=["native", "portable"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(frame, "PORTABLE", True)
    elif frame.PORTABLE:
        pytest.skip("this system has the portable way only")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 5], [100_000], [16_385] * 9, [7] * 5000])
def test_what_was_packed_comes_out(way: None, shared: bool, sizes: list[int]) -> None:
    chance = random.Random(1)
    for body in (b"", b"body", chance.randbytes(20_000)):
        parts = [chance.randbytes(size) for size in sizes]
        assert arrived(pack(body, parts, shared)) == (body, parts)


def test_a_frame_beside_a_buffer_is_short(way: None) -> None:
    for parts in ([bytes(1000)] * 200, [bytes(1 << 20)], [bytes(10)] * 5000):
        assert len(pack(b"body", parts, shared=True).data) <= frame.LARGEST


def test_a_buffer_is_used_again_once_it_is_free(way: None) -> None:
    pool, freed = BufferPool(), []
    first = pack(b"", [b"a" * 100_000], True, pool)
    assert first.buffer is not None
    _, parts = unpack(first.data, os.dup(first.buffer.fd), freed.append)
    assert bytes(parts[0][:3]) == b"aaa"
    del parts
    assert freed == [first.buffer.number]
    pool.free(freed[0])
    again = pack(b"", [b"b" * 90_000], True, pool)
    assert again.buffer is first.buffer
    assert arrived(again) == (b"", [b"b" * 90_000])


def test_what_is_held_back_can_do_without_its_descriptor(way: None) -> None:
    sent = pack(b"body", [b"x" * 100_000, b"y"], shared=True)
    assert arrived(frame.reload(*frame.unload(sent))) == (b"body", [b"x" * 100_000, b"y"])


@pytest.mark.slow
def test_bytes_that_nobody_has_packed_are_refused() -> None:
    """Millions of them in `fuzz_frames.py`."""
    run(10_000, seed=2)


def test_sizes_are_checked_before_anything_is_taken() -> None:
    head = frame.HEADER.pack(frame.MAGIC, frame.VERSION, frame.PARTS, 1, 0)
    for size, place in ((1 << 60, -1), (1 << 60, 0), (1, -2), (1, 1 << 40), (5, -1)):
        with pytest.raises(FrameError):
            unpack(head + struct.pack("<Qq", size, place) + b"four")


def test_bundles_come_apart_as_they_were() -> None:
    frames = [pack(b"x" * n) for n in range(300)]
    assert [one for made in bundle(frames) for one in unbundle(made.data)] == [
        one.data for one in frames
    ]
