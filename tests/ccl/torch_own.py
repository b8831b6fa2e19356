"""Program: run torch's own tests of its distributed package on worker threads; JSON lines out.

    python torch_own.py [NAME ...]

torch ships ``torch.testing._internal.distributed.distributed_test``, whose tests run in four
processes. Here each test runs on the four workers of a session of its own. Changed are only what
belongs to processes: temporary files by process id become barriers, and the profiler, of which
there is one in a process, is left out. A line is ``{"test": …, "outcome": "ok" | "skipped" |
"failed", "reason": …}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import types
import unittest
import warnings
from typing import Any

import torch
import torch.distributed as dist

from discolab import ThreadedSession, WorkerError, ccl

WORLD_SIZE = 4
SECONDS = 20.0  # for one test; the longest takes about five


def load() -> Any:
    """torch's module with the tests, told to test "gloo", which means: tensors on the CPU."""
    os.environ.update(
        BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=tempfile.mkdtemp(prefix="torch_own_")
    )
    os.mkdir(os.path.join(os.environ["TEMP_DIR"], "test_dir"))
    try:
        import expecttest  # noqa: F401 - of torch's test tools, for comparing long texts
    except ImportError:
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.distributed import distributed_test

    torch.autograd.profiler.profile = NoProfile  # type: ignore[misc, assignment]
    torch.profiler.profile = NoProfile  # type: ignore[misc, assignment]
    return distributed_test


class NoProfile(contextlib.nullcontext[Any]):
    """Where torch's tests profile what they do, besides checking it."""

    function_events = ()

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__(self)

    def events(self) -> tuple[()]:
        """Nothing was seen."""
        return ()


def make_case(module: Any) -> type[Any]:
    """torch's tests as one case whose methods run on a worker."""
    from torch.testing._internal.common_utils import TestCase

    class Case(TestCase, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        world_size = WORLD_SIZE

        @property
        def rank(self) -> int:
            return dist.get_rank()

        def _barrier(self, *_args: Any, **_kwargs: Any) -> None:
            meet()

        def _should_stop_test_suite(self) -> bool:
            return False

    return Case


def meet() -> None:
    """All workers, apart from the groups that are tested."""
    ccl.barrier(group=ccl.Group(tuple(range(WORLD_SIZE)), "torch's own tests"))


def run_on_worker(case: type[Any], name: str) -> str:
    """One worker's part in one test; "" or why it was skipped."""
    test = case(name)
    torch.manual_seed(1234)
    meet()
    try:
        getattr(test, name)()
    except unittest.SkipTest as exc:
        return str(exc) or "skipped"
    except SystemExit as exc:  # how torch's multi-process tests say that something is missing
        if exc.code:
            return f"exit code {exc.code} of torch's TEST_SKIPS"
    meet()
    return ""


def run(case: type[Any], name: str) -> dict[str, str]:
    """Run one test in a session of its own."""
    with ThreadedSession(WORLD_SIZE, devices="cpu", timeout=SECONDS) as sess:
        try:
            reasons = sess.call_packed(run_on_worker, case, name).debug_get_from_all()
        except WorkerError as exc:
            first = exc.failures[0]
            text = f"{first.type_name}: {first.message}".splitlines()[0][:200]
            return {"test": name, "outcome": "failed", "reason": text}
        except TimeoutError as exc:
            sess.interrupt()
            return {"test": name, "outcome": "failed", "reason": str(exc).splitlines()[0][:200]}
    skipped = next((reason for reason in reasons if reason), "")
    return {"test": name, "outcome": "skipped" if skipped else "ok", "reason": skipped}


def main(names: list[str]) -> None:
    """Run the tests of these names, or all."""
    warnings.simplefilter("ignore")
    case = make_case(load())
    stdout = sys.stdout
    for name in names or sorted(n for n in dir(case) if n.startswith("test_")):
        print(json.dumps(run(case, name)), flush=True, file=stdout)
        sys.stdout = stdout  # four threads that redirect it at once do not put it back


if __name__ == "__main__":
    main(sys.argv[1:])
