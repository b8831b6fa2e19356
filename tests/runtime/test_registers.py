"""RegisterFile against a model: ids in use are never given out, dropped ones always come back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from discolab.runtime.registers import RegisterFile


class Ref:
    """Something that can die."""


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.file = RegisterFile()
        self.held: list[int] = []
        self.refs: dict[int, Ref] = {}
        self.dropped: list[int] = []
        self.ever = 0

    @rule()
    def take(self) -> None:
        reg = self.file.take()
        assert reg > 0
        assert reg not in self.held
        if self.dropped:
            assert reg == self.dropped.pop(0)
        self.held.append(reg)
        self.refs[reg] = Ref()
        self.file.hold(reg, self.refs[reg])
        self.ever = max(self.ever, len(self.held) + len(self.dropped))

    @rule(holds=st.booleans())
    def tear(self, holds: bool) -> None:
        """A DRef is torn in the making, before it holds its register or after that."""
        reg = self.file.take()
        if holds:
            if self.dropped:
                self.dropped.pop(0)
            self.ever = max(self.ever, len(self.held) + len(self.dropped) + 1)
            self.file.hold(reg, Ref())
            self.dropped.append(reg)

    @rule()
    def tear_a_collection(self) -> None:
        def forget(ids: tuple[int, ...]) -> None:
            raise KeyboardInterrupt

        if self.dropped:
            with pytest.raises(KeyboardInterrupt):
                self.file.collect(forget)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        reg = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        del self.refs[reg]
        self.dropped.append(reg)

    @rule()
    def collect(self) -> None:
        forgotten: list[int] = []
        self.file.collect(forgotten.extend)
        assert forgotten == self.dropped
        self.dropped.clear()

    @invariant()
    def is_valid(self) -> None:
        self.file.validate()
        assert self.file.live == len(self.held)
        assert max(self.held, default=0) <= self.ever, "a fresh id while an old one was free"


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRegisterFile = Model.TestCase


def test_ids_start_at_1_and_the_last_freed_is_the_first_reused() -> None:
    file = RegisterFile()
    refs = {}
    for number in range(1, 5):
        reg = file.take()
        assert reg == number
        refs[reg] = Ref()
        file.hold(reg, refs[reg])
    del refs[2], refs[4]
    forgotten: list[int] = []
    file.collect(forgotten.extend)
    assert forgotten == [2, 4]
    for reg in (4, 2, 5):
        assert file.take() == reg
        refs[reg] = Ref()
        file.hold(reg, refs[reg])
    assert file.take() == 6
    file.keep(6)
    assert file.take() == 7
