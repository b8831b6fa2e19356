"""What a name of a ``%%disco`` cell stands for: Shift-Tab, ``x?`` and ``x??``.

The workers are asked, each in its own namespace; where a program is paused, in the frame in which
it stands. While they are busy nothing is known, and nothing is waited for.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import re
from collections.abc import Mapping
from types import FrameType
from typing import Any

from IPython.core import page
from IPython.core.oinspect import Inspector, OInfo
from IPython.utils.path import compress_user
from IPython.utils.tokenutil import token_at_cursor

from ..debugger.code_objects import scope_of
from ..debugger.debugger import debugger_of
from ..runtime.errors import DiscoError
from ..runtime.failures import name_ranks
from ..runtime.functions import worker_function
from ..runtime.session import Session
from ..runtime.worker import Worker, current_worker
from .sessions import Sessions

_PATIENCE = 1.0  # seconds
_ON_WORKERS = re.compile(r"\s*%%disco(_compare)?\b[^\n]*\n")
_VARIABLE = re.compile(r"""\b([A-Za-z_]\w*)\[\s*(["'])([A-Za-z_]\w*)\2\s*\]""")  # sess["x"]
# what IPython takes for its own
_ASKED = re.compile(r"^(\s*%disco\s+)((?:-.*\s)?)(\S+?)(\?\??)\s*$")
_HELP = {"pinfo": 0, "pinfo2": 1}  # what IPython makes of ? and ??
_IN_FRAME = f"{__name__}:inspect_in_frame"
_ADDRESS = re.compile(r"\b0x[0-9a-f]+", re.IGNORECASE)
_ALONE = "what a name stands for is looked up"

Question = tuple[str, int, str]  # an expression, how much is to be told, and in which colours

# -- on the worker -------------------------------------------------------------------------------


@worker_function("the look at what a name stands for")
def inspect_on_worker(*question: Any) -> dict[str, str] | None:
    """What `Session` shows of an expression (a worker function); None if there is no such thing."""
    worker = current_worker()
    worker.alone = _ALONE
    try:
        return described(worker.namespace, *question)
    finally:
        worker.alone = ""


def inspect_in_frame(_worker: Worker, frame: FrameType, *question: Any) -> dict[str, str] | None:
    """The same in the frame in which a worker stands; asked by `Debugger.ask`."""
    return described({**frame.f_globals, **scope_of(frame)}, *question)


def described(
    names: Mapping[str, Any], expression: str, detail: int, theme: str
) -> dict[str, str] | None:
    """What IPython tells of an object: its signature, docstring, source; None if it is not there.

    Parameters
    ----------
    names
        The variables that there are.
    expression
        A name, attributes and items of it; nothing is called.
    detail
        1: the source too.
    theme
        Of IPython's colours.
    """
    try:
        found = _value_of(ast.parse(expression.strip(), mode="eval").body, names)
    except Exception:  # no such name; or what a property of the user's raises
        return None
    info = OInfo(
        ismagic=False, isalias=False, found=True, obj=found, parent=None, namespace="worker"
    )
    bundle = _inspector(theme)._get_info(found, expression, info=info, detail_level=detail)
    as_file = compress_user(os.path.join(os.getcwd(), "Cell In["))  # as which it takes a cell
    return {"text/plain": str(bundle["text/plain"]).replace(as_file, "Cell In[")}


def _value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a name, an attribute or an item; `LookupError` for any other expression."""
    if isinstance(node, ast.Name):
        return names[node.id] if node.id in names else vars(builtins)[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, names), node.attr)
    if isinstance(node, ast.Subscript):
        return _value_of(node.value, names)[ast.literal_eval(node.slice)]
    raise LookupError


def _inspector(theme: str) -> Inspector:
    if "theme_name" in inspect.signature(Inspector.__init__).parameters:
        return Inspector(theme_name=theme or "nocolor")
    return Inspector()  # type: ignore[call-arg, unused-ignore]  # of an IPython before 9


# -- on the controller ---------------------------------------------------------------------------


def ask_workers(session: Session, question: Question) -> dict[str, str] | None:
    """What the first worker that knows an expression tells of it."""
    debugger = debugger_of(session)
    try:
        if debugger.is_paused:
            told = debugger.ask(_IN_FRAME, *question, timeout=_PATIENCE)
            answers = {rank: value for rank, (well, value) in told.items() if well}
        elif any(status.state != "idle" for status in session.status()):
            return None
        else:
            ref = session.call_packed(inspect_on_worker, *question)
            answers = session.peek(ref, timeout=_PATIENCE)
    except DiscoError:
        return None
    known = {rank: bundle for rank, bundle in sorted(answers.items()) if isinstance(bundle, dict)}
    if not known:
        return None
    first, bundle = next((rank, dict(bundle)) for rank, bundle in known.items())
    texts = {rank: _ADDRESS.sub("", told["text/plain"]) for rank, told in known.items()}
    others = [rank for rank, text in texts.items() if text != texts[first]]
    if others:
        head = f"On {name_ranks([first])}; another on {name_ranks(others)}.\n"
    else:
        head = f"On {name_ranks(known)} alone.\n" if len(known) < len(answers) else ""
    bundle["text/plain"] = head + bundle["text/plain"]
    return bundle


def take_help(source: str) -> tuple[str, list[tuple[str, int]]]:
    """A transformed cell without its lines ``x?`` and ``x??``, and what those ask for."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return source, []
    lines, asked = source.splitlines(), []
    for node in body:
        match node:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(attr="run_line_magic"),
                    args=[ast.Constant(value=magic), ast.Constant(value=str(expression))],
                )
            ) if magic in _HELP:
                asked.append((expression, _HELP[magic]))
                for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                    lines[number] = ""
    return ("\n".join(lines), asked) if asked else (source, [])


def _turned(lines: list[str]) -> list[str]:
    """Lines ``%disco x?`` as ``%disco ?x``: IPython looks up the former in the notebook."""
    return [_ASKED.sub(r"\1\2\4\3\n", line) for line in lines]


class WorkerInspector:
    """Answers for names of ``%%disco`` cells in a kernel, and pages what ``x?`` asks for."""

    def __init__(self, shell: Any, sessions: Sessions) -> None:
        self._shell = shell
        self._sessions = sessions
        self._kernel: Any = getattr(shell, "kernel", None)

    def install(self) -> None:
        """Answer the front end's questions about such cells."""
        self._shell.input_transformers_cleanup.append(_turned)
        if self._kernel is not None:
            self._kernel.do_inspect = self._do_inspect  # over the class's own

    def uninstall(self) -> None:
        """Undo `install`."""
        self._shell.input_transformers_cleanup.remove(_turned)
        if self._kernel is not None:
            del self._kernel.do_inspect

    def show(self, session: Session, asked: list[tuple[str, int]]) -> None:
        """Show what a cell's lines ``x?`` ask for, as IPython does."""
        for expression, detail in asked:
            bundle = ask_workers(session, (expression, detail, self._theme))
            if bundle is None:
                print(f"Object `{expression}` not found on the workers.")
            else:
                page.page(bundle)

    @property
    def _theme(self) -> str:
        return getattr(self._shell.inspector, "_theme_name", "")

    def _do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> Any:
        """See ipykernel."""
        asked = self._asked_at(code, cursor_pos)
        if asked is None:
            return type(self._kernel).do_inspect(
                self._kernel, code, cursor_pos, detail_level, omit_sections
            )
        session, name = asked
        bundle = ask_workers(session, (name, detail_level, self._theme)) if session else None
        found = bundle is not None
        return {"status": "ok", "found": found, "data": bundle or {}, "metadata": {}}

    def _asked_at(self, code: str, cursor_pos: int) -> tuple[Session | None, str] | None:
        """Of which session's workers a place in a cell asks for what; None: of the notebook."""
        head = _ON_WORKERS.match(code)
        if head is None:
            for found in _VARIABLE.finditer(code):
                session = self._shell.user_ns.get(found[1])
                if found.end(1) < cursor_pos <= found.end() and isinstance(session, Session):
                    return session, found[3]
            return None
        if cursor_pos < head.end():
            return None
        name = token_at_cursor(code[head.end() :], cursor_pos - head.end())
        try:
            return (self._sessions.get() if name else None), name
        except DiscoError:
            return None, name
