"""Tab completion inside ``%%disco`` cells: the workers' variables and their attributes.

Worker 0 is asked, so that this works on every engine; it is given a third of a second. While
it is busy, the names that it had last time are offered. The options of the magics are, too.
"""

from __future__ import annotations

import re
import rlcompleter
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)

from ..engines import ENGINES
from ..runtime.errors import DiscoError
from ..runtime.worker import current_worker
from .lab import Lab

_PATIENCE = 0.3  # seconds
_EXPRESSION = re.compile(r"[A-Za-z_][\w.]*(?:\[[\w'\"]*\][\w.]*)*$")


def complete_on_worker(text: str) -> list[str]:
    """What `text`, a name or ``a.b``, may be completed to (a worker function; worker 0 only)."""
    worker = current_worker()
    if worker.worker_id != 0:
        return []
    completer = rlcompleter.Completer(worker.namespace)
    found = completer.attr_matches(text) if "." in text else completer.global_matches(text)
    return sorted({word.rstrip("(): ") for word in found})


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

    def uninstall(self, shell: Any) -> None:
        """Undo `install`."""
        shell.Completer.custom_matchers.remove(self.matcher)

    def _match(self, context: CompletionContext) -> SimpleMatcherResult:
        text = context.full_text.lstrip()
        line = context.line_with_cursor[: context.cursor_position]
        words: list[str] = []
        fragment = context.token
        if line.lstrip().startswith(("%disco", "%%disco")) and fragment.startswith("-"):
            words = self._options(line)
        elif line.lstrip().startswith("%disco_session") and line.rstrip().endswith("--engine"):
            words = list(ENGINES)
        elif text.startswith("%%disco") or line.lstrip().startswith("%disco "):
            match = _EXPRESSION.search(line)
            words = self._ask(match[0]) if match else []
            fragment = match[0] if match else fragment
        found = [SimpleCompletion(text=w, type="worker") for w in words if w.startswith(fragment)]
        return {"completions": found, "matched_fragment": fragment, "suppress": False}

    def _options(self, line: str) -> list[str]:
        name = line.split()[0].lstrip("%")
        magic = self._lab.shell.find_line_magic(name)
        parser = getattr(magic, "parser", None)
        actions = parser._actions if parser is not None else []
        return sorted(o for action in actions for o in action.option_strings)

    def _ask(self, text: str) -> list[str]:
        try:
            session = self._lab.session()
            if session.status()[0].state != "idle":
                return self._names
            ref = session.call_packed(complete_on_worker, text)
            found = session.peek(ref, [0], _PATIENCE)[0]
        except DiscoError:
            return self._names
        if not isinstance(found, list):
            return []
        if "." not in text:
            self._names = found
        return found
