"""Check the collectives on this machine's GPUs, and print what was found as Markdown.

    python benchmarks/gpu_check.py                        # needs a GPU; else exit status 2
    python benchmarks/gpu_check.py --device cpu --quick   # the same checks on the CPU

docs/gpu.md says what is checked. Each section runs in a process of its own, with a time limit,
so that a crash or a hang is one failed check and not the end of the run. The process that the
user starts only collects the records and prints; its children do the work, in gpu_sections.py.

Exit status: 0 when all checks passed, 1 when one failed, 2 when there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from control_plane_report import table
from gpu_places import SIMULATED, make_known

HERE = Path(__file__).resolve().parent
SECTIONS = ("local", "streams", "interrupts", "distributed", "nccl", "speed")
PATIENCE = 400  # seconds that a section may take
NO_GPU = "gpu_check: no GPU that torch can use here; --device cpu runs the same checks on the CPU"


def run_section(section: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of one section; a crash or a hang is one of them."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if args.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(HERE / "gpu_sections.py"), section, f"--device={args.device}"]
    if args.quick:
        command.append("--quick")
    trouble, output = "", ""
    try:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
        output = done.stdout
        if done.returncode:
            trouble = f"its process ended with status {done.returncode}"
    except subprocess.TimeoutExpired as exc:
        if exc.stdout is not None:  # bytes, though text was asked for
            output = exc.stdout.decode() if isinstance(exc.stdout, bytes) else exc.stdout
        trouble = f"its process did not end within {PATIENCE} s"
    lines = [line for line in output.splitlines() if line.startswith("{")]
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    if not trouble and not records:
        trouble = "nothing was checked"
    if trouble:
        records.append(
            {
                "kind": "check",
                "section": section,
                "where": "",
                "check": "the section as a whole",
                "verdict": "FAILED",
                "detail": trouble,
            }
        )
    return records


def describe_machine(device: str) -> list[str]:
    """Lines with date, versions and hardware."""
    lines = [
        f"Date: {datetime.date.today().isoformat()}",
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}",
    ]
    if device == "cpu":
        return [*lines, "Run on the CPU (`--device cpu`): says nothing about any GPU."]
    if device == SIMULATED:
        lines.append("Run on the simulated accelerator of the tests: its speed says nothing.")
    elif torch.version.hip:
        lines.append(f"ROCm {torch.version.hip}")
    elif device == "cuda":
        lines.append(f"CUDA {torch.version.cuda}")
    if device == "cuda" and torch.distributed.is_nccl_available():
        lines[-1] += ", NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    for index in range(torch.accelerator.device_count()):
        found = torch.get_device_module(device).get_device_properties(index)
        lines.append(f"{device}:{index}: {found.name}, {found.total_memory / (1 << 30):.0f} GiB")
    return lines


def report(machine: list[str], records: list[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    checks = [r for r in records if r["kind"] == "check"]
    speeds = [r for r in records if r["kind"] == "speed"]
    failed = sum(r["verdict"] == "FAILED" for r in checks)
    parts = [
        "\n".join(f"- {line}" for line in machine),
        f"{len(checks)} checks, {failed} failed." if failed else f"{len(checks)} checks, all good.",
        _table(checks, ("section", "where", "check", "verdict", "detail")),
    ]
    if speeds:
        columns = ("backend", "where", "op", "size", "ms", "GB/s", "copy GB/s", "part of copy")
        parts.append(_table(speeds, columns))
        parts.append(
            "GB/s: bytes that the operation must at least move in a second. Where workers share a "
            "device: read and written there, beside a copy within it; else: sent and received by "
            "each, beside a copy between two devices. Median of the rounds."
        )
    return "\n\n".join(parts)


def _table(records: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    rows = [[str(record[name]).replace("|", "\\|") for name in columns] for record in records]
    return table(columns, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device", help="cuda, xpu, ...; cpu; or sim, which tests have; else what torch has here"
    )
    parser.add_argument("--quick", action="store_true", help="smaller, fewer, shorter")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION"
    )
    return parser.parse_args()


def main() -> int:
    """Run all sections, print what was found."""
    args = parse_arguments()
    if args.device is not None:
        make_known(args.device)
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = None if found is None else found.type
    args.device = args.device or kind
    if args.device not in ("cpu", kind) or args.device is None:
        print(NO_GPU, file=sys.stderr)
        return 2
    records = []
    for section in args.only:
        print(f"section {section}", file=sys.stderr, flush=True)
        records += run_section(section, args)
    print(report(describe_machine(args.device), records))
    return int(any(record.get("verdict") == "FAILED" for record in records))


if __name__ == "__main__":
    sys.exit(main())
