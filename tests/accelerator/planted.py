"""Plants faults of order in discolab, one at a time, and asks the tests on the simulation.

``python -m tests.accelerator.planted`` tries all, ``... memory`` those of files so named, ``...
40:60`` those of these places in the list. Each leaves out, or puts in the wrong place, something
that orders work on devices, says whose a device is, or keeps somebody from waiting for ever: what a
GPU would forgive most of the time. What changes nothing that anybody could see is not among them.
Each asks the tests that are about its file. Works on a copy, so the checkout stays as it is. Exit
status 1 if one is not seen.
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
SECONDS = 150


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
CONDUCTOR, GROUPS = (
    "discolab/ccl/rendezvous/conductor.py",
    "discolab/ccl/backends/process_groups.py",
)
WORKS, BRIDGE = "discolab/ccl/distributed/works.py", "discolab/ccl/distributed/bridge.py"
DISCO, CHOOSE = "discolab/ccl/disco.py", "discolab/ccl/choose.py"
PLACEMENT, RANDOM = "discolab/engines/placement.py", "discolab/isolation/torch_random.py"
FAKES, SIDES = "discolab/isolation/fake_tensors.py", "discolab/comparison/sides.py"
COLLECTING, RESTORING = "discolab/snapshots/collecting.py", "discolab/snapshots/restoring.py"
METRICS, PROFILER = "discolab/trace/metrics.py", "discolab/trace/profiler.py"
TENSORS = "discolab/views/facts/tensors.py"


def of_library(which: str) -> tuple[str, ...]:
    """Those of the tests with the device's library whose names fit."""
    return "tests/accelerator/test_device_library.py", "-k", which


LIBRARY = of_library("(collectives or done or kept) and threads")
REMOTELY = of_library("(collectives or done or kept) and processes")
STOP, STOP_REMOTELY = of_library("stop and threads"), of_library("stop and processes")
CONNECTS, LATE = of_library("connecting or first_collective"), of_library("host_goes_on")
REFUSED, DTENSORS = of_library("refused"), of_library("dtensors and threads")
POLLED, FAKE_TESTS = of_library("dist_work_is_done"), of_library("fake and threads")
DONE_TESTS, KEPT = (*CCL, "-k", "done"), (*CCL, "-k", "kept")
MASK = ("tests/accelerator/test_sim.py", "-k", "mask")
DEVICES, DEBUGGER = ("tests/accelerator/test_devices.py",), ("tests/accelerator/test_debugger.py",)
LOOKS, FIGURES = (*DEVICES, "-k", "look"), (*DEVICES, "-k", "figures or utilisation")
LANES, SNAPSHOTS = (*DEVICES, "-k", "lanes and threads"), (*DEVICES, "-k", "snapshot")
SEEDS, COMPARISONS = (*DEVICES, "-k", "seeds or warning"), (*DEVICES, "-k", "comparison")
PLACES = ("tests/accelerator/test_rpc.py", "-k", "sync or init_ccl")
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
SENDS = (
    f"{COPY}        message = Message(copy, call.ordinal, call.site, memory.record([copy]), "
    "call.direct)\n"
)
KEEP = "tensor.record_stream(current_stream(tensor.device))"
WAIT = "        staging._stream.wait_stream(current_stream(staging._device))\n"
SENT = "        staging._sent[staging._turn] = staging._stream.record_event()\n"
STAGED = "    stream.wait_stream(accelerators.current_stream(tensor.device))\n"
QUERIED = "all(event.query() for event in self._contribution.done)"
TOGETHER = "for contribution in contributions for t in (*contribution.srcs, *contribution.outs)"
LAUNCHES = "if event.activity_type().endswith(_LAUNCHES):"
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
    Fault(LOCAL, QUERIED, "True", DONE_TESTS),
    Fault(
        LOCAL,
        "for contribution in contributions:\n                    contribution.done = done",
        "for contribution in contributions[1:]:\n                    contribution.done = done",
    ),
    Fault(
        LOCAL,
        "for contribution in contributions:\n                    contribution.done = done",
        "for contribution in contributions[:1]:\n                    contribution.done = done",
    ),
    Fault(
        LOCAL,
        TOGETHER,
        TOGETHER.replace("(*contribution.srcs, *contribution.outs)", "contribution.srcs"),
    ),
    Fault(
        LOCAL,
        TOGETHER,
        TOGETHER.replace("(*contribution.srcs, *contribution.outs)", "contribution.outs"),
    ),
    Fault(LOCAL, "for tensor in tensors:  #", "for tensor in tensors[1:]:  #", KEPT),
    Fault(LOCAL, "for tensor in tensors:  #", "for tensor in tensors[-1:]:  #", KEPT),
    Fault(MEMORY, "for tensors in lists for t", "for tensors in lists[:1] for t"),
    Fault(MEMORY, "for tensors in lists for t", "for tensors in lists[1:] for t"),
    Fault(
        P2P,
        SENDS,
        SENDS.replace(
            "        copy", "        early = memory.record([src])\n        copy", 1
        ).replace("memory.record([copy])", "early"),
        MESSAGES,
    ),
    Fault(P2P, "memory.keep(got)", "memory.keep(out)", MESSAGES),
    Fault(
        WORKS,
        "        return self._work.done()\n\n    def is_success",
        "        return True\n\n    def is_success",
        POLLED,
    ),
    Fault(BRIDGE, 'return ["cpu", accelerators.kind() or "cuda"]', 'return ["cpu"]', DTENSORS),
    # loading through pinned buffers
    Fault(READ, "dtype=torch.uint8).pin_memory() for", "dtype=torch.uint8) for", LOADER),
    Fault(
        READ,
        "torch.empty(size, dtype=torch.uint8).pin_memory()",
        "torch.empty(size, dtype=torch.uint8)",
        LOADER,
    ),
    Fault(READ, "        self._stream.__exit__(*exc)", "", LOADER),
    # remote calls through pinned memory
    Fault(CHANNELS, "    for event in staged:\n", "    for event in staged[:1]:\n", CALLS),
    Fault(CHANNELS, "    for event in staged:\n", "    for event in staged[1:]:\n", CALLS),
    Fault(CHANNELS, "    staged.append(event)\n", "", CALLS),
    Fault(
        CHANNELS,
        "accelerators.current_stream(tensor.device))\n",
        f"{DEFAULT.format('tensor.device')})\n",
        CALLS,
    ),
    Fault(
        CHANNELS,
        "tensor.device, torch.Stream(tensor.device))",
        "tensor.device, torch.Stream(tensor.device.type))",
        CALLS,
    ),
    Fault(CHANNELS, ", pin_memory=True)", ")", CALLS),
    Fault(CHANNELS, " and (device.index or 0) < accelerators.count()", "", CALLS),
    Fault(CHANNELS, "    return device.type == accelerators.kind() and", "    return", CALLS),
    # by the device's own library, threads
    Fault(DEVICE, "    memory.wait_for(begun, srcs, outs)\n", "", LIBRARY),
    Fault(DEVICE, "memory.wait_for(begun, srcs, outs)", "memory.wait_for(begun, srcs)", LIBRARY),
    Fault(DEVICE, "memory.wait_for(begun, srcs, outs)", "memory.wait_for(begun, outs)", LIBRARY),
    Fault(DEVICE, "        tensor.record_stream(stream)\n", "        pass\n", LIBRARY),
    Fault(
        DEVICE,
        "for tensor in (*srcs, *outs):\n        tensor.rec",
        "for tensor in outs:\n        tensor.rec",
        LIBRARY,
    ),
    Fault(DEVICE, "        work.wait()  #", "        pass  #", LIBRARY),
    Fault(
        DEVICE,
        "                return memory.record(srcs, outs)",
        "                return ()",
        LIBRARY,
    ),
    Fault(DEVICE, "return memory.record(srcs, outs)", "return memory.record(srcs)", LIBRARY),
    Fault(DEVICE, "return memory.record(srcs, outs)", "return memory.record(outs)", LIBRARY),
    Fault(
        DEVICE,
        f"{WRITE}            with on(stream):\n",
        f"{WRITE}            if stream:\n",
        LIBRARY,
    ),
    Fault(
        DEVICE,
        "        with on(stream):\n            finish",
        "        if stream:\n            finish",
        LIBRARY,
    ),
    Fault(
        DEVICE,
        "            with on(stream):\n                end",
        "            if stream:\n                end",
        CONNECTS,
    ),
    Fault(DEVICE, "time.monotonic() > deadline", "not deadline", CONNECTS),
    Fault(DEVICE, "timedelta(days=30)", "timedelta(seconds=1)", LATE),
    Fault(DEVICE, "if tensor.device != call.worker.device:", "if False:", REFUSED),
    Fault(DEVICE, "        end()\n", "        pass\n", STOP),
    Fault(DEVICE, "            self._handles.leave(rank)\n", "            pass\n", STOP),
    Fault(DEVICE, "        if len(ranks) > 1:\n", "        if len(ranks) > 2:\n", REFUSED),
    Fault(GROUPS, "contribution.done = write()", "write()", LIBRARY),
    # by the device's own library, processes
    Fault(
        REMOTE,
        "        memory.wait_for(self._done, self._srcs, self._outs)",
        "        pass",
        REMOTELY,
    ),
    Fault(
        REMOTE,
        "memory.wait_for(self._done, self._srcs, self._outs)",
        "memory.wait_for(self._done, self._srcs)",
        REMOTELY,
    ),
    Fault(
        REMOTE,
        "memory.wait_for(self._done, self._srcs, self._outs)",
        "memory.wait_for(self._done, self._outs)",
        REMOTELY,
    ),
    Fault(REMOTE, "        self.adopt = self._wait_for_device\n", "", REMOTELY),
    Fault(REMOTE, "self._begun = memory.record(srcs, outs)", "self._begun = ()", REMOTELY),
    Fault(
        REMOTE,
        "self._begun = memory.record(srcs, outs)",
        "self._begun = memory.record(srcs)",
        REMOTELY,
    ),
    Fault(
        REMOTE,
        "self._begun = memory.record(srcs, outs)",
        "self._begun = memory.record(outs)",
        REMOTELY,
    ),
    Fault(
        REMOTE,
        "            self._done = memory.record(srcs, outs)",
        "            self._done = ()",
        REMOTELY,
    ),
    Fault(
        REMOTE,
        "self._done = memory.record(srcs, outs)",
        "self._done = memory.record(srcs)",
        REMOTELY,
    ),
    Fault(
        REMOTE,
        "self._done = memory.record(srcs, outs)",
        "self._done = memory.record(outs)",
        REMOTELY,
    ),
    Fault(REMOTE, "            self._done = memory", "        self._done = memory", REMOTELY),
    Fault(REMOTE, " and all(event.query() for event in self._done)", "", REMOTELY),
    Fault(REMOTE, "        with device_library.on(stream):\n", "        if stream:\n", REMOTELY),
    Fault(REMOTE, "device_library.end_if_stuck(worker, end_all)", "pass", STOP_REMOTELY),
    # a worker's device, and whoever waits for it
    Fault(WORKER, "    accelerators.set_current(worker.device)\n", "", PLACES),
    Fault(
        WORKER, "            accelerators.synchronize(self.device)\n", "            pass\n", PLACES
    ),
    Fault(DISCO, "    accelerators.synchronize(worker.device)\n", "    pass\n", PLACES),
    Fault(ACCELERATORS, "        current_stream(device).synchronize()\n", "        pass\n", PLACES),
    Fault(
        ACCELERATORS,
        "current_stream(device).synchronize()",
        "torch.accelerator.synchronize(device)",
        PLACES,
    ),
    Fault(ACCELERATORS, "set_device_index(device.index or 0)", "set_device_index(0)", PLACES),
    Fault(ACCELERATORS, "return ask is None or bool(ask())", "return False", CALLS),
    Fault(CHOOSE, "        accelerators.set_current(device)\n", "", PLACES),
    Fault(CHOOSE, "        worker.device = device\n", "", PLACES),
    Fault(PLACEMENT, "{kind}:{r % count}", "{kind}:0", PLACES),
    Fault(PLACEMENT, "{kind}:{r % count}", "{kind}:{r}", MASK),
    Fault(PLACEMENT, "(device.index or 0) >= count", "(device.index or 0) > count", MASK),
    # random numbers, and what is remembered of devices
    Fault(RANDOM, "        own = getattr(", "        getattr(", SEEDS),
    Fault(RANDOM, "        _warn(worker)\n        return own", "        return own", SEEDS),
    Fault(
        FAKES, "            if accelerators.any_in_use():\n", "            if False:\n", FAKE_TESTS
    ),
    Fault(COLLECTING, "get_rng_state(worker.device)", "get_rng_state(0)", SNAPSHOTS),
    Fault(COLLECTING, "    if accelerators.in_use(worker.device):\n", "    if False:\n", SNAPSHOTS),
    Fault(RESTORING, "set_rng_state(of_gpu, worker.device)", "set_rng_state(of_gpu, 0)", SNAPSHOTS),
    Fault(SIDES, "set_rng_state(on_device, device)", "set_rng_state(on_device, 0)", COMPARISONS),
    Fault(SIDES, "get_rng_state(device)", "get_rng_state(0)", COMPARISONS),
    # what is shown of devices
    Fault(METRICS, "memory_stats(device)", "memory_stats(0)", FIGURES),
    Fault(
        METRICS,
        "stats = module",
        "torch.accelerator.synchronize(device)\n        stats = module",
        LOOKS,
    ),
    Fault(
        METRICS,
        "        free, total = module.mem_get_info(device)",
        "        free, total = module.mem_get_info(0)",
        FIGURES,
    ),
    Fault(METRICS, "module.utilization(device)", "module.utilization(0)", FIGURES),
    Fault(PROFILER, "activities = torch.profiler.supported_activities()", "pass", LANES),
    Fault(PROFILER, LAUNCHES, "if True:", LANES),
    Fault(
        PROFILER,
        "launched.get(event.correlation_id(), devices.get(event.device_index()))",
        "devices.get(event.device_index())",
        LANES,
    ),
    Fault(
        PROFILER,
        LAUNCHES,
        "            if False:",
        LANES,
    ),
    Fault(
        TENSORS,
        '    record: Record = {"kind": "tensor", "type": type_name(tensor)}\n    with',
        '    record: Record = {"kind": "tensor", "type": type_name(tensor)}\n'
        "    torch.accelerator.synchronize(tensor.device)\n    with",
        DEBUGGER,
    ),
]


def seen(fault: Fault, copy: Path) -> str:
    """What the tests say: the first test that failed, "" if none did."""
    file = copy / fault.file
    text = file.read_text()
    if text.count(fault.before) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.before)} times {fault.before!r}")
    command = [sys.executable, "-m", "pytest", "-m", "accelerator", "-x", "-q", "--no-header"]
    command += ["-p", "no:cacheprovider", "--tb=line", *fault.tests]
    try:
        _write(file, text.replace(fault.before, fault.after))
        done = subprocess.run(
            command, cwd=copy, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "(a hang)"
    finally:
        _write(file, text)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else "" if done.returncode == 0 else f"status {done.returncode}"


def _write(file: Path, text: str) -> None:
    """Write a module, and forget how it was compiled: sizes and seconds may be the same."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def chosen(words: list[str]) -> list[Fault]:
    """The faults that words are for: parts of names of files, or places such as 10:20."""
    found = []
    for place, fault in enumerate(FAULTS):
        for word in words or [":"]:
            first, colon, last = word.partition(":")
            if colon:
                if int(first or 0) <= place < int(last or len(FAULTS)):
                    found.append(fault)
            elif word in fault.file:
                found.append(fault)
    return found


def main() -> int:
    """Try those that the arguments are for."""
    faults, missed = chosen(sys.argv[1:]), 0
    with TemporaryDirectory(prefix="planted-") as folder:
        for name in COPIED:
            source, copy = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
        for fault in faults:
            began = time.perf_counter()
            found = seen(fault, Path(folder))
            missed += not found
            print(
                f"{'seen' if found else 'NOT SEEN'} ({time.perf_counter() - began:.0f} s) {fault}"
            )
            print(f"    {found}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
