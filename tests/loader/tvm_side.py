"""TVM's side of `test_tvm`: its own ShardLoader, for two workers that are threads.

The wheel has Disco's sessions and loader, but no collectives: the two that the loader calls are
made here, in Python. TVM ends its process where something fails, so the tests run this in a child.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import io
import json
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

WORKERS = 2

Raw = tuple[str, tuple[int, ...], bytes]


def import_tvm() -> Any:
    """TVM, with its library of Disco, which it does not load by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("tvm_ffi")
        found = importlib.util.find_spec("tvm")
        assert found is not None
        assert found.origin is not None
        for name in ("libtvm_runtime.*", "libtvm_runtime_extra.*"):
            for library in sorted(Path(found.origin).parent.rglob(name)):
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        module = importlib.import_module("tvm")
        importlib.import_module("tvm.runtime.disco")
        importlib.import_module("tvm.contrib.tvmjs")
    return module


def dim_0(src: Any, parts: int, out: Any) -> None:
    """A shard function as in TVM's own tests: it gets TVM's tensors."""
    rows, columns = src.shape
    out.copyfrom(src.numpy().reshape(parts, rows // parts, columns))


def dim_1(src: Any, parts: int, out: Any) -> None:
    """The same for columns."""
    rows, columns = src.shape
    out.copyfrom(src.numpy().reshape(rows, parts, columns // parts).transpose(1, 0, 2))


def flat(src: Any, out: Any) -> None:
    """The same elements in another shape."""
    out.copyfrom(src.numpy().reshape(out.shape))


def register() -> Any:
    """TVM, knowing the shard functions."""
    tvm = import_tvm()
    for func in (dim_0, dim_1, flat):
        tvm.register_global_func(f"tests.loader.tvm_{func.__name__}", func, override=True)
    return tvm


class Board:
    """What TVM's worker 0 gives to the others."""

    def __init__(self, tvm: Any) -> None:
        self.rank = tvm.get_global_func("runtime.disco.worker_id")
        self.barrier = threading.Barrier(WORKERS, timeout=20)
        self.given = torch.empty(0)

    def pass_on(self, send: Any, recv: Any, cut: bool) -> None:
        """Copy what worker 0 sends, or a part of it, to `recv`."""
        (rank,) = self.rank()
        if rank == 0:
            self.given = torch.from_dlpack(send)
        self.barrier.wait()
        given = self.given[rank] if cut else self.given
        target = torch.from_dlpack(recv)
        if given.data_ptr() != target.data_ptr():
            target.copy_(given.view(target.shape))
        self.barrier.wait()


def raw(tensor: torch.Tensor) -> Raw:
    """What two tensors share if they are equal bit by bit."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), data.numpy().tobytes()


def raw_all(value: Any) -> Any:
    """The same of a result of a loader: a tensor, TVM's or torch's, or several."""
    if isinstance(value, torch.Tensor):
        return raw(value)
    if hasattr(value, "numpy"):
        return raw(torch.from_dlpack(value))
    return [raw_all(item) for item in value]


def load(index: str, calls: list[tuple[Any, ...]], info: Any = None) -> list[Any]:
    """What TVM's loader gives: for each call of a function its result on each worker."""
    tvm = register()
    board = Board(tvm)
    for name, cut in (("broadcast", False), ("scatter", True)):

        def collective(send: Any, in_group: bool, recv: Any, cut: bool = cut) -> None:
            board.pass_on(send, recv, cut)

        # of a Disco for which none was chosen: its name is empty
        tvm.register_global_func(f"runtime.disco..{name}_from_worker0", collective, override=True)
    sess = tvm.runtime.disco.ThreadedSession(WORKERS)
    create = sess.get_global_func("runtime.disco.ShardLoader")
    loader = create(index, Path(index).read_text(), json.dumps(info or {}), None)
    found = []
    for name, *args in calls:
        given = [tvm.runtime.ShapeTuple([i]) for i in args]
        ref = sess.get_global_func(f"runtime.disco.ShardLoader{name}")(loader, *given)
        sess._sync_all()
        found.append([raw_all(ref.debug_get_from_remote(rank)) for rank in range(WORKERS)])
        del ref
    sess._sync_all()
    sess.shutdown()
    return found


def dump(params: dict[str, torch.Tensor], folder: Path, **options: Any) -> str:
    """Have TVM write a checkpoint; the path of its index."""
    tvm = import_tvm()
    given = {name: tvm.runtime.from_dlpack(tensor) for name, tensor in params.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        tvm.contrib.tvmjs.dump_tensor_cache(given, str(folder), show_progress=False, **options)
    return str(folder / "tensor-cache.json")
