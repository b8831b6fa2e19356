"""The MPI backend, with real processes; and what is said where it can't be used."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from discolab.runtime import ArgumentError

PROGRAM = Path(__file__).with_name("mpi_program.py")
MPIRUN = shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun, and the package mpi4py",
)


@needs_mpi
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_every_operation_between_processes(processes: int) -> None:
    assert MPIRUN is not None
    command = [MPIRUN, "--oversubscribe", "-n", str(processes), sys.executable, str(PROGRAM)]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
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
