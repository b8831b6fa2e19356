"""What is shown while a cell waits for its workers: their output as it comes, and who is busy.

`tick` runs on the thread that waits. In a front end where somebody watches (the kernel may ask
for input there) output comes up to five times a second, and after some seconds a line says what
the workers do; it is gone when the cell ends. Elsewhere, in nbconvert or nbval say, all output
is given at the end, so that stored documents do not depend on timing.
"""

from __future__ import annotations

import time
from typing import Any

from markupsafe import Markup

from ..runtime.failures import name_ranks
from ..runtime.session import Session
from .lock_watch import LockWatch
from .output import OutputCapture

_LINE = Markup("<pre><small>{}</small></pre>")
_OUTPUT_EVERY = 0.2  # seconds
_PROGRESS_EVERY = 1.0  # seconds
PROGRESS_AFTER = 2.0  # seconds before the first line about progress


def is_watched(shell: Any) -> bool:
    """Whether somebody looks at the cell that runs: the kernel may ask for input there."""
    return bool(getattr(getattr(shell, "kernel", None), "_allow_stdin", False))


class LiveView:
    """Shows output and progress of one session during one wait.

    Parameters
    ----------
    stream
        Show output as it comes; None: where somebody watches.
    progress_after
        Seconds before the line about progress, where somebody watches; negative: never.
    watch
        Looks on with each tick.
    """

    def __init__(
        self,
        shell: Any,
        output: OutputCapture,
        session: Session,
        stream: bool | None = None,
        progress_after: float = PROGRESS_AFTER,
        watch: LockWatch | None = None,
    ) -> None:
        watched = is_watched(shell)
        self._output = output
        self._session = session
        self._stream = watched if stream is None else stream
        self._began = time.monotonic()
        self._next_output = self._began + _OUTPUT_EVERY
        quiet = progress_after < 0 or not watched
        self._next_progress = float("inf") if quiet else self._began + progress_after
        self._line: Any = None
        self._watch = watch

    def tick(self) -> None:
        """Show what is due."""
        now = time.monotonic()
        if self._watch is not None:
            self._watch.look()
        if self._stream and now >= self._next_output and self._output.settled():
            self._next_output = now + _OUTPUT_EVERY
            self._output.flush(whole_lines=True)
        if now >= self._next_progress:
            self._next_progress = now + _PROGRESS_EVERY
            text = f"{now - self._began:.0f} s · {describe_progress(self._session)}"
            self._show("\n".join(filter(None, [text, self._output.unfinished()])))

    def end(self) -> None:
        """Take the line away."""
        if self._watch is not None:
            self._watch.rest()
        if self._line is not None:
            self._show("")

    def _show(self, text: str) -> None:
        from IPython.display import HTML, display

        line = HTML(str(_LINE.format(text)) if text else "")
        if self._line is None:
            self._line = display(line, display_id=True)
        else:
            self._line.update(line)


def describe_progress(session: Session) -> str:
    """``workers 0-2 running the cell at Cell In[3], line 4; worker 3 idle``."""
    doing: dict[str, list[int]] = {}
    for status in session.status():
        doing.setdefault(f"{status.state} {status.detail}".strip(), []).append(status.rank)
    return "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in doing.items())
