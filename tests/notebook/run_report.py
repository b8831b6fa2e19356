"""A script that says what it finds in its process: run by torchrun and by ``%disco_run``."""

import atexit
import dataclasses
import inspect
import io
import json
import logging
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import typing
import warnings

import beside  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import __main__

steps, name = 1, "none"
exec(pathlib.Path("configurator.py").read_text())  # nanoGPT's way: globals() overridden by argv


@dataclasses.dataclass
class Config:
    """Of a program that sends its own classes."""

    rank: int
    next: "Config | None" = None


class Squares(Dataset[float]):
    """Knows its rank in workers of its own."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> str:
        return f"{item**2} {os.environ['RANK']} {os.environ['MINE']}"


def draw_all(method: str) -> list[str]:
    """What workers of a DataLoader say."""
    loader = DataLoader(Squares(), batch_size=None, num_workers=1, multiprocessing_context=method)
    return list(loader)


def raises(function: typing.Any) -> str:
    """The name of what a function raises."""
    try:
        function()
    except Exception as exc:
        return type(exc).__name__
    return ""


def main() -> None:
    """Write the report."""
    os.environ["MINE"] = f"of {os.environ['RANK']}"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: list[typing.Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, Config(rank))
    file = io.BytesIO()
    torch.save(Config(rank), file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    multiprocessing.set_start_method("spawn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.barrier()
        warnings.warn(f"of {rank}", stacklevel=1)
    known = json.loads(pathlib.Path("known.json").read_text())
    seen: dict[str, typing.Any] = {
        "argv": sys.argv,
        "path0": sys.path[0],
        "folder": os.getcwd(),
        "configured": [steps, name],
        "beside": beside.WORD,
        "environ": {k: v for k, v in os.environ.items() if k not in known},
        "child sees": subprocess.check_output(["sh", "-c", "echo $RANK $MINE"], text=True),
        "main": [__main__.__name__, __main__.__file__, __main__.__spec__ is None, __name__],
        "main is this": vars(__main__) is globals() and __main__.steps == steps,
        "package": [__package__, __doc__, __file__],
        "hints": str(typing.get_type_hints(Config)),
        "source": [inspect.getsource(Config), inspect.getsource(raises)],
        "pickled": type(pickle.loads(pickle.dumps(Config(1)))) is Config,
        "saved": again == Config(rank) and type(again) is Config,
        "sent": [c.rank for c in found] + [all(type(c) is Config for c in found)],
        "loaders": [draw_all("fork"), draw_all("spawn")],
        "interactive": [hasattr(sys, "ps1"), sys.flags.interactive],
        "logging": [logging.root.level, len(logging.root.handlers)],
        "warnings": [str(w.message) for w in caught],
        "signals": [
            str(signal.getsignal(signal.SIGTERM)),
            raises(lambda: signal.signal(signal.SIGTERM, lambda *_: None)),
        ],
        "launched": dist.is_torchelastic_launched(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "get_ipython": "get_ipython" in dir(__builtins__),
    }
    with open(f"{name}-{rank}.json", "w") as out:
        json.dump(seen, out)

    def at_end() -> None:
        with open(f"{name}-{rank}.json") as before:
            seen = json.load(before)
        with open(f"{name}-{rank}.json", "w") as out:
            json.dump({**seen, "at exit": name}, out)

    atexit.register(at_end)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
