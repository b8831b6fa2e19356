"""Programs as people bring them give, on threads and on processes, what torchrun gives.

Each program in ``programs/`` writes what every rank has got. Threads and processes must agree in
every digit; so must torchrun, where sums of floats over ranks are not rounded in another order
(discolab adds in the order of the ranks, Gloo in one that depends on the size).
"""

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from discolab import make_session
from discolab.notebook.script import read_script, run_script

PROGRAMS = Path(__file__).parent / "programs"
LIBRARIES = {
    "transformers_load": ["transformers", "accelerate"],
    "trainer": ["transformers", "accelerate", "datasets"],
    "accelerate_loop": ["accelerate"],
    "accelerate_state": ["accelerate"],
    "fabric": ["lightning"],
    "lightning_trainer": ["lightning", "torchmetrics"],
    "adapters": ["transformers", "peft", "einops", "torchmetrics"],
    "tools": ["matplotlib", "tensorboard", "hydra", "datasets"],
}
EXACT = {"pipelines", "transformers_load", "tools"}  # at torchrun too: no sums over ranks
OWN = ("ddp", "sharded", "pipelines", "minigpt")  # need no library
FOR_TWO = ("ddp", "minigpt", "accelerate_loop")  # any number of ranks runs them
OFTEN = ("ddp",)  # the others are slow
SECONDS = 100


def needs(name: str) -> Any:
    """The program, skipped where a library is missing."""
    missing = [one for one in LIBRARIES.get(name, []) if importlib.util.find_spec(one) is None]
    why = f"needs {', '.join(missing)}: pip install -e '.[compat]' -c constraints.txt"
    marks = [pytest.mark.skipif(bool(missing), reason=why)]
    if name not in OFTEN:
        marks.append(pytest.mark.slow)
    return pytest.param(name, marks=marks)


def facts_in(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def at_torchrun(name: str, folder: Path, size: int = 4) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += ["--standalone", str(PROGRAMS / f"{name}.py"), str(folder)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ENDS_AT_ONCE": "1"}
    done = subprocess.run(command, capture_output=True, env=environ, timeout=SECONDS, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return facts_in(folder, size)


def on_workers(name: str, folder: Path, engine: str, size: int = 4) -> list[dict[str, Any]]:
    full, source = read_script(str(PROGRAMS / f"{name}.py"))
    with make_session(size, engine, devices="cpu", timeout=SECONDS) as sess:
        sess.call_packed(run_script, full, source, [str(folder)], full).debug_get_from_all()
    return facts_in(folder, size)


def differences(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """Where two results differ by more than the rounding of float32."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [d for key in ours for d in differences(ours[key], theirs[key], f"{place}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [d for i, pair in pairs for d in differences(*pair, f"{place}[{i}]")]
    if isinstance(ours, float) and isinstance(theirs, float):
        if math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-6):
            return []
    elif ours == theirs:
        return []
    return [f"{place}: {ours!r} and {theirs!r}"]


@pytest.mark.filterwarnings("ignore")  # those of libraries are none of ours
@pytest.mark.parametrize("name", [*map(needs, OWN), *(needs(name) for name in LIBRARIES)])
def test_a_program_gives_what_torchrun_gives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = {}
    for how in ("torchrun", "threads", "processes"):
        folder = tmp_path / how
        folder.mkdir()
        run = at_torchrun(name, folder) if how == "torchrun" else on_workers(name, folder, how)
        found[how] = run
    assert found["threads"] == found["processes"]
    assert differences(found["threads"], found["torchrun"]) == []
    if name in EXACT:
        assert found["threads"] == found["torchrun"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*map(needs, FOR_TWO)])
def test_two_workers_give_every_digit_of_torchrun(name: str, tmp_path: Path) -> None:
    """The sum of two floats is the same in either order, so nothing may be rounded otherwise."""
    at_two = {}
    for how in ("torchrun", "threads", "processes"):
        folder = tmp_path / how
        folder.mkdir()
        run = at_torchrun if how == "torchrun" else functools.partial(on_workers, engine=how)
        at_two[how] = run(name, folder, size=2)
    assert at_two["threads"] == at_two["torchrun"]
    assert at_two["processes"] == at_two["torchrun"]
