"""Planted bugs and right programs of model families that the rules were not made for.

The cases are in families/; what the comparison says of each stands in docs/compare.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import discolab
from discolab import Session
from tests.comparison.families import conv, gpt, moe, others
from tests.comparison.families.case import Bug, Right, verdict

pytestmark = pytest.mark.filterwarnings("ignore::discolab.ccl.GradientWarning")

FAMILIES = {"gpt": gpt, "moe": moe, "conv": conv, "others": others}
BUGS = {
    f"{name}: {bug.name}": bug for name in ("gpt", "moe", "conv") for bug in FAMILIES[name].BUGS
}
RIGHT = {f"{name}: {one.name}": one for name, family in FAMILIES.items() for one in family.RIGHT}

# What does not hold yet.
WRONG: set[str] = set()
ALARMS = {"gpt: a step of AdamW"}


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    with discolab.make_session(4, "threads", devices="cpu", timeout=60) as session:
        yield session


def cases(known: dict[str, Any], failing: set[str]) -> list[Any]:
    """The cases as parameters, with their marks."""
    found = []
    for name, case in known.items():
        marks = [pytest.mark.slow] if getattr(case, "slow", False) else []
        if name in failing:
            marks.append(pytest.mark.xfail(strict=True))
        found.append(pytest.param(case, id=name, marks=marks))
    return found


@pytest.mark.one_process
@pytest.mark.parametrize("bug", cases(BUGS, WRONG))
def test_nothing_wrong_is_said_of_a_bug(four: Session, bug: Bug) -> None:
    found = bug.run(four)
    judged = verdict(bug, found)
    assert judged.holds, f"{judged}\n{found}"


@pytest.mark.one_process
@pytest.mark.parametrize("right", cases(RIGHT, ALARMS))
def test_a_right_program_raises_no_alarm(four: Session, right: Right) -> None:
    found = right.run(four)
    assert found.agrees, found


def test_there_are_many() -> None:
    assert len(BUGS) >= 60
    assert len(RIGHT) >= 40 - 3  # three need transformers
