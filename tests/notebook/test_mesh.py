"""A mesh in a notebook: its magic, its picture, rank sets by its axes."""

from __future__ import annotations

from typing import Any

TABLE = "mesh dp=2, tp=2 of workers 0-3\n  dp  tp=0  tp=1\n   0     0     1\n   1     2     3"


def test_magics_make_a_mesh_and_show_it(nb: Any) -> None:
    assert "no mesh yet" in nb.ok("%disco_mesh").stdout
    assert nb.ok("%disco_mesh dp=2, tp=-1").text == TABLE
    assert nb.ok("%disco_mesh").text == TABLE
    assert nb.ok("sess.current_mesh").text == TABLE
    assert "dp=2, tp=2 would fit" in nb.fails("%disco_mesh dp=3,tp=2").stderr
    assert "write axes as dp=2,tp=2" in nb.fails("%disco_mesh 2 x 2").stderr
    assert nb.ok("%disco_mesh").text == TABLE
    result = nb.ok("%disco_session 4 --devices cpu --mesh dp=2,tp=2")
    assert "mesh dp=2, tp=2" in result.stdout
    assert result.stdout.endswith(", mesh\n")
    assert nb.ok("%disco_restart\n").stdout == result.stdout
    assert "would fit" in nb.fails("%disco_session 4 --devices cpu --mesh dp=3").stderr
    assert nb.ok("%disco_mesh").text == TABLE


def test_cells_know_the_mesh(nb: Any) -> None:
    nb.ok("%disco_mesh dp=2,tp=2")
    result = nb.ok(
        "%%disco\nprint(int(ccl.all_reduce(torch.tensor(rank), group=mesh.group('tp'))))"
    )
    assert result.stdout == "[0-1] 1\n[2-3] 5\n"
    assert "mesh dp=2, tp=2" in nb.ok("%%disco\nmesh").text


def test_targets_by_axis(nb: Any) -> None:
    assert "sess.mesh" in nb.fails("%%disco -t tp=0\n1").stderr
    nb.ok("%disco_mesh dp=2,tp=2")
    assert nb.ok("%%disco -t tp=0\nprint(rank)").stdout == "[0] 0\n[2] 2\n"
    assert nb.ok("%%disco --targets dp=1,tp=0:2\nprint(rank)").stdout == "[2] 2\n[3] 3\n"
    assert nb.ok("%disco -t dp=0,tp=1 print(rank)").stdout == "[1] 1\n"
    assert "places 0 to 1" in nb.fails("%%disco -t tp=2\n1").stderr
    assert "its axes are dp=2, tp=2" in nb.fails("%%disco -t pp=0\n1").stderr
    nb.ok("%%disco\nx = rank")
    assert nb.ok("%disco_pull -t tp=1 x\nx").text == "[1, 3]"
    assert nb.ok("%disco_pull -t dp=1,tp=1 x\nx").text == "[3]"
    nb.ok("x = 7")
    nb.ok("%disco_push -t dp=0 x")
    assert nb.ok("sess.pull('x')").text == "[7, 7, 2, 3]"


def test_completion_offers_the_axes(nb: Any) -> None:
    assert "dp=" not in nb.complete("%%disco -t ")
    nb.ok("%disco_mesh dp=2,tp=2")
    assert {"dp=", "tp="} <= set(nb.complete("%%disco -t "))
    assert nb.complete("%%disco -t t") == ["tp="]
    assert nb.complete("%%disco --targets dp=0,tp=") == ["tp=0", "tp=1"]
