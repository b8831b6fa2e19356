"""Workers that fork while others hold locks of torch."""

import pytest

from discolab import ThreadedSession


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
