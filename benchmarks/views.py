"""Measure what views and widgets cost: how long a picture takes, what it moves, CPU of an update.

Workers are threads of this process, or processes with `--engine processes`. Beside the picture of
large tensors stands what it replaces: to fetch the shards and describe them here. CPU of an update
is that of the thread that makes it, with something new each time. Prints one JSON object.

    python benchmarks/views.py
    python benchmarks/views.py --engine processes --gigabytes 0.25
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from discolab import DRef, Session, current_worker, make_session
from discolab.notebook.widgets.devices import Devices
from discolab.notebook.widgets.registers import RegistersWidget
from discolab.views import describe, draw_dref, render_html, render_text

ROUNDS = 7


def median(measure: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The median time of a call in milliseconds, after one that is not counted."""
    measure()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        measure()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times) * 1e3, 2)


def made(count: int) -> torch.Tensor:
    """A tensor of its own on each worker (a worker function)."""
    return torch.full((count,), float(current_worker().worker_id))


def picture(ref: DRef) -> str:
    """All that a cell's last line does."""
    part = draw_dref(ref)
    return render_text(part) + render_html(part)


def fetched(ref: DRef) -> list[Any]:
    """What a picture does without: all shards come here, and are described here."""
    return [describe(shard, False) for shard in ref.debug_get_from_all()]


def large(session: Session, gigabytes: float) -> dict[str, Any]:
    """The picture of one tensor of that size on each worker, without statistics."""
    ref = session.call_packed(made, int(gigabytes * 2**30 / 4))
    session.sync_all()
    records = session.call_packed(describe, ref, "auto").debug_get_from_all()
    ours, theirs = median(lambda: picture(ref)), median(lambda: fetched(ref), 3)
    return {
        "GiB a worker": gigabytes,
        "picture, ms": ours,
        "fetch all and describe, ms": theirs,
        "fetch / picture": round(theirs / ours, 1),
        "bytes off each worker": max(len(pickle.dumps(record)) for record in records),
    }


def small(session: Session) -> dict[str, Any]:
    """The picture of small tensors, with statistics, digests and thumbnails."""
    ref = session.call_packed(made, 16 * 1024)
    html = render_html(draw_dref(ref))
    return {"picture of 64 KiB, ms": median(lambda: picture(ref)), "HTML, bytes": len(html)}


def updates(session: Session, registers: int) -> dict[str, Any]:
    """CPU of one update of each widget, in milliseconds, with something new in each."""
    session.track_registers()
    held = [session.call_packed(made, 16) for _ in range(registers)]
    session.sync_all()
    table = RegistersWidget(lambda: session, dict, lambda: (1, 1), sort="bytes")
    devices = Devices("sess", lambda _: session)

    def news() -> None:
        held[len(held) // 2] = session.call_packed(made, 17)

    return {
        "registers": registers,
        "registers widget": cpu(table.snapshot, news),
        "devices widget": cpu(devices.snapshot, lambda: None),
    }


def cpu(snapshot: Callable[[], Any], news: Callable[[], None]) -> float:
    """CPU of the thread for one snapshot: the median of a hundred."""
    for _ in range(20):  # until all is known
        snapshot()
        time.sleep(0.1)
    times = []
    for _ in range(100):
        news()
        time.sleep(0.1)
        begin = time.thread_time()
        snapshot()
        times.append(time.thread_time() - begin)
    return round(statistics.median(times) * 1e3, 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="threads")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each worker's tensor")
    args = parser.parse_args()
    options = {"engine": args.engine, "devices": "cpu"}
    found: dict[str, Any] = {"engine": args.engine, "workers": args.workers}
    with make_session(args.workers, **options) as session:
        found["large"] = large(session, args.gigabytes)
        found["small"] = small(session)
    with make_session(8, **options) as session:
        found["updates with 8 workers, CPU ms"] = updates(session, 1000)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
