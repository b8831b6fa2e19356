"""Calls that are held back for a moment, to go with the next question: late never, lost never."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import ProcessSession, current_worker
from discolab.engines.connections import command_encoding
from discolab.transport import frame as frames

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def trio() -> Iterator[ProcessSession]:
    session = ProcessSession(3, devices="cpu", timeout=20)
    yield session
    session.shutdown(cancel=True)


def appears(file: Path, within: float = 10) -> bool:
    deadline = time.monotonic() + within
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return file.exists()


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def hold_worker_0(folder: str) -> None:
    """Keep worker 0 busy until worker 2 has left its mark."""
    if current_worker().rank == 0:
        Path(folder, "busy").touch()
        wait_for(Path(folder, "2"))


def mark(folder: str) -> None:
    Path(folder, str(current_worker().rank)).touch()


def test_a_call_runs_though_nothing_comes_after_it(trio: ProcessSession, tmp_path: Path) -> None:
    trio.sync_all()  # now worker 0 is idle, so that the call is held back
    ref = trio.call_packed(mark, str(tmp_path))
    assert all(appears(tmp_path / str(rank)) for rank in range(3))
    del ref


def test_others_get_their_calls_while_worker_0_is_busy(
    trio: ProcessSession, tmp_path: Path
) -> None:
    trio.call_without_result(hold_worker_0, str(tmp_path))
    assert appears(tmp_path / "busy")
    trio.call_without_result(mark, str(tmp_path))
    assert appears(tmp_path / "2"), "worker 0 waits for what worker 2 has not been told to do"
    trio.sync_all()


@pytest.mark.parametrize("large", [0, 1_000_000])
def test_calls_arrive_in_order_with_small_and_large_arguments(
    trio: ProcessSession, large: int
) -> None:
    def add(value: Any) -> None:
        current_worker().namespace.setdefault("seen", []).append(
            value if isinstance(value, int) else int(value.sum())
        )

    for number in range(300):
        trio.call_without_result(add, number)
    trio.call_without_result(add, torch.ones(large + 1))
    trio.call_without_result(add, 301)
    assert trio.pull("seen") == [[*range(300), large + 1, 301]] * 3


def test_what_ctrl_c_has_half_sent_is_done_once(
    trio: ProcessSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> int:
        names = current_worker().namespace
        names["count"] = names.get("count", 0) + 1
        return int(names["count"])

    trio.sync_all()
    ranks: list[int] = []

    def interrupted(channel: Any, write: Any) -> Any:
        def write_then_raise(frame: frames.Frame) -> None:
            write(frame)
            ranks.append(channel.rank)
            if len(ranks) == 1:
                raise KeyboardInterrupt

        return write_then_raise

    with trio._connections.cork:  # worker 0 can't send it on first
        ref = trio.call_packed(count)
        for channel in trio._connections.channels.values():
            monkeypatch.setattr(channel, "write", interrupted(channel, channel.write))
        with pytest.raises(KeyboardInterrupt):
            trio._connections.flush_held()
    assert ref.debug_get_from_all() == [1, 1, 1]
    assert trio.call_packed(count).debug_get_from_all() == [2, 2, 2]
    assert len(ranks) > 3, "nothing was sent a second time: this test tests nothing"


def test_a_call_is_sent_though_ctrl_c_comes_as_it_is_queued(
    trio: ProcessSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    trio.call_without_result(hold_worker_0, str(tmp_path))
    assert appears(tmp_path / "busy")
    with monkeypatch.context() as patch:
        patch.setattr(trio._connections, "held_one", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trio.call_without_result(mark, str(tmp_path))
    assert appears(tmp_path / "2"), "worker 0 waits for what worker 2 has not been told to do"
    trio.sync_all()
    assert all((tmp_path / str(rank)).exists() for rank in range(3))


def test_frames_are_bundled_and_those_with_buffers_stay_apart() -> None:
    small = [frames.pack(bytes([n]) * n) for n in range(1, 6)]
    large = frames.pack(b"head", [bytes(100_000)], shared=True)
    assert large.buffer is not None
    bundles = frames.bundle([*small[:3], large, *small[3:]])
    assert [frame.buffer for frame in bundles] == [None, large.buffer, None]
    assert frames.unbundle(bundles[0].data) == [frame.data for frame in small[:3]]
    assert frames.unbundle(bundles[1].data) == [large.data]
    assert frames.unbundle(bundles[2].data) == [frame.data for frame in small[3:]]


def test_bundles_stay_below_the_longest_message() -> None:
    many = [frames.pack(bytes(500))] * 400
    bundles = frames.bundle(many)
    assert max(len(frame.data) for frame in bundles) <= frames.LARGEST
    found = [message for frame in bundles for message in frames.unbundle(frame.data)]
    assert found == [frame.data for frame in many]


def test_a_reply_with_nothing_to_tell_is_told_from_other_messages() -> None:
    assert command_encoding.unpack_done(command_encoding.pack_done(7, 1 << 40).data) == (7, 1 << 40)
    for other in (
        command_encoding.pack_message(command_encoding.REPLY, 7, 9, []).data,
        b"",
        b"DONE",
        bytes(20),
    ):
        assert command_encoding.unpack_done(other) is None
