"""Damages the indexes of checkpoints in all ways it can think of, and opens them.

    python -m tests.loader.fuzz_index --count 100000

What must come out each time: a catalog that keeps its promises, or one CheckpointError. Nothing
else is raised, no file outside of the checkpoint's folder is opened, nothing waits, and no more
memory is taken than a small multiple of what the files hold. Mutation i of a seed is always the
same one.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import pickle
import random
import resource
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from discolab.loader.catalog import Catalog, c_strides
from discolab.loader.errors import CheckpointError
from discolab.loader.formats import open_checkpoint

from .checkpoints import (
    filled,
    write_dcp,
    write_dcp_chunks,
    write_safetensors,
    write_safetensors_index,
    write_tensor_cache,
    write_torch,
    write_torch_index,
)
from .damage import NUMBERS, damage_bytes, damage_json, damage_pickle

HEADROOM = 2 * 2**20
PER_BYTE = 100
ADDRESS_SPACE = 2**30


@dataclass
class Case:
    """A checkpoint in a folder of its own, and the index in it that is damaged."""

    name: str
    opened: Path
    index: Path
    kind: str  # "json", "header" or "bytes"
    good: bytes = b""

    def __post_init__(self) -> None:
        self.good = self.index.read_bytes()


@dataclass
class Report:
    """What came out."""

    opened: int = 0
    refused: int = 0
    peak: int = 0
    slowest: float = 0.0
    texts: Counter[str] = field(default_factory=Counter)


def make_cases(root: Path) -> list[Case]:
    """One checkpoint of each format, each beside files that must not be opened."""
    state = {
        f"p{i}": filled((3, 2), dtype, i) for i, dtype in enumerate((torch.float32, torch.int8))
    }
    state["s"], state["e"] = torch.tensor(1.0), torch.zeros(0, 3)
    nested = {"model": state, "t": state["p0"].t(), "step": 3, "more": [state["p1"], {1: "x"}]}
    places = {}
    for name in ("cache", "file", "header", "index", "torch", "dcp", "chunks", "inner", "bins"):
        folder = places[name] = root / name / "checkpoint"
        (folder / "sub").mkdir(parents=True)
        (root / name / "outside.bin").write_bytes(b"\xab" * 64)
        (folder / "link.bin").symlink_to("../outside.bin")
        os.mkfifo(folder / "pipe")
    cache = write_tensor_cache(places["cache"], state, formats={"p0": "f32-to-bf16"}, gap=1)
    file = write_safetensors(places["file"] / "m.safetensors", state, {"a": "b"})
    shards = write_safetensors_index(places["index"], [state, {"q": torch.ones(2)}])
    header = write_safetensors_index(places["header"], [state, {"q": torch.ones(2)}])
    shard = header.parent / "model-00001-of-00002.safetensors"
    saved = write_torch(places["torch"] / "m.pt", nested)
    dcp = write_dcp(places["dcp"], nested)
    chunks = write_dcp_chunks(places["chunks"], state, 2)
    bins = write_torch_index(places["bins"], [state, {"q": torch.ones(2)}])
    inner = write_dcp(places["inner"], state)
    return [
        Case("tensor-cache index", cache.parent, cache, "json"),
        Case("safetensors file", file, file, "header"),
        Case("safetensors index", shards, shards, "json"),
        Case("safetensors shard", header, shard, "header"),
        Case("torch.save file", saved, saved, "bytes"),
        Case("torch.save index", bins, bins, "json"),
        Case("DCP .metadata", dcp, dcp / ".metadata", "bytes"),
        Case("DCP .metadata of chunks", chunks, chunks / ".metadata", "bytes"),
        Case("DCP data file", inner, inner / "__0_0.distcp", "bytes"),
    ]  # fmt: skip


def mutate(case: Case, rng: random.Random) -> bytes:
    """The damaged content of a case's index."""
    data = case.good
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if case.kind == "header" and rng.random() < 0.6:
            length = int.from_bytes(data[:8], "little")
            if 8 + length <= len(data):
                text = damage_json(data[8 : 8 + length], rng)
                # with its right length most of the time, or nothing else would ever be looked at
                length = len(text) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64
                data = struct.pack("<Q", length) + text + data[8 + length :][-60:]
                continue
        if case.kind == "json" and rng.random() < 0.7:
            data = damage_json(data, rng)
        elif case.kind == "bytes" and b"\x80\x02" in data + b"\x80\x04" and rng.random() < 0.4:
            data = damage_pickle(data, rng)
        else:
            data = damage_bytes(data, rng)
    return data


def keeps_promises(catalog: Catalog, folder: Path) -> None:
    """What every catalog promises; AssertionError if not."""
    root = folder.resolve()
    for file in catalog.files:
        assert Path(file.path).is_relative_to(root), file
        assert os.path.getsize(file.path) == file.size, file
    for name, entry in catalog.entries.items():
        assert entry.name == name
        held = 0
        for piece in entry.pieces:
            strides = piece.strides or c_strides(piece.shape)
            numel = math.prod(piece.shape)
            last = sum((n - 1) * step for n, step in zip(piece.shape, strides, strict=True))
            end = piece.offset + (last + 1 if numel else 0) * entry.stored.itemsize
            assert 0 <= piece.offset <= end <= catalog.files[piece.file].size, (name, piece)
            for begin, size, whole in zip(piece.start, piece.shape, entry.shape, strict=True):
                assert 0 <= begin <= begin + size <= whole, (name, piece)
            held += numel
        assert held == entry.numel
        # no more than the files hold: nobody is made to allocate on an index's word
        assert entry.stored_bytes <= sum(file.size for file in catalog.files)
    pickle.dumps(catalog)
    assert str(catalog)


_PYTHON = os.path.dirname(os.__file__)
_watched: list[Path] = []
_strays: list[str] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(args[0], str | bytes | os.PathLike):
        path = os.path.realpath(os.fsdecode(args[0]))
        if not Path(path).is_relative_to(_watched[-1]) and not path.endswith((".py", ".pyc")):
            _strays.append(path)
    elif event == "exec" and getattr(args[0], "co_filename", "").startswith(_PYTHON):
        pass  # an import: a codec, mostly
    elif event in ("pickle.find_class", "os.system", "subprocess.Popen", "exec") and _watched:
        _strays.append(f"{event} {args!r}"[:200])


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Fails if anything outside of `folder` is opened, or code of a pickle looked up."""
    if not _watched and not hasattr(sys, "_discolab_fuzz_hook"):
        sys.addaudithook(_hook)
        sys._discolab_fuzz_hook = True  # type: ignore[attr-defined]
    _strays.clear()
    _watched.append(folder.resolve())
    try:
        yield
    finally:
        _watched.pop()
    assert not _strays, f"it opened {_strays}"


def try_one(case: Case, data: bytes, report: Report) -> None:
    """Put `data` in place of the index and open it; AssertionError if that is not handled."""
    case.index.write_bytes(data)
    folder = case.opened if case.opened.is_dir() else case.opened.parent
    tracemalloc.reset_peak()
    before, begin = tracemalloc.get_traced_memory()[0], time.perf_counter()
    with watched(folder):
        try:
            catalog = open_checkpoint(case.opened)
        except CheckpointError as error:
            catalog, refusal = None, error
    report.slowest = max(report.slowest, time.perf_counter() - begin)
    peak = tracemalloc.get_traced_memory()[1] - before
    report.peak = max(report.peak, peak)
    assert peak < HEADROOM + PER_BYTE * len(data), (
        f"it took {peak} bytes for an index of {len(data)}"
    )
    if catalog is not None:
        report.opened += 1
        keeps_promises(catalog, folder)
        return
    report.refused += 1
    report.texts["".join(c for c in refusal.text[:30] if not c.isdigit())] += 1
    assert refusal.file, "no file is named"
    assert len(str(refusal)) < 20_000, "a message without end"
    str(refusal).encode()


def fuzz(case: Case, numbers: range, seed: int, each: Callable[[], None] = lambda: None) -> Report:
    """Mutations of these numbers; AssertionError says which one went wrong."""
    report = Report()
    tracemalloc.start()
    try:
        for number in numbers:
            each()
            data = mutate(case, random.Random(f"{seed}/{case.name}/{number}"))
            try:
                try_one(case, data, report)
            except BaseException as error:
                error.add_note(f"{case.name}: mutation {number} of seed {seed}, in {case.index}")
                raise
    finally:
        tracemalloc.stop()
    case.index.write_bytes(case.good)
    return report


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="mutations in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    args = parser.parse_args()
    # what is not Python's own memory: torch's libraries map some of it
    limit = ADDRESS_SPACE + int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in make_cases(Path(folder)) if args.only in case.name]
        each = -(-args.count // len(cases))
        for case in cases:
            report = fuzz(
                case, range(each), args.seed,
                lambda: faulthandler.dump_traceback_later(30, exit=True),
            )  # fmt: skip
            print(
                f"{case.name:<25} {each} mutations: {report.opened} opened, {report.refused} "
                f"refused with {len(report.texts)} texts; at most {report.peak / 1e6:.2f} MB and "
                f"{report.slowest * 1e3:.0f} ms",
                flush=True,
            )
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
