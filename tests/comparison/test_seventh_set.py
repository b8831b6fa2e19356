"""A trial by somebody without context: the place, the workers and the cause of bugs; no alarms."""

from __future__ import annotations

import re

import pytest

from discolab import Session
from tests.comparison import seventh_set

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.one_process]


@pytest.mark.parametrize("name", seventh_set.BUGS)
def test_a_bug_is_told_rightly(four: Session, name: str) -> None:
    bug = seventh_set.BUGS[name]
    comparison = bug.compared(four)
    assert comparison.first is not None
    assert comparison.first.name in bug.places, comparison
    assert comparison.first.ranks == bug.ranks, comparison
    assert re.search(bug.said, str(comparison)), comparison
    assert not re.search(bug.unsaid, str(comparison)), comparison


@pytest.mark.parametrize("name", seventh_set.RIGHT)
def test_a_right_program_raises_no_alarm(four: Session, name: str) -> None:
    comparison = seventh_set.RIGHT[name](four)
    assert comparison.agrees, comparison
