"""Stacks with the functions of C++, on machines without binutils."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import discolab
from torch._C._profiler import gather_traceback, symbolize_tracebacks

def stack():
    return symbolize_tracebacks([gather_traceback(python=True, script=True, cpp=True)])

with discolab.make_session(2, devices="cpu", timeout=60) as sess:
    stacks = sess.call_packed(stack).debug_get_from_remote(1)[0]
    print(any(frame["name"].startswith("torch::") for frame in stacks))
"""


def test_a_stack_is_read_where_there_is_no_addr2line(tmp_path: Path) -> None:
    unset = ("TORCH_SYMBOLIZE_MODE", "TORCH_ADDR2LINE_BINARY")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        program,
        capture_output=True,
        text=True,
        env=environ | {"PATH": str(tmp_path)},
        timeout=100,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr[-2000:]
