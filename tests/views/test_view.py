"""`view`: statistics of large tensors on demand, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from discolab import DiscoError
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
