"""Who joins a session and who is refused, and what launchers say: without processes."""

from typing import Any

import pytest

from discolab.engines.membership import Membership, versions
from discolab.runtime.rank_from_environment import launcher_rank

HELLO: dict[str, Any] = {
    "versions": versions(),
    "workers": None,
    "rank": None,
    "size": 0,
    "launcher": "",
    "local_rank": 0,
    "machine": "m",
    "name": "host",
    "pid": 1,
    "cores": 4,
    "gpus": 0,
    "accelerator": "cuda",
    "devices": None,
    "address": "10.0.0.2",
    "reached": "10.0.0.1",
}


def hello(**different: Any) -> dict[str, Any]:
    """What a node says, but for some of it."""
    return {**HELLO, **different}


def ranks(membership: Membership) -> dict[bytes, list[int]]:
    """The workers of each node."""
    membership.validate()
    return {node: list(member.ranks) for node, member in membership.members.items()}


def test_workers_are_counted_in_the_order_of_joining() -> None:
    membership = Membership(4, first=2, each=2)
    assert membership.join(b"a", hello()) == ""
    assert (membership.complete, membership.missing(), membership.here()) == (False, 2, "host (2)")
    assert membership.join(b"b", hello()) == ""
    assert membership.complete
    assert ranks(membership) == {b"a": [2, 3], b"b": [4, 5]}


def test_ranks_that_were_given_come_first() -> None:
    membership = Membership(4, first=1, each=1)
    for node, rank in ((b"a", None), (b"b", 2), (b"c", 0), (b"d", None)):
        assert membership.join(node, hello(rank=rank)) == ""
    assert ranks(membership) == {b"c": [1], b"b": [2], b"a": [3], b"d": [4]}


def test_nodes_may_bring_what_they_have() -> None:
    membership = Membership(4, first=1, each=2)
    membership.join(b"a", hello(workers=3))
    membership.join(b"b", hello(workers=1))
    assert ranks(membership) == {b"a": [1, 2, 3], b"b": [4]}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"versions": {**versions(), "torch": "1.0"}}, "it has torch 1.0, the session has"),
        ({"versions": {**versions(), "discolab": "9"}}, "it has discolab 9, the session has"),
        ({"versions": {**versions(), "Python": "2.7"}}, "it has Python 2.7"),
        ({"versions": {}}, "it has discolab None"),
        ({"rank": 7}, "rank 7 has joined already: node 7 on host (pid 1)"),
        ({"workers": 3}, "it brings 3 workers, the session wants 2 more: --workers 2"),
        (
            {"size": 8, "workers": 1, "launcher": "srun"},
            "srun has started 8 processes with 1 worker each, the session wants 4 workers",
        ),
        ({"workers": 0}, "is not understood"),
        ({"workers": "many"}, "is not understood"),
        ({"pid": None}, "is not understood"),
        ({"versions": 3}, "is not understood"),
        ({"devices": 3}, "is not understood"),
    ],
)
def test_refused(said: dict[str, Any], why: str) -> None:
    membership = Membership(4, first=2, each=2)
    assert membership.join(b"a", hello(rank=7)) == ""
    assert why in membership.join(b"b", hello(**said))
    assert list(membership.members) == [b"a"]
    assert len(membership.refused) == 1
    assert "host" in membership.refused[0]
    membership.validate()


def test_anything_may_be_said() -> None:
    membership = Membership(4, first=2, each=2)
    for strange in ({}, {"versions": None}, {"name": [1]}, {"hello": {}}):
        assert "another version?" in membership.join(b"x", strange)


def test_one_too_many() -> None:
    membership = Membership(2, first=2, each=2)
    assert membership.join(b"a", hello()) == ""
    assert "all 2 workers that the session wants" in membership.join(b"b", hello())
    assert membership.leave(b"b") is None


def test_who_leaves_before_all_are_there_may_come_again() -> None:
    membership = Membership(4, first=2, each=2)
    membership.join(b"a", hello(rank=1))
    membership.leave(b"a")
    assert membership.missing() == 4
    assert membership.join(b"c", hello(rank=1)) == ""
    membership.validate()


def test_who_leaves_later_is_still_known() -> None:
    membership = Membership(2, first=2, each=2)
    membership.join(b"a", hello())
    assert membership.leave(b"a") is not None
    member = membership.member_of(3)
    assert member is not None
    assert member.node == b"a"
    assert membership.member_of(1) is None


def test_devices() -> None:
    membership = Membership(8, first=0, each=2)
    membership.join(b"a", hello(gpus=2, workers=3))
    membership.join(b"b", hello(gpus=4, accelerator="xpu", workers=1, local_rank=3))
    membership.join(b"c", hello(workers=2, gpus=2, devices=["cpu"]))
    membership.join(b"d", hello(workers=2))
    named = [member.device_names(None) for member in membership.members.values()]
    assert named == [["cuda:0", "cuda:1", "cuda:0"], ["xpu:3"], ["cpu"] * 2, ["cpu"] * 2]
    assert membership.members[b"a"].device_names("cpu") == ["cpu"] * 3


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "5", "WORLD_SIZE": "4"}, None),
        ({"RANK": "x", "WORLD_SIZE": "4"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ("torchrun", 1, 4, 1)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "2",
            },
            ("mpirun", 2, 4, 0),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("mpirun", 1, 2, 0)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, ("srun", 3, 4, 1)),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"},
            ("srun", 0, 2, 0),
        ),
    ],
)
def test_places(environ: dict[str, str], found: tuple[Any, ...] | None) -> None:
    place = launcher_rank(environ)
    if found is None:
        assert place is None
    else:
        assert place is not None
        assert (place.launcher, place.rank, place.size, place.local_rank) == found
