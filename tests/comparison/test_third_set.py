"""Bugs and right programs of a third, a fourth and a fifth set, in families new to the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from discolab import Session
from tests.comparison import fifth_set, fourth_set, third_set
from tests.comparison.second_set.planted import plant

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.one_process]

BUGS = third_set.BUGS | fourth_set.BUGS | fifth_set.BUGS
HARMLESS = third_set.HARMLESS | fourth_set.HARMLESS | fifth_set.HARMLESS
RIGHT = third_set.RIGHT | fourth_set.RIGHT | fifth_set.RIGHT


@pytest.mark.parametrize("name", BUGS)
def test_nothing_wrong_is_said_of_a_bug(four: Session, tmp_path: Path, name: str) -> None:
    family, bug = BUGS[name]
    comparison = getattr(plant(family, bug, tmp_path), bug.program)(four)
    judged = bug.judged(comparison)
    assert judged.holds, f"{judged}\n{comparison}"
    if bug.accept != r"(?!)":
        assert judged.cause == "right", comparison


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
