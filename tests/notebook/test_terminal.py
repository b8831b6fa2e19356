"""IPython in a terminal shows a DRef in colours, if rich is there; elsewhere its text."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

CODE = """
from IPython.terminal.interactiveshell import TerminalInteractiveShell
from discolab.engines import ThreadedSession
from discolab.notebook import terminal
shell = TerminalInteractiveShell.instance(colors="nocolor", history_load_length=0)
shell.history_manager.enabled = False
terminal.install(shell)
with ThreadedSession(2) as sess:
    shell.user_ns.update(sess=sess, x=sess.call_packed(int))
    shell.run_cell("x")
    shell.run_cell("sess")
    shell.run_cell("sess.compare(x, 0)")
    terminal.uninstall(shell)
    shell.run_cell("x")
"""


def run(tmp_path: Path, terminal: bool) -> str:
    """What the code prints, on a terminal or into a pipe."""
    env = {**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "xterm-256color", "COLUMNS": "100"}
    if not terminal:
        command = [sys.executable, "-c", CODE]
        return subprocess.run(command, capture_output=True, env=env, check=True).stdout.decode()
    ours, its = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=its, stderr=its, env=env) as process:
        os.close(its)
        pieces = []
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            pieces.append(piece)
        os.close(ours)
    assert process.returncode == 0
    return b"".join(pieces).decode()


def test_on_a_terminal_in_colours(tmp_path: Path) -> None:
    shown = run(tmp_path, terminal=True)
    assert shown.count("\x1b[1mDRef\x1b[0m: 0 on all 2 workers") == 1
    assert "\x1b[1mThreadedSession\x1b[0m" in shown
    assert "\x1b[1mx against" not in shown
    assert "\x1b[32m✓ identical\x1b[0m" in shown
    assert shown.count("DRef: 0 on all 2 workers") == 1  # after uninstall


def test_into_a_pipe_as_text(tmp_path: Path) -> None:
    shown = run(tmp_path, terminal=False)
    assert "\x1b[" not in shown
    assert shown.count("DRef: 0 on all 2 workers") == 2
