"""Tries an installed discolab (`make dist`): each engine, the magics in a kernel, the command line.

It needs nothing of the checkout and no pytest: it is copied away and run with ``python -I`` in an
environment that holds the built wheel. ``smoke.py --ray`` tries Ray too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import subprocess
import sys
import time
from pathlib import Path

import torch

import discolab
from discolab.engines import make_session


def work(x: torch.Tensor) -> torch.Tensor:
    return discolab.ccl.all_reduce(x * discolab.current_worker().worker_id)


def try_engine(engine: str, **options: object) -> None:
    began = time.monotonic()
    with make_session(2, engine=engine, devices="cpu", **options) as sess:
        sess.init_ccl()
        x = sess.broadcast(torch.ones(3))
        sums = sess.call_packed(work, x).debug_get_from_all()
        assert [value.tolist() for value in sums] == [[1.0] * 3] * 2, sums
        assert "on 2 workers" in repr(discolab.view(x)) or "all 2 workers" in repr(discolab.view(x))
        assert sess.rpc.rpc_sync(1, max, args=(2, 5)) == 5
    print(f"engine {engine}: good, {time.monotonic() - began:.1f} s")


class Kernel:
    """A kernel of this environment."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        self.manager.start_kernel()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, ok: bool = True) -> str:
        """All that a cell shows, as text."""
        shown: list[str] = []

        def collect(message: dict) -> None:
            content = message["content"]
            if "text" in content:
                shown.append(content["text"])
            elif "data" in content:
                shown.append(content["data"].get("text/plain", ""))
                widget = "application/vnd.jupyter.widget-view+json" in content["data"]
                shown.append("<widget>" if widget else "")
            elif "ename" in content:
                shown.append("\n".join([content["ename"], *content["traceback"]]))

        reply = self.client.execute_interactive(code, output_hook=collect, timeout=120)
        text = "\n".join(shown)
        assert (reply["content"]["status"] == "ok") == ok, f"{code}\n{text}"
        return text

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def try_magics() -> None:
    began = time.monotonic()
    kernel = Kernel()
    see = kernel.run
    try:
        see("%load_ext discolab")
        for engine in ("threads", "processes"):
            assert "workers 0-3 on cpu" in see(f"%disco_session 4 --devices cpu --engine {engine}")
            said = see("%%disco\nw = torch.full((2, 2), float(rank))\nprint('of', world_size)\nw")
            assert "[0-3] of 4" in said, said
            assert "DRef w · float32[2, 2] on 4 workers" in said, said
            assert "<widget>" in see("%disco_show registers")
            assert "<widget>" in see("%disco_show devices")
            assert "<widget>" in see("%disco_show timeline")
            assert "idle" in see("%disco_show status")
            assert "4 different" in see("%disco_show whos")
            assert "worker" in see("%disco_show doctor")
            assert "line 2" in see("%%disco --step\na = rank\nb = a + 1\nb")
            see("%disco_debug next")
            assert "<widget>" in see("%disco_debug")
            assert "30" in see("%disco_debug eval a * 10")
            assert "DRef b" in see("%disco_debug continue")
            failed = see("%%disco\nif rank == 2: raise ValueError('planted')", ok=False)
            assert "worker 2" in failed, failed
            assert "planted" in failed, failed
            assert "ValueError: planted" in see("%disco_debug pm")
        script = Path("script.py")
        script.write_text("import torch.distributed as dist\nprint('rank', dist.get_rank())\n")
        see("%disco_restart --engine threads")
        assert "rank 3" in see(f"%disco_run {script}")
        see("import torch; torch.save({'w': torch.eye(4)}, 'w.pt')")
        assert "float32" in see("%disco_load w.pt")
        see("%disco_shutdown")
    finally:
        kernel.close()
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("ipykernel", "ipython")
    )
    print(f"magics: good with {versions}, {time.monotonic() - began:.1f} s")


def try_the_rest() -> None:
    home = Path(discolab.__file__).resolve().parent
    assert "site-packages" in home.parts, f"discolab comes from {home}, not from a wheel"
    assert importlib.resources.files("discolab").joinpath("py.typed").is_file()
    assert importlib.metadata.version("discolab") == discolab.__version__
    command = Path(sys.executable).with_name("discolab")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    print(f"installed: good, in {home}")


if __name__ == "__main__":
    try_the_rest()
    try_engine("threads")
    try_engine("processes")
    try_engine("sockets", nodes="local:2")
    if "--ray" in sys.argv:
        try_engine("ray")
    try_magics()
