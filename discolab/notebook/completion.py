"""Tab completion inside ``%%disco`` cells: the workers' variables and their attributes.

Worker 0 is asked, so that this works on every engine, and the others for what it does not know;
they are given a third of a second. While worker 0 is busy, the names that it had last time are
offered; where it is paused in a program, after
``%disco_eval`` and ``%disco_set`` those that are known there. The options of the magics are, too,
the words of ``%disco_show`` and ``%disco_debug``, and after ``-t`` the axes of the session's mesh.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)

from ..ccl.choose import backends
from ..debugger.debugger import debugger_of
from ..engines import ENGINES
from ..runtime.errors import DiscoError
from ..runtime.mesh import Mesh
from ..runtime.session import Session
from .cell import IN_FRAME, complete_at_raise, complete_on_worker, names_made
from .lab import Lab
from .magic import MAGICS

_PATIENCE = 0.3  # seconds
_CONDITION = re.compile(
    r"(%disco_break\s+\S+|%%?disco(_run)?\s.*(-b|--break)\s+[\"'][^\"']*)\sif\s[^\"]*$"
)
_EXPRESSION = re.compile(r"[A-Za-z_][\w.]*(?:\[[\w'\"]*\][\w.]*)*$")
_KEY = re.compile(_EXPRESSION.pattern.replace("$", r"\[([\"'])([^\"']*)$"))


def _in_script(before: list[str]) -> bool:
    """Whether the words of ``%disco_run`` have come to the script: what follows is the script's."""
    return before[:1] == ["%disco_run"] and any(word.endswith(".py") for word in before)


def _names_of(session: Session) -> list[str]:
    """The variables of a session's workers, for ``sess["``."""
    try:
        found = session.look(names_made)
    except DiscoError:
        return []
    return sorted({name for names in found.values() for name in names})


def _lists(answers: Mapping[int, Any]) -> list[list[str]]:
    """What workers have answered, if there are words in it."""
    return [words for _, words in sorted(answers.items()) if isinstance(words, list) and words]


class WorkerCompleter:
    """A matcher for IPython's completer."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._names: list[str] = []

        @context_matcher(identifier="discolab")  # type: ignore[untyped-decorator, unused-ignore]
        def matcher(context: CompletionContext) -> SimpleMatcherResult:
            return self._match(context)

        self.matcher = matcher

    def install(self, shell: Any) -> None:
        """Offer worker names in this shell."""
        shell.Completer.custom_matchers.append(self.matcher)
        Session._ipython_key_completions_ = _names_of  # type: ignore[attr-defined]

    def uninstall(self, shell: Any) -> None:
        """Undo `install`."""
        shell.Completer.custom_matchers.remove(self.matcher)
        del Session._ipython_key_completions_  # type: ignore[attr-defined]

    def _match(self, context: CompletionContext) -> SimpleMatcherResult:
        line = context.line_with_cursor[: context.cursor_position]
        words, fragment = self._words(context.full_text.lstrip(), line.lstrip(), context.token)
        found = [SimpleCompletion(text=w, type="worker") for w in words if w.startswith(fragment)]
        # what the notebook knows by such a name is not what the workers know
        return {"completions": found, "matched_fragment": fragment, "suppress": bool(found)}

    def _words(self, cell: str, line: str, token: str) -> tuple[list[str], str]:
        """What may come, and the beginning of it that is there."""
        magic = line.startswith(("%disco", "%%disco"))
        first, _, rest = line.partition(" ")
        family = MAGICS[first.strip("%")].family if first.strip("%") in MAGICS else None
        if magic and family is not None:
            word, space, rest = rest.lstrip().partition(" ")
            if not space and line != first:
                return list(family), word
            if word in family:  # the same as the magic that it stands for
                line = f"%{family[word]} {rest}"
        before = line.split()[:-1] if not line.endswith(" ") else line.split()
        last = "" if line.endswith(" ") or not line.split() else line.split()[-1]
        if magic and last.startswith("-") and not _in_script(before):
            return self._options(line), last
        if magic and before and before[-1] == "--engine":
            return list(ENGINES), last
        if magic and before and before[-1] == "--ccl":
            return ["auto", *backends()], last
        if before == ["%disco_snapshot"] or (magic and before and before[-1] == "--restore"):
            return self._lab.snapshotting.snapshot_names(), last
        if magic and before and before[-1] in ("-s", "--session"):
            return list(self._lab.sessions.by_name), last
        if magic and before and before[-1] in ("-t", "--targets", "-r", "--ranks"):
            return self._places(line, last)
        if line.startswith(("%disco_restart ", "%disco_shutdown ", "%disco_status ")):
            return list(self._lab.sessions.by_name), last
        if magic and before and (choices := self._choices(line, before[-1])):
            return choices, last
        if line.startswith("%disco_load") and before and before[-1] == "--dtype":
            return ["bfloat16", "float16", "float32"], last
        if magic and before and before[-1] == "--group":
            return ["world", *self._axes(line)], last
        if line.startswith("%disco_push"):
            return [n for n in self._lab.shell.user_ns if not n.startswith("_")], last
        if line.startswith("%disco_pull"):
            return self._ask(last), last
        if line.startswith("%disco_history "):
            return self._recorded(), last
        if line.startswith("%disco_whos "):
            return self._ask(last), last
        if line.startswith(("%disco_eval ", "%disco_set ")) or _CONDITION.match(line):
            return self._completed(line, token, self._ask_stopped)
        if line.startswith("%disco_pm ") and " -e " in line:
            return self._completed(line, token, partial(self._ask, func=complete_at_raise))
        if cell.startswith("%%disco") or line.startswith(("%disco ", "%disco_break ")):
            return self._completed(line, token, self._ask)
        return [], token

    def _completed(
        self, line: str, token: str, ask: Callable[[str], list[str]]
    ) -> tuple[list[str], str]:
        """The names, attributes or keys that may end a line, and the beginning that is there."""
        key = _KEY.search(line)
        if key:
            return ask(key[0].rpartition(key[1])[0]), key[2]
        match = _EXPRESSION.search(line)
        if match:
            return ask(match[0]), match[0]
        return (ask(""), "") if line.endswith(" ") else ([], token)

    def _actions(self, line: str) -> list[Any]:
        """What argparse knows of the magic of a line."""
        magic = MAGICS.get(line.split()[0].lstrip("%"))
        return magic.parser()._actions if magic is not None else []

    def _options(self, line: str) -> list[str]:
        return sorted(o for action in self._actions(line) for o in action.option_strings)

    def _choices(self, line: str, option: str) -> list[str]:
        """What may follow an option that takes one of a few words."""
        found = [a for a in self._actions(line) if option in a.option_strings and a.choices]
        return sorted(found[0].choices) if found else []

    def _places(self, line: str, last: str) -> tuple[list[str], str]:
        """Axes of the session's mesh, and the places along one that is named."""
        mesh = self._mesh(line)
        fragment = last.rpartition(",")[2]
        axis, equals, _ = fragment.partition("=")
        if mesh is None or (equals and axis not in mesh.axes):
            return [], fragment
        if equals:
            return [f"{axis}={place}" for place in range(mesh.size(axis))], fragment
        return [f"{axis}=" for axis in mesh.axes], fragment

    def _axes(self, line: str) -> tuple[str, ...]:
        mesh = self._mesh(line)
        return mesh.axes if mesh is not None else ()

    def _mesh(self, line: str) -> Mesh | None:
        """The mesh of the session that a line is about, if it has one."""
        named = [word for flag, word in pairwise(line.split()) if flag in ("-s", "--session")]
        try:
            return self._lab.sessions.get(named[-1] if named else None).current_mesh
        except DiscoError:
            return None

    def _ask_stopped(self, text: str) -> list[str]:
        """What is known where a program stands; where none does, what the workers' cells know."""
        return self._ask_paused(text) or self._ask(text)

    def _ask(self, text: str, func: Any = complete_on_worker) -> list[str]:
        try:
            session = self._lab.sessions.get()
            if session.status()[0].state != "idle":
                return self._names
            ref = session.call_packed(func, text)
            lists = _lists(session.peek(ref, [0], _PATIENCE))
            if not lists:  # what worker 0 does not know
                lists = _lists(session.peek(ref, None, _PATIENCE))
        except DiscoError:
            return self._names
        found: list[str] = lists[0] if lists else []
        if text.isidentifier() and func is complete_on_worker:
            others = _names_of(session)  # which worker 0 may not have
            self._names = sorted({*found, *(name for name in others if name.startswith(text))})
            return self._names
        return found

    def _recorded(self) -> list[str]:
        """The variables that ``%%disco --trace`` has recorded."""
        from ..debugger import history  # which few sessions use

        try:
            return history.names(self._lab.sessions.get())
        except DiscoError:
            return []

    def _ask_paused(self, text: str) -> list[str]:
        """What is known where the first worker that is paused stands."""
        try:
            debugger = debugger_of(self._lab.sessions.get())
            stop = debugger.stop if debugger.is_paused else None
            ranks = [rank for group in stop.groups for rank in group][:1] if stop else []
            found = debugger.ask(IN_FRAME, text, ranks=ranks, timeout=_PATIENCE) if ranks else {}
        except DiscoError:
            return []
        return [word for well, words in found.values() if well for word in words]
