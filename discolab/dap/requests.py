"""The requests: a table of functions that take a client's line and arguments, and give the body.

A thread of the protocol is a worker, its id the rank + 1. Frames are numbered by rank and depth.
What goes on goes on in lockstep, as the debugger decides; with ``singleThread`` that worker alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..debugger.breaks import lines_with_code
from ..debugger.debugger import Debugger
from ..debugger.lockstep import BLOCKED, PAUSED, RUNNING
from ..debugger.records import Spot
from ..debugger.stops import Stop, WorkerAt
from ..runtime.errors import ArgumentError
from ..runtime.failures import name_ranks
from .arguments import Arguments
from .console import command_in, run_command
from .peer import Peer

Body = dict[str, Any] | None
Handler = Callable[[Peer, Arguments], Body]

REQUESTS: dict[str, Handler] = {}
UNATTACHED = frozenset({"initialize", "attach", "launch", "disconnect"})
"""What is answered before the token was shown."""
_MODES = {"continue": "continue", "next": "next", "stepIn": "step", "stepOut": "out"}
GOING_ON = frozenset(_MODES)

_PATIENCE = {"repl": 10.0, "clipboard": 10.0}  # seconds for a value; of others:
_SHORT = 3.0
_FILTERS = (
    ("raised", "Worker fails", "The worker that fails stays where it has failed."),
    ("non-finite", "NaN or infinity is made", "At the first operation that makes one."),
)


def _request(command: str) -> Callable[[Handler], Handler]:
    def enter(handler: Handler) -> Handler:
        REQUESTS[command] = handler
        return handler

    return enter


# -- coming and going ----------------------------------------------------------------------------


@_request("initialize")
def _initialize(client: Peer, arguments: Arguments) -> Body:
    client.name = arguments.text("clientName", arguments.text("clientID", "a client"))[:60]
    if not arguments.flag("linesStartAt1", True) or not arguments.flag("columnsStartAt1", True):
        raise ArgumentError("initialize: lines and columns that start at 0 are not supported")
    if arguments.text("pathFormat", "path") != "path":
        raise ArgumentError("initialize: the one pathFormat that is supported is 'path'")
    client.features = {
        "supportsInvalidatedEvent": arguments.flag("supportsInvalidatedEvent"),
    }
    return {
        "supportsConfigurationDoneRequest": True,
        "supportsFunctionBreakpoints": True,
        "supportsConditionalBreakpoints": True,
        "supportsHitConditionalBreakpoints": True,
        "supportsLogPoints": True,
        "supportsBreakpointLocationsRequest": True,
        "supportsEvaluateForHovers": True,
        "supportsSetVariable": True,
        "supportsSetExpression": True,
        "supportsExceptionInfoRequest": True,
        "supportsTerminateRequest": True,
        "supportSuspendDebuggee": True,
        "supportTerminateDebuggee": True,
        "supportsLoadedSourcesRequest": True,
        "supportsDelayedStackTraceLoading": True,
        "supportsSingleThreadExecutionRequests": True,
        "exceptionBreakpointFilters": [
            {"filter": name, "label": label, "description": text, "default": False}
            for name, label, text in _FILTERS
        ],
    }


@_request("attach")
def _attach(client: Peer, arguments: Arguments) -> Body:
    client.admit(arguments.text("token", ""))
    client.debugger.stops_all = arguments.flag("stepAll", True)
    return None


@_request("launch")
def _launch(client: Peer, arguments: Arguments) -> Body:
    raise ArgumentError('discolab attaches to a session that runs: "request": "attach"')


@_request("configurationDone")
def _configuration_done(client: Peer, arguments: Arguments) -> Body:
    return None


@_request("disconnect")
def _disconnect(client: Peer, arguments: Arguments) -> Body:
    if not client.attached:
        return None
    debugger = client.debugger
    client.leave()
    if arguments.flag("terminateDebuggee") and debugger.is_active:
        debugger.abort()
    elif debugger.is_paused and not arguments.flag("suspendDebuggee"):
        debugger.go("continue")
    return None


@_request("terminate")
def _terminate(client: Peer, arguments: Arguments) -> Body:
    if client.debugger.is_active:
        stuck = client.debugger.abort()
        if stuck:
            client.say(f"{name_ranks(stuck)} did not stop: in a call that can't be interrupted")
    return None


# -- breakpoints ---------------------------------------------------------------------------------


@_request("setBreakpoints")
def _set_breakpoints(client: Peer, arguments: Arguments) -> Body:
    file = client.sources.file(arguments.object("source"))
    wanted = arguments.objects("breakpoints")
    return {"breakpoints": client.breakpoints.in_file(file, wanted)}


@_request("setFunctionBreakpoints")
def _set_function_breakpoints(client: Peer, arguments: Arguments) -> Body:
    return {"breakpoints": client.breakpoints.at_functions(arguments.objects("breakpoints"))}


@_request("setExceptionBreakpoints")
def _set_exception_breakpoints(client: Peer, arguments: Arguments) -> Body:
    wanted = arguments.texts("filters")
    known = [name for name, _, _ in _FILTERS]
    client.debugger.stops_on = frozenset(name for name in wanted if name in known)
    return {
        "breakpoints": [
            {"verified": True}
            if name in known
            else {"verified": False, "message": f"there is no filter {name!r:.60}"}
            for name in wanted
        ]
    }


@_request("breakpointLocations")
def _breakpoint_locations(client: Peer, arguments: Arguments) -> Body:
    first = arguments.number("line")
    last = arguments.number("endLine", first)
    lines = lines_with_code(client.sources.file(arguments.object("source")))
    return {"breakpoints": [{"line": line} for line in lines if first <= line <= last]}


# -- going on ------------------------------------------------------------------------------------


def _going(mode: str) -> Handler:
    def go(client: Peer, arguments: Arguments) -> Body:
        rank = _rank(client, arguments.number("threadId"))
        alone = arguments.flag("singleThread")
        client.stepped = rank
        client.debugger.go(mode, None, [rank] if alone else None)
        return {"allThreadsContinued": not alone} if mode == "continue" else None

    return go


for _command, _mode in _MODES.items():
    REQUESTS[_command] = _going(_mode)


@_request("pause")
def _pause(client: Peer, arguments: Arguments) -> Body:
    client.debugger.pause_soon()
    client.paused = time.monotonic()
    return None


# -- looking -------------------------------------------------------------------------------------


@_request("threads")
def _threads(client: Peer, arguments: Arguments) -> Body:
    stop = client.debugger.stop
    workers = range(client.debugger.session.num_workers)
    return {
        "threads": [
            {"id": rank + 1, "name": f"worker {rank}{_aside(stop.workers[rank]) if stop else ''}"}
            for rank in workers
        ]
    }


@_request("stackTrace")
def _stack_trace(client: Peer, arguments: Arguments) -> Body:
    rank = _rank(client, arguments.number("threadId"))
    worker = _stop(client.debugger).workers[rank]
    if worker.state == RUNNING:
        raise ArgumentError(f"stackTrace: worker {rank} runs: pause it first")
    if worker.state == BLOCKED:
        worker = client.debugger.where(0, [rank]).workers[rank]
    frames = [
        _frame(client, spot, rank, depth) for depth, spot in enumerate(reversed(worker.stack))
    ]
    if worker.state != PAUSED:
        words = worker.words or worker.error or f"worker {rank}{_aside(worker) or ' is idle'}"
        label = {"name": words, "line": 0, "column": 0, "presentationHint": "label"}
        frames.insert(0, {"id": _frame_id(client, rank, 0), **label})
    first, levels = arguments.number("startFrame", 0), arguments.number("levels", 0)
    last = first + levels if levels else None
    return {"stackFrames": frames[first:last], "totalFrames": len(frames)}


@_request("scopes")
def _scopes(client: Peer, arguments: Arguments) -> Body:
    rank, depth = _frame_of(client, arguments.number("frameId"))
    if not _stop(client.debugger).workers[rank].stack and not _blocked(client, rank):
        return {"scopes": []}
    return {"scopes": client.values.scopes(rank, depth)}


@_request("variables")
def _variables(client: Peer, arguments: Arguments) -> Body:
    found = client.values.children(arguments.number("variablesReference"))
    start, count = arguments.number("start", 0), arguments.number("count", 0)
    return {"variables": found[start : start + count if count else None]}


@_request("setVariable")
def _set_variable(client: Peer, arguments: Arguments) -> Body:
    number, name = arguments.number("variablesReference"), arguments.text("name")
    return client.values.assign(number, name, arguments.text("value"))


@_request("setExpression")
def _set_expression(client: Peer, arguments: Arguments) -> Body:
    rank, depth = _frame_or_first(client, arguments)
    target, value = arguments.text("expression"), arguments.text("value")
    return client.values.assign_at(target, value, rank, depth)


@_request("evaluate")
def _evaluate(client: Peer, arguments: Arguments) -> Body:
    expression, context = arguments.text("expression"), arguments.text("context", "")
    command = command_in(expression) if context == "repl" else None
    if command is not None:
        with client.turn:  # what it has go on is told after what it says
            return {"result": run_command(client.debugger, *command), "variablesReference": 0}
    rank, depth = _frame_or_first(client, arguments)
    return client.values.evaluate(expression, rank, depth, _PATIENCE.get(context, _SHORT))


@_request("exceptionInfo")
def _exception_info(client: Peer, arguments: Arguments) -> Body:
    rank = _rank(client, arguments.number("threadId"))
    worker = _stop(client.debugger).workers[rank]
    if worker.reason not in ("raised", "assert", "non-finite"):
        raise ArgumentError(f"exceptionInfo: worker {rank} does not stand at a failure")
    name = {"assert": "disco_assert", "non-finite": "not finite"}.get(worker.reason)
    return {
        "exceptionId": name or worker.note.partition(":")[0],
        "description": worker.note,
        "breakMode": "unhandled" if worker.reason == "raised" else "always",
    }


@_request("source")
def _source(client: Peer, arguments: Arguments) -> Body:
    number = arguments.object("source").number("sourceReference", 0)
    text = client.sources.text(number or arguments.number("sourceReference"))
    return {"content": text, "mimeType": "text/x-python"}


@_request("loadedSources")
def _loaded_sources(client: Peer, arguments: Arguments) -> Body:
    return {"sources": client.sources.cells()}


# -- inside --------------------------------------------------------------------------------------


def _stop(debugger: Debugger) -> Stop:
    stop = debugger.stop
    if stop is None:
        raise ArgumentError("no program is being stepped")
    return stop


def _aside(worker: WorkerAt) -> str:
    """What is said of a worker that does not just stand or run."""
    words = {"collective": "waits", "error": "has failed", "done": "has ended", "aborted": "ended"}
    return f" · {words[worker.state]}" if worker.state in words else ""


def _blocked(client: Peer, rank: int) -> bool:
    return _stop(client.debugger).workers[rank].state == BLOCKED


def _rank(client: Peer, thread: int) -> int:
    workers = client.debugger.session.num_workers
    if not 1 <= thread <= workers:
        raise ArgumentError(f"there is no thread {thread}: the workers are threads 1 to {workers}")
    return thread - 1


def _frame(client: Peer, spot: Spot, rank: int, depth: int) -> dict[str, Any]:
    return {
        "id": _frame_id(client, rank, depth),
        "name": spot.function,
        "line": spot.line,
        "column": 1,
        "source": client.sources.source(spot.file),
    }


def _frame_id(client: Peer, rank: int, depth: int) -> int:
    return 1 + rank + depth * client.debugger.session.num_workers


def _frame_of(client: Peer, number: int) -> tuple[int, int]:
    """The rank and the depth of a frame."""
    if number < 1:
        raise ArgumentError(f"there is no frame {number}")
    depth, rank = divmod(number - 1, client.debugger.session.num_workers)
    return rank, depth


def _frame_or_first(client: Peer, arguments: Arguments) -> tuple[int, int]:
    """The frame that is named, or the one at which the worker that is furthest behind stands."""
    number = arguments.number("frameId", 0)
    if number:
        return _frame_of(client, number)
    groups = _stop(client.debugger).groups
    return (groups[0][0] if groups else 0), 0
