"""Frames that nobody has packed: they are refused, and nothing is allocated for what they claim.

``python tests/transport/fuzz_frames.py 10000000`` for a long run.
"""

import random
import sys
import tracemalloc

from discolab.transport import frame
from discolab.transport.frame import FrameError, bundle, pack, unbundle, unpack

MOST = 64_000  # bytes that a frame of few bytes may make us take


def spoiled(chance: random.Random, good: list[bytes]) -> bytes:
    """Bytes by chance, or a good frame with something in it changed."""
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


def run(count: int, seed: int) -> None:
    """Try so many; raises where one is not refused as it should be."""
    chance = random.Random(seed)
    frames = [
        pack(b""),
        pack(b"body"),
        pack(b"body", [b"1", b"", b"22"]),
        pack(b"b", [b"x"] * (frame.MOST_PARTS + 1)),
    ]
    good = [one.data for one in (*frames, *bundle(frames[:3]))]
    tracemalloc.start()
    for _ in range(count):
        data = spoiled(chance, good)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            for one in unbundle(data):
                unpack(one)
        except FrameError:
            pass
        taken = tracemalloc.get_traced_memory()[1] - before
        assert taken <= MOST + 200 * len(data), f"{taken} bytes for {data!r}"
    tracemalloc.stop()


if __name__ == "__main__":
    run(int(sys.argv[1]), seed=1)
