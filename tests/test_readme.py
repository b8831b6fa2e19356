"""What the README shows is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_program_without_a_notebook_runs() -> None:
    block = README.split("## Without a notebook")[1]
    code = re.findall(r"```python\n(.*?)```", block, re.S)[0]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.strip() == str(["tensor([6., 6., 6.])"] * 4).replace("'", ""), done.stderr
    assert done.stderr == ""


def test_every_file_that_it_links_is_there() -> None:
    links = re.findall(r'\]\(([^)#]+)\)|src="([^"]+)"', README)
    assert len(links) > 6
    for link in (a or b for a, b in links):
        assert (ROOT / link).exists(), link


def test_every_magic_in_its_table_exists() -> None:
    from discolab.notebook import debug_magics, magics  # noqa: F401 - enter themselves
    from discolab.notebook.magic import MAGICS

    for name in set(re.findall(r"`%%?(disco\w*)", README)):
        assert name in MAGICS, name


@pytest.mark.slow
def test_the_demo_runs_in_a_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "discolab", "demo", "--steps", "150"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "DRef w1 · float32[256, 64] Shard(0) on 4 workers" in done.stdout
    assert "float32 rounding" in done.stdout
