"""`compare`: run the reference here and the sharded program on the workers, and compare them.

On the controller's thread: parameters, forward, backward. For each the two sides run and record
(sides.py, recorder.py), the matcher pairs what they have and has it measured (matcher.py), and at
the end the first divergence is diagnosed (diagnose.py). What the workers do is a worker function
like any other, so it works on every engine, and what fails there is the session's `WorkerError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..layouts.layout import ShardLayout
from ..runtime.errors import ArgumentError, WaitTimeoutError, WorkerError
from ..runtime.session import Session
from .arguments import (
    GivenLayouts,
    check_options,
    inputs_of,
    meshes_of,
    name_of,
    program_of,
    session_of,
)
from .causes import is_observation
from .diagnose import (
    Compared,
    detour_notes,
    doubtful_before,
    finding_at,
    first_divergence,
    input_notes,
    known_causes,
    settings_notes,
    two_orders,
    unmatched_before,
    value_notes,
    zero_notes,
)
from .looking import Operations
from .matcher import FORWARD, PARAMETERS, Matcher
from .pairs import Names, only_in
from .proving import Proof, Prover, Start, can_be_put
from .results import Finding, Point, ProgramComparison, Unmatched
from .rounding import LIKELY, Noise, measure_noise
from .sides import Fact, Side, WorkerSides, hold, on_shelf, own_errors
from .systematic import systematic

_NUMBER = re.compile(r"#?\d+")  # of a call, or a layer
_MOST_TRIES = 8  # values that are put in place, one after the other


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
) -> ProgramComparison:
    """Find the first place where a sharded program and its reference compute something else.

    Both run once on the same inputs, from the same random state: forward and backward (and again,
    to measure what rounding does, or to look for a cause, where something differs). What goes
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
        If `sharded` is a function: the worker's module whose inner modules it runs (a DRef). None:
        the one that it holds, as an argument of a `functools.partial` or in a closure.
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
        Two numbers agree if ``|a - b| <= atol + rtol * |b|``. With `rtol` alone, `atol` is that
        times a typical element of the value. None: by the dtype, see docs/compare.md.
    backward
        Whether to compare gradients. Those that the program's own backward leaves, if it runs one.
    loss
        A function of the program's result that gives a scalar, for both; or two, of the reference
        and of the workers. None: backward starts from random gradients of the result.
    seed
        Of the random state at the start.
    timeout
        Seconds to wait for the workers, for each step; None takes the session's.

    Returns
    -------
    ProgramComparison
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
    mine, its = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, loss)
    check_options(reference, rtol, atol, (mine, its))
    meshes = meshes_of(sess)
    given = GivenLayouts(layouts or {}, meshes)
    pathnames = Names(names)
    ours = Side(reference, None, backward, mine)
    workers = WorkerSides(sess, program_of(sess, sharded), module, backward, its, timeout)
    titles = name_of(reference, "reference"), name_of(sharded, "sharded")
    with on_shelf(ours) as token:
        matcher = Matcher(ours, workers, token, pathnames, given, (rtol, atol), meshes)
        return _Run(sess, ours, workers, matcher, titles, backward, seed).compare(inputs)


class _Run:
    """One run of both sides, and what was found until now."""

    def __init__(
        self,
        session: Session,
        ours: Side,
        workers: WorkerSides,
        matcher: Matcher,
        titles: tuple[str, str],
        backward: bool,
        seed: int,
    ) -> None:
        self.session, self.ours, self.workers, self.matcher = session, ours, workers, matcher
        self.titles, self.backward, self.seed = titles, backward, seed
        self.compared = Compared()
        self.notes: list[str] = []
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.cuts: dict[str, ShardLayout] = {}
        self.sizes: dict[str, int] = {}
        self._known_noise: list[Noise | None] = []
        self._starts: dict[str, Any] | None = None  # of backward; None: there was none

    def compare(self, inputs: Any) -> ProgramComparison:
        with _plain_errors():
            parameters = self.workers.facts(PARAMETERS)
        self.compared.parameters = self.matcher.compare_parameters(parameters)
        try:
            cuts = self._run_forward(inputs)
            with self._noting_first():
                self.compared.points = self.matcher.compare_forward(
                    self.workers.facts(FORWARD), self.workers.plain_values()
                )
                points, notes = self.matcher.losses_of_parts(self.compared.points, cuts)
                self.compared.points = points
                self.notes += notes
                if self.backward:
                    self._run_backward(cuts)
                    self._pass_data()
            first = self._proved(self._first())
            unmatched = None if first is None else unmatched_before(self.compared, first.point)
            if first is not None and unmatched is not None:
                words = f"perhaps it begins at the {unmatched.words}: {unmatched.problem}"
                first = replace(first, place=f"{first.place}; {words}")
            if first is not None and first.proved and not known_causes(first):
                mixed = two_orders(self.matcher, self.compared, first.point)
                if mixed:
                    first = replace(first, place=f"{first.place}; {mixed}")
                else:
                    first = self._looked_into(first)
            return self._comparison(first)
        finally:
            self.ours.restore()
            self.workers.end()

    def _pass_data(self) -> None:
        """Pass the gradient of data by, of which each worker has taken its part itself.

        It has the gradient of that part then, and zeros. Nobody sums the gradient of data up.
        """
        told = [
            p for p in self.compared.gradients
            if p.agrees and p.partial and not p.problem and not p.module
            and p.kind in ("argument", "input") and self.matcher.terms_are_parts(p)
        ]  # fmt: skip
        if not told:
            return
        self.compared.by_design |= {p.key for p in told}
        self.notes.append(
            f"each worker has the {told[0].words} of the part that it took, and nothing sums them "
            "up: right for data, and wrong for what something before it has made"
        )

    def _pass_left_gradients(self) -> None:
        """Pass gradients by that a program leaves behind, each worker its own, after its step.

        It has summed them elsewhere, as ZeRO does in a flat tensor, if what follows from the step
        is right.
        """
        points = self.compared.points
        left = [p for p in self.compared.gradients if not p.agrees and p.kind == "parameter"]
        if not left or not all(p.unlike for p in left) or not all(p.agrees for p in points):
            return
        if not any(self.ours.follows_step(p.key) for p in points if not p.problem):
            return
        self.compared.by_design |= {p.key for p in left}
        self.notes.append(
            f"the {left[0].words} that the program leaves behind is each worker's own; what "
            "follows from its step agrees, so the step took another"
        )

    def _first(self) -> Finding | None:
        """The first difference that is more than rounding, and what is perhaps off before it."""
        first = self._first_known()
        found = self._systematic(first)
        if found is not None:
            return found
        before = None if first is None else doubtful_before(self.compared, first.point)
        if first is None or before is None:
            return first
        return replace(
            first,
            place=f"{first.place}; perhaps it begins at the {before.words}, which is off by "
            f"{before.error / before.rounding:.0f} times what rounding did to two runs of the "
            "reference",
        )

    def _systematic(self, first: Finding | None) -> Finding | None:
        """A value before the first difference that only a coarse dtype's tolerance excuses."""
        until = None if first is None else first.point
        if until is not None and until.kind in ("parameter", "buffer") and not until.gradient:
            return None
        points = self.compared.points
        found = systematic(self.matcher, points, until, None)
        if found is not None:
            found = systematic(self.matcher, points, until, self._noise())
        if found is None or not found[2]:
            return None
        number, points[number], words = found
        known = finding_at(self.matcher, self.compared, points, number)
        return replace(known, place=f"{known.place}; {words}: perhaps it goes wrong here")

    def _proved(self, first: Finding | None) -> Finding | None:
        """The first difference of which it is proved that the program goes wrong there.

        What differs before it by design is left out. Where nothing can be proved it is the first of
        all, in humbler words.
        """
        prover = Prover(
            self.matcher, self.workers, Start(self.given, self.seed, self.cuts, self.sizes),
            self._judged_again,
        )  # fmt: skip
        compared, found = self.compared, first
        if first is not None and not first.point.gradient and not first.point.problem:
            dealt = [p for p in compared.parameters if p.key in self.matcher.in_rows]
            if dealt and prover.dealt_wrongly(dealt, compared.points):
                return self._lying(dealt[0], None)
        points = [*compared.parameters, *compared.points]
        passed: list[Finding] = []
        several: list[Finding] = []  # that are no place alone
        after: Point | None = None  # what is wrong with the reference's value at the first of these
        while found is not None and can_be_put(found.point) and len(passed) < _MOST_TRIES:
            shown, lies = prover.tried(found.point, points)
            owned = found.point.kind in PARAMETERS
            if shown is Proof.ALONE and not owned and prover.is_right_later(found.point, points):
                shown = Proof.DESIGN
            if shown in (Proof.PLACE, Proof.ALONE, Proof.UNKNOWN) or (
                shown is Proof.UNTIL and not (owned and several)
            ):
                if lies is not None and lies.is_partial and not known_causes(found):
                    words = "the workers' values are added up after this, and their sum is wrong"
                    found = replace(found, place=f"{found.place}; {words}")
                elif lies is not None and not lies.is_partial:
                    found = self._lying(found.point, lies)
                break
            if found.point.kind == "note" and shown is Proof.NOTHING:
                break  # it should be the same, whether it is used or not
            if shown is Proof.PART and not owned:
                alike = any(_is_alike(f.point, found.point) for f in several)
                found = found if alike else _humbly(found, found.causes, prover.still_wrong)
                break
            passed.append(found)
            if shown is not Proof.DESIGN:
                several.append(found)
                after = prover.still_wrong if len(several) == 1 else after
            compared.pass_by(found.point)
            found = first_divergence(self.matcher, compared)
            if found is None or found.point.kind not in PARAMETERS or found.point.gradient:
                place = prover.first_of_several([f.point for f in several], points)
                together = next((f for f in several if f.point is place), None)
                if together is not None:
                    found = together
                    break
        else:
            if several:
                compared.by_design -= {f.point.key for f in several}
                owned = several[0].point.kind in PARAMETERS  # it differs, whatever else does
                return several[0] if owned else _humbly(several[0], after=after)
        if found is not None:
            place = found.point
            found = next((f for f in several if _made_with(f.point, place)), found)
            found = next((f for f in several if _is_alike(f.point, place)), found)
            passed = passed[: passed.index(found)] if found in passed else passed
        if passed:
            self.notes.append(_by_design([f.point.words for f in passed]))
        return found

    def _lying(self, point: Point, layout: ShardLayout | None) -> Finding:
        """What is to be said of a point if its value is to lie otherwise; None: in rows."""
        known = self.matcher.in_rows.get(point.key)
        if layout is not None or known is None:
            assert layout is not None
            known = self.matcher.judged_as(point, layout)
        points = next(each for each in self.compared.runs if any(p.key == point.key for p in each))
        number = next(n for n, p in enumerate(points) if p.key == point.key)
        points[number] = known
        return finding_at(self.matcher, self.compared, points, number)

    def _judged_again(self, matcher: Matcher, points: list[Point]) -> list[Point]:
        """Points of another run of the workers, judged as those of the first one were."""
        points, _ = matcher.losses_of_parts(points, list(self.cuts.values()))
        noise = self._known_noise[0] if self._known_noise else None
        if noise is None:
            return points
        return [matcher.judged_by_noise(point, noise) for point in points]

    def _noise(self) -> Noise | None:
        """What rounding does to the reference, which is run again for that once."""
        if not self._known_noise:
            self.ours.restore()
            noise = measure_noise(self.ours, *self.given, self.seed, self._starts)
            self._known_noise.append(noise)
        return self._known_noise[0]

    def _first_known(self) -> Finding | None:
        first = first_divergence(self.matcher, self.compared)
        if first is None or not self.matcher.may_be_rounding(first.point):
            return first
        noise = self._noise()
        if noise is None:
            return first
        excused: list[Point] = []
        for points in (self.compared.points, self.compared.gradients):
            for number, point in enumerate(points):
                points[number] = self.matcher.judged_by_noise(point, noise)
                if points[number].agrees and not point.agrees:
                    excused.append(point)
        first = first_divergence(self.matcher, self.compared) if excused else first
        if first is not None and first.point.gradient:
            first = self._doubted(first, excused)
        if excused:
            self.notes.append(
                f"{len(excused)} value{'s' * (len(excused) > 1)} beyond the usual tolerance: off "
                "by no more than rounding does to the reference itself, as two more runs of it "
                "have shown"
            )
        return first

    def _doubted(self, first: Finding, excused: list[Point]) -> Finding:
        """The first difference where backward differs by more than rounding: perhaps in forward.

        There what was excused with a wide allowance, for two runs show little of what rounding may
        do, and what a coarse dtype has nearly become the same again, is the likelier place. What
        stays excused is left in `excused`.
        """
        points = self.compared.points
        for number, judged in enumerate(points):
            point = next((p for p in excused if p.key == judged.key), judged)
            if point is not judged and judged.error > LIKELY * judged.rounding:
                points[number] = replace(point, rounding=judged.rounding)
                excused.remove(point)
        self.compared.doubted = True
        found = first_divergence(self.matcher, self.compared)
        if found is None or found.point.gradient:
            self.compared.doubted = False
            return found or first
        return replace(
            found,
            place=f"{found.place}; rounding may do as much, and backward differs by more than "
            "that: perhaps it goes wrong here",
        )

    def _looked_into(self, first: Finding) -> Finding:
        """The same, with the cause that the operations give away, if they do."""
        point = first.point
        if point.gradient or point.problem or point.kind in ("parameter", "buffer", "argument"):
            return first
        try:
            return Operations(self.ours, self.workers, self.matcher, first).explained(
                self.compared, self.given, self.seed, self.cuts
            )
        except (WorkerError, WaitTimeoutError):
            return first  # the program has run: what fails is to look into it

    def _run_forward(self, inputs: Any) -> list[ShardLayout]:
        """Run both forward; gives the layouts of inputs of which each worker has a part."""
        shared = inputs_of(self.session, inputs, self.matcher.given.find, self.workers.timeout)
        given = self.workers.call(hold, shared.args, shared.kwargs)  # raises if they can't travel
        self.given, self.cuts = (shared.args, shared.kwargs), shared.cuts
        with own_errors(self.titles[0], "forward", self.given):
            self.ours.forward(shared.args, shared.kwargs, self.seed)
        with self._noting_first():
            rename = self.matcher.names.rename
            for key, size in self.ours.whole_sizes().items():
                kind, name, leaf = key.split("|")
                self.sizes[f"{kind}|{rename(name, kind)}|{leaf}"] = size
            modules = self.workers.run_forward(given, self.seed, shared.cuts, self.sizes)
        self.matcher.learn_modules(modules)
        return list(shared.cuts.values())

    def _run_backward(self, cuts: Sequence[ShardLayout]) -> None:
        matcher, points = self.matcher, self.compared.points
        if self.ours.ran_backward and self.ours.loss is None:
            self.ours.take_own_gradients()
            self._compare_gradients(self.workers.own_gradients(), cuts)
            inner = [p for p in self.compared.gradients if p.kind != "input" or p.module]
            self.compared.gradients = inner  # of data a step has no gradient
            self._pass_left_gradients()
            return
        starts = matcher.starts(points)
        if self.ours.loss is None and not starts:
            self.notes.append("no backward: nothing in the result has a gradient and a layout")
            return
        ours, theirs = {}, {}
        for number, (leaf, (shape, layout)) in enumerate(starts.items()):
            ours[leaf] = shape, None, number
            key = matcher.pairs[f"result||{leaf}"].point.theirs
            theirs[key.split("|")[2]] = shape, layout, number
        self._starts = ours
        with own_errors(self.titles[0], "backward"):
            self.ours.backward(self.seed, ours)
        self._compare_gradients(self.workers.run_backward(self.seed, theirs), cuts)

    def _compare_gradients(self, gradients: list[list[Fact]], cuts: Sequence[ShardLayout]) -> None:
        parts = self.matcher.count_of_parts(cuts, self.compared.points)
        self.compared.gradients, notes = self.matcher.compare_gradients(
            gradients, parts, self.matcher.has_loss_of_parts(self.compared.points)
        )
        self.notes += notes

    @contextmanager
    def _noting_first(self) -> Iterator[None]:
        """Have an error of the workers say what was found before it."""
        try:
            yield
        except WaitTimeoutError as error:
            wrong = [p for p in (*self.compared.parameters, *self.compared.points) if not p.agrees]
            known = f"the first difference was in the {wrong[0].words}" if wrong else (
                f"{len(self.compared.parameters)} parameters agree"
            )  # fmt: skip
            error.add_note(f"compare: the sharded program took too long; before that, {known}")
            raise
        except WorkerError as error:
            try:
                first = first_divergence(self.matcher, self.compared)
                if first is None and self.matcher.in_rows:
                    dealt = (p for p in self.compared.every if p.key in self.matcher.in_rows)
                    first = self._lying(next(dealt), None)
            except WorkerError:
                first = None
            if first is not None:
                error.add_note(f"compare: before that, the first difference was in the {first}")
            raise

    def _comparison(self, first: Finding | None) -> ProgramComparison:
        matcher, compared = self.matcher, self.compared
        wrong = None if first is None else first.point
        compared.points = matcher.shown_as_sums(compared.points, wrong)
        compared.gradients = matcher.shown_as_sums(compared.gradients, wrong)
        if first is not None:
            shown = (p for p in compared.every if p.key == first.point.key and not p.agrees)
            first = replace(first, point=next(shown, first.point))
        missing = [point for point in compared.every if point.problem]
        only_ours, only_theirs = _only_on_one_side(matcher)
        notes = [*self.notes, *self._closing_notes(first)]

        def comparable(points: Iterable[Point]) -> tuple[Point, ...]:
            return tuple(point for point in points if not point.problem)

        return ProgramComparison(
            self.titles,
            self.session.num_workers,
            first,
            parameters=comparable(compared.parameters),
            points=comparable(compared.points),
            gradients=comparable(compared.gradients),
            unmatched=Unmatched(p for p in missing if p.theirs or not _within(p.module, only_ours)),
            only_in_reference=only_ours,
            only_in_sharded=only_theirs,
            notes=tuple(notes),
            partly=bool(matcher.presence.skipped or self._ungraded()),
            plain=matcher.presence.plain,
        )

    def _ungraded(self) -> list[str]:
        """How many parameters have a gradient in the reference that was compared with none."""
        known = {p.key for p in self.compared.gradients if not p.problem}
        ours = self.ours.gradient_facts() if self.backward else []
        every = [str(fact[0]) for fact in ours if str(fact[0]).startswith("parameter|")]
        lacking = sum(key not in known for key in every)
        what = "no gradient of a parameter was compared"
        if 0 < lacking < len(every):
            what = f"the gradients of {lacking} of {len(every)} parameters were not compared"
        return [what] if lacking else []

    def _closing_notes(self, first: Finding | None) -> Iterator[str]:
        """What else a reader should know."""
        matcher, names, presence = self.matcher, self.matcher.names, self.matcher.presence
        recorder = self.ours.recorder
        if unused := matcher.given.unused:
            yield f"layouts: nothing has a name that {', '.join(map(repr, unused))} matches"
        if idle := sorted(set(names.given) - names.used):
            yield f"names: the reference has no {', '.join(map(repr, idle))}"
        calls = {names.rename(entry.name, entry.kind) for entry in recorder.entries.values()}
        matched = {point.theirs for point in self.compared.every}
        presence.tell_rest(calls, sorted(matcher.keys), matched)
        presence.tell_parameters(matcher.pairs)
        yield from presence.skipped
        yield from value_notes(matcher.pairs, self.compared.every)
        yield from zero_notes(matcher.ours.value, self.compared.gradients)
        yield from input_notes(self.compared.gradients, first)
        if first is None or first.point.gradient:
            yield from self._ungraded()
        known = () if first is None else first.causes
        yield from settings_notes(recorder.modules, matcher.settings, known)
        yield from detour_notes(self.compared, first)


def _made_with(parameter: Point, point: Point) -> bool:
    """Whether a value comes out of the module that has a parameter."""
    made = point.kind == "output" and point.module == parameter.owner
    return made and parameter.kind in PARAMETERS


def _by_design(words: Sequence[str]) -> str:
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    differ = "differ" if len(words) > 1 else "differs"
    return (
        f"{', '.join(words[:4])}{more} {differ}, perhaps by design: with the reference's values "
        "there nothing that comes after is better"
    )


def _is_alike(point: Point, other: Point) -> bool:
    """Whether two values come out of one module, or of modules of two layers: of one code."""
    one, two = (_NUMBER.sub("", p.module) for p in (point, other))
    return point.kind == other.kind == "output" and one == two != ""


def _humbly(first: Finding, causes: Sequence[str] = (), after: Point | None = None) -> Finding:
    """The first difference, where nothing proves that the program goes wrong there.

    `after`: what is wrong next with the reference's value there.
    """
    then = "after that" if after is None else f"at or before the {after.words}"
    return replace(
        first,
        causes=tuple(causes) or tuple(cause for cause in first.causes if is_observation(cause)),
        place=f"{first.place}; with the reference's value there the rest stays wrong: perhaps it "
        f"differs by design, and goes wrong {then}",
        proved=False,
    )


def _only_on_one_side(matcher: Matcher) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules, parameters and notes that only the reference has, and only the workers have."""
    recorder = matcher.ours.recorder
    mine = [("", path) for path in recorder.modules]
    mine += _paths(recorder.entries)
    theirs = [path for each in matcher.presence.modules for path in each]
    theirs += [path for _, path in _paths(matcher.keys)]
    renamed = {matcher.names.rename(path, kind): path for kind, path in mine}
    lone = only_in([path for name, path in renamed.items() if name not in theirs], ())
    around = {above for name in renamed for above in _above(name)}
    extra = only_in([path for path in dict.fromkeys(theirs) if path not in around], renamed)
    return lone, extra


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
