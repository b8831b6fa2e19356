"""Plants faults of order in discolab, one at a time, and asks the tests on the simulation.

``python -m tests.accelerator.planted`` tries all, ``... memory`` those of files so named. Each
leaves out, or puts in the wrong place, something that orders work on devices: what a GPU would
forgive most of the time. A wait without which torch's own copies between devices keep the order is
not among them. Works on a copy, so the checkout stays as it is. Exit status 1 if one is not seen.
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


MEMORY, LOCAL = "discolab/ccl/memory.py", "discolab/ccl/rendezvous/local.py"
P2P, WORKER = "discolab/ccl/rendezvous/p2p_client.py", "discolab/runtime/worker.py"
READ, CHANNELS = "discolab/loader/read.py", "discolab/rpc/channels.py"
DEVICE = "discolab/ccl/backends/device_library.py"
REMOTE = "discolab/ccl/backends/remote_device_library.py"
LIBRARY = ("tests/accelerator/test_device_library.py", "-k", "collectives or done or kept")
ACCELERATORS = "discolab/runtime/accelerators.py"
MESSAGES = (*CCL, "-k", "messages")
LOADER = ("tests/accelerator/test_loader.py",)
CALLS = ("tests/accelerator/test_rpc.py",)
DEFAULT = "torch.get_device_module({0}).default_stream({0})"
ON = "            stream = current_stream(device)\n"
EVENTS = "for contribution in contributions for event in contribution.events"
DONE = "                done = memory.record(tensors)\n"
EARLY = (
    "            for contribution in contributions:\n"
    "                contribution.done = memory.record(tensors)\n"
)
ADOPT = "memory.wait_for(contribution.done, contribution.srcs, contribution.outs)"
ENTER = "            if on_gpu:\n                memory.wait_for("
INFERENCE = "            with torch.inference_mode():\n                chunks ="
COPY = "        copy = memory.copy_of(src)\n"
KEEP = "tensor.record_stream(current_stream(tensor.device))"
WAIT = "        staging._stream.wait_stream(current_stream(staging._device))\n"
SENT = "        staging._sent[staging._turn] = staging._stream.record_event()\n"
STAGED = "    stream.wait_stream(accelerators.current_stream(tensor.device))\n"
WRITE = "        def write() -> Sequence[memory.Event]:\n"
FAULTS = [
    # events around a collective
    Fault(MEMORY, "                stream.wait_event(event)\n", "                pass\n"),
    Fault(MEMORY, "        event.record(current_stream(device))\n", ""),
    Fault(
        MEMORY,
        "current_stream(device))\n        events",
        f"{DEFAULT.format('device')})\n        events",
    ),
    Fault(MEMORY, ON, ON.replace("current_stream(device)", DEFAULT.format("device"))),
    Fault(MEMORY, "        events.append(event)\n", "    events.append(event)\n"),
    Fault(MEMORY, "            for event in events:\n", "            for event in events[:1]:\n"),
    Fault(MEMORY, "            for event in events:\n", "            for event in events[1:]:\n"),
    Fault(MEMORY, "        for device in devices:\n", "        for device in devices[1:]:\n"),
    Fault(MEMORY, "for device in _devices(lists):", "for device in _devices(lists)[:1]:"),
    Fault(LOCAL, "events = memory.record(srcs, outs) if call.on_gpu else ()", "events = ()"),
    Fault(LOCAL, "memory.record(srcs, outs) if", "memory.record(outs[:0]) if"),
    Fault(LOCAL, ENTER, ENTER.replace("if on_gpu", "if not on_gpu")),
    Fault(LOCAL, EVENTS, EVENTS.replace("contributions for", "contributions[:1] for")),
    Fault(LOCAL, EVENTS, EVENTS.replace("contributions for", "contributions[1:] for")),
    Fault(LOCAL, EVENTS, EVENTS.replace("contributions for", "contributions[:-1] for")),
    Fault(LOCAL, DONE, DONE.replace("memory.record(tensors)", "()")),
    Fault(LOCAL, DONE, DONE.replace("tensors", "tensors[:1]")),
    Fault(LOCAL, DONE, DONE.replace("tensors", "tensors[-1:]")),
    Fault(LOCAL, INFERENCE, f"{EARLY}            on_gpu = False\n{INFERENCE}"),
    Fault(LOCAL, ADOPT, "pass"),
    Fault(LOCAL, ADOPT, ADOPT.replace("contribution.done", "contribution.done[:1]")),
    Fault(LOCAL, ADOPT, "memory.wait_for(contribution.done)"),
    Fault(LOCAL, "                    memory.keep(tensor)\n", "                    pass\n"),
    # messages
    Fault(P2P, "        memory.wait_for(message.events, (got, out))\n", "", MESSAGES),
    Fault(P2P, "memory.wait_for(message.events,", "memory.wait_for(message.events[1:],", MESSAGES),
    Fault(P2P, "        memory.keep(got)\n", "", MESSAGES),
    Fault(P2P, "memory.record([copy])", "[]", MESSAGES),
    Fault(P2P, COPY, "        copy = src\n", MESSAGES),
    Fault(MEMORY, f"        {KEEP}\n", "        pass\n", MESSAGES),
    Fault(MEMORY, KEEP, f"tensor.record_stream({DEFAULT.format('tensor.device')})", MESSAGES),
    # loading through pinned buffers
    Fault(READ, WAIT, "", LOADER),
    Fault(READ, "current_stream(staging._device)", DEFAULT.format("staging._device"), LOADER),
    Fault(READ, "            sent.synchronize()\n", "            pass\n", LOADER),
    Fault(READ, SENT, "", LOADER),
    Fault(READ, "        self._stream.__enter__()\n", "", LOADER),
    Fault(READ, "        self._stream.synchronize()\n", "        pass\n", LOADER),
    # remote calls through pinned memory
    Fault(CHANNELS, STAGED, "", CALLS),
    Fault(CHANNELS, "        event.synchronize()\n", "        pass\n", CALLS),
    Fault(CHANNELS, "    with stream:\n", "    if stream:\n", CALLS),
    Fault(CHANNELS, "        event.record(stream)\n", "", CALLS),
    Fault(CHANNELS, "    tensor.record_stream(stream)", "    pass", CALLS),
    # by the device's own library
    Fault(DEVICE, "    memory.wait_for(begun, srcs, outs)\n", "", LIBRARY),
    Fault(DEVICE, "        tensor.record_stream(stream)\n", "        pass\n", LIBRARY),
    Fault(DEVICE, "        work.wait()  #", "        pass  #", LIBRARY),
    Fault(
        DEVICE,
        "                return memory.record(srcs, outs)",
        "                return ()",
        LIBRARY,
    ),
    Fault(
        DEVICE,
        f"{WRITE}            with on(stream):\n",
        f"{WRITE}            if stream:\n",
        LIBRARY,
    ),
    Fault(
        REMOTE,
        "        memory.wait_for(self._done, self._srcs, self._outs)",
        "        pass",
        LIBRARY,
    ),
    Fault(REMOTE, "self._begun = memory.record(srcs, outs)", "self._begun = ()", LIBRARY),
    Fault(REMOTE, " and all(event.query() for event in self._done)", "", LIBRARY),
    Fault(REMOTE, "        with device_library.on(stream):\n", "        if stream:\n", LIBRARY),
    # a worker's device
    Fault(WORKER, "    accelerators.set_current(worker.device)\n", "", CALLS),
    Fault(ACCELERATORS, "        current_stream(device).synchronize()\n", "        pass\n", CALLS),
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
