"""numba keeps random numbers of compiled functions for each thread, and may compute in turns.

Of its threading layers the one that it takes where there is neither OpenMP nor TBB, "workqueue",
ends the process when two threads come to it at once. Compiled code finds a layer's function by the
name `numba_parallel_for`. While workers live that is `_in_turns`, compiled code too, which takes a
lock first: no interrupt of a worker can come there, as one would within Python.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..thread_state import of_libraries


def _random_states(numba: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    functions: Any = sys.modules["numba._helperlib"]
    here = functions.rnd_get_np_state_ptr, functions.rnd_get_py_state_ptr

    def get() -> Any:
        return [functions.rnd_get_state(state()) for state in here]

    def set_(states: Any) -> None:
        for state, value in zip(here, states, strict=True):
            functions.rnd_set_state(state(), value)

    return get, set_


of_libraries["numba"] = _random_states

_SYMBOL = "numba_parallel_for"
_mutex = ctypes.create_string_buffer(256)  # longer than any system's pthread_mutex_t


def _new_mutex() -> None:
    ctypes.CDLL(None).pthread_mutex_init(_mutex, None)


@functools.cache
def _in_turns(original: int) -> Any:
    """A function that calls the one at an address while no other thread does."""
    numba: Any = sys.modules["numba"]
    process = ctypes.CDLL(None)
    _new_mutex()
    os.register_at_fork(after_in_child=_new_mutex)  # another thread of the parent may have it
    address, word = ctypes.c_void_p, ctypes.c_ssize_t
    on_mutex = ctypes.CFUNCTYPE(ctypes.c_int, address)
    lock, unlock = (
        on_mutex(("pthread_mutex_lock", process)),
        on_mutex(("pthread_mutex_unlock", process)),
    )
    state_of_python = ctypes.CFUNCTYPE(address)(("PyGILState_GetThisThreadState", process))
    compute = ctypes.CFUNCTYPE(None, *[address] * 5, *[word] * 3)(original)
    mutex = ctypes.addressof(_mutex)
    kinds = numba.types

    def parallel_for(function, a, b, c, data, inner, count, threads):  # type: ignore[no-untyped-def]
        if state_of_python():
            lock(mutex)
            compute(function, a, b, c, data, inner, count, threads)
            unlock(mutex)
        else:  # a thread of numba's own, within a computation: numba says that it can't be
            compute(function, a, b, c, data, inner, count, threads)

    signature = kinds.void(*[kinds.voidptr] * 5, *[kinds.intp] * 3)
    return numba.cfunc(signature)(parallel_for)


def _one_at_a_time(module: ModuleType, patches: Patches) -> None:
    binding: Any = importlib.import_module("llvmlite.binding")

    def use_turns() -> None:
        if module._is_initialized and module._threading_layer == "workqueue":
            lib = sys.modules["numba.np.ufunc.workqueue"]
            binding.add_symbol(_SYMBOL, _in_turns(lib.parallel_for).address)
            patches.at_undo(lambda: binding.add_symbol(_SYMBOL, lib.parallel_for))

    def launch_over(launch: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(launch)
        def launch_and_use_turns() -> None:
            known = module._is_initialized
            launch()
            if not known:
                use_turns()

        return launch_and_use_turns

    if not hasattr(os, "register_at_fork"):  # no pthreads, as on Windows, whose numba has OpenMP
        return
    use_turns()
    patches.replace(module, "_launch_threads", launch_over, everywhere=True)


table.add(
    Row(
        state='numba\'s threading layer "workqueue"',
        treatment=Treatment.IN_TURNS,
        meaning="numba takes it for `parallel=True` where it finds neither OpenMP nor TBB, and it "
        "ends the process when two threads compute with it at once; so one does at a time. Not of "
        "functions that the notebook has called before the session: call them on one worker only, "
        "or install `libgomp` or `tbb`.",
        test="tests/isolation/test_libraries.py::test_workers_compute_with_numba_in_turns",
        on_import={"numba.np.ufunc.parallel": _one_at_a_time},
        library="numba",
    )
)
