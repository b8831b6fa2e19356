"""Measure what a ``%%disco`` cell costs more than a plain one, in a real kernel.

Starts an ipykernel of this Python, sends it cells as a notebook does, and waits for each
cell's reply and for the kernel to be idle again. Three kinds of cell take turns, each round
in another order: ``pass``; ``%%disco`` over an empty line; ``%%disco`` over ``pass``. Prints
one JSON object on one line. One thread; the kernel is a child process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from jupyter_client import KernelManager
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

CELLS = {"plain": "pass", "disco_empty": "%%disco\n\n", "disco_pass": "%%disco\npass"}
WARM_UP = 20  # cells of each kind before any are timed
PATIENCE = 60  # seconds that a cell may take


class ThisPython(KernelSpecManager):
    """Knows one kernel: ipykernel in the Python that runs this."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """That kernel, whatever the name and whatever else is installed for the user."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


def run_cell(client: BlockingKernelClient, code: str) -> float:
    """Run a cell; milliseconds until its reply has come and the kernel is idle again."""
    begin = time.perf_counter()
    request = client.execute(code, allow_stdin=True)
    while True:
        reply = client.get_shell_msg(timeout=PATIENCE)
        if reply["parent_header"].get("msg_id") == request:
            break
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["content"].get("execution_state") == "idle":
            break
    taken = (time.perf_counter() - begin) * 1e3
    if reply["content"]["status"] != "ok":
        raise RuntimeError(f"{code!r} failed: " + "\n".join(reply["content"]["traceback"]))
    return taken


def measure(workers: int, cells: int) -> dict[str, Any]:
    """Medians of each kind of cell, and of the differences within a round, in ms."""
    manager = KernelManager(kernel_spec_manager=ThisPython())
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE)
        run_cell(client, f"%load_ext discolab\n%disco_session {workers}")
        taken: dict[str, list[float]] = {kind: [] for kind in CELLS}
        for turn in range(WARM_UP + cells):
            for kind in list(CELLS) if turn % 2 else reversed(CELLS):
                taken[kind].append(run_cell(client, CELLS[kind]))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    taken = {kind: times[WARM_UP:] for kind, times in taken.items()}
    found: dict[str, Any] = {"workers": workers, "cells": cells}
    for kind, times in taken.items():
        found[kind + "_ms"] = statistics.median(times)
        if kind != "plain":
            more = [a - b for a, b in zip(times, taken["plain"], strict=True)]
            found[kind + "_more_ms"] = statistics.median(more)
    return found


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--cells", type=int, default=200)
    args = parser.parse_args()
    print(json.dumps(measure(args.workers, args.cells)), flush=True)


if __name__ == "__main__":
    main()
