"""LiveWidget: what all widgets have in common.

A widget is shown as two outputs of a cell: a static picture, which stays in the saved notebook and
needs neither kernel nor script, and, where somebody watches, the live one, which hides the static
one while it is there. The two find each other by a class, the only mark that JupyterLab leaves on
outputs that it does not trust. The live one shows *frames*: snapshots, never differences, so that
none that is lost matters. Its front end says when it is open, that it still is, and when it is not;
without anybody there is no work at all.

Which thread: `snapshot` runs on the pump's thread (or the one that ends a cell, never both at
once), `command` on the thread for buttons, `_heard` on the kernel's thread for comm messages.
`_viewers` is a dict of which single operations are used.
"""

from __future__ import annotations

import itertools
import time
from importlib.resources import files
from typing import Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import display

from ...runtime.errors import DiscoError
from ...views import Part, render_html, render_text
from ..live import is_watched
from .pump import pump

_SILENT = 90.0  # seconds after which a front end that says nothing is gone: hidden tabs are slow
_numbers = itertools.count(1)


def source(name: str) -> str:
    """A file of the front end, after what all of them share."""
    folder = files(__package__) / "static"
    kind = name.rpartition(".")[2]
    return "\n".join((folder / file).read_text("utf-8") for file in (f"common.{kind}", name))


class LiveWidget(anywidget.AnyWidget):
    """One live picture of a session.

    A subclass sets `_esm` and `_css` (by `source`) and gives `snapshot`, `static` and `command`.

    Attributes
    ----------
    frame
        What the front end shows: the last snapshot, as JSON.
    key
        Ties the live picture to the static one on the page.
    """

    _watched = False  # whether a live picture was shown

    frame = traitlets.Dict().tag(sync=True)
    key = traitlets.Unicode().tag(sync=True)

    def __init__(self) -> None:
        super().__init__(key=f"dl-static-{next(_numbers)}-{time.time_ns() & 0xFFFFFF:x}")
        self._viewers: dict[str, float] = {}
        self._static: Any = None  # the display of the static picture
        self._shown: dict[str, str] | None = None  # what it shows
        self.on_msg(self._heard)

    # -- what a subclass gives -------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What is to be seen now, as JSON; quick, for it is asked ten times a second."""
        raise NotImplementedError

    def static(self) -> Part:
        """The same for a saved notebook."""
        raise NotImplementedError

    def command(self, name: str, content: dict[str, Any]) -> None:
        """Do what a button or a key asks for. A `DiscoError` is shown in the widget."""
        raise DiscoError(f"unknown command {name!r}")

    # -- on the page -------------------------------------------------------------------------

    def open(self) -> None:
        """Tell the front end of this widget; where nobody watches, no document shall hold it."""
        if self._watched and self.comm is None:
            super().open()
            _answer_at_once(self.comm)

    def _ipython_display_(self) -> None:
        """Show the static picture, and the live one where somebody watches."""
        watched = is_watched(get_ipython())
        bundle = self.bundle() if watched else _bundle(self.static())
        self._static = display(bundle, raw=True, display_id=True)
        if watched:
            self._shown = bundle
            self._watched = True
            self.open()
            self.frame = self.snapshot()
            view = {
                "version_major": 2,
                "version_minor": 1,
                "model_id": self.model_id,
            }
            live = {"application/vnd.jupyter.widget-view+json": view, "text/plain": ""}
            display(live, raw=True)

    def bundle(self) -> dict[str, str]:
        """The static picture as text and HTML, to be hidden by a live one."""
        # without its live picture, in a notebook opened later, the other output, a panel with
        # nothing in it but text, is an error message
        child = ".jp-OutputArea-child"
        style = (
            f"{child}:has(.{self.key})~{child}:has(>.jp-OutputArea-output.lm-Panel)"
            ":not(:has(>.lm-Panel>*)){display:none}"
        )
        found = _bundle(self.static())
        html = f'<div class="{self.key}"><style>{style}</style>{found["text/html"]}</div>'
        return {**found, "text/html": html}

    def __repr__(self) -> str:
        return render_text(self.static())

    # -- life --------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it is live in some front end."""
        now = time.monotonic()
        return any(now - heard < _SILENT for heard in tuple(self._viewers.values()))

    def refresh(self) -> bool:
        """Send what is new; see `Pumped`."""
        if not self.is_open or self.comm is None:
            self._viewers.clear()
            self.keep()
            return False
        frame = self.snapshot()
        if frame != self.frame:
            self.frame = frame
        return True

    def keep(self) -> None:
        """Have the static picture show what there is now: it is what a saved notebook shows."""
        if self._shown is not None:
            bundle = self.bundle()
            if bundle != self._shown:
                self._shown = bundle
                self._static.update(bundle, raw=True)

    def close(self) -> None:
        """Take the live picture away; the static one stays."""
        self._viewers.clear()
        super().close()

    def _heard(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        """The front end has said something."""
        kind, viewer = content.get("type"), str(content.get("viewer"))
        if kind in ("open", "alive"):
            self._viewers[viewer] = time.monotonic()
            pump.add(self)
        elif kind == "close":
            self._viewers.pop(viewer, None)
            pump.soon()
        elif kind == "command":
            pump.later(lambda: self._do(content))

    def _do(self, content: dict[str, Any]) -> None:
        try:
            self.command(str(content.get("name")), content)
        except DiscoError as exc:
            self.send({"type": "error", "text": str(exc)})
        except Exception as exc:  # a fault of ours, or of a value that is drawn
            self.send({"type": "error", "text": f"{type(exc).__name__}: {exc}"})
        pump.soon()


def _bundle(part: Part) -> dict[str, str]:
    """Text and HTML; what nobody watches is the same whenever it is made."""
    return {"text/plain": render_text(part), "text/html": render_html(part)}


def _answer_at_once(comm: Any) -> None:
    """Have buttons heard while a cell runs.

    ipykernel 7.4 answers a comm on the subshell that last published on it, which may be the main
    shell, where cells run; `_reply_subshell_for` is not public, so it is left alone where missing.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _data, default: default
