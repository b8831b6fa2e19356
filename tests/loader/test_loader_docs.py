"""What docs/loader.md shows can be typed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from discolab.__main__ import main
from discolab.layouts.text import parse_layout
from discolab.loader import Plan

TEXT = (Path(__file__).parents[2] / "docs" / "loader.md").read_text(encoding="utf-8")


def test_its_layouts_can_be_read() -> None:
    found = re.findall(r"`((?:shard\(|replicate|\[shard)[^`]*)`", TEXT)
    assert len(set(found)) >= 8
    for text in found:
        parse_layout(text)


def test_its_plans_can_be_read() -> None:
    found = re.findall(r"```python\n(?:plan = )?(\{.*?\})\n```", TEXT, re.S)
    assert len(found) == 2
    first, stages = (Plan.of(ast.literal_eval(text)) for text in found)
    assert str(first.layout("model.layers.1.mlp.up_proj.weight", (8, 8))) == "shard(0)"
    assert str(first.layout("model.layers.1.self_attn.k_proj.weight", (8, 8))) == "shard(0)"
    assert str(stages.layout("layers.7.mlp.up_proj.weight", (8, 8))) == "shard(0, stage=0)"
    assert str(stages.layout("layers.12.mlp.up_proj.weight", (8, 8))) == "shard(0, stage=1)"


def test_its_commands_have_these_options(capsys: pytest.CaptureFixture[str]) -> None:
    told = ""
    for command in ("show", "shard"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        told += capsys.readouterr().out
    lines = re.findall(r"^discolab (?:show|shard) .*$", TEXT, re.M)
    assert len(lines) == 7
    for option in {word for line in lines for word in re.findall(r"--[a-z-]+", line)}:
        assert option in told, option
