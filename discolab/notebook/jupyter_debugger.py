"""JupyterLab's own debugger view, shown the workers of a session instead of the kernel.

Its requests come by the kernel's control channel, where ipykernel has debugpy answer. While a
`JupyterDebugger` is installed they go to the session's `dap.Server` instead, as those of any other
editor. Three things are put in other words on the way:

- The front end names a cell by a hash of its text, and may set breakpoints in it before it has run;
  workers know it as ``Cell In[3]``.
- It shows the stack of one thread: what it is told are the stacks of all workers, one below
  another.
- It takes a frame that it has seen for one that has not changed, so each stop has its own numbers.

Requests are answered on the kernel's control thread, which never waits for the kernel's main one;
events come on a thread of the connection. `program_begins` is called on the main thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import dap
from ..dap.connection import Connection
from ..debugger.breaks import lines_with_code
from ..debugger.controller import DebuggerError
from ..runtime.errors import ArgumentError, DiscoError
from .cells import keep_source

_PATIENCE = 15.0  # seconds for an answer; the server has shorter limits of its own
_AT_BEGIN = 5.0  # seconds to set breakpoints in a cell that is about to run
_STOP = 1_000_000  # the frames of two stops have numbers so far apart
_TOLD = frozenset({"stopped", "continued", "terminated"})
_SHOWN_BY_VALUE = frozenset({"int", "float", "bool", "str"})
_KERNELS = frozenset({"inspectVariables", "modules"})  # what only the kernel knows
_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "setBreakpoints": {"breakpoints": []},
    "stackTrace": {"stackFrames": []},
    "scopes": {"scopes": []},
    "variables": {"variables": []},
    "richInspectVariables": {"data": {}, "metadata": {}},
}
"""What stands in an answer that was refused: the front end reads it all the same."""

Body = dict[str, Any]
Message = dict[str, Any]


class _RefusedError(DiscoError):
    """The server has refused a request."""


@dataclass
class _Cell:
    """A cell as the front end knows it.

    Attributes
    ----------
    text
        All of it; "" if only its path is known.
    file
        As the code objects of its last run have it; "" before it has run.
    """

    text: str = ""
    file: str = ""

    @property
    def above(self) -> int:
        """Empty lines above its magic, which IPython takes away."""
        lines = self.text.splitlines()
        return next((number for number, line in enumerate(lines) if line.strip()), 0)

    @property
    def is_for_workers(self) -> bool:
        """Whether it is a ``%%disco`` cell, or may be one."""
        return not self.text or self.text.lstrip().split(maxsplit=1)[:1] == ["%%disco"]


class JupyterDebugger:
    """See the module.

    Parameters
    ----------
    shell
        That of the kernel.
    server
        Of the session whose workers are shown.

    Raises
    ------
    DebuggerError
        If there is no kernel that a front end could ask.
    """

    def __init__(self, shell: Any, server: dap.Server) -> None:
        self._shell = shell
        self._kernel: Any = getattr(shell, "kernel", object())
        if not hasattr(self._kernel, "do_debug_request"):
            raise DebuggerError("JupyterLab's debugger can be had where ipykernel runs the cells")
        self._server = server
        self._kernels: Callable[[Message], Awaitable[Message]] = self._kernel.do_debug_request
        self._line: Connection | None = None
        self._on = False  # for the front end; it is told by no event if the line has ended
        self._capabilities: Body = {}
        self._stopped: int | None = None  # the thread of which the front end was told
        self._stops = 0
        self._cells: dict[str, _Cell] = {}  # by the path that the front end has for it
        self._breaks: dict[str, list[int]] = {}  # by path, also of files
        self._numbers: dict[str, int] = {}  # path -> the server's number of a source
        self._text = ""  # of the notebook's cell that runs

    @property
    def closed(self) -> bool:
        """Whether the kernel's own debugger is there again."""
        return bool(vars(self._kernel).get("do_debug_request") != self._answer)

    def shows(self, server: dap.Server) -> bool:
        """Whether it is installed, for that session."""
        return self._server is server and not self.closed

    def install(self) -> None:
        """Answer the front end from now on.

        Raises
        ------
        DebuggerError
            If the debugger is on, for the kernel.
        """
        if getattr(getattr(self._kernel, "debugger", None), "is_started", False):
            raise DebuggerError(
                "JupyterLab's debugger is on, and shows the kernel: switch it off (the bug above "
                "the notebook), run this again, and switch it on"
            )
        self._kernel.do_debug_request = self._answer
        self._shell.events.register("pre_run_cell", self._cell_begins)

    def end(self) -> None:
        """Show the session no more; if the front end is on, until it is switched off."""
        if not self._on:
            self.uninstall()
        elif self._line is not None:
            self._line.close()

    def uninstall(self) -> None:
        """Leave the front end to the kernel's own debugger again; any number of times."""
        if not self.closed:
            del self._kernel.do_debug_request
            self._shell.events.unregister("pre_run_cell", self._cell_begins)
        if self._line is not None:
            self._line.close()

    # -- on the kernel's main thread -------------------------------------------------------------

    def _cell_begins(self, info: Any) -> None:
        self._text = info.raw_cell or ""

    def program_begins(self, file: str) -> None:
        """The cell that runs is about to run on the workers: set the breakpoints that are in it."""
        path, cell = self._cell_of(self._text)
        if not cell.is_for_workers:
            return
        before, cell.file = cell.file, file
        line, wanted = self._line, self._breaks.get(path)
        if line is not None and wanted:
            try:
                if before:
                    line.ask("setBreakpoints", _breakpoints(before, [])).result(_AT_BEGIN)
                lines = [one - cell.above for one in wanted]
                line.ask("setBreakpoints", _breakpoints(file, lines)).result(_AT_BEGIN)
            except (DiscoError, TimeoutError):  # the session ends, and says so itself
                pass

    # -- requests, on the control thread ---------------------------------------------------------

    async def _answer(self, message: Message) -> Message:
        """What `Kernel.do_debug_request` is while this is installed."""
        command = message["command"]
        if self._server.closed and (command == "initialize" or not self._on):
            self.uninstall()
            return await self._kernels(message)
        idle = self._stopped is None and command in ("variables", "richInspectVariables")
        if command in _KERNELS or idle:
            return await self._kernels(message)
        arguments = message.get("arguments") or {}
        refused = ""
        try:
            body = await self._do(command, arguments)
        except Exception as exc:  # whatever it is, the front end has an answer
            refused = str(exc) or type(exc).__name__
            body = dict(_EMPTY.get(command, {}))
        answer = {"type": "response", "request_seq": message["seq"], "command": command}
        more = {"message": refused} if refused else {}
        return {**answer, "success": not refused, **more, "body": body}

    async def _do(self, command: str, arguments: Body) -> Body:
        own = _HANDLERS.get(command)
        if own is not None:
            return await own(self, arguments)
        given = dict(arguments)
        if given.get("frameId"):
            given["frameId"] %= _STOP
        return await self._ask(command, given)

    async def _ask(self, command: str, arguments: Mapping[str, Any] | None = None) -> Body:
        if self._line is None:
            raise _RefusedError("the debugger is off")
        future = asyncio.wrap_future(self._line.ask(command, arguments))
        try:
            answer = await asyncio.wait_for(future, _PATIENCE)
        except TimeoutError:
            raise _RefusedError(f"{command}: no answer after {_PATIENCE:g} s") from None
        if not answer["success"]:
            raise _RefusedError(answer["message"])
        body: Body = answer.get("body") or {}
        return body

    async def _debug_info(self, _: Body) -> Body:
        info: Body = (await self._kernels(_request("debugInfo")))["body"]
        return {
            **info,  # how it makes paths of cells
            "isStarted": self._line is not None,
            "breakpoints": [
                {"source": path, "breakpoints": [{"line": line} for line in lines]}
                for path, lines in self._breaks.items()
            ],
            "stoppedThreads": [] if self._stopped is None else [self._stopped],
            "copyToGlobals": False,
            "exceptionPaths": [],
        }

    async def _initialize(self, arguments: Body) -> Body:
        if self._line is None:
            server = self._server
            line = Connection(server.host, server.port, self._heard, lambda: self._ended(line))
            self._line = line
            try:
                self._capabilities = await self._ask("initialize", arguments)
                await self._ask("attach", {"token": server.token})
                await self._ask("configurationDone")
            except BaseException:
                line.close()
                self._line = None
                raise
            self._on = True
        return self._capabilities

    async def _nothing(self, _: Body) -> Body:
        return {}

    async def _disconnect(self, arguments: Body) -> Body:
        line, self._on = self._line, False
        self._breaks.clear()
        if line is None:
            return {}
        try:
            return await self._ask("disconnect", arguments)
        finally:
            self._line = self._stopped = None
            line.close()

    async def _dump_cell(self, arguments: Body) -> Body:
        return {"sourcePath": self._cell_of(arguments["code"])[0]}

    async def _set_breakpoints(self, arguments: Body) -> Body:
        path = arguments["source"]["path"]
        lines = [one["line"] for one in arguments.get("breakpoints", ())]
        cell = self._cells.get(path)
        if cell is None and _is_path_of_a_cell(path):
            cell = self._cells[path] = _Cell()
        if cell is None or cell.file:
            above = 0 if cell is None else cell.above
            file = path if cell is None else cell.file
            body = await self._ask("setBreakpoints", _breakpoints(file, [n - above for n in lines]))
            placed = [one["line"] + above for one in body["breakpoints"] if one.get("line")]
        else:
            placed = self._lines_in(path, cell, lines)
        placed = sorted(set(placed))
        self._breaks[path] = placed
        source = {"path": path}
        told = [{"verified": True, "line": line, "source": source} for line in placed]
        return {"breakpoints": told}

    async def _stack_trace(self, arguments: Body) -> Body:
        threads = (await self._ask("threads"))["threads"]
        first = arguments.get("threadId")
        frames = []
        for thread in sorted(threads, key=lambda one: (one["id"] != first, one["id"])):
            try:
                found = (await self._ask("stackTrace", {"threadId": thread["id"]}))["stackFrames"]
            except _RefusedError:  # it runs
                continue
            frames += [self._frame(one, thread["name"]) for one in found if "source" in one]
        return {"stackFrames": frames, "totalFrames": len(frames)}

    async def _variables(self, arguments: Body) -> Body:
        found = (await self._ask("variables", arguments))["variables"]
        # the front end shows the type of what is no number or string, but the value if it has none
        shown = [
            one
            if one.get("type") in _SHOWN_BY_VALUE
            else {key: one[key] for key in one if key != "type"}
            for one in found
        ]
        return {"variables": shown}

    async def _source(self, arguments: Body) -> Body:
        path = arguments.get("source", {}).get("path", "")
        cell = self._cells.get(path)
        if cell is not None and cell.text:
            return {"content": cell.text, "mimeType": "text/x-python"}
        if path in self._numbers:
            return await self._ask("source", {"sourceReference": self._numbers[path]})
        try:
            with open(path, encoding="utf-8") as file:
                return {"content": file.read(), "mimeType": "text/x-python"}
        except (OSError, ValueError) as exc:
            raise _RefusedError(f"{path} can't be read: {exc}") from None

    async def _rich_variable(self, arguments: Body) -> Body:
        frame, name = arguments.get("frameId") or 0, arguments.get("variableName", "")
        found = await self._ask("evaluate", {"expression": name, "frameId": frame % _STOP})
        return {"data": {"text/plain": found["result"]}, "metadata": {}}

    async def _copy_to_globals(self, _: Body) -> Body:
        raise _RefusedError("that is a worker's: %disco_pull fetches it to the notebook")

    # -- cells -----------------------------------------------------------------------------------

    def _cell_of(self, text: str) -> tuple[str, _Cell]:
        """The path that the front end has for a cell, and what is known of it."""
        from ipykernel.compiler import get_file_name  # which has no types

        path = str(get_file_name(text))  # type: ignore[no-untyped-call]
        cell = self._cells.setdefault(path, _Cell())
        cell.text = cell.text or text
        return path, cell

    def _lines_in(self, path: str, cell: _Cell, lines: list[int]) -> list[int]:
        """In a cell that has not run, the next lines with code; none where no worker will run."""
        if not cell.is_for_workers:
            return []
        body = cell.text.lstrip().partition("\n")[2]
        file = f"{path} (not run)"
        keep_source(file, "\n" * (cell.above + 1) + self._shell.transform_cell(body))
        try:
            known = lines_with_code(file) if body else []
        except ArgumentError:  # it will not run either
            known = []
        return [next((line for line in known if line >= one), one) for one in lines]

    def _frame(self, frame: Body, worker: str) -> Body:
        path, line = frame["source"]["path"], frame["line"]
        if "sourceReference" in frame["source"]:
            self._numbers[path] = frame["source"]["sourceReference"]
            for known, cell in self._cells.copy().items():
                if cell.file == path:
                    path, line = known, line + cell.above
                    break
        return {
            **frame,
            "id": frame["id"] + self._stops * _STOP,
            "name": f"{worker} · {frame['name']}",
            "line": line,
            "source": {"name": frame["source"]["name"], "path": path},
        }

    # -- on the connection's thread --------------------------------------------------------------

    def _heard(self, event: Message) -> None:
        name = event["event"]
        if name == "stopped":
            self._stopped = event["body"]["threadId"]
            self._stops += 1
        elif name in ("continued", "terminated"):
            self._stopped = None
        if name in _TOLD:
            self._tell(event)

    def _ended(self, line: Connection) -> None:
        if self._line is line:
            self._line = self._stopped = None

    def _tell(self, event: Message) -> None:
        self._tell_kernel(self._kernel._publish_debug_event, event)

    def _tell_kernel(self, what: Callable[..., Any], *args: Any) -> None:
        """Have the control thread do something: it is the one that sends events of a debugger."""
        self._kernel.control_thread.io_loop.add_callback(what, *args)


_HANDLERS: Mapping[str, Callable[[JupyterDebugger, Body], Awaitable[Body]]] = {
    "debugInfo": JupyterDebugger._debug_info,
    "initialize": JupyterDebugger._initialize,
    "attach": JupyterDebugger._nothing,  # with `initialize`, so that it can be refused
    "configurationDone": JupyterDebugger._nothing,
    "disconnect": JupyterDebugger._disconnect,
    "dumpCell": JupyterDebugger._dump_cell,
    "setBreakpoints": JupyterDebugger._set_breakpoints,
    "stackTrace": JupyterDebugger._stack_trace,
    "variables": JupyterDebugger._variables,
    "source": JupyterDebugger._source,
    "richInspectVariables": JupyterDebugger._rich_variable,
    "copyToGlobals": JupyterDebugger._copy_to_globals,
}


def _request(command: str) -> Message:
    return {"type": "request", "seq": 0, "command": command, "arguments": {}}


def _breakpoints(file: str, lines: list[int]) -> Body:
    return {"source": {"path": file}, "breakpoints": [{"line": line} for line in lines]}


def _is_path_of_a_cell(path: str) -> bool:
    from ipykernel.compiler import get_tmp_directory

    return path.startswith(str(get_tmp_directory()))  # type: ignore[no-untyped-call]
