"""Plans: what a user writes, and what each worker then holds."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard

from discolab import ArgumentError
from discolab.layouts.layout import REPLICATE, Layout, Workers
from discolab.loader.catalog import Catalog, Entry
from discolab.loader.plan import Plan, parse_layout
from tests.loader.plans import LLAMA, catalog_of, llama

quick = settings(deadline=None, max_examples=100)


def layouts_of(plan: Any, shapes: dict[str, tuple[int, ...]], workers: int = 2) -> dict[str, str]:
    resolved = Plan.of(plan).resolve(catalog_of(shapes), Workers((workers,)))
    return {name: str(layout) for name, layout in resolved.layouts.items()}


# -- layouts as they are written -------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dims = draw(st.lists(st.none() | st.integers(-3, 3), min_size=1, max_size=3).map(tuple))
    stage = draw(st.none() | st.integers(0, 3))
    if all(dim is None for dim in dims):
        return Layout(dims, stage=stage)
    numbers = st.lists(st.integers(1, 99), max_size=3).map(tuple)
    return Layout(dims, draw(numbers), draw(numbers), draw(st.integers(0, 99)), stage)


@quick
@given(layouts())
def test_a_layout_is_read_as_it_was_written(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout
    assert parse_layout(layout) == layout


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Shard(1), Layout((1,))),
        (Replicate(), REPLICATE),
        ([Replicate(), Shard(0)], Layout((None, 0))),
        ((Shard(0), Shard(-1)), Layout((0, -1))),
        (_StridedShard(0, split_factor=3), Layout((0,), segments=(3,))),
        ({"dim": 0, "segments": [8, 2, 2]}, Layout((0,), segments=(8, 2, 2))),
        ({"dims": [None, 1], "pad_to": 64}, Layout((None, 1), pad_to=64)),
        ({"stage": 0}, Layout(stage=0)),
        (["replicate", {"dim": 1}], Layout((None, 1))),
        ("Shard(dim=0)", Layout((0,))),
        ("Replicate()", REPLICATE),
        (" shard( 0,segments = 2 ) ", Layout((0,), segments=(2,))),
        ("(replicate, shard(0, stage=0))", Layout((None, 0), stage=0)),
    ],
)
def test_other_forms_of_a_layout(given: Any, expected: Layout) -> None:
    assert parse_layout(given) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("shrad(0)", r"'shrad\(0\)' can't be read .*did you mean 'shard\(0\)'\?"),
        ("shard", "does not say which dimension"),
        ("shard(stage=1)", "does not say which dimension"),
        ("shard(0, 64)", "a number too many"),
        ("replicate(dim=0)", "names a dimension"),
        ("shard(0, segmets=2)", "unknown option 'segmets' .there is segments"),
        ("shard(True)", "True, and a dimension must be an integer"),
        ("shard(0.5)", "0.5, and a dimension"),
        ("shard(rank)", "other than numbers"),
        ("shard(0, pad_to=-1)", "-1, and pad_to must be an integer of at least 0"),
        ("shard(0, segments=[2, 0])", "of at least 1"),
        ("replicate(pad_to=8)", "splits nothing"),
        ("[shard(0, stage=1), shard(1, stage=2)]", "says of stage different things"),
        ("[]", "is empty"),
        ("", "can't be read"),
        ("(" * 5000, "can't be read"),
        ("-" * 9000 + "1", "can't be read"),
        ("x" * 20_000, "20,000 characters"),
        ("__import__('os').getcwd()", "can't be read"),
        (Partial(), "no way to hold a parameter"),
        (None, "NoneType, which is no layout"),
        (7, "int, which is no layout"),
        ({"dim": 0, "dims": [0]}, "both dim and dims"),
        ({"dims": 0}, "must be a list"),
        ([], "is empty"),
    ],
)
def test_what_is_no_layout_is_refused_with_what_was_given(given: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says) as caught:
        parse_layout(given)
    assert "Layouts are written replicate, shard(0)," in str(caught.value)
    assert len(str(caught.value)) < 700


@quick
@given(st.text(max_size=30) | st.text("shardeplict()[]{}0129,=- _x'", max_size=30))
def test_any_text_is_a_layout_or_an_argument_error(text: str) -> None:
    try:
        layout = parse_layout(text)
    except ArgumentError:
        return
    assert parse_layout(str(layout)) == layout


# -- rules -----------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_counts() -> None:
    plan = {
        "*.q_proj.weight": "shard(0)",
        "norm.*": "replicate",
        r"re:layers\.[0-3]\..*": "shard(1)",
        "*": Shard(-1),
    }
    shapes = {
        "layers.0.q_proj.weight": (4, 4), "layers.3.o.weight": (4, 4), "layers.30.o": (4, 4),
        "norm.weight": (4,), "xnorm.weight": (4,),
    }  # fmt: skip
    assert layouts_of(plan, shapes) == {
        "layers.0.q_proj.weight": "shard(0)", "layers.3.o.weight": "shard(1)",
        "layers.30.o": "shard(-1)", "norm.weight": "replicate", "xnorm.weight": "shard(-1)",
    }  # fmt: skip


def test_a_pattern_is_for_the_whole_name_and_sees_capitals() -> None:
    shapes = {"a.weight": (2,), "a.weight_scale": (2,), "A.weight": (2,), "b.a.weight": (2,)}
    for pattern in ("a.weight", r"re:a\.weight", "[a].weigh?"):
        found = layouts_of({pattern: "shard(0)"}, shapes)
        assert [name for name, layout in found.items() if layout != "replicate"] == ["a.weight"]


def test_what_matches_nothing_is_told() -> None:
    plan = Plan({"a.*": "shard(0)", "a.x": "shard(0)", "c": "replicate"}, default="shard(-1)")
    found = plan.resolve(catalog_of({"a.x": (2,), "b": (2, 2)}), Workers((2,)))
    assert found.unmatched == ("b",)
    assert found.unused == ("a.x", "c")  # the rule before took a.x
    assert str(found.layouts["b"]) == "shard(-1)"


def test_no_plan_is_a_copy_on_each_worker() -> None:
    found = Plan.of(None).resolve(catalog_of({"a": (4,), "b": ()}), Workers((3,)))
    assert set(map(str, found.layouts.values())) == {"replicate"}
    assert (found.unmatched, found.unused) == ((), ())


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"*.q": "shrad(0)"}, r"rule '\*\.q': .*did you mean"),
        ({"re:(": "replicate"}, "no regular expression"),
        ({"": "replicate"}, "pattern is a text"),
        ({3: "replicate"}, "pattern is a text"),
        ([("a", "replicate", 3)], "pairs of a pattern"),
        ({"a": Partial()}, "rule 'a': "),
        ({"rules": {}, "defualt": "replicate"}, "'defualt'"),
        (7, "a plan is a dict of rules"),
        ("shard(0)", r"can't be read: .*give \{'\*': 'shard\(0\)'\}"),
    ],
)
def test_what_is_no_plan_is_refused(rules: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Plan.of(rules)


def test_one_error_tells_all_that_does_not_fit() -> None:
    shapes = {f"layers.{i}.weight": (3, 4) for i in range(30)} | {"fine": (4, 4)}
    with pytest.raises(ArgumentError) as caught:
        Plan({"*.weight": "shard(0, segments=2)", "fine": "shard(0)"}).resolve(
            catalog_of(shapes), Workers((2,))
        )
    text = str(caught.value)
    assert text.startswith("30 parameters do not fit the plan:\n  layers.0.weight [3, 4] (rule '*.")
    assert text.endswith("… and 20 more")
    assert text.count("\n") == 11
    assert "fine" not in text


# -- files -----------------------------------------------------------------------------------------


@quick
@given(st.lists(st.tuples(st.sampled_from(["a.*", "b", "re:c+", "*"]), layouts())), layouts())
def test_a_plan_is_the_same_after_json(rules: list[tuple[str, Layout]], default: Layout) -> None:
    plan = Plan(rules, default)
    again = Plan.of(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert hash(again) == hash(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_is_saved_and_read(tmp_path: Path) -> None:
    plan = Plan(LLAMA | {"lm_head.weight": "shard(0, pad_to=64)"}, default="replicate(stage=0)")
    plan.save(tmp_path / "plan.json")
    assert Plan.of(tmp_path / "plan.json") == plan == Plan.of(str(tmp_path / "plan.json"))
    styles = Plan({"wq": ColwiseParallel(), "wo": RowwiseParallel(), "tail": "replicate"})
    styles.save(tmp_path / "styles.json")
    assert Plan.of(tmp_path / "styles.json") == styles


def test_a_bare_object_of_rules_will_do(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(LLAMA))
    assert Plan.of(tmp_path / "plan.json") == Plan(LLAMA)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": "shard(0)", "b": "replicate", "a": "shard(1)"}', "'a' is there twice"),
        ('{"rules": {"a": "shard(0)", "a": "shard(1)"}}', "'a' is there twice"),
        ('{"a": "shard(0)"', "line 1"),
        ("[" * 100_000, "plan"),
        ('["a"]', "an object of rules"),
        ('{"a": 3}', "rule 'a'"),
        ('{"a": "colwize"}', "did you mean 'colwise'"),
        (b"\xff\xfe", "can't be read"),
        (None, "can't be read: No such file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str | bytes | None, says: str) -> None:
    file = tmp_path / "my plan.json"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ArgumentError, match=says) as caught:
        Plan.of(file)
    assert str(file) in str(caught.value)


# -- resolved --------------------------------------------------------------------------------------


def test_bytes_on_a_worker_are_those_of_its_tensors() -> None:
    entries = {
        "cut": Entry("cut", (5, 4), torch.float32, torch.bfloat16, ()),
        "padded": Entry("padded", (5,), torch.float16, torch.float16, ()),
        "second": Entry("second", (4,), torch.int64, torch.int64, ()),
        "scale": Entry("scale", (), torch.float8_e4m3fn, torch.float8_e4m3fn, ()),
    }
    plan = Plan({"cut": "shard(0)", "padded": "shard(0, pad_to=4)", "second": "shard(0, stage=1)"})
    found = plan.resolve(Catalog("x", "torch", (), entries), Workers.of(4, 2))
    assert [found.bytes_on(rank) for rank in range(4)] == [
        3 * 4 * 4 + 4 * 2 + 1,
        2 * 4 * 4 + 4 * 2 + 1,
        3 * 4 * 4 + 4 * 2 + 2 * 8 + 1,
        2 * 4 * 4 + 4 * 2 + 2 * 8 + 1,
    ]
    assert found.bytes_on(3, torch.bfloat16) == 2 * 4 * 2 + 4 * 2 + 2 * 8 + 2
    assert found.cut("second", 1) is None


def test_some_of_the_parameters() -> None:
    plan = Plan({"layers.*": "shard(0)", "none": "replicate"})
    found = plan.resolve(catalog_of(llama(prefix="")), Workers((2,)))
    some = found.subset(["lm_head.weight", "layers.1.mlp.*", "re:layers.0.*_proj.*"])
    assert list(some.layouts) == list(some.catalog.entries)
    assert list(some.layouts) == [
        name
        for name in found.layouts
        if name == "lm_head.weight" or "1.mlp" in name or ("0" in name and "_proj" in name)
    ]
    assert some.unmatched == ("lm_head.weight",)
    assert some.bytes_on(0) < found.bytes_on(0)
    assert list(found.subset("norm.weight").layouts) == ["norm.weight"]
    with pytest.raises(ArgumentError, match=r"no parameter 'lm_haed\.weight'; near are 'lm_head"):
        found.subset(["norm.weight", "lm_haed.weight"])
    with pytest.raises(ArgumentError, match=r"near are 'norm\.weight'"):
        found.cut("nrom.weight", 0)


def test_a_name_is_not_taken_for_a_pattern() -> None:
    found = Plan().resolve(catalog_of({"a[0]": (2,), "a0": (2,)}), Workers((2,)))
    assert list(found.subset("a[0]").layouts) == ["a[0]"]


def test_it_can_be_sent_to_workers() -> None:
    found = Plan(LLAMA).resolve(catalog_of(llama(1)), Workers((4,)))
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert copy.deepcopy(found) is found  # worker threads share it
    assert [again.bytes_on(rank) for rank in range(4)] == [found.bytes_on(r) for r in range(4)]
