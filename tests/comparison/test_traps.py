"""Bugs whose numbers look like those of another: what must not be said of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from discolab import Session, ccl, compare
from discolab.ccl import autograd as dist_fn
from discolab.comparison import ProgramComparison
from tests.comparison.families.case import place

pytestmark = pytest.mark.one_process


class Ensemble(nn.Module):
    """The mean of what four matrices give; each worker has one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.Parameter(torch.randn(4, 16, 16, generator=generator) / 4)
        self.out = nn.Linear(16, 3)
        self.divided_by = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.divided_by:
            return self.out(torch.einsum("bd,edf->ebf", x, self.weights).mean(0))
        y = dist_fn.reduce_from_region(dist_fn.copy_to_region(x) @ self.weights[0])
        return self.out(y / self.divided_by)


def _ensemble(state: dict[str, torch.Tensor], divided_by: int) -> Ensemble:
    me, _ = place()
    model = Ensemble()
    model.load_state_dict(state)
    model.weights = nn.Parameter(state["weights"][me : me + 1].clone())
    model.divided_by = divided_by
    return model


def test_a_mean_that_is_not_divided_is_not_only_called_a_double_sum(four: Session) -> None:
    model, x = Ensemble(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    assert compare(model, four.call_packed(_ensemble, model.state_dict(), 4), x)
    found = compare(model, four.call_packed(_ensemble, model.state_dict(), 1), x)
    assert found.first is not None
    assert found.first.point.words == "input of out"
    assert "is 4 times the reference" in found.first.causes[0]
    assert found.first.causes[0].endswith("or it is not divided by 4")


def test_what_is_divided_twice_is_found_where_it_is_and_is_no_term_of_a_sum(four: Session) -> None:
    model, x = Ensemble(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    found = compare(model, four.call_packed(_ensemble, model.state_dict(), 16), x)
    assert found.first is not None
    assert found.first.point.words == "input of out"
    assert found.first.causes[0].endswith("averaged where a sum belongs, or divided twice")
    assert found.first.ranks == (0, 1, 2, 3)


class Tied(nn.Module):
    """One embedding that is the head, too; each worker has the rows of some words."""

    def __init__(self, words: int = 32) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, 16), nn.LayerNorm(16)
        self.mode = ""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if not self.mode:
            return F.linear(self.norm(self.table(words)), self.table.weight)
        me, _ = place()
        own = (words >= 8 * me) & (words < 8 * me + 8)
        rows = self.table((words - 8 * me).clamp(0, 7)) * own[..., None]
        h = dist_fn.copy_to_region(self.norm(dist_fn.reduce_from_region(rows)))
        weight = self.table.weight
        return F.linear(h, weight.detach() if self.mode == "detached" else weight)


def _tied(state: dict[str, torch.Tensor], mode: str) -> Tied:
    me, n = place()
    model = Tied(8)
    model.norm.load_state_dict({k[5:]: v for k, v in state.items() if k.startswith("norm.")})
    model.table.weight = nn.Parameter(state["table.weight"].chunk(n)[me].clone())
    model.mode = mode
    return model


def test_rows_of_an_embedding_are_no_terms_in_backward(four: Session) -> None:
    model = Tied()
    words = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(2))
    assert compare(model, four.call_packed(_tied, model.state_dict(), "right"), words)
    found = compare(model, four.call_packed(_tied, model.state_dict(), "detached"), words)
    assert found.first is not None
    assert found.first.point.words == "gradient of the parameter table.weight"
    assert not any("all-reduce" in cause for cause in found.first.causes), found


class Scan(nn.Module):
    """A linear recurrence over a sequence, of which each worker has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(0.4, 0.9, 16))
        self.out = nn.Linear(16, 16)
        self.parted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parted:
            x = x.chunk(4, 1)[place()[0]]
        h, steps = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            h = self.decay * h + x[:, step]
            steps.append(h)
        return self.out(torch.stack(steps, 1))


def _scan(state: dict[str, torch.Tensor]) -> Scan:
    model = Scan()
    model.load_state_dict(state)
    model.parted = True
    return model


def test_a_step_of_a_loop_over_a_part_is_not_called_the_first_that_differs(four: Session) -> None:
    model, x = Scan(), torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(3))
    found = compare(model, four.call_packed(_scan, model.state_dict()), x, backward=False)
    assert found.first is not None
    assert found.first.ranks == (1, 2, 3)
    assert "operation getitem" not in str(found)


class TwoResults(nn.Module):
    """What it gives first does not depend on `side`."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.main, self.side, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU()
        self.off = off

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            self.side.bias += self.off
        y = self.main(x), self.act(self.side(x))
        with torch.no_grad():
            self.side.bias -= self.off
        return y


def _two_results(state: dict[str, torch.Tensor], off: float) -> TwoResults:
    model = TwoResults(off)
    model.load_state_dict(state)
    return model


def test_one_right_result_does_not_excuse_what_goes_into_the_other(four: Session) -> None:
    model, x = TwoResults(), torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    assert compare(model, four.call_packed(_two_results, model.state_dict(), 0.0), x)
    found = compare(model, four.call_packed(_two_results, model.state_dict(), 1.0), x)
    assert found.first is not None
    assert found.first.point.words == "output of side"


class TiedLayers(nn.Module):
    """An embedding and a head that share their weight, each a module, cut by rows."""

    def __init__(self, words: int = 32) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(words, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, words, bias=False)
        self.head.weight = self.table.weight
        self.parted, self.copies = False, True

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if not self.parted:
            return self.head(torch.tanh(self.mix(self.table(words))))
        me, _ = place()
        own = (words >= 8 * me) & (words < 8 * me + 8)
        rows = self.table((words - 8 * me).clamp(0, 7)) * own[..., None]
        h = torch.tanh(self.mix(dist_fn.reduce_from_region(rows)))
        return dist_fn.gather_from_region(
            self.head(dist_fn.copy_to_region(h) if self.copies else h)
        )


def _tied_layers(state: dict[str, torch.Tensor], copies: bool) -> TiedLayers:
    me, n = place()
    model = TiedLayers(8)
    model.mix.load_state_dict({k[4:]: v for k, v in state.items() if k.startswith("mix.")})
    model.table.weight = nn.Parameter(state["table.weight"].chunk(n)[me].clone())
    model.head.weight, model.parted, model.copies = model.table.weight, True, copies
    return model


def test_a_shared_weight_is_not_blamed_for_the_gradient_of_its_other_use(four: Session) -> None:
    torch.manual_seed(0)
    model, words = TiedLayers(), torch.randint(0, 32, (3, 7))
    assert compare(model, four.call_packed(_tied_layers, model.state_dict(), True), words)
    found = compare(model, four.call_packed(_tied_layers, model.state_dict(), False), words)
    assert found.first is not None
    assert found.first.point.words == "gradient of the input of head"
    assert "an all-reduce is missing in backward" in found.first.causes[0]
    assert not model.table.weight._post_accumulate_grad_hooks  # nothing is left in the model


class Decoder(nn.Module):
    """Keys and values of all steps before; the heads over the workers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, 16, bias=False)
        self.parted, self.forgets = False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, values, found = [], [], []
        for step in range(4):
            h = dist_fn.copy_to_region(x) if self.parted else x
            q, k, v = (p(h).unflatten(-1, (-1, 4)) for p in (self.q, self.k, self.v))
            if not (self.forgets and step == 2):
                keys.append(k)
                values.append(v)
            weights = (q[:, :, None] * torch.stack(keys, 2)).sum(-1).softmax(-1)
            y = self.o((weights[..., None] * torch.stack(values, 2)).sum(2).flatten(1))
            x = x + (dist_fn.reduce_from_region(y) if self.parted else y)
            x = x / x.square().mean(-1, keepdim=True).sqrt()
            found.append(x)
        return torch.stack(found, 1)


def _decoder(whole: Decoder, forgets: bool) -> Decoder:
    me, n = place()
    model = Decoder(4).to(whole.o.weight.dtype)
    for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
        weight = getattr(whole, name).weight.detach().chunk(n, dim)[me].clone()
        getattr(model, name).weight = nn.Parameter(weight)
    model.parted, model.forgets = True, forgets and me == 1
    return model


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_coarse_dtype_makes_small_later_is_no_other_way(
    four: Session, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    model, x = Decoder().to(dtype), torch.randn(3, 16, dtype=dtype)
    assert compare(model, four.call_packed(_decoder, model, False), x)
    found = compare(model, four.call_packed(_decoder, model, True), x)
    assert found.first is not None
    assert (found.first.point.words, found.first.ranks) == ("input of o#3", (1,)), found


class Pooled(nn.Module):
    """Attention over a set of which each worker has a part; its largest score is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(3, 8))
        self.key, self.value, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.largest = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query @ self.key(x).mT * 2
        if not self.largest:
            return self.head((scores.softmax(-1) @ self.value(x)).mean(1))
        most = scores.detach().amax(-1, keepdim=True)
        if self.largest == "of all":
            most = ccl.all_reduce(most, "max")
        weights = (scores - most).exp()
        total = dist_fn.reduce_from_region(weights.sum(-1, keepdim=True))
        y = dist_fn.reduce_from_region(weights @ self.value(x)) / total
        return self.head(y.mean(1))


def _pooled(whole: Pooled, largest: str) -> Pooled:
    model = Pooled().to(whole.query.dtype)
    model.load_state_dict(whole.state_dict())
    model.largest = largest
    for name, parameter in model.named_parameters():
        if not name.startswith("head"):
            parameter.register_hook(lambda grad: ccl.all_reduce(grad.contiguous()))
    return model


@pytest.mark.parametrize("seed", [2, 5, 8, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_backward_differs_forward_is_not_excused_by_a_coarse_dtype(
    four: Session, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    model, x = Pooled().to(dtype), torch.randn(2, 16, 8, dtype=dtype) * 0.6

    def run(largest: str) -> ProgramComparison:
        held = four.call_packed(_pooled, model, largest)
        return compare(model, held, x, layouts={"input": Shard(1)})

    assert run("of all")
    found = run("of its own")
    assert found.first is not None
    late = found.first.point.words == "output of head" and dtype == torch.bfloat16
    assert late or found.first.point.words == "input of head", found
    if late:  # there the input is off by less than the tolerance
        assert "perhaps it begins at the input of head" in found.first.place, found


class Modulated(nn.Module):
    """A fused linear, its halves taken apart; the linear after it adds its bias elsewhere."""

    def __init__(self, width: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(6, 2 * width), nn.Linear(width, 6, bias=bias)
        self.parted, self.bug = False, ""
        self.added = torch.zeros(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.fused(dist_fn.copy_to_region(x) if self.parted else x).chunk(2, -1)
        y = self.out(torch.tanh(scale) * (1 + shift))
        return self.last(dist_fn.reduce_from_region(y)) if self.parted else y

    def last(self, y: torch.Tensor) -> torch.Tensor:
        if self.bug == "rolled":
            return (y + self.added).roll(1, 0)
        return y + {"half": 0.5, "none": 0.0}.get(self.bug, 1.0) * self.added


def _modulated(whole: Modulated, segments: int, bug: str = "") -> Modulated:
    me, n = place()
    model = Modulated(4, bias=False)
    for name in ("weight", "bias"):
        pieces = getattr(whole.fused, name).detach().chunk(segments)
        part = torch.cat([piece.chunk(n)[me] for piece in pieces])
        setattr(model.fused, name, nn.Parameter(part.clone()))
    model.out.weight = nn.Parameter(whole.out.weight.detach().chunk(n, 1)[me].clone())
    model.added, model.parted, model.bug = whole.out.bias.detach().clone(), True, bug
    return model


@pytest.mark.parametrize(
    ("bug", "where", "cause"),
    [
        ("half", "output of the whole model", "is off by -0.5 × the bias out.bias"),
        ("rolled", "output of the whole model", "those of one place earlier"),
        ("none", "output of out", "bias=False"),
    ],
)
def test_a_bias_that_is_added_later_is_not_said_to_be_missing(
    four: Session, bug: str, where: str, cause: str
) -> None:
    torch.manual_seed(0)
    model, x = Modulated(), torch.randn(5, 6)
    found = compare(model, four.call_packed(_modulated, model, 2, bug), x)
    assert found.first is not None
    assert found.first.point.words == where, found
    assert cause in found.first.causes[0], found
    assert not any("it is not added" in told for told in found.first.causes), found


def test_settings_of_the_module_that_gets_a_wrong_input_are_no_cause(four: Session) -> None:
    torch.manual_seed(0)
    model, x = Modulated(), torch.randn(5, 6)
    assert compare(model, four.call_packed(_modulated, model, 2), x)
    found = compare(model, four.call_packed(_modulated, model, 1), x)
    assert found.first is not None
    assert found.first.point.words == "input of out"
    assert "cut with segments=2?" in found.first.causes[0], found
    assert not any("bias=False" in cause for cause in found.first.causes), found


class Target(nn.Module):
    """An error to a target, of features that are cut; the target is data."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.parted = nn.Linear(6, width), False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.up(dist_fn.copy_to_region(x) if self.parted else x)
        error = (h * y).sum(-1)
        return dist_fn.reduce_from_region(error) if self.parted else error


def _target(whole: Target) -> Target:
    me, n = place()
    model = Target(4)
    model.up.weight = nn.Parameter(whole.up.weight.detach().chunk(n)[me].clone())
    model.up.bias = nn.Parameter(whole.up.bias.detach().chunk(n)[me].clone())
    model.parted = True
    return model


def test_where_an_inputs_gradient_alone_differs_it_is_said_when_that_matters(four: Session) -> None:
    model = Target()
    found = compare(model, four.call_packed(_target, model), (torch.randn(5, 6), torch.randn(5, 1)))
    assert found.first is not None
    assert found.first.point.gradient
    assert any("not if it is data or a target" in note for note in found.notes), found


class Block(nn.Module):
    """The caller of the row-parallel linear sums; `bug` is where worker 2 goes wrong."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32 // parts), nn.Linear(32 // parts, 16, bias=False)
        self.norm2, self.out = nn.LayerNorm(16), nn.Linear(16, 3)
        self.parts, self.bug, self.sequence = parts, "", False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parts == 1:
            x = self.inp(x)
            return self.out(self.norm2(x + self.down(torch.tanh(self.up(self.norm(x))))))
        if self.sequence:
            x = x.chunk(self.parts, 1)[place()[0]]
        x = self.inp(x)
        h = self.norm(x)
        if self.bug == "detached" and place()[0] == 2:
            h = h.detach() + 0 * h
        if self.bug == "halved" and place()[0] == 2:
            h = h.detach() + 0.5 * (h - h.detach())
        if self.sequence:
            h = dist_fn.gather_from_sequence_region(h, 1)
            y = self.down(torch.tanh(self.up(h)))
            y = self.wrong(dist_fn.reduce_scatter_to_sequence_region(y, 1))
            return dist_fn.gather_from_region(self.out(self.norm2(x + y)), 1)
        y = self.down(torch.tanh(self.up(dist_fn.copy_to_region(h))))
        y = y if self.bug == "no sum" else self.wrong(dist_fn.reduce_from_region(y))
        return self.out(self.norm2(x + y))

    def wrong(self, y: torch.Tensor) -> torch.Tensor:
        me, _ = place()
        if self.bug == "seed of its own":
            return y * (torch.rand(y.shape, generator=torch.Generator().manual_seed(me)) > 0.1)
        if self.bug == "scaled on all":
            return 0.9 * y
        if me != 2:
            return y
        if self.bug == "clamped":
            return y.clamp(max=0.1)
        if self.bug == "rolled":
            return y.roll(1, 0)
        return y * 0.9 if self.bug == "scaled" else y


def _block(whole: Block, bug: str, sequence: bool = False) -> Block:
    me, n = place()
    model = Block(n)
    model.bug, model.sequence = bug, sequence
    for name, parameter in model.named_parameters():
        part = whole.get_parameter(name).detach()
        if name.startswith(("up", "down")):
            part = part.chunk(n, int(name == "down.weight"))[me]
        elif sequence:
            parameter.register_hook(lambda grad: ccl.all_reduce(grad.contiguous()))
        parameter.data.copy_(part)
    return model


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("bug", "ranks"),
    [
        ("scaled", (2,)),
        ("clamped", (2,)),
        ("rolled", (2,)),
        ("seed of its own", (0, 1, 2, 3)),
        ("scaled on all", (0, 1, 2, 3)),
    ],
)
def test_what_goes_wrong_after_the_callers_sum_is_no_missing_sum(
    four: Session, bug: str, ranks: tuple[int, ...], sequence: bool
) -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(5, 8, 6)
    found = compare(model, four.call_packed(_block, model, bug, sequence), x, backward=False)
    assert found.first is not None
    assert (found.first.point.words, found.first.ranks) == ("input of norm2", ranks), found
    assert not any("all-reduce" in cause for cause in found.first.causes), found
    if not sequence:
        found = compare(model, four.call_packed(_block, model, "no sum"), x, backward=False)
        assert found.first is not None
        assert found.first.point.words == "output of down", found
        assert "an all-reduce is missing" in found.first.causes[0], found


@pytest.mark.parametrize(("bug", "cause"), [("detached", "all zeros"), ("halved", "0.5 times")])
def test_a_gradient_lost_before_the_copy_is_no_missing_sum_in_backward(
    four: Session, bug: str, cause: str
) -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(5, 8, 6)
    found = compare(model, four.call_packed(_block, model, bug), x)
    assert found.first is not None
    assert found.first.point.words == "gradient of the output of norm", found
    assert found.first.ranks == (2,), found
    assert cause in found.first.causes[0], found


class Deep(nn.Module):
    """Blocks behind each other in bfloat16; `bug` is what the second does to its output."""

    def __init__(self, parts: int = 1, bug: str = "") -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(6))
        self.ups = nn.ModuleList(nn.Linear(64, 128 // parts) for _ in range(6))
        self.downs = nn.ModuleList(nn.Linear(128 // parts, 64, bias=False) for _ in range(6))
        self.ends = nn.ModuleList(nn.Identity() for _ in range(6))
        self.parts = parts
        if bug:
            self.ends[3] = Factor(bug)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = zip(self.norms, self.ups, self.downs, self.ends, strict=True)
        for norm, up, down, end in layers:
            h = norm(x)
            if self.parts == 1:
                x = x + end(down(F.gelu(up(h))))
            else:
                y = down(F.gelu(up(dist_fn.copy_to_region(h))))
                x = x + end(dist_fn.reduce_from_region(y))
        return x


class Factor(nn.Module):
    """Scales what goes through it: on all workers, on one, or not."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bug == "all":
            return x * 0.95
        return x * 0.95 if self.bug == "one" and place()[0] == 2 else x


def _deep(whole: Deep, bug: str) -> Deep:
    me, n = place()
    model = Deep(n, bug)
    for name, parameter in model.named_parameters():
        part = whole.get_parameter(name).detach()
        if not name.startswith("norms"):
            part = part.chunk(n, int(name.startswith("downs")))[me]
        parameter.data.copy_(part)
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("bug", "where", "ranks"),
    [
        ("all", "output of ends.3", (0, 1, 2, 3)),
        ("one", "output of ends.3", (2,)),
    ],
)
def test_a_factor_within_the_tolerance_of_a_coarse_dtype_is_told_with_perhaps(
    four: Session, bug: str, where: str, ranks: tuple[int, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    model, x = Deep().to(torch.bfloat16), torch.randn(4, 16, 64, dtype=torch.bfloat16)
    assert compare(model, four.call_packed(_deep, model, ""), x)
    found = compare(model, four.call_packed(_deep, model, bug), x)
    assert found.first is not None
    assert (found.first.point.words, found.first.ranks) == (where, ranks), found
    assert found.first.place.endswith("perhaps it goes wrong here"), found
    assert not any("all-reduce" in cause for cause in found.first.causes), found
