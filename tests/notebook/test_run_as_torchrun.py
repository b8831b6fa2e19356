"""``%disco_run`` beside torchrun: what a script finds in its process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from discolab import Session, WorkerError, make_session
from discolab.notebook.script import run_script

HERE = Path(__file__).parent
CONFIGURATOR = """
import sys
from ast import literal_eval
for arg in sys.argv[1:]:
    key, value = arg.removeprefix("--").split("=")
    assert type(globals()[key]) in (int, str)
    globals()[key] = literal_eval(value) if value.isdigit() else value
"""

# What torchrun sets that there is nothing of here: its agent, which restarts processes, hears their
# signals, reads the file of their error, and has a store; and a switch that NCCL no longer reads.
AGENT = {
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
OTHERWISE = {
    "MASTER_ADDR": "an address: torchrun says localhost",
    "MASTER_PORT": "a free port",
    "TORCHELASTIC_RUN_ID": "a name of the run",
}
# On a thread, beside those: which thread is the main one, and the notebook's builtins.
ON_THREADS = {"main thread", "get_ipython"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the script is started, not where it is."""
    path = tmp_path_factory.mktemp("run") / "work"
    (path / "scripts").mkdir(parents=True)
    shutil.copy(HERE / "run_report.py", path / "scripts" / "report.py")
    (path / "scripts" / "beside.py").write_text("WORD = 'beside'\n")
    (path / "configurator.py").write_text(CONFIGURATOR)
    (path / "known.json").write_text(json.dumps([*os.environ, "_", "SHLVL", "OLDPWD"]))
    return path.resolve()


@pytest.fixture(scope="module")
def torchrun(folder: Path) -> list[dict[str, Any]]:
    """The reports of torchrun's four processes."""
    script = str(folder / "scripts" / "report.py")
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", script]
    command = [sys.executable, *line, "--steps=7", "--name=TORCHRUN"]
    own = dict(os.environ)  # readline writes more into the process's
    ran = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return reports(folder, "TORCHRUN")


def reports(folder: Path, name: str) -> list[dict[str, Any]]:
    """What the ranks have written."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module", params=["threads", "processes"])
def four(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Four workers on either engine."""
    with make_session(4, request.param, devices="cpu", timeout=60) as session:
        yield session


def run(session: Session, path: Path, args: list[str], folder: Path) -> list[Any]:
    """Run a script in a folder, as `%disco_run` does from there."""
    with contextlib.chdir(folder):
        done = session.call_packed(run_script, str(path), path.read_text(), args)
        return done.debug_get_from_all()


@pytest.mark.slow
def test_a_script_finds_what_torchrun_gives(
    four: Session, folder: Path, torchrun: list[dict[str, Any]]
) -> None:
    before = os.getcwd(), list(sys.argv), dict(os.environ), list(sys.path)
    name = four.engine
    run(four, folder / "scripts" / "report.py", ["--steps=7", f"--name={name}"], folder)
    assert (os.getcwd(), list(sys.argv), dict(os.environ), list(sys.path)) == before
    for rank, (ours, theirs) in enumerate(zip(reports(folder, name), torchrun, strict=True)):
        theirs = json.loads(json.dumps(theirs).replace("TORCHRUN", name))
        variables, expected = ours.pop("environ"), theirs.pop("environ")
        assert variables.keys() == expected.keys() - AGENT
        for variable in variables.keys() - OTHERWISE.keys():
            assert variables[variable] == expected[variable], variable
        for own in ON_THREADS if name == "threads" or rank == 0 else {"get_ipython"}:
            del ours[own], theirs[own]
        theirs.pop("get_ipython", None)
        assert ours == theirs


def test_c_code_of_a_process_sees_its_ranks_variables(four: Session, tmp_path: Path) -> None:
    if four.engine == "threads":
        pytest.skip("C code of one process has one environment")
    path = tmp_path / "reads.py"
    path.write_text(
        "import ctypes, os\n"
        "read = ctypes.CDLL(None).getenv\n"
        "read.restype = ctypes.c_char_p\n"
        "if os.environ['RANK'] != '0':  # which lives in the notebook's process\n"
        "    assert read(b'RANK') == os.environ['RANK'].encode()\n"
        "    assert read(b'WORLD_SIZE') == b'4'\n"
    )
    run(four, path, [], tmp_path)


def test_how_a_script_ends(four: Session, tmp_path: Path) -> None:
    for ending, said in (
        ("sys.exit(3)", "ends.py exited with status 3 at ends.py:3"),
        ("sys.exit('no data')", "ends.py exited at ends.py:3: no data"),
        ("raise ValueError('nine')", "ValueError: nine"),
    ):
        path = tmp_path / "ends.py"
        path.write_text(f"import os, sys\nif os.environ['RANK'] == '2':\n    {ending}\n")
        with pytest.raises(WorkerError, match=said):
            run(four, path, [], tmp_path)
    path.write_text("import sys\nsys.exit(0)\n")
    run(four, path, [], tmp_path)


def test_a_second_script_finds_nothing_of_the_first(four: Session, tmp_path: Path) -> None:
    path = tmp_path / "again.py"
    path.write_text(
        "import atexit, logging, multiprocessing, os, sys, warnings\n"
        "assert 'LEFT' not in os.environ and not hasattr(sys.modules['__main__'], 'left')\n"
        "assert not logging.root.handlers\n"
        "assert ('ignore', None, UserWarning, None, 0) not in warnings.filters\n"
        "left = os.environ['LEFT'] = sys.argv[1]\n"
        "logging.basicConfig(level=logging.DEBUG)\n"
        "warnings.simplefilter('ignore', UserWarning)\n"
        "multiprocessing.set_start_method('spawn')\n"
        "atexit.register(lambda: open(f\"{os.environ['RANK']}.{left}\", 'w').close())\n"
        "sys.argv = []\n"
    )
    for word in ("one", "two"):
        run(four, path, [word], tmp_path)
    ended = sorted(p.name for p in tmp_path.glob("?.*"))
    assert ended == [f"{rank}.{word}" for rank in range(4) for word in ("one", "two")]
