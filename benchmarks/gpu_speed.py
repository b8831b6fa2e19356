"""How fast collectives are beside plain copies of the same run, for gpu_check.py. No state.

`speed` runs on the controller, `timed` on the workers.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from collectives_bytes import OPS, touched_bytes
from collectives_report import show_size
from gpu_places import Place

from discolab import ccl, current_worker


def speed(place: Place, backend: str, size: int, quick: bool) -> str:
    """Print a record for each operation."""
    rounds, count = (2, 5) if quick else (5, 20)
    n = len(place.devices)
    size -= size % (4 * n)
    with place.session() as sess:
        sess.init_ccl(backend)
        for op in OPS:
            found: list[tuple[float, float, float]] = []
            for _ in range(rounds):
                seconds = max(sess.call_packed(timed, op, size, count).debug_get_from_all())
                rate = moved_bytes(place, op, size) / seconds
                found.append((seconds, rate, copy_rate(place, size, count)))
            seconds, rate, copied = map(statistics.median, zip(*found, strict=True))
            part = statistics.median(rate / copied for _, rate, copied in found)
            record = {"kind": "speed", "backend": backend, "where": place.name, "op": op}
            record |= {"size": show_size(size), "ms": f"{seconds * 1e3:.3f}"}
            record |= {"GB/s": f"{rate / 1e9:.1f}", "copy GB/s": f"{copied / 1e9:.1f}"}
            print(json.dumps({**record, "part of copy": f"{part:.2f}"}), flush=True)
    return f"{rounds} rounds of {count}"


def moved_bytes(place: Place, op: str, size: int) -> float:
    """On one device: read and written there; between devices: sent by each, as in a ring."""
    n = len(place.devices)
    if place.shared:
        return touched_bytes(op, size, n)[0]
    share = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}
    return size * share.get(op, (n - 1) / n)


def copy_rate(place: Place, size: int, count: int) -> float:
    """Bytes a second of plain copies: read and written on one device, or sent to another."""
    first, last = place.devices[0], place.devices[-1]
    source, dst = torch.ones(size // 4, device=first), torch.zeros(size // 4, device=last)
    for device in (first, last):
        finish(torch.device(device))
    dst.copy_(source)
    finish(torch.device(first), torch.device(last))
    begin = time.perf_counter()
    for _ in range(count):
        dst.copy_(source)
    finish(torch.device(first), torch.device(last))
    return (2 if place.shared else 1) * size * count / (time.perf_counter() - begin)


def timed(op: str, size: int, count: int) -> float:
    """On a worker: seconds of one collective; `size` is that of its largest tensor."""
    worker = current_worker()
    n, numel = worker.num_workers, size // 4
    source = torch.empty(numel // n if op == "all_gather" else numel, device=worker.device)
    out = torch.empty(numel // n if op == "reduce_scatter" else numel, device=worker.device)
    for tensor in (source, out):
        tensor.fill_(0)  # every page is there before the clock starts; zeros stay zeros in a sum
    run: Callable[[], Any] = {
        "all_reduce": lambda: ccl.all_reduce_(source),
        "all_gather": lambda: ccl.all_gather(source, out=out),
        "reduce_scatter": lambda: ccl.reduce_scatter(source, out=out),
        "broadcast": lambda: ccl.broadcast_(source),
    }[op]
    run()
    finish(worker.device)
    ccl.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        run()
    finish(worker.device)
    return (time.perf_counter() - begin) / count


def finish(*devices: torch.device) -> None:
    """Wait for all that these devices were given."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
