"""What Python's modules csv, sqlite3 and copyreg know by names and classes, for all threads.

For sqlite3 and copyreg, which are asked by C code, the process's table has one function that looks
who calls; a dialect of csv is looked up before C code sees its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..runtime.worker import current_worker_or_none
from . import table
from .imports import worker_unless_importing
from .patches import Patches
from .table import Row, Treatment
from .worker_local import OF_SCRIPT

Function = Callable[..., Any]


class _FunctionOfCaller:
    """Calls the function that the calling worker has registered, else the process's."""

    def __init__(self, name: str, of_process: Function) -> None:
        self.key = f"{OF_SCRIPT}{name}"
        self.of_process = of_process

    def __call__(self, value: Any) -> Any:
        worker = current_worker_or_none()
        own = None if worker is None else worker.process_state.get(self.key)
        return (own or self.of_process)(value)


def _register(
    patches: Patches, entries: dict[Any, Any], key: Any, function: Function, otherwise: Function
) -> bool:
    """Enter a worker's function. False: who calls is no worker, and nothing was entered.

    Parameters
    ----------
    otherwise
        What is done for those for whom nobody has entered a function.
    """
    worker = worker_unless_importing()
    if worker is None:
        return False
    before = entries.get(key)
    if isinstance(before, _FunctionOfCaller):
        of_caller = before
    else:
        of_caller = entries[key] = _FunctionOfCaller(f"{id(entries)} {key}", before or otherwise)

        def put_back() -> None:
            if isinstance(entries.get(key), _FunctionOfCaller):
                entries.pop(key) if before is None else entries.update({key: before})

        patches.at_undo(put_back)
        table.inherits(of_caller.key, functools.partial(entries.__setitem__, key))
    worker.process_state[of_caller.key] = function
    return True


# -- copyreg ---------------------------------------------------------------------------------------


def _copyreg(module: ModuleType, patches: Patches) -> None:
    def pickle_over(plain: Function) -> Function:
        @functools.wraps(plain)
        def pickle(ob_type: Any, pickle_function: Any, constructor_ob: Any = None) -> None:
            as_ever: Function = lambda value: value.__reduce_ex__(4)  # noqa: E731
            entries = module.dispatch_table
            if not callable(pickle_function) or not _register(
                patches, entries, ob_type, pickle_function, as_ever
            ):
                plain(ob_type, pickle_function, constructor_ob)

        return pickle

    patches.replace(module, "pickle", pickle_over, everywhere=True)


# -- sqlite3 ---------------------------------------------------------------------------------------

_BASIC = (int, float, str, bytes, bytearray)


def _sqlite(module: ModuleType, patches: Patches) -> None:
    def unknown(value: Any) -> Any:
        if type(value) in _BASIC:
            return value
        raise module.ProgrammingError(f"type {type(value).__name__!r} is not supported")

    def adapter_over(plain: Function) -> Function:
        @functools.wraps(plain)
        def register_adapter(type_: Any, adapter: Any, /) -> None:
            key = (type_, module.PrepareProtocol)
            if _register(patches, module.adapters, key, adapter, unknown):
                adapter = module.adapters[key]
            plain(type_, adapter)  # which also notes that values of basic types are adapted

        return register_adapter

    def converter_over(plain: Function) -> Function:
        @functools.wraps(plain)
        def register_converter(typename: str, converter: Any, /) -> None:
            def missing(value: bytes) -> Any:
                raise module.ProgrammingError(
                    "other workers, which are threads of this process, have registered a "
                    f"converter for {typename!r}, and this one has not: register it on all, or "
                    "start the session with engine='processes' (%disco_session --engine processes)"
                )

            key = typename.upper()
            if not _register(patches, module.converters, key, converter, missing):
                plain(typename, converter)

        return register_converter

    patches.replace(module, "register_adapter", adapter_over, everywhere=True)
    patches.replace(module, "register_converter", converter_over, everywhere=True)


# -- csv -------------------------------------------------------------------------------------------

_DIALECTS = f"{OF_SCRIPT}csv.register_dialect"


def _dialects() -> dict[str, Any] | None:
    """Those that the calling worker has registered; None for who is no worker."""
    worker = worker_unless_importing()
    return None if worker is None else worker.process_state.setdefault(_DIALECTS, {})


def _named(dialect: Any) -> Any:
    """The worker's own dialect of a name; all else as it is."""
    own = _dialects()
    return own.get(dialect, dialect) if own and isinstance(dialect, str) else dialect


def _csv(module: ModuleType, patches: Patches) -> None:
    def register_over(plain: Function) -> Function:
        @functools.wraps(plain)
        def register_dialect(name: str, *dialect: Any, **fmtparams: Any) -> None:
            own = _dialects()
            if own is None or not isinstance(name, str):
                plain(name, *dialect, **fmtparams)
            else:
                own[name] = module._Dialect(*map(_named, dialect), **fmtparams)

        return register_dialect

    def unregister_over(plain: Function) -> Function:
        @functools.wraps(plain)
        def unregister_dialect(name: str) -> None:
            own = _dialects()
            if own and name in own:
                del own[name]
            else:
                plain(name)

        return unregister_dialect

    def get_over(plain: Function) -> Function:
        @functools.wraps(plain)
        def get_dialect(name: str) -> Any:
            dialect = _named(name)
            return plain(name) if dialect is name else dialect

        return get_dialect

    def list_over(plain: Function) -> Function:
        @functools.wraps(plain)
        def list_dialects() -> list[str]:
            return list(dict.fromkeys([*plain(), *(_dialects() or ())]))

        return list_dialects

    def use_over(plain: Function) -> Function:
        @functools.wraps(plain)
        def with_own_dialect(csvfile: Any, /, dialect: Any = "excel", **fmtparams: Any) -> Any:
            return plain(csvfile, _named(dialect), **fmtparams)

        return with_own_dialect

    plainly = module.register_dialect

    def inherit(own: dict[str, Any]) -> None:
        for name, dialect in own.items():
            plainly(name, dialect)

    table.inherits(_DIALECTS, inherit)
    for name, over in (
        ("register_dialect", register_over),
        ("unregister_dialect", unregister_over),
        ("get_dialect", get_over),
        ("list_dialects", list_over),
        ("reader", use_over),
        ("writer", use_over),
    ):
        patches.replace(module, name, over, everywhere=True)


for _state, _test, _module, _change in (
    ("`csv.register_dialect`", "a_dialect", "csv", _csv),
    ("`sqlite3.register_adapter`, `register_converter`", "an_adapter", "sqlite3.dbapi2", _sqlite),
    ("`copyreg.pickle`", "a_reduction", "copyreg", _copyreg),
):
    table.add(
        Row(
            state=_state,
            treatment=Treatment.PER_WORKER,
            meaning="Each worker gets what it has registered, until its script ends. What a module "
            "registers when it is imported, and the notebook, is there on all.",
            test=f"tests/isolation/test_registries.py::test_each_worker_registers_{_test}",
            on_import={_module: _change},
            library="Python",
        )
    )
