"""VS Code's own protocol test client, `@vscode/debugadapter-testsupport` of npm, against a session.

It is run where node is, and where `DISCOLAB_NODE_MODULES` names a folder with the package.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import PROGRAM

STEP = next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if "x = inner" in line)
NODE = shutil.which("node")
MODULES = os.environ.get("DISCOLAB_NODE_MODULES", "")
CLIENT = "@vscode/debugadapter-testsupport"


@pytest.mark.skipif(NODE is None, reason="there is no node")
@pytest.mark.skipif(
    not Path(MODULES, CLIENT).is_dir(),
    reason=f"DISCOLAB_NODE_MODULES names no folder with {CLIENT}: `npm install {CLIENT}` makes one",
)
def test_the_whole_flow_with_vs_codes_test_client(server, dbg, module):
    file, program = module
    script = Path(__file__).with_name("vscode_client.cjs")
    command = [NODE, script, MODULES, str(server.port), server.token, file, str(STEP)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as js:
        try:
            first = js.stdout.readline().strip()
            if first == "ready":
                dbg.start(program)
            told, errors = js.communicate(timeout=60)
        finally:
            js.kill()
    assert (first, told.strip(), js.returncode) == ("ready", "done", 0), errors
    dbg.wait(20)
    assert dbg.program.result(20).debug_get_from_remote(0) is not None
