"""What becomes of tensors on their way to a worker and back: the same on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import discolab
from discolab.engines.sockets import SocketSession


@pytest.fixture(scope="module")
def sessions() -> Any:
    made = {
        "threads": discolab.ThreadedSession(2),
        "processes": discolab.ProcessSession(2),
        "sockets": SocketSession(2, 1, spawn_nodes=True),
    }
    yield made
    for sess in made.values():
        sess.shutdown()


@st.composite
def some_views(draw: Any) -> list[torch.Tensor]:
    """Views of one or two storages."""
    dtype = draw(st.sampled_from([torch.float32, torch.complex64, torch.bfloat16, torch.int16]))
    bases = [torch.arange(24).to(dtype).reshape(2, 3, 4) + i for i in range(2)]
    made: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 4))):
        view = draw(st.sampled_from(bases + made))
        for _ in range(draw(st.integers(0, 3))):
            how = draw(st.integers(0, 5))
            if how == 0 and view.dim():
                view = view.permute(draw(st.permutations(range(view.dim()))))
            elif how == 1 and view.dim() and view.shape[0] > 1:
                view = view.narrow(0, 1, draw(st.integers(1, view.shape[0] - 1)))
            elif how == 2 and view.dim():
                view = view[..., :: draw(st.integers(1, 3))]
            elif how == 3 and view.dim() < 4:
                view = view.unsqueeze(-1).expand(*view.shape, 2)
            elif how == 4 and dtype is torch.complex64:
                view = view.conj()
            elif how == 5 and view.is_floating_point():
                view = view.detach().requires_grad_()
        made.append(view)
    return made


def facts(tensors: list[torch.Tensor]) -> list[Any]:
    """What each of the tensors is, and which of them are one or begin at the same place."""
    found: list[Any] = []
    for i, tensor in enumerate(tensors):
        bits = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.dtype
        numbers = tensor.detach().to(torch.complex64).tolist()
        shared = [tensor.data_ptr() == other.data_ptr() for other in tensors[:i]]
        same = [tensor is other for other in tensors[:i]]
        found.append(
            (type(tensor), tuple(tensor.shape), tensor.stride(), bits, numbers, shared, same)
        )
    return found


def facts_and_all(*tensors: torch.Tensor, again: Any) -> Any:
    return facts([*tensors, *again["more"]]), [*tensors, *again["more"]]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(some_views())
def test_any_views_on_every_engine(sessions: Any, views: list[torch.Tensor]) -> None:
    whole = [*views, views[0]]
    want = facts(whole)
    for name, sess in sessions.items():
        ref = sess.call_packed(facts_and_all, *views, again={"more": (views[0],)})
        for there, back in ref.debug_get_from_all():
            assert there == want, name
            assert facts(back) == want, name


def layout_of(pair: list[torch.Tensor]) -> str:
    return f"{pair[0].layout} {pair[0].requires_grad} {pair[1].tolist()}"


@pytest.mark.parametrize("where", ["threads", "processes", "sockets"])
@pytest.mark.conformance
def test_a_sparse_tensor_beside_another(sessions: Any, where: str) -> None:
    sess = sessions[where]
    pair = [torch.eye(3).to_sparse().requires_grad_(), torch.ones(1)]
    ref = sess.call_packed(layout_of, pair)
    assert ref.debug_get_from_all() == ["torch.sparse_coo True [1.0]"] * 2
    back = sess.call_packed(list, pair).debug_get_from_remote(1)
    assert torch.equal(back[0].detach().to_dense(), torch.eye(3))


def dense_sum(sparse: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (sparse.to_dense() * factor).sum()


def gradient_of_a_sparse_leaf() -> Any:
    worker = discolab.current_worker()
    leaf = torch.eye(3).to_sparse().requires_grad_()
    factor = torch.full((3, 3), 2.0, requires_grad=True)
    with discolab.rpc.autograd.context() as context:
        out = discolab.rpc.rpc_sync(1 - worker.worker_id, dense_sum, (leaf, factor))
        discolab.rpc.autograd.backward(context, [out])
        grads = discolab.rpc.autograd.get_gradients(context)
        return grads[leaf].to_dense(), grads[factor]


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_a_sparse_leaf_in_a_context_of_autograd(where: str) -> None:
    with discolab.make_session(2, where, devices="cpu", timeout=60) as sess:
        found = sess.call_packed(gradient_of_a_sparse_leaf).debug_get_from_all()
    for of_leaf, of_factor in found:
        assert torch.equal(of_leaf * torch.eye(3), 2 * torch.eye(3))
        assert torch.equal(of_factor, torch.eye(3))


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_a_tensor_that_was_looked_at_can_still_be_resized(
    sessions: Any, where: str, tmp_path: Path
) -> None:
    """FSDP2 empties and fills the storages of parameters; `tensor.numpy()` would forbid that."""
    sess = sessions[where]
    ref = sess.call_packed(lambda: torch.arange(6.0))
    ref.debug_get_from_all()
    repr(ref)
    ref._repr_mimebundle_()
    sess.save(tmp_path / "saved", {"x": ref}, {"x": "replicate"})
    sess.snapshot(tmp_path / "kept")

    def resize(tensor: torch.Tensor) -> int:
        discolab.disco_assert(tensor, "replicated")
        tensor.untyped_storage().resize_(0)
        return tensor.untyped_storage().size()

    assert sess.call_packed(resize, ref).debug_get_from_all() == [0, 0]
