"""LiveWidget: what all widgets have in common.

A widget is shown as two outputs of a cell: a static picture, which stays in the saved notebook and
needs neither kernel nor script, and, where somebody watches, the live one, which hides the static
one while it is there. The two find each other by a class, the only mark that JupyterLab leaves on
outputs that it does not trust. The live one shows *frames*: snapshots, never differences, so that
none that is lost matters. Its front end says when it is open, that it still is, and when it is not;
without anybody there is no work at all. It says too when it was taken off its page (its cell was
run again, or its output cleared), which a page that is hidden or read anew does not: a while later
the widget lets go of what is dear, such as a value on the workers (`let_go`).

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
from ...views import Part, render_text
from ...views.pictures import bundle_of
from ..live import is_watched
from .pump import pump

_SILENT = 90.0  # seconds after which a front end that says nothing is gone: hidden tabs are slow
_LEFT = 10.0  # seconds after the last view was taken off its page
_UNSEEN = 60.0  # seconds in which a front end that shows it should have said so
_KEEP_EVERY = 2.0  # seconds between two static pictures while no cell ends
_KEEP_SHARE = 20.0  # and so many times what one takes to draw
_numbers = itertools.count(1)


def source(*names: str) -> str:
    """Files of the front end, one after the other, after what all of them share."""
    folder = files(__package__) / "static"
    kind = names[0].rpartition(".")[2]
    return "\n".join((folder / file).read_text("utf-8") for file in (f"common.{kind}", *names))


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
    _dear = False  # whether it holds something that it lets go when its views are gone

    frame = traitlets.Dict().tag(sync=True)
    key = traitlets.Unicode().tag(sync=True)

    def __init__(self) -> None:
        super().__init__(key=f"dl-static-{next(_numbers)}-{time.time_ns() & 0xFFFFFF:x}")
        self._viewers: dict[str, float] = {}
        self._static: Any = None  # the display of the static picture
        self._shown: dict[str, str] | None = None  # what it shows
        self._kept: Any = None  # the essence of what it shows
        self._next_keep = 0.0
        self._lets_go = float("inf")  # when, if nobody opens it before
        self.on_msg(self._heard)

    # -- what a subclass gives -------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What is to be seen now, as JSON; quick, for it is asked ten times a second."""
        raise NotImplementedError

    def static(self) -> Part:
        """The same for a saved notebook."""
        raise NotImplementedError

    def essence(self) -> Any:
        """What of the last frame matters enough to be drawn anew for a notebook that is saved."""
        return self.frame

    def let_go(self) -> None:
        """Hold nothing dear any more: its views are gone. One may be opened all the same."""

    def take_hold(self) -> None:
        """Undo `let_go`, as far as that can be: somebody has opened it."""

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
        bundle = self.bundle() if watched else bundle_of(self.static())
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
            self._leave(_UNSEEN)

    def bundle(self) -> dict[str, str]:
        """The static picture as text and HTML, to be hidden by a live one."""
        # without its live picture, in a notebook opened later, the other output, a panel with
        # nothing in it but text, is an error message
        child = ".jp-OutputArea-child"
        style = (
            f"{child}:has(.{self.key})~{child}:has(>.jp-OutputArea-output.lm-Panel)"
            ":not(:has(>.lm-Panel>*)){display:none}"
        )
        found = bundle_of(self.static())
        html = f'<div class="{self.key}"><style>{style}</style>{found["text/html"]}</div>'
        return {**found, "text/html": html}

    def __repr__(self) -> str:
        return render_text(self.static())

    # -- life --------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it is live in some front end."""
        now = time.monotonic()
        return any(now - heard < _SILENT for heard in list(self._viewers.values()))

    def refresh(self) -> bool:
        """Send what is new; see `Pumped`."""
        now = time.monotonic()
        if not self.is_open or self.comm is None:
            if self._viewers or self._lets_go == float("inf") or self._kept != self.essence():
                self._viewers.clear()
                self.keep()
            if now >= self._lets_go or self.comm is None:
                self._lets_go = float("inf")
                self.let_go()
            return self._lets_go < float("inf")
        frame = self.snapshot()
        if frame != self.frame:
            self.frame = frame
        if now >= self._next_keep and self._kept != self.essence():
            self.keep()  # workers go on when a cell has ended
        return True

    def keep(self) -> None:
        """Have the static picture show what there is now: it is what a saved notebook shows."""
        if self._shown is not None:
            began, self._kept = time.monotonic(), self.essence()
            bundle = self.bundle()
            if bundle != self._shown:
                self._shown = bundle
                self._static.update(bundle, raw=True)
            ended = time.monotonic()
            self._next_keep = ended + max(_KEEP_EVERY, _KEEP_SHARE * (ended - began))

    def close(self) -> None:
        """Take the live picture away; the static one stays."""
        if "_viewers" in vars(self):  # else it was never fully made
            self._viewers.clear()
            self.let_go()
        super().close()

    def _leave(self, seconds: float) -> None:
        """Let go in a while, unless somebody looks then."""
        if self._dear:
            self._lets_go = time.monotonic() + seconds
            pump.add(self)

    def _heard(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        """The front end has said something."""
        kind, viewer = content.get("type"), str(content.get("viewer"))
        if kind in ("open", "alive"):
            self._viewers[viewer] = time.monotonic()
            self._lets_go = float("inf")
            self.take_hold()
            pump.add(self)
        elif kind == "close":
            self._viewers.pop(viewer, None)
            if content.get("gone") and not self._viewers:
                self._leave(_LEFT)
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


def _answer_at_once(comm: Any) -> None:
    """Have buttons heard while a cell runs.

    ipykernel 7.4 answers a comm on the subshell that last published on it, which may be the main
    shell, where cells run; `_reply_subshell_for` is not public, so it is left alone where missing.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _data, default: default
