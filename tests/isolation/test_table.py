"""The table of process-wide state: its rows are put in place, and away."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from discolab.isolation import page, table
from discolab.isolation.patches import BoundNames, Patches


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table without rows, of which none is installed."""
    for name in ("_rows", "_installed", "_hooks", "_changed"):
        monkeypatch.setattr(table, name, {})


@pytest.mark.usefixtures("empty")
class TestRows:
    """One row at a time in a table of its own."""

    def test_a_module_is_changed_when_it_is_made_and_put_back_in_the_end(self) -> None:
        def change(module: ModuleType, patches: Patches) -> None:
            patches.replace(module, "answer", lambda before: before + 1)

        later, there = ModuleType("later"), ModuleType("there")
        later.answer = there.answer = 41  # type: ignore[attr-defined]
        table.add(
            table.Row(
                "answers",
                table.Treatment.PER_WORKER,
                "",
                on_import={"later": change, "there": change},
            )
        )
        table.install(own_process=False, loaded={"there": there})
        assert (later.answer, there.answer) == (41, 42)
        table.imported("later", later)
        table.imported("later", later)  # Python asks for a package more than once
        assert (later.answer, there.answer) == (42, 42)
        table.uninstall()
        assert (later.answer, there.answer) == (41, 41)

    def test_a_process_of_its_own_gets_what_it_needs_and_the_rest_with_other_threads(self) -> None:
        done: list[str] = []
        for name, needed in (("a", False), ("b", True)):
            table.add(
                table.Row(
                    name,
                    table.Treatment.SHARED,
                    "",
                    install=lambda _, name=name: done.append(name),  # type: ignore[misc]
                    in_own_process=needed,
                )
            )
        table.install(own_process=True, loaded={})
        assert done == ["b"]
        table.install(own_process=False, loaded={})
        assert done == ["b", "a"]

    def test_another_version_of_a_library_is_told_by_the_name_of_the_row(self) -> None:
        def change(patches: Patches) -> None:
            patches.replace(ModuleType("old"), "gone", lambda before: before)

        table.add(table.Row("the old state", table.Treatment.PER_WORKER, "", install=change))
        with pytest.warns(RuntimeWarning, match="make the old state safe .*processes"):
            table.install(own_process=False, loaded={})

    def test_a_name_stands_for_one_row(self) -> None:
        row = table.Row("twice", table.Treatment.SHARED, "")
        table.add(row)
        with pytest.raises(ValueError, match="twice"):
            table.add(row)


class TestBoundNames:
    """Names that ``from owner import name`` has bound, from session to session."""

    before, after, other = object(), object(), object()

    def replaced_in(self, bound: BoundNames, *modules: ModuleType) -> list[list[str]]:
        """What is replaced there for a session; all is put back."""
        bound.replace(modules, [(self.before, self.after)])
        names = [[n for n, v in vars(m).items() if v is self.after] for m in modules]
        bound.put_back(modules, [(self.before, self.after)])
        assert not any(v is self.after for m in modules for v in vars(m).values())
        return names

    def a_module(self, *, of_library: bool) -> ModuleType:
        module = ModuleType("bound")
        module.__file__ = torch.__file__ if of_library else "/home/user/mine.py"
        module.mine = self.before  # type: ignore[attr-defined]
        module.own = self.other  # type: ignore[attr-defined]
        return module

    @pytest.mark.parametrize("of_library", [True, False])
    def test_new_names_are_found_in_the_next_session_and_old_ones_again(
        self, of_library: bool
    ) -> None:
        bound, module = BoundNames(), self.a_module(of_library=of_library)
        assert self.replaced_in(bound, module) == [["mine"]]
        module.late = self.before  # type: ignore[attr-defined]
        assert self.replaced_in(bound, module) == [["mine", "late"]]
        assert self.replaced_in(bound, module) == [["mine", "late"]]
        another = self.a_module(of_library=of_library)
        assert self.replaced_in(bound, module, another) == [["mine", "late"], ["mine"]]

    def test_a_name_that_the_user_binds_anew_is_found(self) -> None:
        bound, module = BoundNames(), self.a_module(of_library=False)
        assert self.replaced_in(bound, module) == [["mine"]]
        module.own = self.before  # type: ignore[attr-defined]
        assert self.replaced_in(bound, module) == [["mine", "own"]]

    def test_what_was_bound_during_a_session_is_put_back(self) -> None:
        bound, module = BoundNames(), self.a_module(of_library=True)
        bound.replace([module], [(self.before, self.after)])
        module.late = self.after  # type: ignore[attr-defined]
        bound.put_back([module], [(self.before, self.after)])
        assert (module.mine, module.late) == (self.before,) * 2

    def test_what_is_replaced_for_the_first_time_is_looked_for_in_all_modules(self) -> None:
        bound, module = BoundNames(), self.a_module(of_library=True)
        assert self.replaced_in(bound, module) == [["mine"]]
        bound.replace([module], [(self.other, self.after)])
        assert module.own is self.after

    def test_a_module_in_the_place_of_another_is_looked_through(self) -> None:
        bound, module = BoundNames(), self.a_module(of_library=True)
        del module.mine
        assert self.replaced_in(bound, module) == [[]]
        module.mine = module.own
        del module.own
        again = self.a_module(of_library=True)
        bound._known[id(again)] = bound._known[id(module)]  # as if it had got that one's address
        again.own = again.mine
        del again.mine
        assert self.replaced_in(bound, again) == [["own"]]


def test_the_page_of_the_docs_is_the_table() -> None:
    path = Path(__file__).parents[2] / "docs" / "isolation.md"
    _, mark, below = path.read_text(encoding="utf-8").partition(page.MARK)
    assert mark + below == page.page(), "write it anew: python -m discolab.isolation"


def test_each_row_says_what_it_means_and_names_its_test() -> None:
    for row in table.rows():
        assert row.meaning.endswith("."), row.state
        path, _, name = row.test.partition("::")
        if row.test:
            text = (Path(__file__).parents[2] / path).read_text(encoding="utf-8")
            assert f"def {name}" in text, row.state
