"""Builds the simulated accelerator, once for each state of its source and each torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = [
    HERE / f"{name}.cpp" for name in ("runtime", "device", "operators", "collectives", "profiler")
]
KINETO = Path(torch.__file__).parent / "include" / "kineto"  # whose headers include each other
CACHE = "DISCOLAB_SIM_CACHE"  # the folder to build in


def library() -> Path:
    """The built library; builds it where that has not been done, one process at a time."""
    content = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.[ch]*")) if path.is_file())
    named = f"{torch.__version__} {sys.version_info[:2]}".encode()
    key = hashlib.sha256(named + content).hexdigest()[:16]
    root = Path(
        os.environ.get(CACHE) or Path(tempfile.gettempdir()) / f"discolab-sim-{os.getuid()}"
    )
    folder = root / key
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    built = folder / "sim.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            from torch.utils import cpp_extension

            made = folder / "objects"
            made.mkdir(exist_ok=True)
            (made / "lock").unlink(missing_ok=True)  # of a build that was killed
            cpp_extension.load(
                "sim",
                [str(path) for path in SOURCES],
                extra_cflags=["-O1", "-g0"],
                extra_include_paths=[str(KINETO)],
                build_directory=str(made),
                is_python_module=False,
                is_standalone=False,
            )
            (made / "sim.so").rename(built)
    return built
