"""Tensors of one shape that differ on all workers: said to be shards only where that is known."""

from __future__ import annotations

import html
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import Shard

from discolab.engines import ThreadedSession
from discolab.runtime import DRef
from discolab.views import draw_dref, render_html, render_rich, render_text

QUESTION = "4 different values: shards of a larger tensor, or partial sums?"
WHOLE = torch.arange(96.0).view(8, 12)


@pytest.fixture(scope="module")
def sess() -> Iterator[ThreadedSession]:
    with ThreadedSession(4) as session:
        session.init_ccl()
        yield session


def said(ref: DRef) -> str:
    """What the first line says behind the type; text, HTML and rich must agree."""
    part = draw_dref(ref)
    line = render_text(part).split("\n")[0]
    words = line.partition(" on 4 workers · ")[2]
    assert html.escape(words) in render_html(part)
    assert render_rich(part) is not None
    return words


def mine(scale: int) -> torch.Tensor:
    from discolab.runtime import current_worker

    generator = torch.Generator().manual_seed(scale)
    return torch.randn(8, 12, generator=generator) * (current_worker().worker_id + scale)


def part_of(whole: torch.Tensor, dim: int) -> torch.Tensor:
    from discolab.runtime import current_worker

    return whole.chunk(4, dim)[current_worker().worker_id].clone()


def test_nothing_is_claimed_of_values_that_just_differ(sess: ThreadedSession) -> None:
    ref = sess.call_packed(mine, 1)
    other = sess.call_packed(lambda: torch.ones(8, 12))  # equal on all, and not their sum
    assert said(ref) == QUESTION
    assert 'class="m">4 different' not in render_html(draw_dref(ref))  # it is not played down
    del other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_that_have_come_apart_are_no_partial_sums(
    sess: ThreadedSession, dtype: torch.dtype
) -> None:
    """Their mean is each of them, also the one that all hold."""
    from discolab.runtime import current_worker

    def apart() -> torch.Tensor:
        step = torch.finfo(dtype).eps * current_worker().worker_id
        return (torch.randn(40, 50, generator=torch.Generator().manual_seed(3)) * (1 + step)).to(
            dtype
        )

    ref = sess.call_packed(apart)
    held = sess.call_packed(
        lambda: torch.randn(40, 50, generator=torch.Generator().manual_seed(3)).to(dtype)
    )
    words = "4 different values: nearly equal; replicas that have come apart, or shards?"
    assert said(ref) == words
    del held


def test_a_number_is_no_shard(sess: ThreadedSession) -> None:
    from discolab.runtime import current_worker

    ref = sess.call_packed(lambda: torch.tensor(current_worker().worker_id / 3))
    assert said(ref) == "4 different values: each worker's own, or partial sums?"


def test_a_forgotten_sum_is_found_where_somebody_holds_it(sess: ThreadedSession) -> None:
    ref = sess.call_packed(mine, 2)
    total = sess.call_packed(lambda: torch.zeros(8, 12))
    sess.allreduce(ref, total)
    total.name = "total"
    words = "4 different values: their sum is total, equal on all workers: perhaps partial sums"
    assert said(ref) == words
    assert "equal on all workers" in said(total)
    mean = sess.call_packed(lambda t: t / 4, total)
    mean.name = "mean"
    del total
    sess.sync_all()
    assert "their mean is mean, equal" in said(ref)


def test_a_sum_that_is_off_by_more_than_rounding_is_none(sess: ThreadedSession) -> None:
    ref = sess.call_packed(mine, 3)
    total = sess.call_packed(lambda: torch.zeros(8, 12))
    sess.allreduce(ref, total)
    near = sess.call_packed(lambda t: t + (torch.arange(12) == 3) * 1e-2, total)
    del total
    sess.sync_all()
    assert said(ref) == QUESTION
    del near


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_tensor_that_all_hold(sess: ThreadedSession, dim: int) -> None:
    whole = sess.push({"whole": WHOLE})
    del whole
    ref = sess.call_packed(part_of, sess["whole"], dim)
    assert said(ref) == f"4 different values: the parts of whole along dim {dim}"
    ref.placements = [Shard(dim)]
    assert said(ref) == "shards distinct"  # as somebody says so


def test_what_a_scatter_has_made_is_known(sess: ThreadedSession) -> None:
    ref = sess.scatter(torch.randn(4, 3, 5))
    assert said(ref) == "4 different values: the pieces of a scatter"


def test_what_was_all_reduced_and_differs_is_odd(sess: ThreadedSession) -> None:
    total = sess.call_packed(lambda: torch.zeros(8, 12))
    sess.allreduce(sess.call_packed(mine, 4), total)
    sess.call_packed(lambda t: t.mul_(mine(5)), total)
    assert said(total) == "≠ 4 different values, although it was all-reduced"


def test_whole_numbers_do_no_harm(sess: ThreadedSession) -> None:
    assert said(sess.call_packed(lambda: mine(6).long())) == QUESTION
