"""How an error of discolab looks in an ordinary cell: the user's own lines, and what is wrong.

discolab's frames say nothing to who has passed a wrong argument, or whose worker has died; `%debug`
still has them all. Errors with a look of their own (`WorkerError`) keep it.
"""

from __future__ import annotations

from itertools import dropwhile

from ..runtime.errors import DiscoError
from ..runtime.failures import user_frames
from ..runtime.sources import excerpt, is_cell, is_installed, place

_AROUND = 2  # source lines shown before and after the line of a cell


def install() -> None:
    """Have IPython show errors of discolab so."""
    DiscoError._render_traceback_ = render  # type: ignore[attr-defined]


def uninstall() -> None:
    """Undo `install`."""
    if "_render_traceback_" in vars(DiscoError):
        del DiscoError._render_traceback_  # type: ignore[attr-defined]


def render(error: DiscoError) -> list[str]:
    """The lines that are shown of an error."""
    lines = []
    # IPython's own come first
    for file, line, function in dropwhile(lambda f: is_installed(f[0]), user_frames(error)):
        inside = "" if function == "<module>" else f", in {function}"
        lines.append(f"{place(file, line)}{inside}")
        lines += excerpt(file, line, _AROUND if is_cell(file) else 0)
    return [*lines, f"{type(error).__name__}: {error}"]
