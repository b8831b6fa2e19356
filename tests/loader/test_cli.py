"""`discolab show` and `discolab shard`: what they print, write and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from discolab.__main__ import main
from discolab.loader import open_checkpoint

PLAN = {
    "*.qkv.weight": "shard(0, segments=[16, 8, 8], heads=[4, 2, 2])",
    "*.out.weight": "shard(1)",
    "head.weight": "shard(0, pad_to=8)",
    "norm.weight": "replicate",
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    """What `tmp_path / "model"` holds; a plan is beside it."""
    made = {"norm.weight": torch.ones(8), "head.weight": torch.randn(21, 8)}
    for i in range(3):
        made[f"h.{i}.qkv.weight"] = torch.randn(32, 8)
        made[f"h.{i}.out.weight"] = torch.randn(8, 16)
    (tmp_path / "model").mkdir()
    save_file(made, tmp_path / "model" / "model.safetensors")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return made


@pytest.fixture
def run(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run a command in the folder of the model: status, output, errors."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(words)
        told = capsys.readouterr()
        return status, told.out, told.err

    return call


def test_show_tells_what_is_there(run: Run) -> None:
    status, out, err = run("show", "model")
    assert (status, err) == (0, "")
    assert out.startswith("model · safetensors · 8 parameters, ")
    assert "  h.*.qkv.weight  ×3  [32, 8]  float32    3 KiB\n" in out


def test_show_tells_what_a_plan_would_do(run: Run) -> None:
    status, out, _ = run("show", "model", "--plan", "plan.json", "--workers", "4")
    assert status == 0
    assert "shard(0, segments=[16, 8, 8], heads=[4, 2, 2])  [12, 8]" in out
    assert "[6, 8], padded" in out
    assert "workers 0,1" in out
    assert "without a rule" not in out
    some = run("show", "model", "--workers", "2", "--params", "h.1.*", "--dtype", "bf16")[1]
    assert "safetensors · 2 parameters, " in some
    assert "float32 → bfloat16" in some


def test_shard_and_back(run: Run, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    plan = ("--plan", "plan.json")
    status, out, _ = run("shard", "model", "four", *plan, "--workers", "4")
    assert status == 0
    assert out.startswith("four · safetensors · 8 parameters, ")
    assert "cut for 4 workers" in out
    names = list(open_checkpoint(tmp_path / "four").entries)
    assert "h.0.qkv.weight_shard-1-of-4" in names
    assert run("shard", "four", "two", *plan, "--workers", "2", "--format", "tensor-cache")[0] == 0
    assert "two · tensor-cache · 8 parameters" in run("show", "two")[1]
    assert run("shard", "two", "one", "--workers", "1", "--whole")[0] == 0
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(found[name], value), name


def test_shard_casts(run: Run, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    words = ("--plan", "plan.json", "--workers", "2", "--groups", "2", "--dtype", "bf16")
    assert run("shard", "model", "half", *words)[0] == 0
    assert run("shard", "half", "one", "--workers", "1", "--whole")[0] == 0
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert torch.equal(found["h.1.out.weight"], tensors["h.1.out.weight"].bfloat16())


def test_what_others_have_cut_needs_a_plan(
    run: Run, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    parts = tensors["h.0.out.weight"].chunk(2, 1)
    cut = {f"w_shard-{i + 1}-of-2": part.contiguous() for i, part in enumerate(parts)}
    save_file(cut, tmp_path / "theirs.safetensors")
    assert "w_shard-2-of-2" in run("show", "theirs.safetensors")[1]
    status, _, err = run("shard", "theirs.safetensors", "one", "--workers", "1", "--whole")
    assert status == 1
    assert "does not say how 'w' was cut" in err
    (tmp_path / "cut.json").write_text('{"w": "shard(1)"}')
    words = ("--source-plan", "cut.json", "--workers", "1", "--whole")
    assert run("shard", "theirs.safetensors", "one", *words)[0] == 0
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert torch.equal(found["w"], tensors["h.0.out.weight"])


def test_what_is_wrong_is_one_line(run: Run, tmp_path: Path) -> None:
    whole = (tmp_path / "model" / "model.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(whole[:-10])
    (tmp_path / "bad.json").write_text('{"norm.weight": "shard(3)"}')
    for words, told in {
        ("show", "short.safetensors"): "short.safetensors",
        ("show", "nothing"): "no such",
        ("show", "model", "--plan", "plan.json"): "--workers 4",
        ("show", "model", "--plan", "no.json", "--workers", "2"): "no.json",
        ("show", "model", "--plan", "bad.json", "--workers", "2"): "norm.weight",
        ("show", "model", "--workers", "4", "--groups", "3"): "groups",
        ("show", "model", "--params", "h.7.*"): "h.7.*",
        ("shard", "model", "out", "--workers", "0"): "worker",
        ("shard", "model", "out", "--workers", "2", "--dtype", "int8"): "int8",
        ("shard", "short.safetensors", "out", "--workers", "2"): "short.safetensors",
    }.items():
        status, out, err = run(*words)
        assert status == 1, words
        assert out == "", words
        assert err.startswith("error: "), words
        assert told in err, (words, err)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_the_command_line_itself(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "discolab",
            "show",
            "model",
            "--plan",
            "plan.json",
            "--workers",
            "2",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("model · safetensors · 8 parameters, ")
    with pytest.raises(SystemExit):
        main(["shard", "model"])
