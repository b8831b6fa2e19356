"""Workers that fork at once, and while others hold locks of torch."""

import os
import threading
import time

import pytest

from discolab import ThreadedSession

FORKING: list[int] = []  # threads, as each begins to fork and when it has
WATCHED: list[bool] = []  # whether the fork of a test is on its way


def note_thread() -> None:
    if WATCHED:
        FORKING.append(threading.get_ident())
        time.sleep(0.05)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_fork_one_at_a_time() -> None:
    """What runs before a fork and after it, such as `filelock`'s, is written for one at a time."""

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0) == (pid, 0)

    os.register_at_fork(before=note_thread, after_in_parent=note_thread)
    with ThreadedSession(4, devices="cpu") as sess:
        WATCHED.append(True)
        try:
            sess.call_packed(fork).debug_get_from_all()
        finally:
            WATCHED.clear()
    assert len(FORKING) == 8
    assert FORKING[::2] == FORKING[1::2]


@pytest.mark.slow
@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_loaders_of_processes_while_others_seed() -> None:
    def program() -> int:
        import time

        import torch
        from torch.utils.data import DataLoader

        from discolab import current_worker

        batches = 0
        end = time.monotonic() + 6
        while time.monotonic() < end:
            if current_worker().rank:
                torch.manual_seed(1)
            else:
                loader = DataLoader(list(range(4)), num_workers=2, timeout=20)  # type: ignore[arg-type]
                batches += sum(len(batch) for batch in loader)
        return batches

    with ThreadedSession(4, devices="cpu") as sess:
        batches = sess.call_packed(program).debug_get_from_remote(0, timeout=60)
    assert batches
    assert batches % 4 == 0
