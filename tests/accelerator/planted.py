"""Plants faults of order in discolab, one at a time, and asks the tests on the simulation.

``python -m tests.accelerator.planted`` tries all, ``... moves`` those of files so named. Each leaves
out, or puts in the wrong place, something that orders work on devices: what a GPU would forgive
most of the time. Works on a copy, so the checkout stays as it is. Exit status 1 if one is not seen.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = ("discolab", "tests", "pyproject.toml")
CCL = ("tests/accelerator/test_ccl.py",)
SECONDS = 400


class Fault(NamedTuple):
    """In the place of that text, which is there once, this one."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...] = CCL

    def __str__(self) -> str:
        first = [line.strip() for line in self.before.splitlines() if line.strip()]
        after = " ".join(self.after.split())
        return f"{self.file}: {first[0]!r} becomes {after[:60]!r}"


MOVES, LOCAL = "discolab/ccl/moves.py", "discolab/ccl/rendezvous/local.py"
P2P = "discolab/ccl/rendezvous/p2p_client.py"
LIST = "[event for contribution in contributions for event in contribution.events]"
FAULTS = [
    # events around a collective
    Fault(MOVES, "                stream.wait_event(event)\n", "                pass\n"),
    Fault(MOVES, "        event.record(current_stream(device))\n", ""),
    Fault(
        MOVES,
        "event.record(current_stream(device))",
        "event.record(torch.get_device_module(device).default_stream(device))",
    ),
    Fault(
        MOVES,
        "            stream = current_stream(device)\n            for event",
        "            stream = torch.get_device_module(device).default_stream(device)\n"
        "            for event",
    ),
    Fault(MOVES, "        events.append(event)\n", "    events.append(event)\n"),
    Fault(MOVES, "            for event in events:\n", "            for event in events[:1]:\n"),
    Fault(MOVES, "            for event in events:\n", "            for event in events[1:]:\n"),
    Fault(MOVES, "        for device in devices:\n", "        for device in devices[1:]:\n"),
    Fault(MOVES, "adopt = enter\n", "def adopt(*_: object) -> None: ...\n"),
    Fault(
        MOVES, "    for device in _devices(lists):\n", "    for device in _devices(lists)[:1]:\n"
    ),
    Fault(LOCAL, "events = moves.posted(srcs, outs) if call.on_gpu else ()", "events = ()"),
    Fault(LOCAL, "moves.posted(srcs, outs) if", "moves.posted(outs[:0]) if"),
    Fault(
        LOCAL,
        "            if on_gpu:\n                moves.enter(",
        "            if not on_gpu:\n                moves.enter(",
    ),
    Fault(LOCAL, LIST, LIST.replace("in contributions for", "in contributions[:1] for")),
    Fault(LOCAL, LIST, LIST.replace("in contributions for", "in contributions[1:] for")),
    Fault(LOCAL, LIST, LIST.replace("in contributions for", "in contributions[:-1] for")),
    Fault(
        LOCAL,
        "                collective.done = moves.posted(tensors)\n",
        "                collective.done = ()\n",
    ),
    Fault(
        LOCAL,
        "collective.done = moves.posted(tensors)",
        "collective.done = moves.posted(tensors[:1])",
    ),
    Fault(
        LOCAL,
        "collective.done = moves.posted(tensors)",
        "collective.done = moves.posted(tensors[-1:])",
    ),
    Fault(
        LOCAL,
        "            moves.adopt(collective.done, self._contribution.srcs, self._contribution.outs)\n",
        "            pass\n",
    ),
    Fault(
        LOCAL,
        "moves.adopt(collective.done, self._contribution.srcs, self._contribution.outs)",
        "moves.adopt(collective.done[:1], self._contribution.srcs, self._contribution.outs)",
    ),
    Fault(
        LOCAL, "self._contribution.srcs, self._contribution.outs)\n", "self._contribution.srcs)\n"
    ),
    Fault(
        LOCAL, "self._contribution.srcs, self._contribution.outs)\n", "self._contribution.outs)\n"
    ),
    Fault(
        LOCAL,
        "            with torch.inference_mode():\n                chunks = execute(collective, contributions)\n",
        "            collective.done = moves.posted(tensors) if on_gpu else ()\n"
        "            with torch.inference_mode():\n"
        "                chunks = execute(collective, contributions)\n"
        "            on_gpu = False\n",
    ),
    # messages
    Fault(P2P, "        moves.enter(message.events, (got, out))\n", ""),
    Fault(
        P2P,
        "        moves.enter(message.events, (got, out))\n",
        "        moves.enter(message.events[1:], (got, out))\n",
    ),
    Fault(P2P, "        moves.keep(got)\n", ""),
    Fault(P2P, "moves.posted([copy])", "[]"),
    Fault(
        P2P,
        "        copy = moves.copy_of(src)\n        message = Message(copy, call.ordinal, call.site, moves.posted([copy]), call.direct)\n",
        "        events = moves.posted([src])\n        copy = moves.copy_of(src)\n        message = Message(copy, call.ordinal, call.site, events, call.direct)\n",
    ),
    Fault(P2P, "        copy = moves.copy_of(src)\n", "        copy = src\n"),
    Fault(MOVES, "        tensor.record_stream(current_stream(tensor.device))\n", "        pass\n"),
    Fault(
        MOVES,
        "tensor.record_stream(current_stream(tensor.device))",
        "tensor.record_stream(torch.get_device_module(tensor.device).default_stream(tensor.device))",
    ),
]


def seen(fault: Fault) -> str:
    """What the tests say: the first test that failed, "" if none did."""
    with TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        file = copy / fault.file
        text = file.read_text()
        if text.count(fault.before) != 1:
            raise SystemExit(f"{fault.file} has {text.count(fault.before)} times {fault.before!r}")
        file.write_text(text.replace(fault.before, fault.after))
        command = [sys.executable, "-m", "pytest", "-m", "accelerator", "-x", "-q", "--no-header"]
        command += ["-p", "no:cacheprovider", "--tb=line", *fault.tests]
        try:
            done = subprocess.run(
                command, cwd=copy, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return "(a hang)"
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0] if failed else "" if done.returncode == 0 else f"status {done.returncode}"


def main() -> int:
    """Try all whose file has one of the words that were given."""
    words = sys.argv[1:]
    chosen = [fault for fault in FAULTS if not words or any(word in fault.file for word in words)]
    missed = 0
    for fault in chosen:
        began = time.perf_counter()
        found = seen(fault)
        missed += not found
        print(f"{'seen' if found else 'NOT SEEN'} ({time.perf_counter() - began:.0f} s) {fault}")
        print(f"    {found}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
