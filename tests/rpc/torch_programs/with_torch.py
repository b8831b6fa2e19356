"""Program: run programs with torch's own RPC, in processes; their numbers as a line of JSON each.

python with_torch.py WORLD_SIZE PROGRAM ...
"""

import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def load(name: str) -> Any:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(rank: int, world_size: int, port: int, name: str) -> None:
    """One process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    numbers = load(name).run(rank, world_size)
    if rank == 0:
        print(json.dumps(numbers), flush=True)


def main(world_size: int, names: list[str]) -> None:
    """Each program in processes of its own: torch keeps the names of workers of the one before."""
    for name in names:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(run, (world_size, port, name), world_size)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
