"""Program: run programs of the catalogue under Gloo in four processes; what each rank returned.

    python -m tests.ccl.torch_programs.gloo FILE [NAME ...]

FILE gets a list with a dict for each rank: a program's name and its result, or the text of its
error in a `Failed`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from . import everything
from .catalogue import PROGRAMS, Failed, N, run


def rank_of(rank: int, port_file: str, folder: str, names: list[str]) -> None:
    """One process."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(N))
    store = dist.FileStore(port_file, N)
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=N, timeout=limit)
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = run(name)
        except Exception:
            results[name] = Failed(traceback.format_exc())
        dist.barrier()
    torch.save(results, f"{folder}/{rank}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # nothing that a program has left behind is waited for


def main(file: str, names: list[str]) -> None:
    """Fork the ranks from this process, which has imported everything once."""
    assert everything
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            rank_of,
            (f"{folder}/store", folder, names or list(PROGRAMS)),
            nprocs=N,
            start_method="fork",
        )
        found = [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(N)]
    torch.save(found, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
