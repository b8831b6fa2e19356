"""Ctrl-C at random moments, as in `ctrl_c`, some hundred times; `make soak` sends 10,000."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("loop", ["drops", "fetches"])
def test_none_is_lost_and_nothing_goes_on(
    kind: str, loop: str, how_many: Callable[..., int]
) -> None:
    rounds = how_many(1000, often=100)
    command = [sys.executable, "-m", "tests.soak.ctrl_c", kind, loop, str(rounds), "3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f'"came": {rounds}' in ended.stdout
