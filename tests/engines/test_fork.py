"""A forked child process holds no worker, and may have a session of its own."""

import os
import subprocess
from collections.abc import Callable

import pytest

from tests.selection import slow

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("sys.exit(7)", 7),
        slow("sys.exit('words')", 1),
        slow("sys.exit()", 0),
        ("raise ValueError('mine')", 1),
        ("return 5", 0),
        slow("return ccl.all_reduce(torch.ones(1))", 1),
    ],
)
def test_a_child_forked_in_a_worker_ends_with_its_command(
    run_python: RunPython, last: str, code: int
) -> None:
    done = run_python(f"""
        import os, sys, torch
        from discolab import ThreadedSession, ccl, current_worker

        def fork():
            child = os.fork() if current_worker().rank == 0 else 1
            if child == 0:
                {last}
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child > 1 else None

        with ThreadedSession(2, timeout=20) as session:
            print(session.call_packed(fork).debug_get_from_remote(0))
            print(session.call_packed(lambda: "well").debug_get_from_all())
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(code), "['well', 'well']"]


def test_a_session_made_in_a_forked_child_has_a_housekeeper(run_python: RunPython) -> None:
    done = run_python("""
        import os, threading, time
        from discolab import ThreadedSession

        outer = ThreadedSession(2)
        sleep = time.sleep
        if os.fork() == 0:
            assert time.sleep is not sleep, "the hooks are put back"
            with ThreadedSession(2, timeout=20) as session:
                assert "discolab-housekeeper" in [t.name for t in threading.enumerate()]
                refs = [session.call_packed(int) for _ in range(9)]
                session.sync_all()
                del refs
                deadline = time.monotonic() + 5
                while any(worker.registers for worker in session._workers):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            print("child is done", flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        outer.shutdown()
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["child is done", "0"]
