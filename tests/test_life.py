"""docs/life.md names files that exist."""

import re
from pathlib import Path

import discolab

ROOT = Path(discolab.__file__).parent
PAGE = ROOT.parent / "docs" / "life.md"


def test_all_files_are_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text)) - {"tests/test_life.py"}
    assert len(names) > 40
    assert not [name for name in names if not (ROOT / name).is_file()]
    functions = re.findall(r"`((?:\w+/)+\w+\.py)`:\s+`(\w+)`", text)
    assert len(functions) > 5
    for name, function in functions:
        assert f"def {function}(" in (ROOT / name).read_text(encoding="utf-8"), (name, function)
