"""What is said while an index of many tensors is read, before any byte lands; and Ctrl-C then."""

import gc
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from discolab import Session
from discolab.loader import open_checkpoint, progress

safetensors = pytest.importorskip("safetensors.torch")
MANY = 3000


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
    class Pressed:
        """Whoever reads of that step, presses Ctrl-C."""

        def __init__(self) -> None:
            self.lines = 0

        def write(self, text: str) -> None:
            if step in text:
                self.lines += 1
                if self.lines == 3:
                    os.kill(os.getpid(), signal.SIGINT)

        def flush(self) -> None:
            pass

    pair.sync_all()
    gc.collect()
    before, screen = pair.statistics().live_registers, Pressed()
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
