"""The mesh of a session: its value, its groups on the workers, and what keeps it."""

import pickle
import sys
import threading
from typing import Any

import pytest
import torch

from discolab import ArgumentError, ThreadedSession, WorkerError, ccl
from discolab.runtime import Mesh, current_worker

pytestmark = pytest.mark.any_engine


def grid(**axes: int) -> Mesh:
    count = int(torch.tensor(list(axes.values())).prod())
    return Mesh(tuple(axes), tuple(axes.values()), tuple(range(count)))


# -- the value -----------------------------------------------------------------------------------


def test_places_are_row_by_row() -> None:
    mesh = grid(pp=2, dp=3, tp=4)
    cube = torch.arange(24).reshape(2, 3, 4)
    for rank in range(24):
        place = mesh.coordinate(of=rank)
        assert cube[place] == rank
        assert [mesh.rank(axis, of=rank) for axis in ("pp", "dp", "tp")] == list(place)
        assert list(mesh.peers("dp", of=rank)) == cube[place[0], :, place[2]].tolist()
        assert list(mesh.peers("pp", "tp", of=rank)) == cube[:, place[1]].flatten().tolist()
        assert mesh.peers(of=rank) == (rank,)
    assert (mesh.size(), mesh.size("dp")) == (24, 3)
    assert 23 in mesh
    assert 24 not in mesh


def test_a_submesh_is_the_part_in_which_a_worker_is() -> None:
    mesh = grid(pp=2, dp=2, tp=2)
    part = mesh.submesh("pp", "tp", of=3)
    assert part == Mesh(("pp", "tp"), (2, 2), (2, 3, 6, 7))
    assert repr(part) == "<mesh pp=2, tp=2 of workers 2-3, 6-7>"
    assert part.coordinate(of=6) == (1, 0)
    assert part.group("tp", of=6).ranks == (6, 7)
    assert mesh.submesh("pp", "dp", "tp", of=3) == mesh
    with pytest.raises(ArgumentError, match=r"worker 0 is not in <mesh pp=2"):
        part.coordinate(of=0)
    for axes in [(), ("tp", "pp"), ("dp", "dp")]:
        with pytest.raises(ArgumentError, match="in the order of the mesh"):
            mesh.submesh(*axes, of=0)


def test_it_is_small_and_survives_pickling() -> None:
    mesh = grid(dp=2, tp=4)
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert len(pickle.dumps(mesh)) < 200
    assert hash(mesh) == hash(grid(dp=2, tp=4))


@pytest.mark.parametrize(
    ("axes", "sizes", "ranks", "complaint"),
    [
        (("a", "a"), (1, 2), (0, 1), "twice"),
        (("a",), (2,), (1, 0), "ascending"),
        (("a",), (2,), (-1, 0), "ascending"),
        (("a",), (2,), (0,), "2 places, got 1"),
        (("a b",), (2,), (0, 1), "Python name"),
        (("world",), (2,), (0, 1), "other than world"),
        (("a",), (1, 2), (0, 1), "a size each"),
        (("a",), (True,), (0,), "size of 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(
    axes: tuple[str, ...], sizes: tuple[int, ...], ranks: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        Mesh(axes, sizes, ranks)


def test_the_controller_must_say_of_which_worker() -> None:
    with pytest.raises(ArgumentError, match="of=rank"):
        grid(tp=2).group("tp")


# -- of a session --------------------------------------------------------------------------------


def test_sizes_that_do_not_fit_are_told_with_some_that_would(sess: ThreadedSession) -> None:
    for axes, words in {
        (("dp", 3), ("tp", 2)): "4 workers, and the sizes must multiply to that; dp=2, tp=2 would",
        (("dp", 8),): "dp=4 would fit",
        (("dp", 3), ("tp", -1)): "dp=4, tp=1 would fit",
        (("a", 2), ("b", 3), ("c", 5)): "a=2, b=1, c=2 would fit",
        (("dp", -1), ("tp", -1)): "one -1 at most",
        (("dp", 0),): "size of 1 or more",
        (): "sess.mesh(dp=2, tp=2)",
    }.items():
        with pytest.raises(ArgumentError) as caught:
            sess.mesh(**dict(axes))
        assert words in str(caught.value)
    assert sess.current_mesh is None
    assert sess.mesh(dp=-1, tp=2) == sess.mesh(dp=2, tp=-1) == grid(dp=2, tp=2)


@pytest.mark.conformance
def test_collectives_run_along_its_axes(sess: ThreadedSession) -> None:
    mesh = sess.mesh(dp=2, tp=2)

    def sums(mesh: Mesh) -> list[Any]:
        x = torch.tensor(10.0 ** current_worker().rank)
        groups = [mesh.group("tp"), mesh.group("dp"), mesh.group(), mesh["tp"].group()]
        assert isinstance(groups[0], ccl.Group)
        return [int(ccl.all_reduce(x, group=group)) for group in groups]

    found = sess.call_packed(sums, mesh).debug_get_from_all()
    assert found == [
        [11, 101, 1111, 11],
        [11, 1010, 1111, 11],
        [1100, 101, 1111, 1100],
        [1100, 1010, 1111, 1100],
    ]


def test_an_axis_can_be_named_as_a_group(sess: ThreadedSession) -> None:
    def total(axis: str) -> int:
        return int(ccl.all_reduce(torch.tensor(10.0 ** current_worker().rank), group=axis))

    with pytest.raises(WorkerError, match="mesh"):  # there is none yet
        sess.call_packed(total, "tp").debug_get_from_all()
    sess.mesh(dp=2, tp=2)
    assert sess.call_packed(total, "tp").debug_get_from_all() == [11, 11, 1100, 1100]
    assert sess.call_packed(total, "dp").debug_get_from_all() == [101, 1010, 101, 1010]
    with pytest.raises(WorkerError, match=r"no axis 'ep'; its axes are dp=2, tp=2"):
        sess.call_packed(total, "ep").debug_get_from_all()


def test_the_last_mesh_is_current_and_old_ones_stay_valid(sess: ThreadedSession) -> None:
    old = sess.mesh(dp=2, tp=2)
    in_cells = sess["mesh"]
    new = sess.mesh(pp=4)
    assert sess.current_mesh is new
    assert in_cells.debug_get_from_all() == [old] * 4
    assert sess["mesh"].debug_get_from_all() == [new] * 4
    mine = sess.call_packed(lambda: current_worker().mesh)
    assert mine.debug_get_from_all() == [new] * 4
    ranks = sess.call_packed(lambda mesh: mesh.group("tp").ranks, old)
    assert ranks.debug_get_from_all() == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_sessions_have_meshes_of_their_own(sess: ThreadedSession, pair: ThreadedSession) -> None:
    sess.mesh(dp=4)
    pair.mesh(tp=2)
    mine = "mesh"
    assert sess[mine].debug_get_from_remote(0) == grid(dp=4)
    assert pair[mine].debug_get_from_remote(0) == grid(tp=2)


@pytest.mark.one_process
def test_a_mesh_that_some_workers_did_not_get_is_not_the_current_one(
    sess: ThreadedSession,
) -> None:
    old = sess.mesh(dp=4)
    release = threading.Event()

    def wait_for_release() -> None:
        if current_worker().rank == 3:
            release.wait(20)

    sess.call_without_result(wait_for_release)
    sess.timeout = 0.2
    with pytest.raises(TimeoutError):
        sess.mesh(tp=4)
    sess.timeout = 20
    release.set()
    assert sess.current_mesh is old
    assert sess["mesh"].debug_get_from_all() == [old] * 4


def test_a_mesh_is_drawn_as_a_table() -> None:
    bundle = grid(dp=2, tp=2)._repr_mimebundle_()
    assert bundle["text/plain"] == (
        "mesh dp=2, tp=2 of workers 0-3\n  dp  tp=0  tp=1\n   0     0     1\n   1     2     3"
    )
    assert "tp=1" in bundle["text/html"]
    wide = grid(dp=70, tp=20)._repr_mimebundle_()["text/plain"].splitlines()
    assert wide[1].split("  ")[-1] == "tp=0 to 19"
    assert wide[2].split()[-1] == "0-19"
    assert wide[-1] == "6 more rows"
    assert len(wide) == 2 + 64 + 1


@pytest.mark.skipif(
    "discolab.ccl.distributed" not in sys.modules,
    reason="discolab.ccl.distributed, torch.distributed inside worker threads, is not loaded",
)
def test_it_converts_to_that_of_torch(sess: ThreadedSession) -> None:
    mesh = sess.mesh(dp=2, tp=2)

    def convert(mesh: Mesh) -> Any:
        import torch.distributed as dist

        other = mesh.to_torch()
        line = dist.get_process_group_ranks(other.get_group("tp"))
        return other.mesh_dim_names, other.mesh.tolist(), other.get_coordinate(), line

    found = sess.call_packed(convert, mesh).debug_get_from_all()
    assert [one[0] for one in found] == [("dp", "tp")] * 4
    assert [one[1] for one in found] == [[[0, 1], [2, 3]]] * 4
    assert [list(one[2]) for one in found] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [one[3] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def with_a_process_group() -> float:
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = torch.tensor(float(current_worker().rank))
    return float(ccl.all_reduce(mine, group=grid.get_group("tp")))


def test_a_process_group_of_torch_is_a_group() -> None:
    with ThreadedSession(4) as sess:
        assert sess.call_packed(with_a_process_group).debug_get_from_all() == [1.0, 1.0, 5.0, 5.0]
