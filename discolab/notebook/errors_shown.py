"""How an error of discolab looks in a notebook: the user's own lines, and what is wrong.

discolab's frames say nothing to who has passed a wrong argument, or whose worker has died; `%debug`
still has them all. Of a `WorkerError` the workers' tracebacks are shown, in the colours of
IPython's own. Frames of libraries are folded there; ``%disco_traceback`` shows the last error with
all of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from itertools import dropwhile
from typing import Any

from ..runtime.errors import ArgumentError, DiscoError, WorkerError
from ..runtime.failures import Failure, explain, name_ranks, user_frames
from ..runtime.sources import Paint, excerpt, is_cell, is_installed, place, plain
from .running import doctor_hint

_AROUND = 2  # source lines shown before and after the line of a cell
_WHOLE = "%disco_traceback shows all"
_COLOUR = re.compile(r"\x1b\[[\d;]*m")

_paint: Paint = plain
_last: list[Failure] = []  # of the error that was shown last, without the exceptions themselves


def install(shell: Any) -> None:
    """Have IPython show errors of discolab so."""
    global _paint
    _paint = painter(shell)
    DiscoError._render_traceback_ = render  # type: ignore[attr-defined]
    WorkerError.renderer = staticmethod(render_failures)


def uninstall() -> None:
    """Undo `install`."""
    global _paint
    _paint = plain
    _last.clear()
    WorkerError.renderer = None
    if "_render_traceback_" in vars(DiscoError):
        del DiscoError._render_traceback_  # type: ignore[attr-defined]


def render(error: DiscoError) -> list[str]:
    """The lines that are shown of an error."""
    lines = []
    # IPython's own come first
    for file, line, function in dropwhile(lambda f: is_installed(f[0]), user_frames(error)):
        inside = "" if function == "<module>" else f", in {_paint('function', function)}"
        lines.append(f"{_paint('place', place(file, line))}{inside}")
        lines += excerpt(file, line, _AROUND if is_cell(file) else 0, _paint)
    return [*lines, f"{_paint('error', type(error).__name__)}: {error}"]


def render_failures(error: WorkerError) -> list[str]:
    """The lines that are shown of an error of workers; `whole` shows it once more."""
    _last[:] = [replace(failure, exception=None) for failure in error.failures]
    lines = explain(error.failures, paint=_paint, hint=_WHOLE)
    lines += ["", f"{_paint('error', type(error).__name__)}: {error.short}"]
    hint = doctor_hint(error.failures)
    return [*lines, hint] if hint else lines


def whole(ranks: Collection[int] | None = None) -> str:
    """The error of workers that was shown last, with all its frames.

    Raises
    ------
    ArgumentError
        If none was shown, or none of these workers.
    """
    shown = [failure for failure in _last if ranks is None or failure.rank in ranks]
    if not _last:
        raise ArgumentError("no error of workers has been shown yet")
    if not shown:
        failed = name_ranks(failure.rank for failure in _last)
        raise ArgumentError(f"nothing has failed on {name_ranks(ranks or ())}, but on {failed}")
    return "\n".join(explain(shown, whole=True, paint=_paint))


def painter(shell: Any) -> Paint:
    """Colours as those of IPython's own tracebacks, as its user has set them."""
    from IPython.utils import PyColorize

    traceback = shell.InteractiveTB
    roles = {"place": "FilenameEm", "function": "VName", "arrow": "LinenoEm", "number": "Lineno",
             "error": "ExcName", "folded": "NormalEm"}  # fmt: skip

    def paint(role: str, text: str) -> str:
        if role == "code":
            # of a line whose statement goes on in the next IPython says below it that it has no end
            coloured = str(shell.pycolorize(text)).partition("\n")[0]
            return coloured if _COLOUR.sub("", coloured) == text.expandtabs() else text
        theme = getattr(traceback, "_theme_name", None)
        if theme is not None:
            styled = [(getattr(PyColorize.Token, roles[role]), text)]  # type: ignore[attr-defined]
            return str(PyColorize.theme_table[theme].format(styled))
        old = {"place": "filenameEm", "function": "vName", "arrow": "linenoEm", "number": "lineno",
               "error": "excName", "folded": "normalEm"}  # fmt: skip
        colors = traceback.Colors  # of an IPython before 9
        return f"{getattr(colors, old[role])}{text}{colors.Normal}"

    return paint
