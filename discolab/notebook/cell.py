"""Run one cell on every worker: the worker function, and the controller's side of it.

The source travels as text; each worker compiles it once (workers of one process share that)
and runs it in its own namespace. The value of a last expression is the call's result, so a
cell is an ordinary call whose DRef is the last value.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import linecache
import tokenize
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from ..debugger import assertions as _assertions  # noqa: F401 - gives cells `disco_assert`
from ..debugger import post_mortem
from ..debugger.code_objects import scope_of
from ..debugger.fingerprints import note_cell
from ..debugger.frames import GIVEN, given_here, given_names
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError, DiscoError, WaitTimeoutError
from ..runtime.failures import Failure, name_ranks
from ..runtime.functions import worker_function
from ..runtime.registers import OWN
from ..runtime.services import probe
from ..runtime.session import Session
from ..runtime.sources import is_cell, place
from ..runtime.user_code import is_user_file
from ..runtime.worker import Worker, current_worker
from ..views.formats import cut
from .awaiting import run_code
from .cells import keep_source

AFTER_CELL = "discolab.notebook.after_cell"  # in `Worker.shared`: functions for the end of a cell
_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
IN_FRAME = f"{__name__}:complete_in_frame"


class CellInterrupted(KeyboardInterrupt):
    """A cell was stopped; says where each worker was, and which go on."""

    def __init__(self, failures: list[Failure], going_on: Sequence[str] = ()) -> None:
        where: dict[str, list[int]] = {}
        before: dict[str, list[int]] = {}
        for failure in failures:
            if not failure.frames:
                continue
            # the cell's own line, also below the loop in which it awaited
            users = (frame for frame in failure.frames if is_user_file(frame[0]))
            file, line, _ = next(users, failure.frames[0])
            if failure.interrupted or failure.victim:
                where.setdefault(place(file, line), []).append(failure.rank)
            else:  # by itself, before
                words = f"{cut(failure.headline.splitlines()[0], 200)} at {place(file, line)}"
                before.setdefault(words, []).append(failure.rank)
        places = [f"{name_ranks(ranks)} at {text}" for text, ranks in where.items()]
        failed = [f"{name_ranks(ranks)} had failed: {text}" for text, ranks in before.items()]
        text = "; ".join(["stopped " + "; ".join(places) if places else "stopped", *failed])
        if going_on:
            text = "; ".join(["not stopped: " + ", ".join(going_on), *places, *failed])
        super().__init__(text)

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


class CellSyntaxError(DiscoError):
    """A cell can't be compiled; nothing ran."""

    def __init__(self, error: SyntaxError) -> None:
        super().__init__(f"{error.msg} (line {error.lineno})")
        self.error = error

    def _render_traceback_(self) -> list[str]:
        error = self.error
        file = error.filename or ""
        lines = [place(file, error.lineno)]
        text = error.text or linecache.getline(file, error.lineno or 0)
        if text:
            lines.append("    " + text.rstrip())
            if error.offset:
                lines.append(" " * (3 + error.offset) + "^")
        return [*lines, f"{type(error).__name__}: {error.msg}"]


# -- on the worker -------------------------------------------------------------------------


def prepare_namespace() -> None:
    """Bind the names that every cell can use; what the user bound since is kept."""
    worker = current_worker()
    names = worker.namespace
    if "__builtins__" in names:
        return
    names.update(__name__="__main__", __builtins__=builtins, **given_names(worker))
    note_cell(worker, "")  # how it was before the first cell


@worker_function("the cell")
def run_cell(source: str, filename: str, targets: list[int] | None) -> Any:
    """Execute a cell on this worker and return the value of its last expression.

    On workers that are not among `targets` nothing runs and None is returned.
    """
    worker = current_worker()
    post_mortem.forget()
    if targets is not None and worker.worker_id not in targets:
        worker.sat_out = worker.executed
        return None
    prepare_namespace()
    body, last = compile_cell(source, filename)
    try:
        return run_code(body, last, worker.namespace)
    except BaseException as exc:
        post_mortem.keep(filename, exc)
        raise
    finally:
        note_cell(worker, filename)
        for end in worker.shared.get(AFTER_CELL, ()):
            end()


@functools.lru_cache(maxsize=256)
def compile_cell(source: str, filename: str) -> tuple[CodeType, CodeType | None]:
    """Compile a cell: all but the last expression, and that expression if there is one."""
    keep_source(filename, source)
    tree = ast.parse(source, filename)
    last = None
    expression = tree.body[-1] if tree.body else None
    if isinstance(expression, ast.Expr) and not _ends_with_semicolon(source):
        tree.body.pop()
        last = compile(ast.Expression(expression.value), filename, "eval", _AWAIT, True)
    return compile(tree, filename, "exec", _AWAIT, True), last  # without this file's `__future__`


@probe
def names_made(worker: Worker) -> list[str]:
    """The variables of a worker that cells have made."""
    return [
        name
        for name in tuple(worker.namespace)
        if not name.startswith("_") and name not in GIVEN and name != "mesh"
    ]


def complete_on_worker(text: str) -> list[str]:
    """What `text`, a name or ``a.b``, may be completed to (a worker function)."""
    return completions(text, current_worker().namespace)


def complete_at_raise(text: str) -> list[str]:
    """The same where the last cell failed on this worker (a worker function); [] if none did."""
    frame = post_mortem.frame_kept()
    return [] if frame is None else completions(text, {**frame.f_globals, **scope_of(frame)})


def complete_in_frame(worker: Worker, frame: FrameType, text: str) -> list[str]:
    """The same in the frame in which a worker stands; asked by `Debugger.ask`."""
    return completions(text, {**given_here(), **frame.f_globals, **scope_of(frame)})


def completions(text: str, names: dict[str, Any]) -> list[str]:
    """What `text`, a name or ``a.b``, may be completed to where these names are known.

    Of ``a.b[`` the keys that are strings; of nothing the names themselves. Nothing that this meets
    is an error: there are no such words then.
    """
    try:
        return _completions(text, names)
    except Exception:
        return []


def _completions(text: str, names: dict[str, Any]) -> list[str]:
    if not text:
        return sorted(name for name in names if not name.startswith("_"))
    if text.endswith("["):
        value = eval(text[:-1], names)
        keys: Any = getattr(value, "_ipython_key_completions_", getattr(value, "keys", list))()
        return sorted(key for key in keys if isinstance(key, str))
    import rlcompleter  # here: it sets up the terminal, which workers of other processes have not

    completer = rlcompleter.Completer(names)
    found = completer.attr_matches(text) if "." in text else completer.global_matches(text)
    return sorted({word.rstrip("(): ") for word in found})


@worker_function("the look at a cell's value")
def has_value(value: Any) -> bool:
    """Whether there is something to show (a worker function)."""
    return value is not None


def _ends_with_semicolon(source: str) -> bool:
    """Whether the last thing in `source`, comments aside, is a ``;``."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.DEDENT, tokenize.ENDMARKER)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except tokenize.TokenError:
        return False
    return [t.string for t in tokens if t.type not in skipped][-1:] == [";"]


# -- on the controller ---------------------------------------------------------------------


class CellRun:
    """A cell that was sent to the workers: wait for it, fetch its result.

    ``%%disco -a`` gives one; the names are those of ipyparallel's results.
    """

    def __init__(
        self, session: Session, targets: list[int], func: Any, *args: Any, what: str = "the cell"
    ) -> None:
        self.session = session
        self.targets = targets
        self.ref: DRef = session.call_packed(func, *args)
        self._shown = session.call_packed(has_value, self.ref)
        self._shown.name = OWN
        self._ticket = session.request(self._shown, tell=True, what=what)

    @classmethod
    def of_source(
        cls,
        session: Session,
        source: str,
        filename: str,
        targets: list[int],
        func: Callable[..., Any] = run_cell,
    ) -> CellRun:
        """Send the source of a cell to the workers among `targets`, to be run by `func`."""
        whole = len(targets) == session.num_workers
        run = cls(session, targets, func, source, filename, None if whole else list(targets))
        run.ref.name = last_name(source)
        return run

    def ready(self) -> bool:
        """Whether all workers have run it."""
        return self._ticket.acquire(0)

    @property
    def failures(self) -> list[Failure]:
        """What has failed so far, a `Failure` for each worker."""
        return [v for v in self._ticket.values.values() if isinstance(v, Failure)]

    def wait(self, timeout: float | None = None, interrupt: bool = True) -> None:
        """Wait until all workers have run it; without `interrupt` Ctrl-C leaves them at it.

        Raises
        ------
        WorkerError
            If it failed on one or more workers.
        WaitTimeoutError, CellInterrupted
        """
        try:
            self.session.wait(self._ticket, timeout, interrupt)
        except KeyboardInterrupt:
            raise self.interrupted() from None
        except WaitTimeoutError:
            raise
        except DiscoError:
            self.session.mark_reported(self.ref)
            raise
        failures = self.failures
        if failures and all(f.interrupted for f in failures):
            raise CellInterrupted(self._stops())
        if failures:
            raise self.session.report(failures)

    def get(self, timeout: float | None = None, interrupt: bool = True) -> DRef | None:
        """Wait, and return the DRef of the last expression; None if it has no value."""
        self.wait(timeout, interrupt)
        return self.ref if any(self._ticket.values.values()) else None

    def interrupted(self) -> CellInterrupted:
        """What to raise where the workers were interrupted: says where each was.

        What had failed by itself is told by that, and no more by the next wait, of another cell.
        """
        failures = self._stops()
        if not all(failure.interrupted for failure in failures):
            self.session.report(failures)
        return CellInterrupted(failures, self._going_on())

    def _going_on(self) -> list[str]:
        """What workers do that have not stopped."""
        if self._ticket.acquire(0):
            return []
        busy = [s for s in self.session.status() if s.rank in self._ticket.missing]
        return [str(status) for status in busy if status.state != "idle"]

    def _stops(self) -> list[Failure]:
        """What each worker tells of the interrupt, as far as they answer at once."""
        try:
            values = self.session.peek(self.ref, timeout=0.5)
        except WaitTimeoutError as exc:
            values = exc.partial
        except DiscoError:
            values = {}
        return [v for v in values.values() if isinstance(v, Failure)]

    def __repr__(self) -> str:
        state = "done" if self.ready() else "running"
        return f"<cell on {name_ranks(self.targets)}: {state}; .get() waits for it>"


def check_syntax(session: Session, source: str, filename: str) -> None:
    """Raise for a syntax error here, once, rather than on every worker.

    The session keeps it, for no worker has a record of it.

    Raises
    ------
    CellSyntaxError
    """
    try:
        compile_cell(source, filename)
        session.not_compiled = None
    except SyntaxError as exc:
        session.not_compiled = Failure(
            -1,
            "the cell" if is_cell(filename) else "the script",
            "",
            type(exc).__name__,
            exc.msg,
            ((filename, exc.lineno or 1, "<module>"),),
            call=session.calls_sent,
        )
        raise CellSyntaxError(exc) from None
    magic = _first_magic(source)
    if magic is not None:
        raise ArgumentError(
            f"{magic} inside a %%disco cell would run in the notebook, not on the workers; put it "
            "in a cell of its own, or a cell magic such as %%time above %%disco"
        )


def _first_magic(source: str) -> str | None:
    """The first IPython magic in a transformed cell; shell commands (``!ls``) are none."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("run_line_magic", "run_cell_magic")
            and isinstance(node.args[0], ast.Constant)
        ):
            return ("%" if node.func.attr == "run_line_magic" else "%%") + str(node.args[0].value)
    return None


def last_name(source: str) -> str | None:
    """The variable that a cell's last line names, if that is all it does."""
    body = ast.parse(source).body
    last = body[-1] if body else None
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Name):
        return last.value.id
    return None
