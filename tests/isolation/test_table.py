"""The table of process-wide state: its rows are put in place, and away."""

from pathlib import Path
from types import ModuleType

import pytest

from discolab.isolation import page, table
from discolab.isolation.patches import Patches


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
