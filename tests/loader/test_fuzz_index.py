"""Damaged indexes of all formats: refused in one way, or right. More of them: fuzz_index.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from discolab.loader.errors import CheckpointError
from discolab.loader.formats import open_checkpoint

from .fuzz_index import Case, fuzz, keeps_promises, make_cases, watched

NAMES = (
    "tensor-cache index", "safetensors file", "safetensors index", "safetensors shard",
    "torch.save file", "torch.save index", "DCP .metadata", "DCP .metadata of chunks",
    "DCP data file",
)  # fmt: skip
EACH = 60


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {case.name: case for case in make_cases(tmp_path_factory.mktemp("fuzz"))}


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_index_is_refused_or_right(cases: dict[str, Case], name: str) -> None:
    report = fuzz(cases[name], range(EACH), seed=1)
    assert report.opened + report.refused == EACH
    assert len(report.texts) > 5  # it got to more than one check


@pytest.mark.parametrize("name", NAMES)
def test_what_is_damaged_was_right_before(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    catalog = open_checkpoint(case.opened)
    assert "p0" in str(list(catalog.entries))
    keeps_promises(catalog, case.opened if case.opened.is_dir() else case.opened.parent)


def test_all_cases_are_tried(cases: dict[str, Case]) -> None:
    assert set(cases) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_no_begin_of_an_index_is_taken_for_the_whole(cases: dict[str, Case], name: str) -> None:
    """Cut off after each of its bytes (some 60 of them for a long one)."""
    case = cases[name]
    try:
        for length in range(0, len(case.good), max(1, len(case.good) // 60)):
            case.index.write_bytes(case.good[:length])
            with pytest.raises(CheckpointError):
                open_checkpoint(case.opened)
    finally:
        case.index.write_bytes(case.good)


def test_who_looks_outside_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to("../out")
    (tmp_path / "out").write_text("x")
    with watched(tmp_path):
        (tmp_path / "in" / "link").read_bytes()
    with pytest.raises(AssertionError, match="out"), watched(tmp_path / "in"):
        (tmp_path / "in" / "link").read_bytes()
