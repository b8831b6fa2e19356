"""`compare`: run the reference here and the sharded program on the workers, and compare them.

The course of a comparison, on the controller's thread: parameters, forward, backward. Each part
of it is a worker function like any other, so it works on every engine, and what fails on a worker
is the session's own `WorkerError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...layouts.layout import ShardLayout
from ...loader.plans.patterns import matcher
from ...runtime.dref import DRef
from ...runtime.errors import ArgumentError, WaitTimeoutError, WorkerError
from ...runtime.registers import OWN
from ...runtime.session import Session
from . import remote
from .averages import count_of_parts, judged_averages
from .blame import first_finding
from .failing import own_errors
from .gathering import Seen
from .given import (
    check_options,
    inputs_of,
    meshes_of,
    name_of,
    program_of,
    read_layout,
    session_of,
)
from .judging import Judge, Pair
from .matching import (
    Held,
    Names,
    by_key,
    check_some_match,
    is_number,
    lone_keys,
    only_in,
    settings_words,
)
from .presence import Presence
from .remarks import detour_notes, settings_notes, value_notes
from .results import Comparison, Finding, Point, point_name
from .sides import Fact, Side

_FORWARD = ("argument", "input", "output", "note", "result")
_PARAMETERS = ("parameter", "buffer")


def compare(
    reference: Any,
    sharded: Any,
    inputs: Any,
    *,
    session: Session | None = None,
    module: Any = None,
    layouts: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    backward: bool = True,
    loss: Any = None,
    seed: int = 0,
    timeout: float | None = None,
) -> Comparison:
    """Find the first place where a sharded program and its reference compute something else.

    Both run once on the same inputs, from the same random state: forward and backward. What goes
    into and comes out of each module, the gradients of that, parameters and their gradients are
    compared on the workers. Nothing of either program is changed: gradients, buffers and random
    states are put back.

    Parameters
    ----------
    reference
        A module or function here.
    sharded
        What the workers call: a DRef of each worker's module or function (``sess["model"]``), a
        function here, or the name of a registered one.
    inputs
        A tensor, a tuple of arguments, or a dict of named ones; each worker has its own copy. A
        DRef for what the workers have already.
    session
        Needed where no DRef tells it.
    module
        If `sharded` is a function: the worker's module whose inner modules it runs (a DRef).
    layouts
        How values lie over the workers, where that should not be inferred:
        ``{"*.qkv.weight": "shard(0, segments=3)", "input": Shard(0)}``. Names are ``a.b`` (what
        module ``a.b`` puts out), ``a.b.input``, ``a.b.weight``, of notes their own, ``input`` and
        ``output`` of the program, and for gradients these with ``.grad``. Globs, the first that
        matches counts. Layouts are those of torch, `Shard`, `Replicate` and `Partial`, or of the
        loader (see docs/loader.md).
    names
        Paths of the reference to paths of the sharded model where these differ.
    rtol, atol
        Two numbers agree if ``|a - b| <= atol + rtol * |b|``. None: by the dtype, see
        docs/compare.md.
    backward
        Whether to compare gradients.
    loss
        A function of the program's result that gives a scalar, for both; or two, of the reference
        and of the workers. None: backward starts from random gradients of the result.
    seed
        Of the random state at the start.
    timeout
        Seconds to wait for the workers, for each step; None takes the session's.

    Returns
    -------
    Comparison
        Shows itself; has `agrees`, `first`, `points`, `gradients`, `parameters`.

    Raises
    ------
    ArgumentError
        If something given can't be used.
    WorkerError
        If the sharded program fails on a worker; a note says what had been found until then.
    ForeignDRefError, WaitTimeoutError, SessionClosedError
    """
    sess = session_of(session, sharded, module, inputs)
    options = Options(rtol, atol, backward, seed, timeout)
    course = Course(sess, reference, sharded, module, layouts or {}, names or {}, loss, options)
    return course.run(inputs)


@dataclass(frozen=True, slots=True)
class Options:
    """What `compare` was given besides programs and inputs."""

    rtol: float | None
    atol: float | None
    backward: bool
    seed: int
    timeout: float | None


class Course:
    """One comparison."""

    def __init__(
        self,
        session: Session,
        reference: Any,
        sharded: Any,
        module: Any,
        layouts: Mapping[str, Any],
        names: Mapping[str, str],
        loss: Any,
        options: Options,
    ) -> None:
        mine, its = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, loss)
        check_options(reference, options.rtol, options.atol, (mine, its))
        self.session, self.options = session, options
        self.meshes = meshes_of(session)
        self.names = Names(names)
        self.layouts = [(p, matcher(p), read_layout(v, self.meshes)) for p, v in layouts.items()]
        self._unused = set(layouts)
        self.ours = Side(reference, None, options.backward, mine)
        self.theirs = self._call(
            remote.begin, program_of(session, sharded), module, options.backward, its
        )
        self.called = (name_of(reference, "reference"), name_of(sharded, "sharded"))
        self.pairs: dict[str, Pair] = {}
        self.parameters: list[Point] = []
        self.points: list[Point] = []
        self.gradients: list[Point] = []
        self.notes: list[str] = []
        self.modules: list[dict[str, tuple[Any, ...]]] = []  # of each worker
        self.keys: set[str] = set()  # of all that the workers have
        self._lone: tuple[set[str], set[str]] = set(), set()  # of both sides, see `lone_keys`
        self.presence = Presence(session.num_workers)

    # -- the course ----------------------------------------------------------------------------

    def run(self, inputs: Any) -> Comparison:
        """Do it."""
        options = self.options
        with remote.on_shelf(self.ours) as token:
            self.judge = Judge(
                self.session, self.ours, self.theirs, token, self.meshes,
                (options.rtol, options.atol), options.timeout,
            )  # fmt: skip
            self._compare_parameters()
            try:
                self._run_forward(inputs)
                with self._telling():
                    self._compare_forward()
                    if options.backward:
                        self._compare_backward()
                return self._result(self._first())
            finally:
                self.ours.restore()
                if not self.session.closed:
                    self._call(remote.end, self.theirs)

    def _compare_parameters(self) -> None:
        with _plain_errors():
            held = by_key(self._fetch(remote.facts, self.theirs, _PARAMETERS))
        self.keys |= set(held)
        ours = self.ours.facts(_PARAMETERS)
        self.names.unwrap([str(fact[0]) for fact in ours], list(held))
        self.parameters = self._judged(ours, held)

    def _run_forward(self, inputs: Any) -> None:
        shared = inputs_of(self.session, inputs, self._layout_of, self.options.timeout)
        given = self._call(remote.hold, shared.args, shared.kwargs)  # raises if they can't travel
        with own_errors(self.called[0], "forward", (shared.args, shared.kwargs)):
            self.ours.forward(shared.args, shared.kwargs, self.options.seed)
        cuts = {name: layout.plain for name, layout in shared.cuts.items()}
        self._cuts = list(shared.cuts.values())
        call = self._call(remote.run_forward, self.theirs, given, self.options.seed, cuts)
        with self._telling():
            answers = self.session.fetch(call, None, self.options.timeout)
        self.modules = [{path: tuple(about) for path, *about in each} for each in answers]
        paths = list(dict.fromkeys(path for each in self.modules for path in each))
        check_some_match(list(self.ours.tape.modules), paths, self.names)

    def _compare_forward(self) -> None:
        held = by_key(self._fetch(remote.facts, self.theirs, _FORWARD))
        self.keys |= set(held)
        ours = self.ours.facts(_FORWARD)
        theirs = [next(iter(facts.values())) for facts in held.values()]
        self._lone = lone_keys(ours), lone_keys(theirs)
        self.presence.learn(held)
        told = self._fetch(remote.told, self.theirs)
        points = self._judged(ours, held)
        self.points = [
            *points,
            *self.presence.other_values(self.ours.tape.told, told, held, self.names.rename),
        ]

    def _compare_backward(self) -> None:
        starts = self._starts()
        if self.ours.loss is None and not starts:
            self.notes.append("no backward: nothing in the result has a gradient and a layout")
            return
        ours, told = {}, {}
        for number, (leaf, (shape, layout)) in enumerate(starts.items()):
            ours[leaf] = shape, None, number
            key = self.pairs[f"result||{leaf}"].point.theirs
            told[key.split("|")[2]] = shape, layout.plain, number
        with own_errors(self.called[0], "backward"):
            self.ours.backward(self.options.seed, ours)
        held = by_key(self._fetch(remote.run_backward, self.theirs, self.options.seed, told))
        self.keys |= set(held)
        self.gradients, notes = judged_averages(
            lambda: self._judged(self.ours.gradient_facts(), held),
            self.ours,
            count_of_parts(self._cuts, self.points, self.pairs),
            self.session.num_workers,
        )
        self.notes += notes

    def _starts(self) -> dict[str, tuple[tuple[int, ...], ShardLayout]]:
        """From what backward starts: the tensors of the result whose layout is known."""
        found = {}
        for leaf, tensor in self.ours.results():
            pair = self.pairs.get(f"result||{leaf}")
            if pair is None or not tensor.requires_grad or pair.point.problem:
                continue
            if any(is_number(fact) for fact in pair.held.values()):
                continue
            judged = next(p for p in self.points if p.key == pair.point.key)
            layout = next((s for s in pair.layouts if s.words == judged.layout), pair.layouts[0])
            found[leaf] = tuple(tensor.shape), layout
        return found

    def _first(self) -> Finding | None:
        seen = Seen(self.parameters, self.points, self.gradients, self.pairs, self._settings)
        first = first_finding(self.judge, seen)
        if first is None or first.point.gradient or not self.modules:
            return first
        idle = ""
        if first.point.kind in ("output", "result"):
            module = self.names.rename(first.point.module)
            idle = self.presence.not_run(module, first.ranks, self.modules)
        return replace(first, causes=(idle, *first.causes)) if idle else first

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Have an error of the workers say what was found before it."""
        try:
            yield
        except WaitTimeoutError as error:
            wrong = [p for p in (*self.parameters, *self.points) if not p.agrees]
            known = f"the first difference was in the {wrong[0].words}" if wrong else (
                f"{len(self.parameters)} parameters agree"
            )  # fmt: skip
            error.add_note(f"compare: the sharded program took too long; before that, {known}")
            raise
        except WorkerError as error:
            try:
                first = self._first()
            except WorkerError:
                first = None
            if first is not None:
                error.add_note(f"compare: before that, the first difference was in the {first}")
            raise

    def _call(self, func: Any, *args: Any) -> DRef:
        ref = self.session.call_packed(func, *args)
        ref.name = OWN
        return ref

    def _fetch(self, func: Any, *args: Any) -> list[Any]:
        return self.session.fetch(self._call(func, *args), None, self.options.timeout)

    # -- pairs ---------------------------------------------------------------------------------

    def _judged(self, ours: Sequence[Fact], held: Held) -> list[Point]:
        pairs = []
        for key, shape, dtype, number, _ in ours:
            kind, module, leaf = str(key).removesuffix(".grad").split("|")
            gradient = str(key).endswith(".grad")
            theirs = self.names.find(key, held, *self._lone)
            shown = "" if str(key).removesuffix(".grad") in self._lone[0] else leaf
            point = Point(kind, module, shown, gradient, shape, dtype, key, theirs or "")
            if theirs is not None:
                self.presence.without_tokens(point, held, theirs)
            pair = self.judge.pair(point, number, held.get(theirs or "", {}), self._given(point))
            if kind in ("argument", "result", "note") or theirs is not None or pair.point.problem:
                pairs.append(pair)
                self.pairs[key] = pair
        return self.presence.judged(self.judge.judge(pairs), self.pairs)

    def _given(self, point: Point) -> ShardLayout | None:
        found = self._layout_of(point.name)
        if found is None and point.gradient:
            found = self._layout_of(point_name(point.kind, point.module, point.leaf, False))
            if found is not None and found.is_partial:
                # terms of a sum have the sum's whole gradient
                return None
        return found

    def _layout_of(self, name: str) -> ShardLayout | None:
        for pattern, matches, layout in self.layouts:
            if matches(name):
                self._unused.discard(pattern)
                return layout
        return None

    def _settings(self, path: str) -> list[str]:
        ours = self.ours.tape.modules.get(path)
        other = self.names.rename(path)
        theirs = {r: known[other] for r, known in enumerate(self.modules) if other in known}
        return settings_words(ours, theirs) if ours is not None and theirs else []

    # -- the end -------------------------------------------------------------------------------

    def _result(self, first: Finding | None) -> Comparison:
        self.points = self.judge.shown_as_sums(self.points, self.pairs, first)
        self.gradients = self.judge.shown_as_sums(self.gradients, self.pairs, first)
        every = [*self.parameters, *self.points, *self.gradients]
        missing = [point for point in every if point.problem]
        mine = [("", path) for path in self.ours.tape.modules]
        mine += _paths(self.ours.tape.entries)
        theirs = [path for each in self.modules for path in each]
        theirs += [path for _, path in _paths(self.keys)]
        renamed = {self.names.rename(path, kind): path for kind, path in mine}
        lone = only_in([path for name, path in renamed.items() if name not in theirs], ())
        around = {above for name in renamed for above in _above(name)}
        extra = only_in([path for path in dict.fromkeys(theirs) if path not in around], renamed)
        if self._unused:
            unused = ", ".join(map(repr, sorted(self._unused)))
            self.notes.append(f"layouts: nothing has a name that {unused} matches")
        if idle := sorted(set(self.names.given) - self.names.used):
            self.notes.append(f"names: the reference has no {', '.join(map(repr, idle))}")
        calls = {self.names.rename(e.name, e.kind) for e in self.ours.tape.entries.values()}
        matched = {point.theirs for point in every}
        self.presence.tell_rest(calls, sorted(self.keys), matched, self.modules)
        self.presence.tell_parameters(self.pairs, self.modules)
        self.notes += self.presence.skipped
        self.notes += value_notes(self.pairs, every)
        known = () if first is None else first.causes
        self.notes += settings_notes(self.ours.tape.modules, self._settings, known)
        self.notes += detour_notes((self.points, self.gradients), first)

        def good(points: Sequence[Point]) -> tuple[Point, ...]:
            return tuple(point for point in points if not point.problem)

        return Comparison(
            self.called, self.session.num_workers, first,
            good(self.parameters), good(self.points), good(self.gradients),
            tuple(p for p in missing if p.theirs or not _within(p.module, lone)), lone, extra,
            tuple(self.notes), bool(self.presence.skipped), self.presence.plain,
        )  # fmt: skip


def _paths(keys: Any) -> Iterator[tuple[str, str]]:
    """The names of parameters and notes among keys, each behind which it is."""
    for key in keys:
        kind, name, _ = str(key).removesuffix(".grad").split("|")
        if kind in ("parameter", "note"):
            yield kind, name


def _above(path: str) -> Iterator[str]:
    """The paths of the modules around one, the model's own too."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _within(module: str, paths: Sequence[str]) -> bool:
    path = module.split("#")[0]
    return any(path == above or path.startswith(f"{above}.") for above in paths)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What the workers say of an argument is an `ArgumentError` here too."""
    try:
        yield
    except WorkerError as error:
        if isinstance(error.__cause__, ArgumentError) and "compare:" in str(error.__cause__):
            raise ArgumentError(str(error.__cause__)) from None
        raise
