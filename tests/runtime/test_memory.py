"""Memory does not grow with the number of calls."""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_a_million_calls_leave_memory_flat() -> None:
    program = """
        import discolab

        def resident():
            with open("/proc/self/statm") as f:
                return int(f.read().split()[1]) * 4096 / 2**20

        def nothing():
            return None

        with discolab.ThreadedSession(2, timeout=60) as session:
            for number in range(1_000_000):
                session.call_packed(nothing)
                if number == 200_000:
                    session.sync_all()
                    before = resident()
            session.sync_all()
            after = resident()
            assert session.statistics().live_registers < 10
        print(after - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16, "megabytes"
