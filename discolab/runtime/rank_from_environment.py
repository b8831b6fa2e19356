"""Reads the rank of a process from the environment that torchrun, srun or mpirun gave it; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# names of rank, number of processes, rank on this machine; a launcher that another one may have
# started comes first, because it inherits the rest: mpirun under Slurm has Slurm's variables too
_NAMES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


SERVED_BEFORE = "DISCOLAB_NODE_SERVED_BEFORE"
"""In the environment of workers whose node has served another session before theirs."""


@dataclass(frozen=True)
class LauncherRank:
    """Which of a launcher's processes this one is."""

    launcher: str
    rank: int
    size: int
    local_rank: int


def launcher_rank(environ: Mapping[str, str]) -> LauncherRank | None:
    """The rank that a launcher has given to the process with this environment; None: no launcher.

    Examples
    --------
    >>> launcher_rank({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    LauncherRank(launcher='torchrun', rank=3, size=8, local_rank=1)
    >>> launcher_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}).local_rank
    0
    >>> launcher_rank({"RANK": "0"}) is None
    True
    """
    for launcher, *names in _NAMES:
        rank, size, local_rank = (_number(environ.get(name)) for name in names)
        if rank is not None and size is not None and rank < size:
            return LauncherRank(launcher, rank, size, local_rank or 0)
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
