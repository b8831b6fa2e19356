"""Fuzzing of the protocol: whatever comes in, `decode` gives a value or a `ProtocolError`.

    python tests/runtime/fuzz_protocol.py --seconds 60              mutates the corpus blindly
    python tests/runtime/fuzz_protocol.py --atheris -- -max_total_time=600 /tmp/corpus
    python tests/runtime/fuzz_protocol.py --minimise /tmp/corpus    what of it reaches new code

The second needs `pip install atheris` and follows the coverage of the decoder; what stands
behind ``--`` is for libFuzzer. The tests replay the corpus beside this file and use `check`.

One input is a message in one piece: a byte of flags and the number of frames, the size of each
frame (u16), the frames, the body. What is beyond the end of the input is cut off.
"""

import argparse
import contextlib
import math
import random
import re
import resource
import struct
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "protocol_corpus"
READ_ONLY, UNTRUSTED = 0x80, 0x40  # flags; the other bits are the number of frames
MOST = 1 << 20  # elements that are looked at; few bytes can be shown as any number of them
SECONDS = 1.0  # of the processor, for any input of the size that a fuzzer makes
BYTES_A_BYTE, BYTES = 400, 400_000  # memory allowed for each byte of a message, and besides

if __name__ == "__main__" and "--atheris" in sys.argv:
    import atheris

    instrument = atheris.instrument_imports(
        include=[
            "discolab.runtime.protocol",
            "discolab.runtime.regions",
            "discolab.runtime.sealed",
            "discolab.runtime.wire_alias",
            "discolab.runtime.wire_read",
            "discolab.runtime.wire_tensors",
            "discolab.runtime.wire_types",
            "discolab.runtime.wire_write",
        ]
    )
else:
    instrument = contextlib.nullcontext()

import numpy as np  # noqa: E402  # what is not to be instrumented, first
import torch  # noqa: E402

with instrument:
    from discolab.runtime import protocol, sealed, wire_alias, wire_read, wire_tensors, wire_types
    from discolab.runtime.wire_tensors import Frames


class Pair:
    """A user type: two numbers."""

    pack = struct.Struct("<hh")

    def __init__(self, first: int, second: int) -> None:
        self.both = first, second

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and self.both == other.both

    def __hash__(self) -> int:
        return hash(self.both)


protocol.register_type(
    Pair,
    "fuzz.Pair",
    lambda pair: Pair.pack.size,
    lambda pair, buffer: Pair.pack.pack_into(buffer, 0, *pair.both),
    lambda buffer: Pair(*Pair.pack.unpack(buffer)),
)


# -- inputs -------------------------------------------------------------------------------------


def join(body: bytes, frames: Any = (), flags: int = 0) -> bytes:
    """One input of a message."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    assert len(sizes) < UNTRUSTED
    assert all(size < 2**16 for size in sizes)
    head = struct.pack(f"<B{len(sizes)}H", flags | len(sizes), *sizes)
    return b"".join([head, *map(bytes, frames), body])


def split(data: bytes) -> tuple[bytes, list[Any], bool]:
    """Body, frames and whether pickles are allowed."""
    if not data:
        return b"", [], True
    flags = data[0]
    count = flags & (UNTRUSTED - 1)
    sizes = data[1 : 1 + 2 * count]
    at = 1 + 2 * count
    frames: list[Any] = []
    for i in range(len(sizes) // 2):
        end = at + int.from_bytes(sizes[2 * i : 2 * i + 2], "little")
        frames.append(data[at:end] if flags & READ_ONLY else bytearray(data[at:end]))
        at = end
    return data[at:], frames, not flags & UNTRUSTED


# -- what must hold ------------------------------------------------------------------------------


def check(data: bytes) -> str:
    """Decode one input and what comes of it again; the outcome in a word or a message.

    Raises `AssertionError` where a promise is broken; an exception of another kind than
    `ProtocolError` goes through.
    """
    body, frames, trusted = split(data)
    size = len(body) + sum(map(len, frames))
    traced = tracemalloc.is_tracing()
    if traced:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
    start = time.thread_time()  # not that of the clock: the machine may be busy
    try:
        value = protocol.decode(body, frames, trusted)
    except protocol.ProtocolError as exc:
        outcome = str(exc)
        assert 0 < len(outcome) < 4000, f"a message of {len(outcome)} characters"
        return outcome
    finally:
        seconds = time.thread_time() - start
        assert seconds < SECONDS, f"{size} bytes took {seconds:.1f} s"
        if traced:
            used = tracemalloc.get_traced_memory()[1] - before
            assert used < BYTES_A_BYTE * size + BYTES, f"{size} bytes took {used} of memory"
    again = protocol.encode(value, pickled=trusted)
    third = protocol.decode(again.body, again.frames, trusted)
    assert same(value, third), f"{value!r} came again as {third!r}"
    last = protocol.encode(third)
    assert len(last.body) == len(again.body)
    assert [bytes(frame) for frame in last.frames] == [bytes(frame) for frame in again.frames]
    for item in sealed_in(value):
        with contextlib.suppress(protocol.ProtocolError):
            sealed.read_table(item.table, Frames(item.frames))
    return "value"


def same(a: Any, b: Any) -> bool:
    """Whether two values are of the same type and equal, NaNs and the bits of tensors included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        return (
            (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            and (a.layout, a.is_conj(), a.is_neg()) == (b.layout, b.is_conj(), b.is_neg())
            and (a.layout is not torch.strided or not a.numel() or a.stride() == b.stride())
            and (not 0 < a.numel() < MOST or torch.equal(bits(a), bits(b)))
        )
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, protocol.Sealed):
        return (a.what, a.data, a.table) == (b.what, b.data, b.table) and [
            bytes(frame) for frame in a.frames
        ] == [bytes(frame) for frame in b.frames]
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))
    if isinstance(a, set | frozenset):
        left = list(b)
        for item in a:
            for i, other in enumerate(left):
                if same(item, other):
                    del left[i]
                    break
            else:
                return False
        return not left
    if isinstance(a, slice | range):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return own.as_strided((own.numel(),), (1,)).view(torch.uint8)


def sealed_in(value: Any) -> Iterator[Any]:
    """Every `Sealed` in the containers of a value."""
    if type(value) is protocol.Sealed:
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from sealed_in(item)
    elif isinstance(value, dict):
        yield from sealed_in(list(value.items()))
    elif isinstance(value, slice):
        yield from sealed_in([value.start, value.stop, value.step])


# -- running ------------------------------------------------------------------------------------

ODD_BYTES = (0, 1, 2, 3, 8, 16, 17, 18, 48, 49, 52, 53, 64, 65, 127, 128, 254, 255)
ODD_WORDS = (0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**61 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """An input near another one."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(out) + 1)
        how = rng.randrange(8)
        if how == 0 and out:
            out[at % len(out)] = rng.choice(ODD_BYTES)
        elif how == 1 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif how == 2:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == 3:
            del out[at : at + rng.randrange(1, 9)]
        elif how == 4:
            out[at : at + 8] = rng.choice(ODD_WORDS).to_bytes(8, "little")
        elif how == 5:
            del out[at:]
        elif how == 6:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            out[at : at + rng.randrange(16)] = other[start : start + rng.randrange(64)]
        else:
            out[at:at] = out[at : at + rng.randrange(32)] * rng.randrange(1, 4)
    return bytes(out[:4096])


def read_corpus(folder: Path = CORPUS) -> list[bytes]:
    """The inputs in a folder, by name."""
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()]


def fuzz_blindly(seconds: float, seed: int) -> None:
    """Mutate what is in the corpus; print each new kind of outcome's count at the end."""
    rng = random.Random(seed)
    inputs = read_corpus()
    values = runs = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        data = mutate(rng.choice(inputs), inputs, rng)
        try:
            values += check(data) == "value"
        except BaseException:
            print(f"seed {seed}, run {runs}, input {data.hex()}", file=sys.stderr)
            raise
        runs += 1
    print(f"{runs} inputs, {values} of them messages; seed {seed}")


DECODER = (protocol, sealed, wire_alias, wire_read, wire_tensors, wire_types)


def arcs_of(data: bytes) -> frozenset[tuple[str, int, int]]:
    """The steps from line to line of the decoder that an input makes, and what comes of it."""
    files = {module.__file__ for module in DECODER}
    found: set[tuple[str, int, int]] = set()
    last: dict[int, int] = {}

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            key = id(frame)
            found.add((frame.f_code.co_filename, last.get(key, 0), frame.f_lineno))
            last[key] = frame.f_lineno
        elif event == "return":
            last.pop(id(frame), None)
        return trace

    sys.settrace(trace)
    try:
        outcome = check(data)
    finally:
        sys.settrace(None)
    found.add((re.sub(r"[^a-z ]|b?'.*'", "", outcome), 0, 0))
    if outcome == "value":
        found.add(("type index", split(data)[0][10], 0))
    return frozenset(found)


def minimise(folder: Path, out: Path) -> None:
    """Copy to `out` what of a folder reaches code that nothing shorter reaches."""
    inputs = sorted({*read_corpus(folder), *read_corpus(out)}, key=lambda data: (len(data), data))
    seen: set[tuple[str, int, int]] = set()
    kept = []
    for data in inputs:
        arcs = arcs_of(data)
        if not arcs <= seen:
            seen |= arcs
            kept.append((data, arcs))
    # once more from behind: a long input may have made shorter ones needless
    chosen: list[bytes] = []
    covered: set[tuple[str, int, int]] = set()
    for data, arcs in reversed(kept):
        if not arcs <= covered:
            covered |= arcs
            chosen.append(data)
    for path in out.iterdir():
        path.unlink()
    for i, data in enumerate(sorted(chosen, key=lambda data: (len(data), data))):
        (out / f"{i:03}").write_bytes(data)
    print(f"{len(inputs)} inputs, {len(chosen)} kept, {len(covered)} steps of the decoder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--minimise", type=Path)
    parser.add_argument("--memory", action="store_true", help="trace it, at half the speed")
    options, rest = parser.parse_known_args()
    soft = 8 * 2**30  # of address space; torch alone reserves some of it
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.set_num_threads(1)
    if options.memory:
        tracemalloc.start()
    if options.minimise:
        minimise(options.minimise, CORPUS)
    elif options.atheris:
        rest = [word for word in rest if word != "--"]
        inputs = read_corpus()

        def near(data: bytes, longest: int, seed: int) -> bytes:
            rng = random.Random(seed)
            if rng.random() < 0.5:
                return atheris.Mutate(data, longest)
            return mutate(data, inputs, rng)[:longest]

        atheris.Setup([sys.argv[0], *rest], lambda data: check(data) and None, custom_mutator=near)
        atheris.Fuzz()
    else:
        fuzz_blindly(options.seconds, options.seed)


if __name__ == "__main__":
    main()
