"""The soak: a minute of it on threads and on processes, and that it finds what is planted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.selection import slow

from .steps import draw
from .work import PLANTED

SECONDS = 60


def soak(engine: str, seconds: int, seed: int, **environment: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.soak", engine, str(seconds), str(seed)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.alone
@pytest.mark.timeout(800)  # with a search for a shorter story
@pytest.mark.parametrize("kind", [slow("threads"), slow("processes")])
def test_a_minute(kind: str) -> None:
    status, output = soak(kind, SECONDS, 7)
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_a_planted_fault_is_found_and_its_story_is_short() -> None:
    status, output = soak("threads", 60, 7, **{PLANTED: "mul", "DISCOLAB_SOAK_SHRINKING": "90"})
    assert status == 1
    assert "threads, seed 7: these" in output
    story = [json.loads(line) for line in output.splitlines() if line.startswith('  {"do"')]
    assert len(story) <= 10  # of some hundred; fewer where the search has more time
    assert "combine" in [step["do"] for step in story] or story[0]["do"] == "threads"


def test_steps_follow_from_the_seed() -> None:
    first = [step for step, _ in zip(draw(3), range(50), strict=False)]
    assert first == [step for step, _ in zip(draw(3), range(50), strict=False)]
    assert first == json.loads(json.dumps(first))
