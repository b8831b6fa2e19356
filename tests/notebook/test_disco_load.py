"""Checkpoints in a notebook: `%disco_load`, its table, the same name here and on the workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from discolab.loader import shard

PLAN = {
    "*.qkv.weight": "shard(0, segments=[16, 8, 8], heads=[4, 2, 2])",
    "*.out.weight": "shard(1)",
    "norm.weight": "replicate",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and its plan; some that are cut short, have a NaN, or another checksum."""
    made = tmp_path_factory.mktemp("my models")
    tensors = {"norm.weight": torch.ones(8)}
    for i in range(3):
        tensors[f"h.{i}.qkv.weight"] = torch.arange(256.0).view(32, 8) + i
        tensors[f"h.{i}.out.weight"] = torch.arange(128.0).view(8, 16) + i
    save_file(tensors, made / "model.safetensors")
    (made / "plan.json").write_text(json.dumps(PLAN))
    whole = (made / "model.safetensors").read_bytes()
    (made / "short.safetensors").write_bytes(whole[:-100])
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, made / "nan.safetensors")
    shard(made / "model.safetensors", made / "cache", format="tensor-cache", presharded=False)
    data = next((made / "cache").glob("*.bin"))
    changed = bytearray(data.read_bytes())
    changed[-1] ^= 1
    data.write_bytes(changed)
    return made


def test_the_same_name_here_and_on_the_workers(nb: Any, folder: Path) -> None:
    nb.ok(f"%cd -q {folder}")
    shown = nb.ok("%disco_load model.safetensors --plan plan.json")
    assert shown.text.startswith("model.safetensors · safetensors · 7 parameters, ")
    assert "h.*.qkv.weight  ×3  [32, 8]  float32" in shown.text
    assert "workers 0,1" in shown.text  # drawn: a head of k that two workers have
    assert "<table" in shown.data[-1]["text/html"]
    ref = nb.ok('weights["h.1.out.weight"]')
    assert "float32[8, 16] Shard(1) on 4 workers" in ref.text
    assert nb.ok('sorted(weights) == sorted(f"h.{i}.{w}.weight" for i in range(3) '
                 'for w in ("qkv", "out")) + ["norm.weight"]').text == "True"  # fmt: skip
    cell = '%%disco\nw = weights["h.2.out.weight"]\nprint(tuple(w.shape), float(w[0, 0]))'
    assert nb.ok(cell).stdout == "".join(f"[{r}] (8, 4) {4.0 * r + 2}\n" for r in range(4))
    assert nb.ok("%%disco\nprint(len(weights), type(weights).__name__)").stdout == "[0-3] 7 dict\n"
    near = nb.fails('weights["h.1.out.weigth"]')
    assert "did you mean 'h.1.out.weight'" in near.error["evalue"]


def test_options(nb: Any, folder: Path) -> None:
    nb.ok(f"%cd -q {folder}")
    nb.ok('plan = {"*.qkv.weight": "shard(0)"}')
    shown = nb.ok("%disco_load model.safetensors --plan plan --params *.qkv.*,norm* --dtype bf16 "
                  "--as some --verify --check-nan")  # fmt: skip
    assert "4 parameters" in shown.text
    assert "float32 → bfloat16" in shown.text
    assert nb.ok("len(some), str(some.dtype)").text == "(4, 'torch.bfloat16')"
    cell = '%%disco\nprint(some["h.0.qkv.weight"].dtype, tuple(some["h.0.qkv.weight"].shape))'
    assert nb.ok(cell).stdout == "[0-3] torch.bfloat16 (8, 8)\n"
    nb.ok("from discolab.notebook import disco_load")
    again = nb.ok("disco_load('model.safetensors', plan=plan, params='norm*', name='one')")
    assert "1 parameter" in again.text
    nb.ok("%disco_session 2 --devices cpu --name pair")
    nb.ok(f"%disco_load '{folder}/model.safetensors' --as here -s pair")
    assert nb.ok("here['norm.weight'].session is pair").text == "True"


def test_a_dry_run_binds_nothing(nb: Any, folder: Path) -> None:
    nb.ok(f"%cd -q {folder}")
    shown = nb.ok("%disco_load model.safetensors --plan plan.json --as dry --dry-run")
    assert "h.*.out.weight" in shown.text
    assert "<table" in shown.data[-1]["text/html"]
    assert "NameError" in nb.fails("dry").traceback
    assert "no variable named 'dry'" in nb.fails("%disco_pull dry").stderr


def test_a_bad_file_is_one_line_and_leaves_what_was(nb: Any, folder: Path) -> None:
    nb.ok(f"%cd -q {folder}")
    nb.ok("%disco_load model.safetensors --params norm*")
    for file, words in {"short": "expected", "nan": "NaN", "missing": "no such file"}.items():
        told = nb.fails(f"%disco_load {file}.safetensors --check-nan")
        assert told.error["ename"] == "CheckpointError"
        assert len(told.error["traceback"]) == 1
        assert words in told.traceback, told.traceback
        assert f"{file}.safetensors" in told.traceback
    assert "content has changed" in nb.fails("%disco_load cache --verify").error["evalue"]
    assert nb.ok("list(weights)").text == "['norm.weight']"
    assert nb.ok("%%disco\nprint(list(weights))").stdout == "[0-3] ['norm.weight']\n"


def test_what_is_typed_wrongly_is_told_in_a_line(nb: Any, folder: Path) -> None:
    nb.ok(f"%cd -q {folder}")
    for line, words in {
        "model.safetensors --plan nothing.json": "no such file",
        "model.safetensors --params *.qkw.weight": "did you mean",
        "model.safetensors --dtype bf17": "unknown dtype",
        "model.safetensors --as 1x": "Python name",
        "model.safetensors --dryrun": "did you mean --dry-run?",
        "": "required: CHECKPOINT",
    }.items():
        assert words in nb.fails(f"%disco_load {line}").stderr, line
    nb.ok('bad = {"*.out.weight": "shard(2)"}')
    told = nb.fails("%disco_load model.safetensors --plan bad").stderr
    assert "h.0.out.weight" in told
    assert "dimension 2" in told
    assert "bf16" in nb.ok("%disco_load --help").stdout


def test_tab_knows_flags_and_files(nb: Any, folder: Path) -> None:
    nb.ok(f"%cd -q {folder}")
    flags = {"--plan", "--params", "--dtype", "--as", "--dry-run", "--verify", "--check-nan"}
    assert flags <= set(nb.complete("%disco_load model.safetensors --"))
    assert any("model.safetensors" in found for found in nb.complete("%disco_load mod"))
    assert any("plan.json" in found for found in nb.complete("%disco_load m --plan pl"))
    assert nb.complete("%disco_load m --dtype b") == ["bfloat16"]


def test_stages_have_their_own_parameters(nb: Any, folder: Path) -> None:
    nb.ok("%disco_session 4 --devices cpu --groups 2")
    nb.ok(f"%cd -q {folder}")
    nb.ok('plan = {"h.0.*": "shard(0, stage=0)", "h.[12].*": "shard(0, stage=1)"}')
    assert "on 2,3" in nb.ok("%disco_load model.safetensors --plan plan").text
    cell = "%%disco\nprint(len(weights))"
    assert nb.ok(cell).stdout == "[0-1] 3\n[2-3] 5\n"


def test_workers_in_processes_have_it_too(nb: Any, folder: Path) -> None:
    nb.ok("%disco_session 2 --devices cpu --engine processes")
    nb.ok(f"%cd -q {folder}")
    nb.ok("%disco_load model.safetensors --plan plan.json --params *.out.* --read-by first")
    cell = '%%disco\nprint(len(weights), float(weights["h.1.out.weight"][0, 0]))'
    assert nb.ok(cell).stdout == "[0] 3 1.0\n[1] 3 9.0\n"
    nb.ok("%disco_shutdown")


SLOWLY = """
import time
from pathlib import Path
import torch
from discolab.loader import read

whole = read.Files._pread

def slowly(self, *args):
    time.sleep(0.02)
    whole(self, *args)

read.Files._pread = slowly
"""


def test_a_load_of_more_than_a_second_has_a_bar_for_each_worker(nb: Any, tmp_path: Path) -> None:
    tensors = {f"{i}.w": torch.ones(64, 64, dtype=torch.float32) for i in range(90)}
    save_file(tensors, tmp_path / "m.safetensors")
    nb.ok(SLOWLY)
    try:
        shown = nb.ok(f"loaded = sess.load(r'{tmp_path}')").updates
    finally:
        nb.ok("read.Files._pread = whole")
    bars = shown[-1]
    lines = bars["text/plain"].splitlines()
    assert [line[: len("loading, worker 0: 100%")] for line in lines] == [
        f"loading, worker {rank}: 100%" for rank in range(4)
    ]
    assert all("1.41M/1.41M" in line and "B/s" in line for line in lines)


MANY_STEPS = """
from discolab.loader import progress
was = progress.SHOW_AFTER, progress._EVERY
progress.SHOW_AFTER = progress._EVERY = 0.0
"""


def test_a_large_index_is_said_to_be_read_in_a_line_of_its_own(nb: Any, tmp_path: Path) -> None:
    save_file({f"w{i}": torch.ones(1) for i in range(250)}, tmp_path / "m.safetensors")
    nb.ok(MANY_STEPS)
    try:
        shown = nb.ok(f"%disco_load {tmp_path}").updates
    finally:
        nb.ok("progress.SHOW_AFTER, progress._EVERY = was")
    texts = [update["text/plain"] for update in shown]
    for step in (
        "reading the index, tensor 101",
        "checking the index, tensor 101",
        "naming tensor",
    ):
        assert any(text.startswith(f"loading: {step}") for text in texts), texts
