"""Variables that a library's functions write, and attributes of its classes: each worker's own.

Libraries that shard keep their groups, ranks and trackers of random numbers so: what one worker
has written last would be everybody's rank. The functions and methods of the module that name such a
variable run with a copy of the module's variables, which a worker makes at its first call and keeps
until its script ends; others who read ``module.name`` are given what stands in that copy. What
somebody sets in the module beside these variables, as who replaces a function does, is for all.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import weakref
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from . import table
from .patches import ModuleOfWorkers, ModuleWithProperties, Patches
from .worker_local import OF_SCRIPT, own_value


def _own(value: Any) -> Any:
    """A worker's, to begin with: a copy of what is filled in place."""
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _own_object(value: Any) -> Any:
    """The same, of what was named as changed in place: an object with all that it holds."""
    own = _own(value)
    return copy.deepcopy(value) if own is value else own


class _Own:
    """A worker's copy of a module's variables, and the functions that run with it."""

    def __init__(
        self, shared: dict[str, Any], names: frozenset[str], filled: frozenset[str]
    ) -> None:
        self.variables = shared.copy()
        for name in names & self.variables.keys():
            make = _own_object if name in filled else _own
            self.variables[name] = make(self.variables[name])
        self._shared = shared
        self._functions: dict[FunctionType, FunctionType] = {}

    def bound(self, function: FunctionType) -> Callable[..., Any]:
        """The function with these variables, and so are those that it wraps as a decorator's."""
        made = self._functions.get(function)
        if made is None:
            bound: dict[FunctionType, FunctionType] = {}
            made = self._bind(function, bound)
            self._functions.update(bound)  # other threads are given none whose cells are empty
        return made

    def _bind(
        self, function: FunctionType, bound: dict[FunctionType, FunctionType]
    ) -> FunctionType:
        """The function, unless it is `bound`, as functions are that hold each other."""
        if function in bound:
            return bound[function]
        here = function.__globals__ is self._shared
        variables = self.variables if here else function.__globals__
        closure = function.__closure__ or ()
        cells = tuple(CellType() if self._is_held(cell) else cell for cell in closure)
        defaults = tuple(map(_own, function.__defaults__ or ())) or None
        made = FunctionType(function.__code__, variables, function.__name__, defaults, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        bound[function] = made
        for cell, own_cell in zip(closure, cells, strict=True):
            if cell is not own_cell:
                own_cell.cell_contents = self._bind(cell.cell_contents, bound)
        return made

    def _is_held(self, cell: CellType) -> bool:
        """Whether a cell holds a function that needs these variables."""
        with contextlib.suppress(ValueError):  # an empty one
            return _is_of(cell.cell_contents, self._shared)
        return False


def own_globals(module: ModuleType, patches: Patches, *more: str) -> None:
    """Have each worker find variables of its own in a module: those that its functions write.

    Parameters
    ----------
    more
        Others, such as lists, dictionaries and objects of classes that are changed in place, of
        which a worker begins with a copy.
    """
    shared = vars(module)
    classes = _classes(module)
    names = frozenset(written_names(module) | {*more})
    key = f"{OF_SCRIPT}variables of {module.__name__}"
    here = functools.partial(own_value, key, lambda: make())

    def over(function: FunctionType) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_own_variables(*args: Any, **kwargs: Any) -> Any:
            own = here()
            return (function if own is None else own.bound(function))(*args, **kwargs)

        return with_own_variables

    for name, value in shared.copy().items():
        if _is_of(value, shared) and names & _named(value, shared):
            patches.replace(module, name, over, everywhere=True)
    for owner in classes:
        for name, wrap, function in _methods(owner):
            if names & _named(function, shared):
                patches.replace(owner, name, _Method(wrap, over(function)))

    def variable(name: str) -> property:
        def get(module: Any) -> Any:
            own = here()
            try:
                return (shared if own is None else own.variables)[name]
            except KeyError:
                raise AttributeError(f"{module.__name__} has no {name!r}") from None

        def set_(module: Any, value: Any) -> None:
            own = here()
            (shared if own is None else own.variables)[name] = value

        def delete(module: Any) -> None:
            own = here()
            try:
                del (shared if own is None else own.variables)[name]
            except KeyError:
                raise AttributeError(f"{module.__name__} has no {name!r}") from None

        return property(get, set_, delete)

    copies: list[weakref.ref[_Own]] = []

    def make() -> _Own:
        own = _Own(shared, names, frozenset(more))
        copies.append(weakref.ref(own, copies.remove))
        return own

    def set_for_all(module: ModuleType, name: str, value: Any) -> None:
        ModuleOfWorkers.__setattr__(module, name, value)
        if name not in names:  # a function, say, that somebody replaces
            for own in filter(None, [copied() for copied in tuple(copies)]):
                own.variables[name] = value

    def variables_here(module: ModuleType) -> dict[str, Any]:
        own = here()
        return shared if own is None else own.variables

    about = {"__setattr__": set_for_all, "__dict__": property(variables_here)}
    properties: dict[str, Any] = {name: variable(name) for name in names}
    kind = type("ModuleOfOwnGlobals", (ModuleWithProperties,), properties | about)
    patches.change_class(module, kind)

    def inherit(own: _Own) -> None:
        shared.update({n: value for n, value in own.variables.items() if n in names})
        for name in (names & shared.keys()) - own.variables.keys():
            del shared[name]

    table.inherits(key, inherit)


def owning_globals(*more: str) -> Callable[[ModuleType, Patches], None]:
    """For `Row.on_import`: `own_globals` of the module."""
    return lambda module, patches: own_globals(module, patches, *more)


def own_class_attributes(module: ModuleType, name: str, patches: Patches, *names: str) -> None:
    """Have each worker find values of its own in attributes of a class, asked for by its name.

    A class in its place has them, and derives from it: who sets an attribute must name that one.
    Whoever reads it, by an instance or a subclass too, is given the worker's, which begins with
    that of the process.
    """
    owner: Any = getattr(module, name)
    key = f"{OF_SCRIPT}attributes of {module.__name__}.{name}"
    shared = {attribute: getattr(owner, attribute) for attribute in names}
    here = functools.partial(
        own_value, key, lambda: {name: _own(value) for name, value in shared.items()}
    )

    def variable(attribute: str) -> property:
        def get(cls: Any) -> Any:
            own = here()
            return (shared if own is None else own)[attribute]

        def set_(cls: Any, value: Any) -> None:
            own = here()
            (shared if own is None else own)[attribute] = value

        return property(get, set_)

    def put_back() -> None:
        for attribute, value in shared.items():
            setattr(owner, attribute, value)

    def inherit(own: dict[str, Any]) -> None:
        shared.update(own)
        put_back()

    def is_instance(cls: Any, instance: Any) -> Any:
        return meta.__instancecheck__(owner if cls is new else cls, instance)

    def is_subclass(cls: Any, other: Any) -> Any:
        return meta.__subclasscheck__(owner if cls is new else cls, other)

    meta: Any = type(owner)
    variables: dict[str, Any] = {attribute: variable(attribute) for attribute in names}
    checks = {"__instancecheck__": is_instance, "__subclasscheck__": is_subclass}
    kind = type(meta.__name__, (meta,), variables | checks)
    about = {n: getattr(owner, n) for n in ("__module__", "__qualname__", "__doc__")}
    new = patches.replace(module, name, lambda _: kind(name, (owner,), about), everywhere=True)
    for attribute in names:
        setattr(owner, attribute, _Read(variables[attribute]))
    patches.at_undo(put_back)
    table.inherits(key, inherit)


class _Read:
    """In a class: an attribute that instances and subclasses read, and may set for themselves."""

    def __init__(self, variable: property) -> None:
        self._variable = variable

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._variable.__get__(instance if owner is None else owner)


class _Method:
    """For `Patches.replace`: the new function, as the kind of method that the old one was."""

    def __init__(self, wrap: Callable[[Any], Any], function: Callable[..., Any]) -> None:
        self._new = wrap(function)

    def __call__(self, original: Any) -> Any:
        return self._new


def _is_class_of(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def written_names(module: ModuleType) -> set[str]:
    """The variables of a module that its functions and methods set."""
    shared = vars(module)
    plain = [value for value in shared.copy().values() if _is_of(value, shared)]
    plain += [function for owner in _classes(module) for _, _, function in _methods(owner)]
    return {name for function in plain for name in _written(function, shared)}


def _classes(module: ModuleType) -> list[type]:
    return [value for value in vars(module).copy().values() if _is_class_of(value, module)]


def _methods(owner: type) -> Iterator[tuple[str, Callable[[Any], Any], FunctionType]]:
    """Functions of a class: their names, what they are wrapped in, and themselves."""
    for name, value in vars(owner).copy().items():
        if isinstance(value, FunctionType):
            yield name, lambda function: function, value
        elif isinstance(value, staticmethod | classmethod) and isinstance(
            value.__func__, FunctionType
        ):
            yield name, type(value), value.__func__


def _is_of(value: Any, shared: dict[str, Any]) -> bool:
    """Whether it is a function of a module, or a decorator's that holds one."""
    return isinstance(value, FunctionType) and any(True for _ in _parts(value, shared))


def _parts(function: FunctionType, shared: dict[str, Any]) -> Iterator[FunctionType]:
    """Of a function and those that it wraps, the ones that see a module's variables."""
    found = [function]
    for part in found:  # which grows meanwhile; functions may hold each other
        if part.__globals__ is shared:
            yield part
        for cell in part.__closure__ or ():
            with contextlib.suppress(ValueError):
                held = cell.cell_contents
                if isinstance(held, FunctionType) and held not in found:
                    found.append(held)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _named(function: FunctionType, shared: dict[str, Any]) -> set[str]:
    codes = (code for part in _parts(function, shared) for code in _codes(part.__code__))
    return {name for code in codes for name in code.co_names}


def _written(function: FunctionType, shared: dict[str, Any]) -> set[str]:
    codes = (code for part in _parts(function, shared) for code in _codes(part.__code__))
    return {
        step.argval
        for code in codes
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    }
