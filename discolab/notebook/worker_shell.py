"""What code finds of IPython and the notebook in a worker that is a process of its own.

There is no kernel in such a process. `set_up` puts a `WorkerShell` where `get_ipython()` looks:
enough of a shell for `display`, for shell commands (``!ls``) and for libraries that draw when a
cell ends. What is displayed becomes a bundle here, on the worker, and goes to the notebook with
what is printed, in order. Of workers in the notebook's own process only the figures are shown.
"""

from __future__ import annotations

import builtins
import ctypes
import getpass
import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core.display_functions import display
from IPython.core.displaypub import DisplayPublisher
from IPython.core.events import EventManager, available_events
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import SingletonConfigurable

from ..runtime.worker import Worker, current_worker
from . import cells, prompts
from .cell import AFTER_CELL, prepare_namespace

_WIDGET = "application/vnd.jupyter.widget-view+json"


def set_up(known: dict[str, cells.Entry]) -> None:
    """Prepare this worker for cells of a notebook (a worker function, once a session).

    Parameters
    ----------
    known
        The notebook's own cells so far, see `cells`.
    """
    worker = current_worker()
    prepare_namespace()
    output = getattr(worker.link, "output_buffer", None)
    if output is None:  # a worker in the process of the notebook
        ends = worker.shared.setdefault(AFTER_CELL, [])
        if _show_figures not in ends:
            ends.append(_show_figures)
        return
    cells.listen(worker, known)
    prompts.install(getpass)
    shell = WorkerShell.instance(worker, output)
    builtins.display = display  # type: ignore[attr-defined]  # as IPython has it in its cells
    builtins.get_ipython = get_ipython  # type: ignore[attr-defined]
    worker.shared.setdefault(AFTER_CELL, []).append(shell.after_cell)


def _show_figures() -> None:
    """Show and close this worker's figures of pyplot, as IPython does after a cell of its own."""
    inline = sys.modules.get("matplotlib_inline.backend_inline")
    pyplot = sys.modules.get("matplotlib.pyplot")
    if inline is None or pyplot is None or not pyplot.get_fignums():
        return
    if "inline" not in str(pyplot.rcParams["backend"]):
        return
    if inline.InlineBackend.instance().close_figures:
        inline.show(True)
        return
    for number in pyplot.get_fignums():
        figure = inline.Gcf.figs[number].canvas.figure
        if figure in inline.show._to_draw:
            inline.show._to_draw.remove(figure)
            display(figure)


class WorkerShell(InteractiveShell):
    """A shell that displays and runs programs; it has no history, no magics and no input."""

    def __init__(self, worker: Worker, output: Any) -> None:
        SingletonConfigurable.__init__(self)  # not InteractiveShell's, which takes the process over
        self.configurables = [self]
        self.user_ns = worker.namespace
        self.events = EventManager(self, available_events)
        self.init_display_formatter()
        self.display_pub = _Publisher(output)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"IPython on a worker of another process has no {name!r}: it displays, and runs shell "
            "commands; magics run in the notebook"
        )

    def run_cell(self, *_: Any, **__: Any) -> NoReturn:
        """Not here: a cell of the workers is the notebook's affair."""
        self.__getattr__("run_cell")

    run_cell_async = run_code = run_line_magic = run_cell_magic = run_cell

    def enable_gui(self, gui: Any = None) -> None:
        """Nothing: there is no window to be shown."""

    def showtraceback(self, *_: Any, **__: Any) -> None:
        """Print the exception that is being handled."""
        sys.excepthook(*sys.exc_info())

    def after_cell(self) -> None:
        """What is drawn and printed late is shown with the cell."""
        self.events.trigger("post_execute")
        _flush_c()


class _Publisher(DisplayPublisher):
    """Gives bundles to the worker's link."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def publish(self, data: Any, metadata: Any = None, *_: Any, **__: Any) -> None:
        """See IPython; an update of an earlier display is one more display."""
        bundle = _plain(data)
        bundle.pop(_WIDGET, None)  # its model would be in a kernel, and there is none here
        self._output.add(("display", bundle, _plain(metadata or {})))

    def clear_output(self, wait: bool = False) -> None:
        """Forget what nobody has seen yet."""
        self._output.clear()
        self._output.add(("clear", ""))


def _plain(bundle: Any) -> dict[str, Any]:
    """A bundle of what can be sent: texts, bytes, and what JSON has."""
    return {
        str(kind): value
        if isinstance(value, str | bytes)
        else json.loads(json.dumps(value, default=repr))
        for kind, value in dict(bundle).items()
    }


def _find_flush() -> Callable[[], Any]:
    try:
        flush = ctypes.CDLL(None).fflush
    except (OSError, AttributeError, TypeError):  # no such library by that name here
        return lambda: None
    return lambda: flush(None)


_flush_c = _find_flush()
