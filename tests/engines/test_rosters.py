"""Who joins a session and who is refused, and what launchers say: without processes."""

from typing import Any

import pytest

from discolab.engines.nodes.launchers import place_of
from discolab.engines.nodes.roster import Roster, versions

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
    "devices": None,
    "address": "10.0.0.2",
    "reached": "10.0.0.1",
}


def hello(**different: Any) -> dict[str, Any]:
    """What a node says, but for some of it."""
    return {**HELLO, **different}


def ranks(roster: Roster) -> dict[bytes, list[int]]:
    """The workers of each node."""
    roster.validate()
    return {node: list(party.ranks) for node, party in roster.parties.items()}


def test_workers_are_counted_in_the_order_of_joining() -> None:
    roster = Roster(4, first=2, each=2)
    assert roster.join(b"a", hello()) == ""
    assert (roster.complete, roster.missing(), roster.here()) == (False, 2, "host (2)")
    assert roster.join(b"b", hello()) == ""
    assert roster.complete
    assert ranks(roster) == {b"a": [2, 3], b"b": [4, 5]}


def test_ranks_that_were_given_come_first() -> None:
    roster = Roster(4, first=1, each=1)
    for node, rank in ((b"a", None), (b"b", 2), (b"c", 0), (b"d", None)):
        assert roster.join(node, hello(rank=rank)) == ""
    assert ranks(roster) == {b"c": [1], b"b": [2], b"a": [3], b"d": [4]}


def test_nodes_may_bring_what_they_have() -> None:
    roster = Roster(4, first=1, each=2)
    roster.join(b"a", hello(workers=3))
    roster.join(b"b", hello(workers=1))
    assert ranks(roster) == {b"a": [1, 2, 3], b"b": [4]}


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
    roster = Roster(4, first=2, each=2)
    assert roster.join(b"a", hello(rank=7)) == ""
    assert why in roster.join(b"b", hello(**said))
    assert list(roster.parties) == [b"a"]
    assert len(roster.refused) == 1
    assert "host" in roster.refused[0]
    roster.validate()


def test_anything_may_be_said() -> None:
    roster = Roster(4, first=2, each=2)
    for strange in ({}, {"versions": None}, {"name": [1]}, {"hello": {}}):
        assert "another version?" in roster.join(b"x", strange)


def test_one_too_many() -> None:
    roster = Roster(2, first=2, each=2)
    assert roster.join(b"a", hello()) == ""
    assert "all 2 workers that the session wants" in roster.join(b"b", hello())
    assert roster.leave(b"b") is None


def test_who_leaves_before_all_are_there_may_come_again() -> None:
    roster = Roster(4, first=2, each=2)
    roster.join(b"a", hello(rank=1))
    roster.leave(b"a")
    assert roster.missing() == 4
    assert roster.join(b"c", hello(rank=1)) == ""
    roster.validate()


def test_who_leaves_later_is_still_known() -> None:
    roster = Roster(2, first=2, each=2)
    roster.join(b"a", hello())
    assert roster.leave(b"a") is not None
    party = roster.party_of(3)
    assert party is not None
    assert party.node == b"a"
    assert roster.party_of(1) is None


def test_devices() -> None:
    roster = Roster(8, first=0, each=2)
    roster.join(b"a", hello(gpus=2, workers=3))
    roster.join(b"b", hello(gpus=4, workers=1, local_rank=3))
    roster.join(b"c", hello(workers=2, gpus=2, devices=["cpu"]))
    roster.join(b"d", hello(workers=2))
    named = [party.device_names(None) for party in roster.parties.values()]
    assert named == [["cuda:0", "cuda:1", "cuda:0"], ["cuda:3"], ["cpu"] * 2, ["cpu"] * 2]
    assert roster.parties[b"a"].device_names("cpu") == ["cpu"] * 3


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
    place = place_of(environ)
    if found is None:
        assert place is None
    else:
        assert place is not None
        assert (place.launcher, place.rank, place.size, place.local_rank) == found
