"""What a script's end takes out of modules, and what it leaves, at the level of modules."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from discolab.isolation import left_patches


class Unequal(type):
    """A metaclass whose classes can't be compared, nor be in a set."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module beside the script, as the notebook has it; `__main__` has a second name."""
    (tmp_path / "beside_script.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    notebook = ModuleType("__main__")
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, notebook)
    odd = ModuleType("odd_module")
    odd.Odd = Unequal("Odd", (), {})
    monkeypatch.setitem(sys.modules, "odd_module", odd)
    yield importlib.import_module("beside_script")
    del sys.modules["beside_script"]


def test_what_a_script_has_replaced_is_put_back(helper: Any, tmp_path: Path) -> None:
    gelu, forward = torch.nn.functional.gelu, torch.nn.Linear.forward
    before = left_patches.attributes()
    script = {"__file__": str(tmp_path / "script.py"), "torch": torch}
    exec(
        "torch.nn.functional.gelu = torch.nn.Linear.forward = lambda *args: None\n"
        "torch.nn.Linear.more = lambda self: 1\n",
        script,
    )
    assert torch.nn.functional.gelu is not gelu
    left_patches.put_back(before, str(tmp_path))
    assert torch.nn.functional.gelu is gelu
    assert torch.nn.Linear.forward is forward
    assert not hasattr(torch.nn.Linear, "more")


def test_what_the_notebook_does_meanwhile_stays(helper: Any, tmp_path: Path) -> None:
    before = left_patches.attributes()
    importlib.reload(helper)
    new = sys.modules["__main__"].f = helper.f
    left_patches.put_back(before, str(tmp_path))
    assert helper.f is new
    assert sys.modules["__main__"].f is new
