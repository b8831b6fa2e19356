"""What a worker saves of its variables: pickles without the bytes of tensors, and those bytes.

Runs on the worker's thread. A pickle has numbers in place of the memory that tensors and arrays lie
in (`Memory`), so that two tensors on one storage stay so, and no byte of a tensor is copied before
it is written. Variables that share an object are pickled together, in one *bundle*; what can't be
pickled is found out variable by variable, and named.

Functions and classes of cells go with their code. Of a function only the code does: its globals are
the worker's variables, here and where it is restored.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import platform
import random
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy
import torch
from torch.utils.hooks import RemovableHandle

from ..debugger.frames import given_names
from ..layouts.layout import Layout
from ..layouts.text import layout_of, read_placements
from ..loader.formats.checks import MAX_DIMS, SAFETENSORS_NAMES
from ..loader.plan import Plan
from ..runtime import accelerators
from ..runtime.functions import worker_function
from ..runtime.mesh import Mesh
from ..runtime.serialize import reduce_module
from ..runtime.worker import Worker, current_worker
from ..views.facts.tensors import is_dtensor
from . import rebuilding
from .manifest import Bundle, Memory, Saved, Shard, TorchMesh

_SKELETONS = ("_make_skeleton_class", "_make_skeleton_enum")  # how cloudpickle begins a class
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
_NAMED_WHOLE = (*_FILES, *_LOCKS, threading.Thread, type, FunctionType, ModuleType)
"""Why these can't be saved needs no word on their attributes."""
_SHARED = (
    *(str, bytes, int, float, complex, bool, type, torch.dtype, Enum),
    *(BuiltinFunctionType, FunctionType, ModuleType, CodeType),
)
"""Of these it makes no difference whether two variables have the same object."""
_DEEPEST = 6
_MOST_CHILDREN = 1000


class CannotSave(Exception):
    """A value that does not outlive its process; the text says what it is."""


@dataclass(frozen=True)
class Wanted:
    """What to save; the same for all workers.

    Attributes
    ----------
    names
        Variables; None: all.
    refs
        The names of the DRefs whose values come along.
    plan
        How tensors are laid out over the workers, by ``variable`` or ``variable.member``.
    known
        The same for single tensors, by the same names: layout and the shape of the whole tensor.
    sizes, groups
        The workers that layouts are for.
    """

    names: tuple[str, ...] | None
    refs: tuple[str, ...]
    plan: Plan | None
    known: Mapping[str, tuple[Layout, tuple[int, ...] | None]]
    sizes: tuple[int, ...]
    groups: int


@dataclass
class Collected:
    """What a worker is about to write; stays on the worker.

    Attributes
    ----------
    saved
        What the manifest says of it.
    meshes
        By the numbers that its bundles have for them.
    pickles
        By bundle.
    memories
        By their numbers: storages, or buffers of arrays.
    """

    saved: Saved
    meshes: tuple[TorchMesh, ...]
    pickles: list[io.BytesIO] = field(repr=False)
    memories: list[Any] = field(repr=False)


@worker_function("collecting variables for a snapshot")
def collect(wanted: Wanted, values: Sequence[Any]) -> Collected:
    """Pickle this worker's variables, and the `values` of DRefs (a worker function)."""
    worker = current_worker()
    chosen = _variables(worker, wanted)
    book = _Book(worker)
    left_out: dict[str, str] = {
        name: "this worker has no such variable"
        for name in wanted.names or ()
        if ("variable", name) not in chosen
    }
    chosen.update({("ref", n): v for n, v in zip(wanted.refs, values, strict=True)})
    for (_, name), value in chosen.items():
        _note_layouts(book, wanted, name, value)
    memos: dict[tuple[str, str], dict[int, Any]] = {}
    for key, value in chosen.items():
        pickler = _Pickler(book, dry=True)
        try:
            pickler.dump(value)
        except Exception as exc:  # whatever a user's __reduce__ raises
            left_out[key[1]] = _why(book, key[1], value, exc)
        else:
            memos[key] = pickler.shareable()
            for note in pickler.notes:
                book.notes.setdefault(key[1], note)
    pickles, bundles = [], []
    for keys in (*_sharing(memos), []):
        values_of = [chosen[key] for key in keys] if keys else _random_states(worker)
        pickler = _Pickler(book)
        try:
            pickler.dump(values_of)
        except Exception as exc:
            left_out.update({name: reason_of(exc) for _, name in keys})
            continue
        pickles.append(pickler.file)
        bundles.append(
            Bundle(
                tuple(name for kind, name in keys if kind == "variable"),
                tuple(name for kind, name in keys if kind == "ref"),
                pickler.file.getbuffer().nbytes,
                hashlib.sha256(pickler.file.getbuffer()).hexdigest(),
                tuple(pickler.memories),
                tuple(pickler.meshes),
            )
        )
    memories = tuple(book.memory(number) for number in range(len(book.memories)))
    saved = Saved(platform.node(), memories, tuple(bundles), left_out, book.notes)
    return Collected(saved, tuple(book.meshes), pickles, book.memories)


def _variables(worker: Worker, wanted: Wanted) -> dict[tuple[str, str], Any]:
    """The user's variables by name, in alphabetical order: the same on workers that are alike."""
    given = given_names(worker)
    return {
        ("variable", name): value
        for name, value in sorted(worker.namespace.items(), key=lambda item: str(item[0]))
        if isinstance(name, str)
        and not (name.startswith("__") and name.endswith("__"))
        and (wanted.names is None or name in wanted.names)
        and not (name in given and _is_given(value, given[name]))
        and not (isinstance(value, Mesh) and value is worker.mesh)
    }


def _is_given(value: Any, given: Any) -> bool:
    return value is given or (type(value) is type(given) is int and value == given)


def _random_states(worker: Worker) -> list[Any]:
    """In one value: of torch, of Python, of numpy, and of the worker's GPU if it has one."""
    gpu = None
    if accelerators.in_use(worker.device):
        gpu = accelerators.module_of(worker.device).get_rng_state(worker.device)
    numpy_state = numpy.random.get_state(legacy=False)
    return [torch.get_rng_state(), random.getstate(), numpy_state, gpu]


# -- which variables belong together -----------------------------------------------------------


def _sharing(memos: Mapping[tuple[str, str], Mapping[int, Any]]) -> list[list[tuple[str, str]]]:
    """Sets of variables: those that have an object in common are in one."""
    parent = {key: key for key in memos}

    def root(key: tuple[str, str]) -> tuple[str, str]:
        while parent[key] != key:
            key = parent[key]
        return key

    owner: dict[int, tuple[str, str]] = {}
    for key, memo in memos.items():
        for number in memo:
            other = root(owner.setdefault(number, key))
            mine = root(key)
            if other != mine:
                parent[mine] = other
    sets: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key in memos:
        sets.setdefault(root(key), []).append(key)
    return list(sets.values())


# -- memory and meshes, known by number --------------------------------------------------------


class _Book:
    """The memories and meshes of all bundles of one worker, by number."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.memories: list[Any] = []
        self.meshes: list[TorchMesh] = []
        self.notes: dict[str, str] = {}
        self.classes: dict[type, str] = {}
        self._numbers: dict[Any, int] = {}
        # by what identifies a storage: the tensor in it whose layout is known, and all views of it
        self._laid: dict[int, tuple[torch.Tensor, Shard]] = {}
        self._views: dict[int, set[Any]] = {}
        self._kept: list[torch.UntypedStorage] = []  # these, so that the keys stay theirs
        self._class_names: Counter[str] = Counter()
        self._hook_ids: dict[int, _HookId] = {}
        self._hooks: dict[int, tuple[Any, Any]] = {}  # by id: those of a module, and what is saved

    def storage(self, storage: torch.UntypedStorage) -> int:
        return self._number(storage._cdata, storage)

    def buffer(self, buffer: pickle.PickleBuffer) -> int:
        return self._number(object(), buffer.raw())

    def _number(self, key: Any, memory: Any) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.memories)
            self.memories.append(memory)  # kept, so that the key stays its own
        return self._numbers[key]

    def memory(self, number: int) -> Memory:
        memory = self.memories[number]
        if isinstance(memory, memoryview):
            return Memory(memory.nbytes, of_array=True)
        on_device = memory.device.type != "cpu"
        if isinstance(memory, torch.UntypedStorage):
            return Memory(memory.nbytes(), on_device=on_device)
        shard = self._laid[memory.untyped_storage()._cdata][1]
        return Memory(memory.nbytes, on_device=on_device, shard=shard)

    def mesh(self, mesh: Any) -> int:
        grid, axes = mesh.mesh, mesh.mesh_dim_names
        ranks = tuple(grid.reshape(-1).tolist())
        made = TorchMesh(
            mesh.device_type, ranks, tuple(grid.shape), None if axes is None else tuple(axes)
        )
        if made not in self.meshes:
            self.meshes.append(made)
        return self.meshes.index(made)

    def class_id(self, kind: type) -> str:
        """What a class is called that is pickled with its code: the same on workers alike."""
        if kind not in self.classes:
            name = f"{kind.__module__}.{kind.__qualname__}"
            self._class_names[name] += 1
            self.classes[kind] = f"{name} {self._class_names[name]}"
        return self.classes[kind]

    def hook_id(self, number: int) -> _HookId:
        return self._hook_ids.setdefault(number, _HookId())

    def hooks(self, of_module: Any) -> Any:
        """Hooks of a module as they are saved; what are no hooks, or none, is given back."""
        if type(of_module) not in (dict, OrderedDict) or not of_module:
            return of_module
        if not all(type(number) is int for number in of_module):
            return of_module
        if id(of_module) not in self._hooks:
            made = type(of_module)((self.hook_id(n), hook) for n, hook in of_module.items())
            self._hooks[id(of_module)] = of_module, made
        return self._hooks[id(of_module)][1]

    def lay(self, tensor: torch.Tensor, shard: Callable[[torch.Tensor], Shard]) -> None:
        """Note that a tensor is a part of a larger one."""
        if (
            tensor.layout == torch.strided
            and tensor.device.type != "meta"
            and tensor.is_contiguous()
            and tensor.dtype in SAFETENSORS_NAMES
            and tensor.dim() <= MAX_DIMS
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        ):
            storage = tensor.untyped_storage()
            self._kept.append(storage)
            self._laid[storage._cdata] = tensor, shard(tensor)

    def saw(self, storage: torch.UntypedStorage, view: Any) -> None:
        """Note how something that is saved looks at a storage."""
        self._kept.append(storage)
        self._views.setdefault(storage._cdata, set()).add(view)

    def is_part(self, tensor: torch.Tensor) -> bool:
        """Whether it is known as a part of a larger one, and nothing else is seen of its memory."""
        key = tensor.untyped_storage()._cdata
        return key in self._laid and self._views.get(key) == {_view(self._laid[key][0])}

    def part(self, tensor: torch.Tensor) -> int:
        """The number of the memory of such a tensor: its own bytes, not all of its storage."""
        return self._number(tensor.untyped_storage()._cdata, tensor)


def _note_layouts(book: _Book, wanted: Wanted, name: str, value: Any) -> None:
    """Enter what is known of how tensors lie over the workers."""
    for full, tensor in _tensors_of(name, value):
        if full in wanted.known:
            layout, whole = wanted.known[full]
        else:
            rule = wanted.plan.find(full, tuple(tensor.shape)) if wanted.plan else None
            if rule is None:
                continue
            layout, whole = rule[1], None

        def shard(
            part: torch.Tensor, layout: Layout = layout, whole: tuple[int, ...] | None = whole
        ) -> Shard:
            return Shard(
                *(str(part.dtype), tuple(part.shape), str(layout)),
                *(whole, wanted.sizes, wanted.groups),
            )

        book.lay(tensor.detach(), shard)


def _tensors_of(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of a variable, by ``variable`` or ``variable.member``."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict(keep_vars=True)
    items = value.items() if isinstance(value, Mapping) else [("", value)]
    for key, item in items:
        plain = type(item) in (torch.Tensor, torch.nn.Parameter) and _is_strided(item)
        if isinstance(key, str) and plain:
            yield (f"{name}.{key}" if key else name), item


# -- pickling ----------------------------------------------------------------------------------


class _HookId:
    """Stands for the number of a hook: the process's own, which workers that are threads share."""


class _Marker:
    """Stands for the worker's variables as the globals of a function."""

    def __bool__(self) -> bool:
        return True


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles one bundle.

    Parameters
    ----------
    dry
        Only see whether it can be done: no memory and no mesh is entered in the book.

    Attributes
    ----------
    memories, meshes
        What the bundle uses, as numbers of the `_Book`; in the pickle are indexes of these lists.
    notes
        What is not saved of what is.
    """

    def __init__(self, book: _Book, dry: bool = False) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=5, buffer_callback=self._keep_buffer)
        self._book = book
        self._namespace = book.worker.namespace
        self._marker = _Marker()
        self._dry = dry
        self.memories: list[int] = []
        self.meshes: list[int] = []
        self.notes: list[str] = []
        self._where: dict[int, int] = {}  # number of a memory -> its index
        self._hook_numbers: dict[_HookId, int] = {}

    def shareable(self) -> dict[int, Any]:
        """The objects of which two variables might have the same, by id; they are kept alive."""
        return {
            number: kept
            for number, (_, kept) in self.memo.copy().items()
            if not isinstance(kept, _SHARED)
            and not (type(kept) is tuple and not kept)
            and not (isinstance(kept, CellType) and _holds_class(kept))
        }

    def _keep_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.readonly:
            return True  # in the pickle: an array made of a read-only buffer would be read-only
        if not self._dry:
            self._at(self._book.buffer(buffer))
        return False

    def _at(self, number: int) -> int:
        if number not in self._where:
            self._where[number] = len(self.memories)
            self.memories.append(number)
        return self._where[number]

    def _storage(self, storage: torch.UntypedStorage) -> int:
        if storage.device.type == "meta":
            raise CannotSave("a storage without memory (device meta)")
        return 0 if self._dry else self._at(self._book.storage(storage))

    def persistent_id(self, obj: Any) -> Any:
        """What stands for memory, meshes, the worker and its variables."""
        kind = type(obj)
        if kind is torch.storage.TypedStorage:
            return "typed", self._storage(obj._untyped_storage), obj.dtype
        if kind is torch.UntypedStorage:
            if self._dry:
                self._book.saw(obj, "all")
            return "untyped", self._storage(obj)
        if kind is rebuilding.Part:
            return "part", self._at(self._book.part(obj.tensor))
        if obj is self._marker or obj is self._namespace:
            return ("namespace",)
        if obj is self._book.worker:
            return ("worker",)
        if kind is _HookId:
            return "hook", self._hook_numbers.setdefault(obj, len(self._hook_numbers))
        if kind.__name__ == "DeviceMesh" and kind.__module__.startswith("torch.distributed"):
            if self._dry:
                return "mesh", 0
            number = self._book.mesh(obj)
            if number not in self.meshes:
                self.meshes.append(number)
            return "mesh", self.meshes.index(number)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle`: how each object is taken apart."""
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, _FILES):
            raise CannotSave(f"an open file ({getattr(obj, 'name', '?')!s:.80})")
        if isinstance(obj, _LOCKS):
            raise CannotSave("a lock or an event")
        if isinstance(obj, threading.Thread):
            raise CannotSave("a thread")
        if _is_process_group(obj):
            raise CannotSave("a process group")
        if isinstance(obj, torch.Generator):
            return rebuilding.build_generator, (obj.device.type, obj.get_state())
        if (named := reduce_module(obj)) is not None:
            return named
        if isinstance(obj, torch.nn.Module | RemovableHandle):
            return self._reduce_hooked(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            return self._reduce_class(obj, reduced)
        return reduced

    def _reduce_hooked(self, obj: Any) -> Any:
        """A module, or what removes a hook: hooks get numbers of the process that restores them."""
        reduced = obj.__reduce_ex__(5)
        if not isinstance(reduced, tuple) or len(reduced) < 3:  # made by code of its own
            return reduced
        build, args, state, *rest = reduced
        book = self._book
        if isinstance(obj, RemovableHandle):
            hooks, number, *more = state
            others = (tuple(map(book.hooks, dicts)) for dicts in more)
            state = book.hooks(hooks), book.hook_id(number), *others
        elif isinstance(state, dict):
            state = {k: book.hooks(v) if "_hooks" in k else v for k, v in state.items()}
        return build, args, state, *rest

    def _reduce_class(self, kind: type, reduced: tuple[Any, ...]) -> Any:
        """A class with its code; its id must not differ between workers that are alike."""
        build, args, *rest = reduced
        if getattr(build, "__name__", "") not in _SKELETONS:
            return reduced
        *front, _, extra = args
        return (build, (*front, self._book.class_id(kind), extra), *rest)

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        build, args, (state, slots), *rest = super()._dynamic_function_reduce(func)
        slots["_cloudpickle_submodules"].sort(key=lambda module: module.__name__)
        if func.__globals__ is self._namespace:
            args = (args[0], self._marker, *args[2:])
            slots = {**slots, "__globals__": {}}
        return (build, args, (state, slots), *rest)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if is_dtensor(tensor):
            reduced = self._reduce_dtensor(tensor)
        elif tensor.device.type == "meta":
            return tensor.__reduce_ex__(5)
        elif self._seen(tensor) and self._book.is_part(tensor):
            part = rebuilding.Part(tensor.detach())
            reduced = rebuilding.build_part, (part, tensor.requires_grad)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="backward hook", category=UserWarning)
                reduced = tensor.__reduce_ex__(5)
        own = {k: v for k, v in vars(tensor).items() if k != "_is_param"}
        if own and reduced[0] in (rebuilding.build_dtensor, rebuilding.build_part):
            reduced = rebuilding.with_attributes, (*reduced[:2], own)
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            self.notes.append("hooks of tensors are not saved")
        if not tensor.is_leaf:
            self.notes.append("the graph for backward is not saved: it is a leaf when restored")
            return reduced
        if tensor.grad is None:
            return reduced
        build, args, *more = reduced
        return (
            build,
            args,
            (more[0] if more else None, tensor.grad),
            None,
            None,
            rebuilding.set_grad,
        )

    def _seen(self, tensor: torch.Tensor) -> bool:
        """Whether all that is saved of its memory is known; else note what this sees of it."""
        if type(tensor) is not torch.Tensor or not _is_strided(tensor):
            return False
        if self._dry:
            self._book.saw(tensor.untyped_storage(), _view(tensor))
        return not self._dry

    def _reduce_dtensor(self, tensor: Any) -> Any:
        local, spec = tensor._local_tensor.detach(), tensor._spec
        shard = _shard_of(tensor, self._book.worker)
        if shard is not None:
            self._book.lay(local, shard)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return rebuilding.build_dtensor, (
            *(local, spec.mesh, tuple(spec.placements), tuple(tensor.shape)),
            *(tuple(tensor.stride()), tensor.requires_grad, is_parameter),
        )


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor sees of its storage."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), lazy


def _holds_class(cell: CellType) -> bool:
    """Whether it is that of a method that calls ``super()``."""
    try:
        return isinstance(cell.cell_contents, type)
    except ValueError:
        return False


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _is_process_group(value: Any) -> bool:
    distributed = torch.distributed
    if not distributed.is_available():
        return False
    return isinstance(
        value, (distributed.ProcessGroup, torch._C._distributed_c10d.Store, distributed.Work)
    )


def _shard_of(tensor: Any, worker: Worker) -> Callable[[torch.Tensor], Shard] | None:
    """What a DTensor says of its local part; None if that does not say all."""
    mesh = tensor.device_mesh
    sizes = tuple(mesh.mesh.shape)
    if mesh.mesh.reshape(-1).tolist() != list(range(worker.num_workers)):
        return None
    try:
        layout = layout_of(read_placements(tensor.placements), tensor.dim())
    except (ValueError, TypeError, LookupError):
        return None
    if layout.partial:
        return None
    axes = mesh.mesh_dim_names

    def shard(local: torch.Tensor) -> Shard:
        return Shard(
            *(str(local.dtype), tuple(local.shape), str(layout), tuple(tensor.shape)),
            *(sizes, 1, tuple(axes) if axes is not None else ()),
        )

    return shard


# -- why not -----------------------------------------------------------------------------------


def _why(book: _Book, name: str, value: Any, exc: Exception) -> str:
    """What in a value can't be saved, and where in it."""
    path = name
    for _ in range(_DEEPEST):
        for label, child in _children(value):
            try:
                _Pickler(book, dry=True).dump(child)
            except Exception as deeper:
                path, value, exc = path + label, child, deeper
                break
        else:
            break
    return reason_of(exc) if path == name else f"{path} is {reason_of(exc)}"


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    if type(value) is dict:
        items = [(f"[{key!r:.40}]", item) for key, item in value.items()]
    elif type(value) in (list, tuple):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        names = getattr(value, "__dict__", None)
        if isinstance(names, dict) and not isinstance(value, _NAMED_WHOLE):
            items = [(f".{key}", item) for key, item in names.items()]
    return items[:_MOST_CHILDREN]


def reason_of(exc: Exception) -> str:
    """What an error of pickle says of a value, in a few words."""
    if isinstance(exc, CannotSave):
        return str(exc)
    text = (str(exc).splitlines() or [""])[0]
    kind = text.removeprefix("cannot pickle '").removesuffix("' object")
    if text == f"cannot pickle '{kind}' object":
        return f"a {kind}, which can't be pickled"
    return f"not to be pickled: {type(exc).__name__}: {text:.200}"
