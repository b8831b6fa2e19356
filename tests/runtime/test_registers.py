"""RegisterFile against a model: ids in use are never given out, dropped ones always come back."""

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
            assert reg == self.dropped.pop()
        self.held.append(reg)
        self.refs[reg] = Ref()
        self.file.hold(reg, self.refs[reg])
        self.ever = max(self.ever, len(self.held) + len(self.dropped))

    @rule(torn=st.sampled_from(["before", "dead", "alive"]))
    def tear(self, torn: str) -> None:
        """A DRef is torn before it holds its register, or after, and dies before or later."""
        reg = self.file.take()
        if self.dropped:
            assert reg == self.dropped.pop()
        self.ever = max(self.ever, len(self.held) + len(self.dropped) + 1)
        ref = Ref()
        if torn != "before":
            self.file.hold(reg, ref)
        if torn == "dead":
            del ref
        self.file.give_back(reg)
        self.dropped.append(reg)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        reg = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        del self.refs[reg]
        self.dropped.append(reg)

    @rule()
    def collect(self) -> None:
        assert list(self.file.collect()) == self.dropped
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
    assert file.collect() == (2, 4)
    assert [file.take() for _ in range(3)] == [4, 2, 5]
