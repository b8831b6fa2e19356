"""In IPython in a terminal: values that show themselves as pictures are in colours, by rich.

Where there is a kernel, no terminal or no rich, nothing changes. Runs on the shell's thread.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from ..runtime.display import Drawn


def install(shell: Any) -> None:
    """Have the shell show pictures with rich, if it runs in a terminal."""
    if getattr(shell, "kernel", None) is not None or importlib.util.find_spec("rich") is None:
        return
    shell.display_formatter.ipython_display_formatter.for_type(Drawn, _show)


def uninstall(shell: Any) -> None:
    """Let the shell show them as before."""
    shell.display_formatter.ipython_display_formatter.pop(Drawn, None)


def _show(value: Any) -> None:
    """Print one value; decline where the output is no terminal, and the text is shown."""
    if not sys.stdout.isatty():
        raise NotImplementedError
    from rich.console import Console

    Console(file=sys.stdout).print(value)
