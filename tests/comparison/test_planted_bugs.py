"""Bugs that people make in tensor parallelism, each in a real transformer: where, and why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import discolab
from discolab import Session, compare
from tests.comparison.transformer import make_reference, make_sharded, tokens

BUGS = [
    # what it is, the module that has it, how it is found, what is said of it
    ("no reduce", "blocks.1.mlp.down", "output", "an all-reduce is missing"),
    ("bias and no reduce", "blocks.0.attn.out", "output", "which each worker has added"),
    ("no reduce", "tok", "output", "an all-reduce is missing"),
    ("reduced twice", "blocks.0.attn.out", "output", "4 times the reference"),
    ("bias on each", "blocks.1.attn.out", "output", "added on every worker before the sum"),
    ("no bias", "blocks.0.mlp.down", "output", "it is not added"),
    ("wrong bias", "blocks.0.mlp.up", "parameter", "worker 0 holds worker 1's part"),
    ("swapped", "blocks.1.attn.q", "parameter", "worker 2 holds worker 3's part"),
    ("wrong dim", "blocks.0.attn.k", "parameter", "split along dim 1 and is transposed"),
    ("interleaved", "blocks.0.attn.v", "parameter", "every 4th element along dim 0"),
    ("stale", "blocks.1.mlp.down", "parameter", "one element of"),
    ("no scale", "blocks.1.attn.core", "output", "inside blocks.1.attn.core"),
    ("mask", "blocks.0.attn.core", "output", "inside blocks.0.attn.core"),
    ("local norm", "blocks.0.ln2", "output", "inside blocks.0.ln2"),
    ("local softmax", "logp", "output", "inside logp"),
    ("one in eval", "blocks.0.drop", "output", "worker 2 is in eval mode"),
    ("dropout seed", "blocks.0.drop", "output", "inside blocks.0.drop"),
    ("offset", "tok", "output", "inside tok"),
    ("no mask", "tok", "output", "inside tok"),
    ("residual on each", "blocks.0.attn.out", "input", "3 × the input of blocks.0:"),
    ("gather order", "head", "output", "in the order 3, 0, 1, 2"),
    ("downcast", "blocks.1.mlp.up", "output", "worker 3 holds numbers of bfloat16 precision"),
    ("NaN", "blocks.0.mlp.up", "output", "worker 1 holds NaN elements"),
    ("no backward reduce", "blocks.1.attn.k", "input", "missing in backward"),
    ("gradient not summed", "blocks.1.ln2", "parameter", "all-reduce of this gradient is missing"),
    ("gradient summed twice", "blocks.0.ln2", "parameter", "is 4 times the reference: summed"),
    ("positions", "pos", "input", ""),
    ("gelu", "blocks.0.mlp.act", "output", "worker 1: GELU(approximate='tanh')"),
    ("eps", "blocks.1.ln1", "output", "eps=0.01"),
]
RANKS = {"one in eval": 2, "dropout seed": 2, "downcast": 3, "NaN": 1, "stale": 1, "gelu": 1,
         "positions": 3}  # fmt: skip
BACKWARD = {"no backward reduce", "gradient not summed", "gradient summed twice"}


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    with discolab.make_session(4, "threads", devices="cpu", timeout=30) as session:
        yield session


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("bug", "where", "kind", "words"), BUGS, ids=[f"{b} in {w}" for b, w, *_ in BUGS]
)
def test_a_bug_is_found_where_it_is(
    four: Session, bug: str, where: str, kind: str, words: str
) -> None:
    reference = make_reference()
    if bug in ("one in eval", "dropout seed"):
        reference.train()
    sharded = four.call_packed(make_sharded, reference.state_dict(), bug, where)
    found = compare(reference, sharded, tokens())
    assert found.first is not None
    said = str(found.first)
    assert words in said
    point = found.first.point
    assert point.kind == kind
    assert point.gradient == (bug in BACKWARD)
    if bug == "residual on each":  # it shows where the sum is used next
        assert point.module == "blocks.0.ln2"
    elif kind == "parameter":
        assert point.module.rpartition(".")[0] == where
    else:
        assert point.module == where
    assert found.first.ranks == ((RANKS[bug],) if bug in RANKS else found.first.ranks)
    assert f"first difference: {point.words}" in repr(found)
