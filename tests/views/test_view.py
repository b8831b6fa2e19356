"""`view`: statistics of large tensors on demand, as text and as HTML."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from discolab import ArgumentError, DiscoError, current_worker
from discolab.engines import ThreadedSession
from discolab.views import view


@pytest.fixture(scope="module")
def sess() -> Iterator[ThreadedSession]:
    with ThreadedSession(2) as session:
        yield session


def large() -> torch.Tensor:
    return torch.ones(1100, 1000)


def test_statistics_on_demand(sess: ThreadedSession) -> None:
    ref = sess.call_packed(large)
    sess["w"] = ref
    unasked = view(sess["w"])
    assert "discolab.view(w, stats=True)" in repr(unasked)
    assert "contents not compared" in repr(unasked)
    asked = view(sess["w"], stats=True)
    assert "✓ equal on all workers" in repr(asked)
    assert "view(" not in repr(asked)
    bundle = asked._repr_mimebundle_()
    assert bundle["text/plain"] == repr(asked)
    assert "✓ equal on all workers" in bundle["text/html"]
    assert "mean" not in repr(view(sess["w"], stats=False))


def test_axes_of_the_mesh_are_used() -> None:
    with ThreadedSession(4) as session:
        session.mesh(dp=2, tp=2)
        ref = session.call_packed(own_part)
        assert "equal along dp, distinct along tp" in repr(view(ref))


def own_part() -> torch.Tensor:
    from discolab import current_worker

    return torch.arange(4.0) + current_worker().rank % 2


def test_a_closed_session() -> None:
    session = ThreadedSession(1)
    ref = session.call_packed(large)
    session.shutdown()
    with pytest.raises(DiscoError):
        view(ref)


def test_arguments_are_checked(sess: ThreadedSession) -> None:
    ref = sess.call_packed(lambda: torch.ones(2))
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (torch.ones(2), {}),
        (ref, {"timeout": None}),
        (ref, {"timeout": "a"}),
        (ref, {"timeout": float("nan")}),
        (ref, {"stats": "foo"}),
        (ref, {"stats": 1}),
    ]
    for value, options in wrong:
        with pytest.raises(ArgumentError, match="view"):
            view(value, **options)


def test_a_repr_that_sleeps_does_not_hold_the_session_up(sess: ThreadedSession) -> None:
    sess.sync_all()
    assert "still busy" in repr(view(sess.call_packed(Sleepy), timeout=0.3))
    ready = sess.call_packed(lambda: torch.ones(2))
    assert "equal on all workers" in repr(view(ready, timeout=20.0))  # not after half a minute


class Sleepy:
    def __repr__(self) -> str:
        time.sleep(40)
        return "awake"


def test_shapes_that_differ_are_told_in_the_order_of_their_workers() -> None:
    def make() -> torch.Tensor:
        return torch.ones((2, 3) if current_worker().rank == 0 else 2)

    with ThreadedSession(3) as sess:
        told = str(view(sess.call_packed(make)))
    words = "differences not looked at: float32[2, 3] and float32[2]"
    assert f"worker 0 against worker 1: {words}" in told
