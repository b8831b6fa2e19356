"""One row of the tables in docs/compare.md: a program with a bug, or a right one, and its verdict.

A case was written before the rules that find causes were: it says what a person who knows the bug
would accept. `verdict` holds that against what a comparison has said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import discolab
from discolab import Session
from discolab.comparison import ProgramComparison

State = dict[str, torch.Tensor]

ALL = (0, 1, 2, 3)

# What says where and how much, and claims no cause.
_OBSERVATIONS = (
    r"^one element of [\d,]+( of worker \d+)? differs$",
    r"^\d+ of \d+ places along dim \d+( of worker \d+)? differ",
)


@dataclass(frozen=True)
class Bug:
    """A planted bug.

    Attributes
    ----------
    name
        In words, for the table.
    kind
        ``tp``, ``sp``, ``dp``, ``pp``, ``fsdp`` or ``ep`` (experts).
    part
        Where it shows: ``weights``, ``forward``, ``backward`` or ``optimizer``.
    run
        Compares, on a session of four workers.
    where
        The names of points that are right as the first place, as patterns of the whole name.
    causes
        Patterns of what is right to say; whatever else is said of the cause is wrong.
    ranks
        The workers that differ; None: any, as when each holds a term of a sum.
    """

    name: str
    kind: str
    part: str
    run: Callable[[Session], ProgramComparison]
    where: tuple[str, ...]
    causes: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = ALL


@dataclass(frozen=True)
class Right:
    """A program that is right: nothing may be said to differ."""

    name: str
    kind: str
    run: Callable[[Session], ProgramComparison]
    slow: bool = False


@dataclass(frozen=True)
class Verdict:
    """What a comparison has said of a bug: right, or not."""

    place: bool
    workers: bool
    cause: str  # "right", "not known" or "WRONG"
    said: str

    @property
    def holds(self) -> bool:
        """Whether nothing of it sends a reader the wrong way."""
        return self.place and self.workers and self.cause != "WRONG"


def verdict(bug: Bug, found: ProgramComparison) -> Verdict:
    """Hold what a comparison has said against what is right."""
    first = found.first
    if first is None:
        return Verdict(False, False, "not known", "agrees")
    place = any(re.fullmatch(pattern, first.point.name) for pattern in bug.where)
    workers = bug.ranks is None or first.ranks == bug.ranks
    claims = [c for c in first.causes if not any(re.search(o, c) for o in _OBSERVATIONS)]
    right = [any(re.search(pattern, claim) for pattern in bug.causes) for claim in claims]
    cause = "not known" if not claims else "right" if all(right) else "WRONG"
    return Verdict(place, workers, cause, f"{first.point.words}: {'; '.join(claims) or '—'}")


def bug_row(name: str, bug: Bug, judged: Verdict) -> str:
    """The row of a bug in the table of docs/compare.md."""
    at = judged.said.partition(":")[0] if judged.place else "elsewhere"
    workers = "" if judged.workers else ", on other workers"
    return f"| {name} | {bug.kind} | {bug.part} | {at}{workers} | {judged.cause} |"


def right_row(name: str, right: Right, agrees: bool) -> str:
    """The row of a right program."""
    return f"| {name} | {right.kind} | {'no alarm' if agrees else 'ALARM'} |"


# -- what the families' programs are made with ------------------------------------------------


def place() -> tuple[int, int]:
    """This worker's number and how many there are."""
    worker = discolab.current_worker()
    return worker.worker_id, worker.num_workers


def part(tensor: torch.Tensor, dim: int = 0, segments: int = 1) -> torch.Tensor:
    """This worker's part; of a fused tensor, of each segment."""
    me, n = place()
    pieces = [piece.chunk(n, dim)[me] for piece in tensor.chunk(segments, dim)]
    return torch.cat(pieces, dim).clone()


def shard_(module: nn.Module, name: str, dim: int, segments: int = 1) -> None:
    """Keep this worker's part of a parameter."""
    whole = getattr(module, name).detach()
    setattr(module, name, nn.Parameter(part(whole, dim, segments)))


def uneven(module: nn.Module, seed: int = 1) -> nn.Module:
    """Parameters that all matter: no bias is zero, no norm's weight one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.empty_like(parameter).normal_(generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(float("norm" in name and "weight" in name) + 0.2 * noise)
            else:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
    return module


def process_group() -> None:
    """Torch's own, for DDP, FSDP and DTensor."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()
