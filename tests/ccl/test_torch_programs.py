"""Programs in torch's own style (torch_programs/), with the results that Gloo gives them.

The catalogue runs once under Gloo in four processes without discolab, then on four workers of each
engine. Results are compared bit by bit where the arithmetic is the same. A part of it runs always,
the whole in a slow test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from discolab import WorkerError

from .conftest import Start
from .torch_programs.catalogue import PROGRAMS, Failed, N, run
from .torch_programs.comparing import difference

pytestmark = [
    pytest.mark.any_engine,
    pytest.mark.filterwarnings("ignore"),  # four threads share the filters
    pytest.mark.timeout(400),
]


def names(step: int) -> tuple[str, ...]:
    """Every so manieth program."""
    from .torch_programs import everything

    assert everything.AREAS
    return tuple(list(PROGRAMS)[::step])


@cache
def under_gloo(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """What each rank returns; one run for all engines."""
    root = Path(__file__).parents[2]
    with TemporaryDirectory() as folder:
        file = str(Path(folder, "results"))
        program = [sys.executable, "-m", "tests.ccl.torch_programs.gloo", file, *names]
        environ = {
            **os.environ,
            "PYTHONPATH": str(root),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            program, cwd=root, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[dict[str, Any]] = torch.load(file, weights_only=False)
        return found


@cache
def on_threads(names: tuple[str, ...]) -> dict[str, Any]:
    """Filled by the test on threads, for the one on processes."""
    return {}


def differences(start: Start, names: tuple[str, ...], engine: str) -> dict[str, str]:
    """By program what is not as it is under Gloo, or on another engine."""
    expected, other, told = under_gloo(names), on_threads(names), {}
    with start(N, timeout=60) as sess:
        for name in names:
            failed = [each[name].text for each in expected if isinstance(each[name], Failed)]
            if failed:
                told[name] = f"under Gloo: {failed[0][-500:]}"
                continue
            try:
                found = sess.call_packed(run, name).debug_get_from_all()
            except WorkerError as exc:
                told[name] = str(exc)[:500]
                continue
            rounding = PROGRAMS[name].rounding
            texts = [
                difference(mine, theirs[name], rounding=rounding)
                for mine, theirs in zip(found, expected, strict=True)
            ]
            if engine == "threads":
                other[name] = found
            elif name in other:  # a program gives the same bits on each engine
                texts.append(difference(found, other[name]))
            if any(texts):
                told[name] = "; ".join(filter(None, texts))[:500]
    return told


def test_a_part_of_the_programs_gives_what_gloo_gives(
    start: Start, request: pytest.FixtureRequest
) -> None:
    told = differences(start, names(15), request.node.callspec.params["start"])
    assert not told, "\n\n".join(f"{name}: {text}" for name, text in told.items())


@pytest.mark.slow
def test_all_programs_give_what_gloo_gives(start: Start, request: pytest.FixtureRequest) -> None:
    told = differences(start, names(1), request.node.callspec.params["start"])
    assert not told, "\n\n".join(f"{name}: {text}" for name, text in told.items())


def test_the_catalogue_has_many_programs_of_every_area() -> None:
    counts = Counter(name.partition("/")[0] for name in names(1))
    assert len(counts) == 9
    assert sum(counts.values()) >= 700
    assert min(counts.values()) >= 12, counts


def test_a_difference_is_found() -> None:
    one, other = torch.ones(3), torch.ones(3)
    other[1] += 1e-7
    assert not difference([one, {"a": 1}], [one, {"a": 1}])
    assert not difference([one], [other], rounding=True)
    for found, expected in (
        ([one], [other]),
        ([one], [one.double()]),
        ([one], [one, one]),
        ({"a": 1}, {"a": 2}),
        (1, True),
        (float("nan"), 1.0),
    ):
        assert difference(found, expected, rounding=expected == 1.0)
