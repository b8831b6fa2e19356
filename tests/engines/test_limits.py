"""Worker processes where few files may be open."""

import subprocess
from collections.abc import Callable

Run = Callable[..., subprocess.CompletedProcess[str]]

FEW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import torch, discolab
def ones(number):
    return torch.full((100_000,), float(number))
"""


def test_any_number_of_tensors_can_be_fetched_and_kept(run_python: Run) -> None:
    """In shared memory each takes a descriptor, here and at the worker."""
    done = run_python(
        FEW
        + """
with discolab.ProcessSession(3, devices="cpu", timeout=20) as sess:
    kept = [sess.call_packed(ones, n).debug_get_from_all() for n in range(70)]
    for n in range(70):
        sess.push({f"x{n}": kept[n][2]})
    back = [sess[f"x{n}"].debug_get_from_remote(1) for n in range(70)]
    assert all(torch.equal(a, ones(n)) for n, values in enumerate(kept) for a in values)
    assert all(torch.equal(a, ones(n)) for n, a in enumerate(back))
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_more_workers_than_there_may_be_files_is_one_clear_error(run_python: Run) -> None:
    done = run_python(FEW + 'discolab.ProcessSession(24, devices="cpu")')
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "DiscoError: 24 workers need more open files than this process may have" in last
