"""A second set of planted bugs and right programs, written without knowing the rules.

The families are in second_set/; what the comparison says of each bug stands in docs/compare.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from discolab import Session
from tests.comparison.second_set import BUGS, HARMLESS, RIGHT
from tests.comparison.second_set.planted import plant, row

# A lost gradient is told as a warning.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.one_process]

TABLE = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
TABLE = TABLE.partition("<!-- second set -->")[2].partition("<!-- end of second set -->")[0]
STALE = "docs/compare.md is not what is found: python -m tests.comparison.second_set"


@pytest.mark.parametrize("name", BUGS)
def test_nothing_wrong_is_said_of_a_bug(four: Session, tmp_path: Path, name: str) -> None:
    family, bug = BUGS[name]
    comparison = getattr(plant(family, bug, tmp_path), bug.program)(four)
    judged = bug.judged(comparison)
    assert judged.holds, f"{judged}\n{comparison}"
    assert row(family, bug, judged) in TABLE, STALE


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_raises_no_alarm(four: Session, name: str) -> None:
    comparison = getattr(RIGHT[name], name.partition(": ")[2])(four)
    assert comparison.agrees, comparison


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_computed_in_another_way_raises_no_alarm(
    four: Session, tmp_path: Path, name: str
) -> None:
    family, change = HARMLESS[name]
    comparison = getattr(plant(family, change, tmp_path), change.program)(four)
    assert comparison.agrees, comparison


def test_the_table_counts_what_it_holds() -> None:
    rows = [line for line in TABLE.splitlines() if line.endswith(("| right |", "| not known |"))]
    assert len(rows) == len(BUGS) >= 30
    assert len(RIGHT) + len(HARMLESS) >= 15
