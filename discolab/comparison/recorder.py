"""Records what one run of a program computes: the values between its modules, their gradients.

An `ActivationRecorder` is made for one run, of the reference on the controller or of the sharded
program on a worker, and written by the thread that runs it (on a GPU the gradients by autograd's
threads). Hooks on the modules take inputs and outputs, `note` takes what has no module. A value is
copied when it is seen, since a program may write over it later; one tensor under several names is
copied once. `leaves` and its kin name the tensors that are in a value.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch

from ..layouts.text import read_placements
from ..runtime.interrupts import plain_lock
from ..views.facts.tensors import is_dtensor

V = TypeVar("V")

Sharding: TypeAlias = tuple[Any, ...]
"""How a DTensor lies: placements, shape and ranks of its mesh, its logical shape."""

_LARGEST_DENSE = 2**28  # elements of a sparse tensor that are written out

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

_here = threading.local()


def note(name: str, value: V) -> V:
    """Name a value in the middle of a program, for `discolab.compare` to compare; gives it back.

    ``h = discolab.note("scores", q @ k.mT)``: the value of that name in the reference is compared
    with it, and so are the gradients. While nothing is compared it does nothing, so it can stay
    in the program.

    Parameters
    ----------
    name
        The second value of a name in one run is called ``name#2``, and so on.
    value
        A tensor, or a list, tuple or dict of tensors.
    """
    recorder: ActivationRecorder | None = getattr(_here, "recorder", None)
    return value if recorder is None else recorder.take("note", str(name) or "note", value)


@dataclass(slots=True)
class Gradient:
    """The gradient of a value, once it has come, and as which one.

    It was multiplied by `factor`; `pieces` are the gradients of a batch's parts.
    """

    value: torch.Tensor | None = None
    sharding: Sharding | None = None
    order: int = -1
    factor: float = 1.0
    pieces: tuple[Gradient, ...] = ()


@dataclass(slots=True)
class Snapshot:
    """What a tensor held when it was seen. `number` is its own in the recording."""

    number: int
    value: torch.Tensor
    sharding: Sharding | None
    version: int
    source: Callable[[], torch.Tensor | None]
    gradient: Gradient = field(default_factory=Gradient)
    hooked: bool = False


@dataclass(slots=True)
class Entry:
    """A value under one of its names.

    `kind` is ``argument`` or ``result`` of the program, ``input`` or ``output`` of a module,
    ``note``, ``parameter``, ``buffer``, or ``state`` for what a run left in one; `name` the path of
    the module or what it was named, with ``#2`` at its second call; `leaf` says which value of
    several, else it is empty.
    """

    kind: str
    name: str
    leaf: str
    snapshot: Snapshot
    gradient: Gradient
    number: str = ""  # "python float" for a number that is no tensor
    requires_grad: bool = False

    @property
    def key(self) -> str:
        """The name by which it is asked for."""
        return f"{self.kind}|{_safe(self.name)}|{_safe(self.leaf)}"


class _Put(torch.autograd.Function):
    """Another value in place of a tensor, whose gradient it has: a program may run backward."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> Any:
        return grad, None


class ActivationRecorder:
    """The values of one run, in the order in which they came."""

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients
        self.entries: dict[str, Entry] = {}
        self.modules: dict[str, tuple[str, str, bool]] = {}
        self.plain_values: dict[str, tuple[str, str]] = {}
        self.unchanged: set[str] = set()  # states that are what buffers held before
        self.put: dict[str, torch.Tensor] = {}  # by key, what goes on in place of a value
        self._rows_put: dict[str, int] = {}  # of a batch in pieces: how many rows went on
        self._seen: dict[int, Snapshot] = {}
        self._calls: dict[tuple[str, str], int] = {}
        self._numbers = 0
        self._order = 0
        self._lock = plain_lock()  # gradients may come on several threads
        self._order_hooks: list[Any] = []

    # -- while it runs -------------------------------------------------------------------------

    @contextmanager
    def recording(self, module: torch.nn.Module | None) -> Iterator[None]:
        """Take what goes through the submodules of `module` on this thread, and what is noted."""
        hooks: list[Any] = []
        thread = threading.get_ident()
        before = getattr(_here, "recorder", None)
        _here.recorder = self
        try:
            for path, inner in module.named_modules() if module is not None else ():
                hooks += self._hook(plain_path(path), inner, thread)
            yield
        finally:
            _here.recorder = before
            for hook in hooks:
                hook.remove()
            self._seen.clear()

    def _hook(self, path: str, module: torch.nn.Module, thread: int) -> list[Any]:
        self.modules[path] = type(module).__name__, _extra(module), module.training
        stack: list[str] = []  # the calls that have begun

        # Worker threads may share a module. torch enters a hook, then that it takes kwargs: another
        # thread may call it without them in between, for which it does nothing.

        def before(_: Any, args: Any, kwargs: Any = None) -> Any:
            if torch.compiler.is_compiling():  # what is compiled now would have this hook in it
                return None
            if threading.get_ident() != thread or getattr(_here, "recorder", None) is not self:
                return None
            stack.append(self._numbered("module", path))
            return self._take_inputs(stack[-1], args, kwargs)

        def after(_: Any, *args_kwargs_output: Any) -> Any:
            if torch.compiler.is_compiling():
                return None
            if stack and threading.get_ident() == thread:
                return self._enter("output", stack.pop(), args_kwargs_output[-1])
            return None

        return [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def take(self, kind: str, name: str, value: V) -> V:
        """Enter a value, and the gradient that comes for it; gives what goes on in its place."""
        return self._enter(kind, self._numbered(kind, name), value)

    def _enter(self, kind: str, name: str, value: V) -> V:
        if self.put:

            def put(leaf: str, tensor: torch.Tensor) -> torch.Tensor:
                return self._in_place_of(kind, name, leaf, tensor)

            value = replaced(value, "", put)
        if kind in ("result", "note"):
            self._enter_plain(kind, name, value)
        for leaf, tensor in leaves(value):
            snapshot = self._snapshot(tensor)
            if self.gradients and tensor.requires_grad and not snapshot.hooked:
                snapshot.hooked = True
                tensor.register_hook(self._receiver(snapshot.gradient))
            graded = tensor.requires_grad
            self._add(Entry(kind, name, leaf, snapshot, snapshot.gradient, requires_grad=graded))
        return value

    def _in_place_of(self, kind: str, name: str, leaf: str, tensor: torch.Tensor) -> torch.Tensor:
        """What goes on in place of a tensor: itself, or what was put there.

        Of a batch in pieces, which `join_calls` makes one value, each call has the next rows.
        """
        key = f"{kind}|{_safe(name)}|{_safe(leaf)}"
        first = f"{kind}|{_safe(name.partition('#')[0])}|{_safe(leaf)}"
        given = self.put.get(key, self.put.get(first))
        if given is None:
            return tensor
        local = local_of(tensor)[0]
        if given.shape != local.shape:
            start = self._rows_put.get(first, 0)
            self._rows_put[first] = start + len(local) if local.dim() else start
            given = given[start : start + len(local)] if local.dim() and given.dim() else given
        elif key not in self.put:
            return tensor  # another call, of which nothing was put
        if given.shape != local.shape:
            return tensor
        given = given.to(local.device, local.dtype, copy=True)
        if is_dtensor(tensor):
            whole: Any = tensor
            given = type(whole).from_local(
                given, whole.device_mesh, whole.placements, run_check=False,
                shape=whole.shape, stride=whole.stride(),
            )  # fmt: skip
        if not tensor.requires_grad:
            return given
        put: torch.Tensor = _Put.apply(tensor, given)  # type: ignore[no-untyped-call]
        return put

    def _enter_plain(self, kind: str, name: str, value: Any) -> None:
        """Enter numbers as tensors without a dimension, and keep in words what is no number."""
        for leaf, one in plain_leaves(value):
            if isinstance(one, bool | int | float) and not is_huge(one):
                dtype = torch.float64 if isinstance(one, float) else None
                snapshot = self._snapshot(torch.tensor(one, dtype=dtype))
                label = f"python {type(one).__name__}"
                self._add(Entry(kind, name, leaf, snapshot, snapshot.gradient, label))
            elif one is None or isinstance(one, str | bytes | int):
                self.plain_values[f"{kind}|{_safe(name)}|{_safe(leaf)}"] = "value", f"{one!r}"
            else:
                self.plain_values[f"{kind}|{_safe(name)}|{_safe(leaf)}"] = (
                    "type",
                    type(one).__name__,
                )

    def _take_inputs(self, name: str, args: Any, kwargs: Any) -> Any:
        """Enter a module's inputs; each gets a view of its own, for the gradient is by module."""
        lone = len(leaves((args, kwargs))) == 1

        def taken(leaf: str, tensor: torch.Tensor) -> torch.Tensor:
            snapshot, gradient = self._snapshot(tensor), Gradient()
            shown = "" if lone else leaf
            if self.put:
                tensor = self._in_place_of("input", name, shown, tensor)
                snapshot = self._snapshot(tensor)
            graded = tensor.requires_grad
            self._add(Entry("input", name, shown, snapshot, gradient, requires_grad=graded))
            if not (self.gradients and tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            if isinstance(tensor, torch.nn.Parameter):
                return tensor
            view = tensor.view_as(tensor)
            view.register_hook(self._receiver(gradient))
            self._seen[id(view)] = dataclasses.replace(
                snapshot, source=weakref.ref(view), version=_version(view), hooked=False,
                gradient=Gradient(),
            )  # fmt: skip
            return view

        return tuple(replaced(arg, str(i), taken) for i, arg in enumerate(args)), {
            key: replaced(value, key, taken) for key, value in kwargs.items()
        }

    def _add(self, entry: Entry) -> None:
        while entry.key in self.entries:  # keys 1 and "1" of one dict
            entry.leaf += "'"
        self.entries[entry.key] = entry

    def _numbered(self, kind: str, name: str) -> str:
        """The name with the number of the call, from the second on."""
        count = self._calls[kind, name] = self._calls.get((kind, name), 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def _snapshot(self, tensor: torch.Tensor) -> Snapshot:
        snapshot = self._seen.get(id(tensor))
        version = _version(tensor)
        if (
            snapshot is not None
            and snapshot.source() is tensor
            and snapshot.version == version >= 0
        ):
            return snapshot
        value, sharding = local_copy(tensor)
        self._numbers += 1
        snapshot = Snapshot(self._numbers, value, sharding, version, weakref.ref(tensor))
        self._seen[id(tensor)] = snapshot
        return snapshot

    def _receiver(self, gradient: Gradient) -> Callable[[torch.Tensor], None]:
        def receive(grad: torch.Tensor) -> None:
            with self._lock:
                self._order += 1
                gradient.order = self._order
            gradient.value, gradient.sharding = local_copy(grad)

        return receive

    # -- micro-batches -------------------------------------------------------------------------

    def join_calls(self, whole: Mapping[str, int]) -> None:
        """Make one call of several: of modules that take a batch in pieces.

        Parameters
        ----------
        whole
            For each value of a module that the reference calls once: its size along dim 0.
        """
        again: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            path, hash_sign, _ = entry.name.partition("#")
            if entry.kind in ("input", "output") and hash_sign:
                again.setdefault(f"{entry.kind}|{path}|{_safe(entry.leaf)}", []).append(entry)
        for key, later in again.items():
            first = self.entries.get(key)
            if first is None or key not in whole:
                continue
            pieces = [entry.snapshot.value for entry in (first, *later)]
            kinds = {(piece.shape[1:], piece.dtype) for piece in pieces if piece.dim()}
            rows = sum(len(piece) for piece in pieces if piece.dim())
            if len(kinds) != 1 or rows != whole[key] or any(not piece.dim() for piece in pieces):
                continue
            self._numbers += 1
            joined = dataclasses.replace(
                first.snapshot, number=self._numbers, value=torch.cat(pieces)
            )
            gradient = Gradient(pieces=tuple(entry.gradient for entry in (first, *later)))
            self.entries[key] = dataclasses.replace(first, snapshot=joined, gradient=gradient)
            for entry in later:
                del self.entries[entry.key]

    def join_gradients(self) -> None:
        """The same of what backward has left."""
        for entry in self.entries.values():
            values = [piece.value for piece in entry.gradient.pieces]
            if values and all(value is not None for value in values):
                entry.gradient.value = torch.cat([value for value in values if value is not None])
                entry.gradient.order = max(piece.order for piece in entry.gradient.pieces)

    # -- parameters ----------------------------------------------------------------------------

    def take_parameters(self, module: torch.nn.Module | None) -> None:
        """Enter parameters and buffers, as they are: they are not copied."""
        if module is None:
            return
        for kind, found in (
            ("parameter", module.named_parameters(remove_duplicate=False)),
            ("buffer", module.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in found:
                value, sharding = local_of(tensor)
                self._numbers += 1
                snapshot = Snapshot(self._numbers, value, sharding, 0, weakref.ref(tensor))
                self._add(Entry(kind, plain_path(name), "", snapshot, snapshot.gradient))

    def take_states(
        self,
        module: torch.nn.Module,
        before: list[tuple[torch.Tensor, torch.Tensor]],
        changed_only: bool,
    ) -> None:
        """Enter what a run has left in buffers, which held something `before` it.

        How often a `BatchNorm` was called is no statistic: a batch may come in pieces.
        """
        same = {
            id(buffer) for buffer, old in before
            if buffer.layout is not torch.strided or torch.equal(buffer, old)
        }  # fmt: skip
        for name, tensor in module.named_buffers():
            if name.endswith("num_batches_tracked") or (changed_only and id(tensor) in same):
                continue
            snapshot = self._snapshot(tensor)
            entry = Entry("state", plain_path(name), "", snapshot, snapshot.gradient)
            self._add(entry)
            if id(tensor) in same:
                self.unchanged.add(entry.key)

    def note_parameter_order(self, module: torch.nn.Module | None) -> None:
        """Note when backward has the last part of each parameter's gradient, until `forget_order`.

        A parameter that several modules use, as a tied one, has it after the last of them.
        """
        if module is None or not self.gradients:
            return
        for name, parameter in module.named_parameters(remove_duplicate=False):
            entry = self.entries.get(f"parameter|{plain_path(name)}|")
            if entry is not None and parameter.requires_grad and parameter.is_leaf:
                hook = self._arrival(entry.gradient)
                self._order_hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _arrival(self, gradient: Gradient) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            with self._lock:
                self._order += 1
                gradient.order = self._order

        return arrived

    def forget_order(self) -> None:
        """Undo `note_parameter_order`."""
        while self._order_hooks:
            self._order_hooks.pop().remove()

    def take_parameter_gradients(self, module: torch.nn.Module | None) -> None:
        """Enter what backward has left in the ``.grad`` of the parameters."""
        if module is None:
            return
        for name, parameter in module.named_parameters(remove_duplicate=False):
            entry = self.entries.get(f"parameter|{plain_path(name)}|")
            if entry is not None and parameter.grad is not None:
                entry.gradient.value, entry.gradient.sharding = local_of(parameter.grad)


def plain_path(path: str) -> str:
    """A module's path without what wrappers put in it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _safe(text: str) -> str:
    """A name that can be a part of a key."""
    text = text.replace("|", "/")
    return f"{text[:-5]}_grad" if text.endswith(".grad") else text


def local_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Sharding | None]:
    """What of a tensor lies here, and how it lies if it says so."""
    if not is_dtensor(tensor):
        return _dense(tensor.detach()), None
    whole: Any = tensor
    mesh = whole.device_mesh
    sharding = (
        tuple(read_placements(whole.placements)),
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        tuple(whole.shape),
    )
    local = whole._local_tensor
    return getattr(local, "wait", lambda: local)().detach(), sharding


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A sparse tensor with its zeros; of one that is too large for that what it stores."""
    if tensor.layout is torch.strided:
        return tensor
    if tensor.numel() > _LARGEST_DENSE and (tensor.is_sparse or tensor.is_sparse_csr):
        return (tensor.coalesce() if tensor.is_sparse else tensor).values().detach()
    return tensor.to_dense()


def local_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, Sharding | None]:
    """As `local_of`, for a tensor that may change later."""
    with torch.no_grad():
        value, sharding = local_of(tensor)
        return value.clone(memory_format=torch.contiguous_format), sharding


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to; -1 if it does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _extra(module: torch.nn.Module) -> str:
    try:
        return str(module.extra_repr())[:200]
    except Exception:
        return ""


# -- what is in a value: its tensors and the rest, by names as ``hidden.1`` ------------------------


def leaves(value: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in a value; names like ``0`` and ``hidden.1``, empty if it is a tensor."""
    return [(leaf, one) for leaf, one in _walk(value, name) if isinstance(one, torch.Tensor)]


def plain_leaves(value: Any) -> list[tuple[str, Any]]:
    """All in a value that is no tensor and no container; names as of `leaves`."""
    return [(leaf, one) for leaf, one in _walk(value, "") if not isinstance(one, torch.Tensor)]


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type | torch.Tensor):
        items = ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
    else:
        yield name, value
        return
    for key, item in items:
        yield from _walk(item, f"{name}.{key}" if name else str(key))


def is_huge(number: float) -> bool:
    """Whether a number is an integer that no tensor holds."""
    return isinstance(number, int) and abs(number) >= 2**63


def replaced(value: Any, name: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A value with all its tensors changed; what is in a container of an unknown type is not."""
    if isinstance(value, torch.Tensor):
        return change(name, value)
    inner = f"{name}." if name else ""
    if isinstance(value, Mapping):
        items = {key: replaced(v, f"{inner}{key}", change) for key, v in value.items()}
        if all(items[key] is v for key, v in value.items()):
            return value
        return items if type(value) is dict else _like_mapping(value, items)
    if isinstance(value, list | tuple):
        parts = [replaced(v, f"{inner}{i}", change) for i, v in enumerate(value)]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    return value


def _like_mapping(value: Any, items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)
    except Exception:  # a mapping of its own kind: its tensors stay as they were
        return value
