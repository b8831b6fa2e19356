"""Tensors that leave their device by another way than a collective: staged, or after a wait."""

from __future__ import annotations

import time

import pytest
import torch

from discolab import current_worker, make_session
from discolab.rpc import channels
from tests.accelerator import sim

pytestmark = pytest.mark.accelerator

SIZE = 1 << 10


def late(value: float, device: torch.device | str) -> torch.Tensor:
    """Written when the current stream comes to it."""
    with sim.device(device):
        x = torch.empty(SIZE, device=device)
        sim.sleep(0.005)
        return x.fill_(value)


@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_staging_waits_for_the_tensor_and_the_message_for_the_copy(own: bool, delays: int) -> None:
    """Also of several tensors on several devices; they may be freed and written to after it."""
    for device in range(sim.device_count()) if own else ():
        sim.set_stream(torch.Stream(f"sim:{device}"))
    for turn in range(5):
        value = [late(turn + i, f"sim:{i}") for i in range(4)]
        sent = channels.outgoing(value, False)
        for one in value:
            one.fill_(-1)
        del value, one
        again = [torch.zeros(SIZE, device=f"sim:{i}") for i in range(4)]
        for i, stand_in in enumerate(sent):
            assert stand_in.channel == channels.STAGED
            assert stand_in.content.is_pinned()
            assert (stand_in.content == turn + i).all()
            back = channels._tensor(stand_in, torch.device("cpu"))
            assert back.device == torch.device(f"sim:{i}")
            assert back.sum().item() == SIZE * (turn + i)
        del again


def test_an_error_between_the_copy_and_the_wait_frees_nothing_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator knows of the stream that copies."""

    empty, asked = torch.empty, []

    def none_left(*args: object, **options: object) -> torch.Tensor:
        asked.append(args)
        if len(asked) > 1:
            raise MemoryError
        return empty(*args, **options)  # type: ignore[call-overload,no-any-return]

    value = [late(1.0, "sim:1"), torch.zeros(SIZE, device="sim:1")]
    monkeypatch.setattr(torch, "empty", none_left)
    with pytest.raises(MemoryError):
        channels.outgoing(value, False)
    monkeypatch.undo()
    del value
    torch.zeros(SIZE, device="sim:1")


def test_a_device_that_is_not_here_is_the_receivers_own() -> None:
    """As where a mask hides it, or the sender has devices of another type."""
    for name in ("sim:7", "cuda:0", "xpu:1"):
        stand_in = channels.StandIn(channels.STAGED, name, 0, torch.ones(3))
        found = channels._tensor(stand_in, torch.device("sim:2"))
        assert found.device == torch.device("sim:2")
        assert found.sum().item() == 3


def test_sync_waits_for_the_workers_stream_alone() -> None:
    """Not for whatever else its device has to do."""

    def begin() -> None:
        with torch.Stream(current_worker().device):
            sim.sleep(1.5)

    with make_session(2, "threads", timeout=30) as sess:
        sess.call_packed(begin)
        began = time.monotonic()
        sess.sync_all()
        sess.call_packed(sess.get_global_func("runtime.disco.sync_worker")).debug_get_from_all()
        assert time.monotonic() - began < 1.0


def test_init_ccl_moves_workers_to_other_devices() -> None:
    """They compute there from then on."""

    def place() -> tuple[str, int, int]:
        made = torch.empty(1, device="sim")
        return str(current_worker().device), made.device.index, sim.current_device()

    with make_session(4, "threads", timeout=30) as sess:
        assert sess.init_ccl("local", 3, 2, 1, 0).startswith("local")
        assert sess.call_packed(place).debug_get_from_all() == [
            (f"sim:{index}", index, index) for index in (3, 2, 1, 0)
        ]


def test_workers_have_their_device_and_sync_waits_for_it(delays: int) -> None:
    """A device that is named without a number is the worker's own."""

    def begin() -> int:
        sim.sleep(0.02)
        return torch.empty(1, device="sim").device.index

    with make_session(4, "threads", timeout=30) as sess:
        assert [str(device) for device in sess.devices] == [f"sim:{i}" for i in range(4)]
        assert sess.call_packed(begin).debug_get_from_all() == [0, 1, 2, 3]
        for function in ("runtime.disco.sync_worker", None):
            sess.call_packed(begin)
            if function is None:
                sess.sync_all()
            else:
                sess.call_packed(sess.get_global_func(function)).debug_get_from_all()
            idle = lambda: sim.current_stream(current_worker().device).query()  # noqa: E731
            assert sess.call_packed(idle).debug_get_from_all() == [True] * 4
