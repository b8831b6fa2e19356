"""Tables and drawings of plans: what they say, how they fold, that all of a parameter is drawn."""

from __future__ import annotations

import html as html_module
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from discolab import ArgumentError
from discolab.layouts.layout import REPLICATE, cut
from discolab.loader import Catalog, Entry, File, Layout, Piece, Plan, Workers, show
from discolab.loader.showing import Shown
from discolab.loader.tables import catalog_parts, draw, fold, fold_names, plan_parts
from discolab.views import Grid, Line, Row, Table, VStack, render_html, render_text


def catalog(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32, **dtypes: torch.dtype
) -> Catalog:
    """A checkpoint that says it has such parameters, in one file that is not there."""
    entries, offset = {}, 0
    for name, shape in shapes.items():
        kind = dtypes.get(name, dtype)
        size = tuple(shape)
        piece = Piece(0, offset, (0,) * len(size), size)
        entries[name] = Entry(name, size, kind, kind, (piece,))
        offset += entries[name].stored_bytes
    return Catalog("/models/tiny", "safetensors", (File("/models/tiny/a", offset),), entries)


def llama(layers: int) -> Catalog:
    """The parameters of a model of many layers."""
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (32000, 4096)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.qkv_proj.weight": (6144, 4096),
            f"{at}.self_attn.o_proj.weight": (4096, 4096),
            f"{at}.mlp.gate_proj.weight": (14336, 4096),
            f"{at}.mlp.up_proj.weight": (14336, 4096),
            f"{at}.mlp.down_proj.weight": (4096, 14336),
            f"{at}.input_layernorm.weight": (4096,),
            f"{at}.post_attention_layernorm.weight": (4096,),
            f"{at}.self_attn.rotary_emb.inv_freq": (64,),
        }
    shapes |= {"model.norm.weight": (4096,), "lm_head.weight": (32000, 4096)}
    return catalog(shapes, torch.bfloat16)


PLAN = {
    "*.qkv_proj.weight": "shard(0, segments=[4096, 1024, 1024], heads=[32, 8, 8])",
    "*.o_proj.weight": "shard(1)",
    "*.gate_proj.weight": "shard(0)",
    "*.up_proj.weight": "shard(0)",
    "*.down_proj.weight": "shard(1)",
    "*norm.weight": "replicate",
    "*.k_proj.weight": "shard(0)",
    "*embed_tokens.weight": "shard(0)",
    "lm_head.weight": "shard(0)",
}


def table(part: Any) -> list[list[str]]:
    """The cells of the first table with parameters."""
    found = [t for t in _tables(part) if t.columns[0].title == "parameter"]
    return [[cell.text for cell in row.cells] for row in found[0].rows]


def _tables(part: Any) -> list[Table]:
    if isinstance(part, Table):
        return [part]
    return [t for child in getattr(part, "children", ()) for t in _tables(child)]


# -- folding ---------------------------------------------------------------------------------


def test_layers_share_a_row() -> None:
    folds = fold({"h.0.w": 1, "h.0.b": 2, "h.1.w": 1, "h.1.b": 2, "head": 1})
    assert [(f.label, len(f.names)) for f in folds] == [("h.*.w", 2), ("h.*.b", 2), ("head", 1)]


def test_layers_that_differ_say_which_they_are() -> None:
    kinds = {f"h.{i}.w": i // 3 for i in range(6)} | {"h.9.w": 9}
    assert [f.label for f in fold(kinds)] == ["h.{0-2}.w", "h.{3-5}.w", "h.9.w"]


def test_several_numbers_fold_at_once() -> None:
    kinds = {f"layers.{i}.experts.{j}.w1": 0 for i in range(3) for j in range(8)}
    assert fold_names(list(kinds)) == ["layers.*.experts.*.w1 ×24"]
    assert fold_names([f"layers.1.experts.{j}.w1" for j in range(8)]) == [
        "layers.1.experts.*.w1 ×8"
    ]
    assert fold_names(["param_0", "param_1", "w1", "w2"]) == ["param_* ×2", "w1", "w2"]


# -- the table -------------------------------------------------------------------------------


def test_a_large_model_fits_on_a_page() -> None:
    resolved = Plan.of(PLAN).resolve(llama(40), Workers.of(8))
    assert len(resolved.layouts) == 323
    part = plan_parts(resolved)
    rows = table(part)
    assert len(rows) == 11
    up = next(row for row in rows if "up_proj" in row[0])
    assert up == [
        "model.layers.*.mlp.up_proj.weight", "×40", "[14336, 4096]", "bfloat16", "shard(0)",
        "[1792, 4096]", "560 MiB",
    ]  # fmt: skip
    assert len(render_html(part).encode()) < 20_000
    assert len(render_text(part).encode()) < 6_000


def test_memory_is_what_the_plan_itself_says() -> None:
    resolved = Plan.of(PLAN).resolve(llama(2), Workers.of(8))
    text = render_text(plan_parts(resolved))
    assert "8 workers · each holds" in text
    shapes = {"w": (101, 64), "n": (5,), "steps": (3,)}
    plan = Plan.of({"w": "shard(0, pad_to=8)", "n": "shard(0)"})
    for dtype in (None, torch.float16):
        resolved = plan.resolve(catalog(shapes, steps=torch.int64), Workers.of(4))
        memory = _tables(plan_parts(resolved, dtype))[0]
        told = [(row.ranks, row.cells[0].text) for row in memory.rows]
        expected = [resolved.bytes_on(rank, dtype) for rank in range(4)]
        assert [ranks for ranks, _ in told] == [(0,), (1,), (2,), (3,)]
        for (_, words), size in zip(told, expected, strict=True):
            assert words == (f"{size / 1024:.4g} KiB"), (words, size)


def test_a_cast_leaves_integers_alone() -> None:
    resolved = Plan.of(None).resolve(
        catalog({"w": (4, 4), "steps": (2,)}, steps=torch.int64), Workers.of(2)
    )
    rows = table(plan_parts(resolved, torch.bfloat16))
    assert [row[2] for row in rows] == ["float32 → bfloat16", "int64"]
    assert [row[-1] for row in rows] == ["32 B", "16 B"]


def test_shards_that_differ_say_on_which_workers() -> None:
    resolved = Plan.of({"w": "shard(0)", "b": "shard(0, stage=1)"}).resolve(
        catalog({"w": (10, 3), "b": (8,)}), Workers.of(4, 2)
    )
    rows = table(plan_parts(resolved))
    assert rows[0][4] == "[5, 3]"
    assert rows[1][3:5] == ["shard(0, stage=1)", "[4] on 2,3"]
    uneven = Plan.of({"*": "shard(0)"}).resolve(catalog({"w": (10,)}), Workers.of(4))
    cells = table(plan_parts(uneven))[0]
    assert cells[4:6] == ["[3] on 0-2, [1] on 3", "4 B–12 B"]


def test_what_fits_no_rule_and_rules_that_fit_nothing_are_told() -> None:
    resolved = Plan.of(PLAN).resolve(llama(32), Workers.of(4))
    text = render_text(plan_parts(resolved))
    lost = "model.layers.*.self_attn.rotary_emb.inv_freq ×32"
    assert f"32 parameters without a rule (replicate): {lost}" in text
    assert "1 rule that decides nothing: *.k_proj.weight" in text
    quiet = render_text(plan_parts(Plan.of(None).resolve(llama(1), Workers.of(4))))
    assert "rule" not in quiet


def test_a_long_table_ends_and_says_so() -> None:
    shapes = {f"layer_{chr(97 + i % 26)}{chr(97 + i // 26)}": (i + 1,) for i in range(60)}
    shown = catalog_parts(catalog(shapes))
    assert len(table(shown)) == 40
    assert "and 20 more parameters" in render_text(shown)
    assert len(table(catalog_parts(catalog(shapes), limit=None))) == 60


def test_names_from_a_file_can_do_no_harm() -> None:
    evil = "<script>alert(1)</script>\x1b[31m\u202e"
    resolved = Plan.of({evil + "x": "shard(0)"}).resolve(catalog({evil: (4, 4)}), Workers.of(2))
    part = plan_parts(resolved)
    assert "<script" not in render_html(part)
    assert "\x1b" not in render_text(part) + render_html(part)
    assert "\u202e" not in render_text(part) + render_html(part)


# -- the drawing -----------------------------------------------------------------------------


def test_a_fused_weight_shows_who_shares_a_head() -> None:
    entry = catalog({"qkv": (64, 16)}).entries["qkv"]
    layout = Layout((0,), segments=(32, 16, 16), heads=(8, 2, 2))
    assert render_text(draw(entry, layout, Workers.of(4))) == "\n".join(
        [
            "  qkv: float32[64, 16], shard(0, segments=[32, 16, 16], heads=[8, 2, 2])",
            "    [0:8, :]    worker 0",
            "    [8:16, :]   worker 1",
            "    [16:24, :]  worker 2",
            "    [24:32, :]  worker 3",
            "    [32:40, :]  workers 0,1",
            "    [40:48, :]  workers 2,3",
            "    [48:56, :]  workers 0,1",
            "    [56:64, :]  workers 2,3",
        ]
    )


def test_padding_is_drawn_and_said() -> None:
    entry = catalog({"w": (30, 16)}).entries["w"]
    text = render_text(draw(entry, Layout((0,), pad_to=16), Workers.of(4)))
    assert "    [24:30, :]          worker 3\n    [30:32, :] padding  worker 3" in text


def test_meshes_stages_and_nothing_at_all() -> None:
    entry = catalog({"w": (8, 8)}).entries["w"]
    mesh = render_text(draw(entry, Layout((0, 1)), Workers((2, 2))))
    assert "[0:4, 4:8]  worker 1" in mesh
    stage = render_text(draw(entry, Layout((0,), stage=1), Workers.of(4, 2)))
    assert stage.endswith("[0:4, :]  worker 2\n    [4:8, :]  worker 3")
    assert render_text(draw(entry, REPLICATE, Workers.of(4))).endswith("replicate: workers 0-3")
    for shape in ((), (0, 4)):
        empty = catalog({"e": shape}).entries["e"]
        assert "e: float32" in render_text(draw(empty, REPLICATE, Workers.of(4)))
    many = catalog({"w": (4096, 4)}).entries["w"]
    assert "too many to draw" in render_text(draw(many, Layout((0,)), Workers.of(512)))


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
    workers=st.sampled_from([Workers.of(1), Workers.of(3), Workers.of(4, 2), Workers((2, 3))]),
    dims=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=2),
    pad=st.sampled_from([0, 0, 5]),
)
@settings(max_examples=80, deadline=None)
def test_a_drawing_has_all_of_the_parameter(
    shape: tuple[int, ...], workers: Workers, dims: list[int | None], pad: int
) -> None:
    cutting = [dim for dim in dims if dim is not None]
    if len(dims) > len(workers.sizes) or any(dim >= len(shape) for dim in cutting):
        return
    if len(set(cutting)) < len(cutting):
        return
    layout = Layout(tuple(dims), pad_to=pad if len(cutting) == 1 else 0)
    entry = catalog({"w": shape}).entries["w"]
    grid = draw(entry, layout, workers)
    assert isinstance(grid, Grid)
    # the elements of tiles, by owner, are those of the owners' cuts; padding in neither
    drawn = dict.fromkeys(range(workers.count), 0)
    for tile in (tile for line in grid.tiles for tile in line):
        if tile.label.endswith("padding"):
            continue
        words = re.findall(r"[^\[\], ]+", tile.label)
        size = 1
        for word, full in zip(words, shape, strict=True):
            begin, _, end = word.partition(":")
            size *= int(end or full) - int(begin or 0)
        for rank in tile.owners:
            drawn[rank] += size
    for rank, size in drawn.items():
        found = cut(layout, shape, workers, rank)
        assert found is not None
        held = sum(torch.Size(box.shape).numel() for box in found.boxes)
        assert size == held, (rank, render_text(grid))


# -- show ------------------------------------------------------------------------------------


def test_show_takes_a_plan_and_gives_both_forms(tmp_path: Path) -> None:
    Plan.of(PLAN).save(tmp_path / "plan.json")
    shown = show(llama(2), tmp_path / "plan.json", workers=4)
    assert isinstance(shown, Shown)
    bundle = shown._repr_mimebundle_()
    assert bundle["text/plain"] == str(shown) == repr(shown)
    assert "model.layers.*.mlp.up_proj.weight" in html_module.unescape(bundle["text/html"])
    drawn = str(shown.draw("model.layers.1.mlp.down_proj.weight"))
    assert "[:, 0:3584]" in drawn
    with pytest.raises(ArgumentError, match=r"did you mean lm_head\.weight"):
        shown.draw("lm_heat.weight")


def test_show_without_workers_tells_what_is_there() -> None:
    shown = show(llama(2))
    assert str(shown).startswith("tiny · safetensors · 19 parameters, ")
    with pytest.raises(ArgumentError, match="how many workers"):
        shown.draw("lm_head.weight")
    some = show(llama(2), params="*.mlp.*, lm_head*")
    assert str(some).startswith("tiny · safetensors · 7 parameters, ")


def test_what_is_typed_wrongly_is_told() -> None:
    with pytest.raises(ArgumentError, match="for a number of workers"):
        show(llama(1), PLAN)
    with pytest.raises(ArgumentError, match="equal"):
        show(llama(1), PLAN, workers=4, groups=3)
    with pytest.raises(ArgumentError, match=r"did you mean model\.norm\.weight"):
        show(llama(1), params="model.norms.weight")
    with pytest.raises(ArgumentError, match="cast to"):
        show(llama(1), PLAN, workers=4, dtype="int8")


def test_no_part_is_left_without_a_form() -> None:
    part = plan_parts(Plan.of(PLAN).resolve(llama(2), Workers.of(4)), torch.float16)
    assert isinstance(part, VStack)
    assert isinstance(part.children[0], Line)
    assert all(isinstance(row, Row) for found in _tables(part) for row in found.rows)
    assert "could not be drawn" not in render_text(part) + render_html(part)
