"""Measure sides round by round, each in a child process of its own; used by engines.py and rpc.py.

Never do two children run at once, but for those that take turns: they wait in between. What is
not installed, or fails, is noted and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from children import HERE, ChildFailed, WaitingChild, load, run_child, say
from rounds_report import Results

PATIENCE = 240.0  # seconds that a side may take


def installed(
    packages: Mapping[str, Sequence[str]], sides: Sequence[str], results: Results
) -> list[str]:
    """The sides whose packages are there; the others are noted."""
    found = []
    for side in sides:
        absent = [name for name in packages[side] if importlib.util.find_spec(name) is None]
        if absent:
            note(results, f"{side}: not measured, {' and '.join(absent)} not installed")
        else:
            found.append(side)
    return found


def measure_rounds(
    results: Results, script: str, sides: Sequence[str], rounds: int, *options: str
) -> list[str]:
    """Measure each side once a round; the order is turned round each time.

    A side that fails before it gives any figure is not tried again, and not among those returned.
    """
    left = list(sides)
    for turn in range(rounds):
        for side in left[:] if turn % 2 == 0 else left[::-1]:
            before = load()
            say(f"{script}, round {turn + 1}/{rounds}: {side}, load {before}")
            try:
                sample = run_child(str(HERE / script), side, *options, patience=PATIENCE)
            except ChildFailed as exc:
                text = str(exc).strip()
                if exc.found is None:
                    left.remove(side)
                    note(results, f"{side}: it does not run:\n{_indented(text)}")
                    continue
                sample = {**exc.found, "failed": text[-300:]}
            results.samples.append({**sample, "round": turn, "load": before})
    return left


def take_turns(results: Results, script: str, sides: Sequence[str], turns: int) -> None:
    """Fill in `Results.turns`: what a child measures once, of each side, one after the other."""
    say(f"{script}, {turns} turns: {', '.join(sides)}, load {load()}")
    try:
        with ExitStack() as stack:
            children = {
                side: stack.enter_context(WaitingChild(str(HERE / script), side, "--turns"))
                for side in sides
            }
            for child in children.values():  # one after the other: starting, too, is work
                child.ask()
            for turn in range(turns):
                order = sides if turn % 2 == 0 else sides[::-1]
                results.turns.append({side: children[side].ask() for side in order})
    except ChildFailed as exc:
        note(results, f"the turns of {', '.join(sides)} ended early:\n{_indented(str(exc))}")


def note(results: Results, text: str) -> None:
    """Say something now, and in the report."""
    results.notes.append(text)
    say(text)


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Those that all such benchmarks have."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"({rounds})")
    parser.add_argument("--calls", type=int, default=2000, help="timed one by one, at most (2000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")


def write_json(results: Results, file: Path | None) -> None:
    """Write all samples, if a file was asked for."""
    if file is not None:
        file.write_text(json.dumps(asdict(results), indent=1) + "\n")


def _indented(text: str, lines: int = 6) -> str:
    return "\n".join("    " + line for line in text.splitlines()[-lines:])
