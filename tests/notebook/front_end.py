"""The front end's side of a widget's comm, spoken by hand in a kernel's own protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .conftest import Kernel, Result


class Comm:
    """One widget as a front end has it: what it was sent, and what it says.

    Parameters
    ----------
    kernel
        Where the widget lives; between two calls here nobody else may read its messages.
    result
        Of the cell that showed it, so that its model id can be found.
    """

    def __init__(self, kernel: Kernel, result: Result) -> None:
        self._client = kernel.client
        views = [
            data["application/vnd.jupyter.widget-view+json"]
            for data in result.data
            if "application/vnd.jupyter.widget-view+json" in data
        ]
        self.model_id: str = views[-1]["model_id"]
        self.frames: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []
        self.displays: list[dict[str, Any]] = []

    def say(self, kind: str, viewer: str = "here", **content: Any) -> None:
        """Say something, as common.js does."""
        whole = {"type": kind, "viewer": viewer, **content}
        data = {"method": "custom", "content": whole}
        message = {"comm_id": self.model_id, "data": data}
        self._client.shell_channel.send(self._client.session.msg("comm_msg", message))

    def command(self, name: str, **content: Any) -> None:
        """Press a button."""
        self.say("command", name=name, **content)

    def listen(self, seconds: float) -> None:
        """Read what comes for so long."""
        self.until(lambda: False, seconds, strict=False)

    def until(self, ready: Callable[[], bool], seconds: float = 10.0, strict: bool = True) -> None:
        """Read what comes until `ready()`."""
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                assert not strict, (self.frames[-1:], self.said[-3:])
                return
            if self._client.iopub_channel.msg_ready():
                self._take(self._client.iopub_channel.get_msg(timeout=1))
            else:
                time.sleep(0.005)

    def _take(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "update_display_data":
            self.displays.append(content["data"])
        if message["msg_type"] != "comm_msg" or content["comm_id"] != self.model_id:
            return
        data = content["data"]
        if data["method"] == "update" and "frame" in data["state"]:
            self.frames.append(data["state"]["frame"])
        elif data["method"] == "custom":
            self.said.append(data["content"])


class BesideCells(Comm):
    """What it says is heard while a cell runs, as JupyterLab's comms are: on a subshell."""

    def __init__(self, kernel: Kernel, result: Result) -> None:
        super().__init__(kernel, result)
        client = kernel.client
        client.control_channel.send(client.session.msg("create_subshell_request", {}))
        reply = client.control_channel.get_msg(timeout=10)
        self._subshell = reply["content"]["subshell_id"]

    def say(self, kind: str, viewer: str = "here", **content: Any) -> None:
        """See `Comm`."""
        client, whole = self._client, {"type": kind, "viewer": viewer, **content}
        data = {"method": "custom", "content": whole}
        message = client.session.msg("comm_msg", {"comm_id": self.model_id, "data": data})
        message["header"]["subshell_id"] = self._subshell
        client.shell_channel.send(message)
