"""What is said of many tensors before any byte lands, and after; and Ctrl-C then."""

import gc
import os
import re
import signal
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from discolab import Session, current_worker
from discolab.loader import open_checkpoint, progress
from tests.loader.checkpoints import write_torch

safetensors = pytest.importorskip("safetensors.torch")
MANY = 3000


class Pressed:
    """A screen: whoever reads there of a step for the third time, presses Ctrl-C."""

    def __init__(self, step: str) -> None:
        self.step, self.lines = step, 0

    def write(self, text: str) -> None:
        if self.step in text:
            self.lines += 1
            if self.lines == 3:
                os.kill(os.getpid(), signal.SIGINT)

    def flush(self) -> None:
        pass


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint; a second has always passed, and a line is drawn as often as can be."""
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    path = tmp_path / "many.safetensors"
    safetensors.save_file({f"w{i}": torch.full((2,), float(i)) for i in range(MANY)}, path)
    return path


def test_each_step_before_the_first_byte_is_said(
    pair: Session, many: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = pair.load(many)
    said = capsys.readouterr().err
    for step in ("reading the index, tensor", "checking the index, tensor", "laying out tensor"):
        assert re.search(rf"\rloading: {step} 2,[0-9]01 \([0-9]+ s\)", said), said[:2000]
    assert re.search(r"\rloading: naming tensor 1,001 ", said)
    assert torch.equal(loaded["w7"].debug_get_from_remote(1), torch.full((2,), 7.0))


def test_each_step_of_a_save_is_said(
    pair: Session, many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = pair.load(many, progress=False)
    pair.save(tmp_path / "quiet", loaded, progress=False)
    assert capsys.readouterr().err == ""
    pair.save(tmp_path / "saved", loaded)
    said = capsys.readouterr().err
    for step in ("laying out tensor", "finding room for tensor", "sharing out tensor"):
        assert re.search(rf"\rsaving: {step} 2,[0-9]01 \([0-9]+ s\)", said), said[:2000]


def test_each_step_of_a_snapshot_is_said(
    pair: Session, many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def keep(slow: float) -> None:
        time.sleep(slow)
        tensors = {f"w{i}": torch.full((2,), float(i)) for i in range(MANY)}
        current_worker().namespace["tensors"] = tensors

    pair.call_without_result(keep, 0.2)
    pair.snapshot(tmp_path / "snapshot", names=["tensors"])
    said = capsys.readouterr().err
    assert "\rsaving a snapshot: what the workers hold (" in said
    for step in ("describing tensor", "finding room for tensor"):
        assert re.search(rf"\rsaving a snapshot: {step} 2,[0-9]01 ", said), said[:2000]
    pair.restore(tmp_path / "snapshot")
    said = capsys.readouterr().err
    assert re.search(r"\rrestoring: reading the index, tensor 2,[0-9]01 ", said), said[:2000]
    assert pair.pull("tensors")[1]["w7"].tolist() == [7.0, 7.0]


@pytest.mark.usefixtures("many")
def test_a_pickle_that_nests_deeply_is_said_and_ctrl_c_ends_it(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = b"\x80\x02" + b"]" * 400_000 + b"a" * 399_999 + b"."
    with zipfile.ZipFile(write_torch(tmp_path / "flat.pt", {"x": torch.ones(1)})) as flat:
        records = {name: flat.read(name) for name in flat.namelist()}
    with zipfile.ZipFile(tmp_path / "deep.pt", "w") as deep:
        for name, data in records.items():
            deep.writestr(name, inside if name.endswith("/data.pkl") else data)
    screen = Pressed("reading the pickle, item")
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(KeyboardInterrupt):
        pair.load(tmp_path / "deep.pt")
    assert 3 <= screen.lines <= 5  # one more as it ends


def test_nothing_is_said_within_a_second_nor_unasked(
    pair: Session,
    many: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair.load(many, progress=False)
    open_checkpoint(many)
    monkeypatch.setattr(progress, "SHOW_AFTER", 1000.0)
    pair.load(many)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("step", ["reading the index", "checking", "laying out", "naming"])
def test_ctrl_c_ends_each_of_them_at_once(
    pair: Session, many: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    pair.sync_all()
    gc.collect()
    before, screen = pair.statistics().live_registers, Pressed(step)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        with pytest.raises(KeyboardInterrupt):
            pair.load(many)
    assert screen.lines <= 5  # one more as it ends
    pair.sync_all()
    gc.collect()
    pair.sync_all()
    assert pair.statistics().live_registers <= before
    loaded = pair.load(many, progress=False)
    assert torch.equal(loaded["w9"].debug_get_from_remote(1), torch.full((2,), 9.0))
