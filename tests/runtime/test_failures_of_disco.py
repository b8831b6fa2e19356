"""How TVM's Disco fails, and the test that says it does not happen here.

The rows of the table that concern worker threads; what follows is a file of this folder or of
``tests/engines``, and a test in it.

====================================  ===========================================================
in Disco                              here
====================================  ===========================================================
exception in a worker function        test_errors: an_exception_is_told_with_ranks_command_and…
unknown function                      test_modules: an_unknown_function_is_an_error_at_once_with…
size mismatch in a copy               test_bad_input: what_only_a_worker_can_see_is_told_by_the…
a value that can't be fetched         test_errors: a_value_that_cannot_be_copied_is_an_error_of…
dropping a session with queued work   test_sessions: a_dropped_session_ends_its_queued_work_and…
interpreter exit, busy worker         test_exit: a_busy_worker_does_not_hold_up_the_exit
call and sync after shutdown          test_bad_input: a_closed_session_says_so_at_once
Ctrl-C in a sync                      test_interrupts: ctrl_c_in_a_sync_is_seen_promptly_and…
two threads use one session           test_waits: two_threads_use_one_session
a DRef collected on another thread    test_drefs: drefs_dropped_by_the_collector_on_another…
a busy worker blocks sends            test_waits: calls_wait_for_a_worker_that_is_far_behind
… and freezes the dropping of DRefs   test_waits: a_busy_worker_does_not_freeze_the_dropping_of…
DRef of another session               test_bad_input: a_dref_of_another_session_is_refused…
errors on workers other than 0        test_errors: a_failure_on_any_worker_is_seen_by_sync_all
====================================  ===========================================================

Here the rows are put together: one session lives through all of them.
"""

import gc
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from discolab import (
    ForeignDRefError,
    ThreadedSession,
    UnknownFunctionError,
    WorkerError,
    current_worker,
)


def test_each_row_names_a_test_that_is_there() -> None:
    rows = re.findall(r"(test_\w+): (\w+)", __doc__)
    assert len(rows) == 14
    here = Path(__file__).parent
    for file, name in rows:
        (path,) = [p for f in (here, here.parent / "engines") for p in f.glob(f"{file}.py")]
        assert f"def test_{name}" in path.read_text(encoding="utf-8"), (file, name)


@pytest.mark.conformance
def test_one_session_survives_all_of_it(sess: ThreadedSession) -> None:
    def fail_on_3() -> None:
        if current_worker().rank == 3:
            raise ValueError("on worker 3")

    def spin() -> None:
        while True:
            pass

    kept = sess.call_packed(torch.arange, 3)
    sess.call_packed(fail_on_3)
    with pytest.raises(WorkerError, match="worker 3 failed"):
        sess.sync_all()
    with pytest.raises((UnknownFunctionError, WorkerError), match="no function named"):
        sess.get_global_func("no.such.function")().debug_get_from_all()
    sess.copy_to_worker_0(np.zeros(7), kept)
    with pytest.raises(WorkerError, match="dtype and number of elements"):
        sess.sync_all()
    with ThreadedSession(1, timeout=20) as other, pytest.raises(ForeignDRefError):
        sess.call_packed(torch.relu, other.call_packed(torch.ones, 1))
    dropped = [[sess.call_packed(torch.ones, 3)] for _ in range(20)]
    for ring in dropped:
        ring.append(ring)  # type: ignore[arg-type]
    del dropped, ring
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join(20)
    sess.call_packed(spin)
    for _ in range(20_000 // 4):
        sess.call_packed(int)
    time.sleep(0.01)
    assert sess.interrupt(timeout=20) == []
    sess.sync_all()
    assert [v.tolist() for v in kept.debug_get_from_all()] == [[0, 1, 2]] * 4
    sess._registers.validate()
