"""In IPython in a terminal: DRefs, sessions and comparisons are shown in colours, by rich.

Where there is a kernel, no terminal or no rich, nothing changes. Runs on the shell's thread.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from ..runtime.dref import DRef
from ..runtime.session import Session

_KINDS = (DRef, Session)
_COMPARISON = ("discolab.views.difference", "Comparison")  # not imported before use


def install(shell: Any) -> None:
    """Have the shell show what workers hold with rich, if it runs in a terminal."""
    if getattr(shell, "kernel", None) is not None or importlib.util.find_spec("rich") is None:
        return
    formatter = shell.display_formatter.ipython_display_formatter
    for kind in _KINDS:
        formatter.for_type(kind, _show)
    formatter.for_type_by_name(*_COMPARISON, _show)


def uninstall(shell: Any) -> None:
    """Let the shell show them as before."""
    formatter = shell.display_formatter.ipython_display_formatter
    for kind in _KINDS:
        formatter.pop(kind, None)
    formatter.pop(".".join(_COMPARISON), None)


def _show(value: Any) -> None:
    """Print one value; decline where the output is no terminal, and the text is shown."""
    if not sys.stdout.isatty():
        raise NotImplementedError
    from rich.console import Console

    Console(file=sys.stdout).print(value)
