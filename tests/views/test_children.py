"""Modules, containers and plain values: what is told of them, and which worker differs in what."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from discolab.engines import ThreadedSession
from discolab.runtime.worker import current_worker
from discolab.views import describe, dref_parts, render_html, render_text, view
from discolab.views.dref.summary import LayoutFacts
from discolab.views.whos_view import Variables, whos_parts


def text(values: Iterable[object], **options: Any) -> str:
    records: dict[int, Any] = {rank: describe(value) for rank, value in enumerate(values)}
    return render_text(dref_parts(records, name="w", num_workers=len(records), **options))


def lines_of(drawn: str, word: str) -> list[str]:
    return [line for line in drawn.split("\n") if word in line]


def network(layers: int = 2, seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)])


def changed(module: Any, name: str) -> Any:
    with torch.no_grad():
        module.get_parameter(name)[0] += 1
    return module


def test_equal_modules_are_a_line_and_a_closed_table() -> None:
    assert text([network(1)] * 2).split("\n") == [
        "DRef w: Sequential (20 parameters, 80 B) on all 2 workers",
        "parameters: 2, all equal",
        "    name      shape   dtype    bytes  workers",
        "    0.weight  [4, 4]  float32   64 B  equal",
        "    0.bias    [4]     float32   16 B  equal",
    ]


def test_the_worker_whose_parameter_differs_is_named() -> None:
    drawn = text([network(), network(), changed(network(), "1.bias"), network()])
    assert "≠ 1 of 4 parameters differs" in drawn.split("\n")[0]
    assert "≠ A A B A (worker 2)" in lines_of(drawn, "1.bias")[0]
    assert len(lines_of(drawn, " equal")) == 3


def test_a_parameter_that_differs_is_shown_however_far_behind_it_is() -> None:
    values = [network(80), changed(network(80), "79.bias")] + [network(80)] * 2
    drawn = text(values)
    assert "≠ A B A A (worker 1)" in lines_of(drawn, "79.bias")[0]
    assert "the others: 159, all equal" in drawn
    html = render_html(
        dref_parts({r: describe(v) for r, v in enumerate(values)}, name="w", num_workers=4)
    )
    assert html.index("79.bias") < html.index("<details")


def test_of_two_workers_the_one_parameter_that_differs_is_found() -> None:
    drawn = text([network(60), changed(network(60), "55.bias")])
    assert "≠ 1 of 120 parameters differs" in drawn.split("\n")[0]
    assert "≠ distinct" in lines_of(drawn, "55.bias")[0]
    assert "of 2 parameters distinct" not in text([network(1), network(1, seed=1)])


def test_frozen_parameters_gradients_and_buffers_are_marked() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    module[1].weight.grad = torch.zeros(2)
    drawn = text([module] * 2)
    assert lines_of(drawn, "0.bias")[0].endswith("frozen")
    assert lines_of(drawn, "1.weight")[0].endswith("grad")
    assert lines_of(drawn, "running_mean")[0].endswith("buffer")
    assert "parameters and buffers: 7" in drawn


def test_a_buffer_that_differs_is_found() -> None:
    values = [torch.nn.BatchNorm1d(2) for _ in range(3)]
    values[1].running_mean[0] = 3  # type: ignore[index]
    assert "(worker 1)" in lines_of(text(values), "running_mean")[0]


def test_stages_of_a_pipeline_are_a_row_each() -> None:
    stages = []
    for rank in range(3):
        layers = {str(2 * rank + i): torch.nn.Linear(2, 2) for i in range(2)}
        stages.append(torch.nn.ModuleDict({"layers": torch.nn.ModuleDict(layers)}))
    stages[2]["norm"] = torch.nn.LayerNorm(2)
    assert "each has parameters of its own" in text(stages)
    assert text([*stages, None]).split("\n")[1:] == [
        "  rank  type        layers            parameters  bytes",
        "  0     ModuleDict  layers.0,1                12   48 B",
        "  1     ModuleDict  layers.2,3                12   48 B",
        "  2     ModuleDict  layers.4,5, norm          16   64 B",
        "  3     None",
    ]


def filled(value: float) -> torch.nn.Linear:
    layer = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def test_what_several_stages_have_by_one_name_is_compared() -> None:
    stages = [
        torch.nn.ModuleDict({f"l{rank}": filled(1), "emb": filled(5 if rank == 2 else 1)})
        for rank in range(4)
    ]
    drawn = text(stages)
    assert "≠ 1 of 1 common parameters differs" in drawn
    assert lines_of(drawn, "emb.weight")[0].split("  ")[-2:] == ["≠ A A B A (worker 2)", "0-3"]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_replicas_of_a_stage_that_differ_are_told(num_groups: int) -> None:
    stages = [torch.nn.ModuleDict({f"l{r % 2}": filled(1 if r < 2 else 3)}) for r in range(4)]
    drawn = text(stages, num_groups=num_groups)
    assert "parameters of the same name are distinct" in drawn
    assert "common parameters: 2, all distinct" in drawn
    assert lines_of(drawn, "l1.weight")[0].split()[-2:] == ["distinct", "1,3"]


def test_modules_and_dicts_that_some_workers_lack_are_compared_on_the_others() -> None:
    assert "parameters of the same name are distinct" in text([filled(0), filled(1), None, None])
    drawn = text([torch.nn.Sequential(filled(1)), filled(1), filled(1)])
    assert "equal where several have a parameter" in drawn
    items = [{"w": torch.ones(2) * (rank == 1)} for rank in range(3)]
    assert "1 of 1 items differs" in text([*items, None])
    assert "all distinct" in text([*items[:2], None])
    assert "equal on workers 0,2" in text([items[0], None, items[0]])
    drawn = text([{"w": 1}, *({"w": 1, "b": value["w"]} for value in items)])
    assert "only on workers 1-3, ≠ - A B A (worker 2)" in drawn


def test_a_parameter_that_is_frozen_on_one_worker_is_told() -> None:
    modules = [filled(1).requires_grad_(rank != 1) for rank in range(3)]
    drawn = text(modules)
    assert "≠ 1 of 1 parameters differs" in drawn
    assert "≠ frozen only on worker 1" in lines_of(drawn, "weight")[0]
    values = [torch.ones(3).requires_grad_(rank == 1) for rank in range(3)]
    assert "[1] alone requires grad" in text(values)
    assert "requires grad" not in text(values[1:2] * 3)


def test_modules_with_equal_parameters_that_are_set_up_differently_are_told() -> None:
    """In the picture and in the list of variables: dropout, the mode, what is frozen."""
    rates = [torch.nn.Sequential(filled(1), torch.nn.Dropout(rank // 2 / 4)) for rank in range(3)]
    drawn = text(rates)
    assert "≠ modules are set up differently" in drawn.split("\n")[0]
    one, other = "Dropout(p=0.0, inplace=False)", "Dropout(p=0.25, inplace=False)"
    assert drawn.endswith(f"set up differently: [0,1] {one}; [2] {other}")
    modes = [filled(1).train(rank != 1) for rank in range(3)]
    assert text(modes).endswith("[0,2] in train mode; [1] in eval mode")
    frozen = [filled(1).requires_grad_(rank != 1) for rank in range(3)]
    for values, words in ((rates, "≠ set"), (modes, "≠ set"), (frozen, "≠ set"), (rates[:2], "✓")):
        variables = {rank: Variables({"m": describe(one)}) for rank, one in enumerate(values)}
        assert words in render_text(
            whos_parts("s", variables, LayoutFacts(num_workers=len(values)))
        )


def test_equal_ragged_tensors_are_equal() -> None:
    """torch counts ragged sizes through a process: j1, j2, ..."""
    parts = [torch.ones(2), torch.ones(3)]
    ragged = [torch.nested.nested_tensor(parts, layout=torch.jagged) for _ in range(2)]
    assert "✓ equal on all workers" in text(ragged)
    assert "[2, j] jagged" in text(ragged)


def test_layers_that_tell_their_rank_are_no_warning() -> None:
    class Layer(torch.nn.Linear):
        def extra_repr(self) -> str:
            return f"part={int(self.weight[0, 0])}"

    layers = [Layer(2, 2) for _ in range(2)]
    for rank, layer in enumerate(layers):
        torch.nn.init.constant_(layer.weight, rank)
    drawn = text(layers)
    assert drawn.endswith("set up differently: [0] Layer(part=0); [1] Layer(part=1)")
    assert "≠" not in drawn


def test_parameters_without_data_are_called_so_not_large() -> None:
    drawn = text([torch.nn.LazyLinear(3)] * 2)
    assert "[0,1] lazy: no data yet (2 parameters)" in drawn
    drawn += text([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")])
    assert "[1] meta tensor: no data (2 parameters)" in drawn
    assert "large" not in drawn


def test_layers_have_their_numbers_in_the_whole_model() -> None:
    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(2, 2)
            self.layers = torch.nn.ModuleDict({str(i): torch.nn.Linear(2, 2) for i in (4, 5, 6)})

    assert describe(Stage())["layers"] == ["embed", "layers.4-6"]
    assert describe(network(3))["layers"] == ["0-2"]


def test_a_large_module_is_compared_on_demand_only() -> None:
    module = torch.nn.Linear(2**12, 2**10 + 1, bias=False)
    record: Any = describe(module)
    assert "digest" not in record
    assert "digest" not in record["params"][0]
    assert "digest" in describe(module, stats=True)
    drawn = text([module] * 2)
    assert "contents not compared" in drawn
    assert "stats=True" in drawn


def test_a_record_of_a_module_stays_small() -> None:
    names = [f"a_rather_long_name_of_a_layer_{i}" * 2 for i in range(1200)]
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(1)) for name in names})
    record: Any = describe(module)
    assert len(json.dumps(record)) < 100_000
    assert (len(record["params"]), record["more"]) == (40, 1160)
    drawn = text([module, changed(module, names[-1])])
    assert "and 1160 more" in drawn


def test_the_digest_sees_what_is_told_of_no_parameter() -> None:
    one, other = (torch.nn.ParameterList(torch.ones(1) for _ in range(700)) for _ in range(2))
    assert describe(one)["digest"] == describe(other)["digest"]
    assert describe(one)["digest"] != describe(changed(other, "699"))["digest"]


def test_items_of_a_dict_are_compared_one_by_one() -> None:
    values = [{"tokens": torch.arange(3) + (rank == 1), "mask": torch.ones(3)} for rank in range(4)]
    drawn = text(values)
    assert "≠ 1 of 2 items differs" in drawn
    assert "≠ A B A A (worker 1)" in lines_of(drawn, "'tokens'  ")[0]
    assert lines_of(drawn, "'mask'  ")[0].endswith("equal")


def test_items_that_some_workers_lack_are_told() -> None:
    drawn = text([{"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}])
    assert "only on worker 0" in lines_of(drawn, "'b'  ")[0]


def test_a_long_dict_of_tensors_is_compared_to_its_end() -> None:
    values = [{f"w{i}": torch.zeros(2) for i in range(200)} for _ in range(4)]
    assert "items: 200, all equal" in text(values)
    assert "contents not compared" not in text(values)
    values[3]["w199"] = torch.ones(2)
    drawn = text(values)
    assert "≠ 1 of 200 items differs" in drawn.split("\n")[0]
    assert "≠ A A A B (worker 3)" in lines_of(drawn, "'w199'")[0]


def test_nested_containers_are_folded() -> None:
    state = {"step": 3, "state": {"x": torch.zeros(3)}}
    drawn = text([state] * 2)
    assert "in 'state'" in drawn
    assert "'x'  float32[3]" in drawn
    html = render_html(dref_parts({r: describe(state) for r in range(2)}, name="w", num_workers=2))
    assert html.count("<details") == 2


def test_items_with_other_shapes_say_where() -> None:
    drawn = text([[torch.ones(2)], [torch.ones(3)]])
    assert "float32[2] on 0; float32[3] on 1" in drawn


def test_dicts_of_plain_values_show_the_keys_that_differ() -> None:
    drawn = text([{"lr": 0.1, "rank": rank, "seed": 7 + (rank == 2)} for rank in range(4)])
    assert drawn.split("\n")[1:] == [
        "  rank  'rank'  'seed'",
        "  0          0       7",
        "  1          1       7",
        "  2          2       8",
        "  3          3       7",
        "1 other key is equal",
    ]


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    layers: int = 3
    weights: Any = dataclasses.field(default=None, repr=False)


def test_dataclasses_show_the_fields_that_differ() -> None:
    assert text([Config()] * 2) == "DRef w: Config(lr=0.1, layers=3) on all 2 workers"
    drawn = text([Config(), Config(), Config(layers=4)])
    assert "differ: A A B (worker 2)" in drawn
    assert drawn.split("\n")[1:] == [
        "  rank   layers",
        "  [0,1]       3",
        "  2           4",
        "1 other key is equal",
    ]


def test_a_dataclass_with_a_repr_of_its_own_keeps_it() -> None:
    @dataclasses.dataclass
    class Named:
        name: str

        def __repr__(self) -> str:
            return f"<{self.name}>"

    assert describe(Named("x")) == {"kind": "object", "type": "Named", "repr": "<x>"}


def test_long_lists_of_plain_values_are_compared() -> None:
    assert "all 2 workers" in text([list(range(100))] * 2)
    assert "differ: A A B (worker 2)" in text([[0] * 99, [0] * 99, [0] * 98 + [1]])


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "module", "params": [{}], "layouts": 3, "brief": [[1, 2, 3]]},
        {"kind": "module", "params": [{"layout": 0}], "layouts": [{"mesh": 3}]},
        {"kind": "dataclass", "items": [{"key": 1, "value": {}}]},
        {"kind": "dict", "items": [{"key": "a", "value": {"kind": "tensor", "sharding": {}}}]},
    ],
)
def test_malformed_records_never_raise(record: Any) -> None:
    for held in ({0: record, 1: record}, {0: record, 1: describe({"a": torch.ones(1)})}):
        assert render_text(dref_parts(held, name="w", num_workers=2)).startswith("DRef w")


def sharded_layer() -> torch.nn.Module:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = torch.nn.Linear(8, 8)
    for name, places in (("weight", [Replicate(), Shard(0)]), ("bias", [Replicate()] * 2)):
        whole = torch.arange(8.0 * 8).view(8, 8) if name == "weight" else torch.zeros(8)
        setattr(layer, name, torch.nn.Parameter(distribute_tensor(whole, mesh, places)))
    if current_worker().worker_id == 3:
        layer.weight._local_tensor.data[0, 0] += 1  # type: ignore[operator]
    return layer


def test_shards_need_not_be_equal_but_their_replicas() -> None:
    with ThreadedSession(4) as sess:
        layer = sess.call_packed(sharded_layer)
        sess.sync_all()
        drawn = layer._repr_mimebundle_()["text/plain"]
    weight = lines_of(drawn, "weight")[0]
    assert "[8, 8]  float32  Replicate(), Shard(0)     128 B" in weight
    assert "≠ A B A C (worker 3)" in weight
    assert lines_of(drawn, "bias")[0].endswith("equal")


@pytest.mark.parametrize("kind", ["module", "dict"])
def test_the_one_of_a_thousand_that_differs_is_named(kind: str) -> None:
    def thousand() -> Any:
        odd = 900 if current_worker().worker_id == 2 else -1
        tensors = {f"p{place}": torch.full((1,), float(place == odd)) for place in range(1000)}
        if kind == "dict":
            return tensors
        return torch.nn.ParameterDict(tensors)

    with ThreadedSession(4) as session:
        text = repr(view(session.call_packed(thousand)))
    lines = [line for line in text.split("\n") if "p900" in line]
    assert lines, text
    assert any("≠ A A B A (worker 2)" in line for line in lines)
    assert "1 of 1000 " in text.split("\n")[0]
