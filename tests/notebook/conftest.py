"""Kernels for the tests of the notebook layer: cells run in them as from a front end."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from jupyter_client.manager import KernelManager


@dataclass
class Result:
    """What one cell gave."""

    status: str
    outputs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    pages: list[dict[str, Any]] = field(default_factory=list)  # what was paged, as by ``x?``
    updates: list[dict[str, Any]] = field(default_factory=list)  # of displays, in order

    def stream(self, name: str) -> str:
        """All text of stdout or stderr."""
        return "".join(o["text"] for o in self.outputs if o.get("name") == name)

    @property
    def stdout(self) -> str:
        return self.stream("stdout")

    @property
    def stderr(self) -> str:
        return self.stream("stderr")

    @property
    def data(self) -> list[dict[str, Any]]:
        """The bundles of results and displays."""
        return [o["data"] for o in self.outputs if "data" in o]

    @property
    def text(self) -> str:
        """The text/plain of the last result."""
        return self.data[-1]["text/plain"]

    @property
    def error(self) -> dict[str, Any]:
        """ename, evalue, traceback."""
        return next(o for o in self.outputs if "ename" in o)

    @property
    def traceback(self) -> str:
        """What is shown of the error, without colours."""
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(self.error["traceback"]))


class Kernel:
    """A kernel process and the client that talks to it."""

    def __init__(self) -> None:
        env = dict(os.environ, OMP_NUM_THREADS="1")
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        # not from a place where somebody's own start-up files are read
        self.manager.start_kernel(env=env, stderr=None)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(
        self,
        code: str,
        timeout: float = 60,
        interrupt_after: float | None = None,
        watched: bool = False,
    ) -> Result:
        """Run one cell; with `interrupt_after` press stop that many seconds after its start.

        `watched` as in a front end that can ask its user for input.
        """
        began = time.monotonic()
        result = Result("")
        pressed = 0.0
        msg_id = self.client.execute(code, allow_stdin=watched)
        idle = False
        while not (result.status and idle):
            now = time.monotonic()
            assert now - began < timeout, f"no end after {timeout} s: {result.outputs}\n{code}"
            if interrupt_after is not None and not pressed and now - began > interrupt_after:
                self.manager.interrupt_kernel()
                pressed = now
            for message in self._messages(msg_id):
                content = message["content"]
                if message["msg_type"] == "execute_reply":
                    result.status = content["status"]
                    result.pages = [p["data"] for p in content.get("payload", ()) if "data" in p]
                elif message["msg_type"] == "status":
                    idle = content["execution_state"] == "idle"
                elif message["msg_type"] in ("stream", "display_data", "execute_result", "error"):
                    result.outputs.append(content)
                elif message["msg_type"] == "update_display_data":
                    result.updates.append(content["data"])
        result.seconds = time.monotonic() - (pressed or began)
        return result

    def ok(self, code: str, **more: Any) -> Result:
        """Run one cell that must not fail."""
        result = self.run(code, **more)
        assert result.status == "ok", result.outputs
        return result

    def fails(self, code: str, **more: Any) -> Result:
        """Run one cell that must fail."""
        result = self.run(code, **more)
        assert result.status == "error", result.outputs
        return result

    def complete(self, code: str) -> list[str]:
        """What tab offers at the end of `code`."""
        reply = self.client.complete(code, len(code), reply=True, timeout=30)
        return reply["content"]["matches"]

    def inspect(self, code: str, at: int | None = None, detail: int = 0) -> str:
        """What Shift-Tab shows at `at`, the end of `code` if None; "" if nothing is known."""
        place = len(code) if at is None else at
        reply = self.client.inspect(code, place, detail_level=detail, reply=True, timeout=30)
        data = reply["content"]["data"]
        return re.sub(r"\x1b\[[\d;]*m", "", data.get("text/plain", ""))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def _messages(self, msg_id: str, wait: float = 0.02) -> list[dict[str, Any]]:
        found = []
        for channel in (self.client.iopub_channel, self.client.shell_channel):
            while channel.msg_ready():
                message = channel.get_msg(timeout=1)
                if message["parent_header"].get("msg_id") == msg_id:
                    found.append(message)
        if not found:
            time.sleep(wait)
        return found


@pytest.fixture(scope="module")
def bare_kernel() -> Iterator[Kernel]:
    """A kernel in which discolab is not loaded yet."""
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def lab_kernel() -> Iterator[Kernel]:
    """A kernel with discolab loaded."""
    kernel = Kernel()
    kernel.ok("%load_ext discolab")
    yield kernel
    kernel.close()


@pytest.fixture
def nb(lab_kernel: Any) -> Any:
    """The kernel with four fresh workers, named `sess`."""
    lab_kernel.ok("%disco_session 4 --devices cpu")
    return lab_kernel
