"""Frames and first messages by strangers: refused, and nothing is allocated for them.

``python tests/transport/fuzz_frames.py 10000000`` for a long run.
"""

import contextlib
import random
import socket
import sys
import tracemalloc
from collections.abc import Callable

from discolab.transport import frame, handshake
from discolab.transport.frame import FrameError, bundle, pack, unbundle, unpack
from discolab.transport.handshake import hear_hello, new_token, say_hello
from discolab.transport.unix_sockets import local_socket

MOST = 64_000  # bytes that a few bytes may make us take
TOKEN = new_token()


def spoiled(chance: random.Random, good: list[bytes]) -> bytes:
    """Bytes by chance, or good ones with something in them changed."""
    if chance.random() < 0.2:
        return chance.randbytes(chance.randrange(64))
    data = bytearray(chance.choice(good))
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data)) if data else 0
        change = chance.randrange(4)
        if change == 0:
            data[at : at + 1] = chance.randbytes(1)
        elif change == 1:
            data[at : at + 8] = chance.choice([b"\xff" * 8, bytes(8), chance.randbytes(8)])
        elif change == 2:
            del data[at:]
        else:
            data[at:at] = chance.randbytes(chance.randrange(9))
    return bytes(data)


def take_frame(data: bytes) -> None:
    """As a connection does with a frame that came."""
    with contextlib.suppress(FrameError):
        for one in unbundle(data):
            unpack(one)


def take_hello(data: bytes) -> None:
    """As a port does with a first message."""
    hello = hear_hello(data, TOKEN)
    assert hello is None or TOKEN in data


def take_stream(data: bytes) -> None:
    """As a port does with what a stranger writes to a stream."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        ours.setblocking(False)
        receiving = local_socket(ours)
        with contextlib.suppress(OSError):
            while (found := receiving.recv(wait=False, most=handshake.SIZE)) is not None:
                assert len(found[0]) <= handshake.SIZE


def run(count: int, seed: int) -> None:
    """Try so many of each; a hundredth of them on a socket."""
    chance = random.Random(seed)
    frames = [
        pack(b""),
        pack(b"body"),
        pack(b"body", [b"1", b"", b"22"]),
        pack(b"b", [b"x"] * (frame.MOST_PARTS + 1)),
    ]
    hello = say_hello(TOKEN, 3, 1)
    kinds: list[tuple[int, Callable[[bytes], None], list[bytes]]] = [
        (count, take_frame, [one.data for one in (*frames, *bundle(frames[:3]))]),
        (count, take_hello, [hello]),
        (count // 100, take_stream, [len(hello).to_bytes(4, "little") + b"\0" + hello]),
    ]
    tracemalloc.start()
    for number, take, good in kinds:
        for _ in range(number):
            data = spoiled(chance, good)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            take(data)
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken <= MOST + 200 * len(data), f"{taken} bytes for {data!r}"
    tracemalloc.stop()


if __name__ == "__main__":
    run(int(sys.argv[1]), seed=1)
