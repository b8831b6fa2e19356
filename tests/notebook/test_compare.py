"""``%disco_compare`` in a kernel: the line, the cell, options, what is told of mistakes."""

from __future__ import annotations

from typing import Any

MODEL = """\
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
state, x = model.state_dict(), torch.randn(3, 8)"""
SHARDED = """\
%%disco -i state
from discolab.ccl import autograd as dist_fn
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 8, False))
own = {k: v.chunk(world_size, "02".index(k[0]))[rank] for k, v in state.items() if k != "2.bias"}
model.load_state_dict(own)
bias = torch.nn.Parameter(state["2.bias"]);"""
CELL = """\
h = dist_fn.copy_to_region(x)
dist_fn.reduce_from_region(model(h)) + bias"""


def test_compare_in_a_notebook(nb: Any) -> None:
    nb.ok(MODEL)
    nb.ok(SHARDED)
    found = nb.ok("found = %disco_compare model x --no-backward\nfound")
    assert "first difference: output of 2" in found.text
    assert "2.bias" in found.text
    assert "<table" in found.data[-1]["text/html"]

    good = nb.ok(f"%%disco_compare model x\n{CELL}")
    assert "✓ agrees" in good.text
    assert "only in the reference: 2.bias" in good.text
    assert nb.ok("%%disco\n'x' in globals()").text == "DRef: False on all 4 workers"

    wrong = nb.ok(f"%%disco_compare model x\n{CELL.replace('dist_fn.copy_to_region(x)', 'x')}")
    assert "gradient of the input of 0" in wrong.text
    assert "missing in backward" in wrong.text

    nb.ok("batch, other = {'input': x}, model")
    named = nb.ok("found = %disco_compare model batch --no-backward\nfound")
    assert "first difference: output of 2" in named.text
    nb.ok("%%disco\nsharded = model;")
    assert "output of 2" in nb.ok("%disco_compare other batch --module sharded").text
    table = nb.ok("found.unmatched")
    assert "every value could be compared" in table.text

    failed = nb.fails("%%disco_compare model x\nx @ x")
    assert "Cell In[" in failed.traceback
    assert "line 2" in failed.traceback

    told = nb.ok("%%disco_compare model x --layout '*.weight=shard(0, segments=2)' --rtol 0.1\nx")
    assert "4" in told.text
    for line, words in {
        "%disco_compare nope x": "no variable named nope",
        "%disco_compare model nope": "no variable named nope",
        "%disco_compare model": "called as Sequential(): ",
        "%disco_compare model x x": "called as Sequential(float32[3, 8], float32[3, 8]): ",
        "%disco_compare model x --module nope": "no worker variable nope",
        "%disco_compare other x": "--module NAME",
        "%disco_compare model x --layout weight": "has no =",
        "%disco_compare model x --rtoll 3": "did you mean --rtol",
    }.items():
        result = nb.fails(line)
        assert words in result.stderr + (result.traceback if not result.stderr else ""), line
    assert "--no-backward" in nb.ok("%disco_compare --help").stdout
