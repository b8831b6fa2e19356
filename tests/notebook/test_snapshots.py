"""Snapshots in a notebook: `%disco_snapshot`, `%disco_session --restore`, completion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def test_snapshot_and_restore(nb: Any, tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0).view(6, 2)}, tmp_path / "model.safetensors")
    nb.ok(f"%cd -q {tmp_path}")
    assert nb.ok("%disco_snapshot").stdout == "no snapshots in disco_snapshots\n"
    nb.ok('%disco_session 3 --name more\nplan = {"w": "shard(0)"}')
    nb.ok("%disco_load model.safetensors --plan plan")
    nb.ok(
        "%%disco\nclass Box:\n    pass\nbox = Box(); box.w = weights['w']\nf = open('/dev/null')"
    )  # closed with the kernel
    told = nb.ok("%disco_snapshot setup").stdout.splitlines()
    assert told[0].startswith("setup: Box, box, weights of 3 workers, ")
    assert told[1:] == ["  left out  f: an open file (/dev/null)"]
    assert nb.ok("%disco_snapshot").stdout.startswith("setup: Box, box, weights of 3 workers, ")
    assert nb.complete("%disco_snapshot se") == ["setup"]
    assert nb.complete("%disco_session 2 --restore s") == ["setup"]
    told = nb.ok("%disco_session --restore setup --name more").stdout.splitlines()
    assert told[0].endswith("4 variables are gone: Box, box, f, weights")
    assert told[1].startswith("more: workers 0-2")
    assert told[2] == "restored Box, box, weights"
    same = "%%disco\nprint(box.w is weights['w'], box.w.tolist(), isinstance(box, Box))"
    assert nb.ok(same).stdout.splitlines()[1] == "[1] True [[4.0, 5.0], [6.0, 7.0]] True"
    told = nb.ok("%disco_session 2 --restore setup --name more").stdout
    assert "(random states): workers 0 and 1 have different values" in told
    assert nb.ok("%%disco\nprint(box.w is weights['w'], box.w.shape[0])").stdout == "[0-1] True 3\n"
    near = nb.fails("%disco_session 2 --restore stup --name more")
    assert "there is no snapshot 'stup'" in near.stderr
    assert "(there are: setup)" in near.stderr
    assert nb.ok("%disco_snapshot other --names box -s more").stdout.startswith("other: box of 2")
    nb.ok("%disco_shutdown more")
