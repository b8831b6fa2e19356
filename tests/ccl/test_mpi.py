"""The MPI backend, with real processes; and what is said where it can't be used."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import discolab
from discolab import make_session
from discolab.ccl.backends import remote_mpi
from discolab.runtime import ArgumentError
from tests.selection import slow

SESSION = Path(__file__).with_name("mpi_session.py")
PROGRAM = Path(__file__).with_name("mpi_program.py")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
MPIRUN = shutil.which("mpirun", path=PATH)
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun, and the package mpi4py",
)


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("processes", [slow(2), 3, slow(4)])
def test_every_operation_between_processes(processes: int) -> None:
    assert MPIRUN is not None
    command = [MPIRUN, "-n", str(processes), sys.executable, str(PROGRAM)]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    as_root["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **as_root, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line)
    assert lines == [f"worker {rank} ok" for rank in range(processes)], done.stderr


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("case", ["collectives", "absence", "death", "late", "stay"])
def test_a_session_whose_nodes_mpirun_has_started(case: str, tmp_path: Path) -> None:
    assert MPIRUN is not None
    root, here = Path(discolab.__file__).parent.parent, Path(__file__).parent
    paths = os.pathsep.join([str(root), str(here), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SESSION), case, MPIRUN],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": paths,
            "DISCOLAB_HOME": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{case} ok"


def test_workers_that_mpirun_has_not_started_are_refused(start: Any) -> None:
    with make_session(2, "processes", devices="cpu") as sess:
        words = "worker 1 can't use it: it was not started by mpirun.*mpirun -n 1 discolab node"
        if importlib.util.find_spec("mpi4py") is None:
            words = r"pip install 'discolab\[mpi\]'"
        with pytest.raises(ArgumentError, match=words):
            sess.init_ccl("mpi")


def test_what_mpirun_has_started_must_be_one_worker_each() -> None:
    zero, one = remote_mpi.Standing(), remote_mpi.Standing("", "mpirun", 0, 2, "a:1")
    two = one._replace(rank=1, parent="a:2")
    assert remote_mpi.obstacle([zero, one, two]) == remote_mpi.obstacle([zero, two, one]) == ""
    assert "one worker in each" in remote_mpi.obstacle([zero, one, two._replace(parent="a:1")])
    assert "one worker in each" in remote_mpi.obstacle([zero, one, two._replace(rank=0)])
    assert "has started 2 processes, of which the session has 1" in remote_mpi.obstacle([zero, one])
    assert "worker 0 can't use it: x" in remote_mpi.obstacle([remote_mpi.Standing("x"), one, two])


def test_threads_of_one_process_are_refused(start: Any) -> None:
    with start(2) as sess:
        words = "'mpi' needs a process for every worker.* these 2 are threads .* use 'local'"
        with pytest.raises(ArgumentError, match=words):
            sess.init_ccl("mpi")


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is not None, reason="says what is told without mpi4py"
)
def test_mpi4py_is_named_where_it_is_missing(start: Any) -> None:
    with start(1) as sess, pytest.raises(ArgumentError, match=r"package mpi4py .* 'local'"):
        sess.init_ccl("mpi")
