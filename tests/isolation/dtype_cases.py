"""What torch's functions give under a default dtype, as far as that can be asked of all of them.

Every function of torch's public namespaces is called with a few kinds of arguments that have no
floating dtype of their own. ``python -m tests.isolation.dtype_cases DTYPE`` does it in a process of
its own and prints what came out as JSON.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

# They change the process, need files, never end, or are about something else.
_LEFT_OUT = (
    "_", "set_", "use_", "init", "import_", "load", "save", "compile", "seed", "manual_seed",
    "fork", "get_rng", "thread", "classproperty", "empty", "resize", "share", "map", "apply", "is_",
    "typename", "wait", "prepare", "from_file", "from_dlpack", "to_dlpack", "cudnn", "mkldnn",
    "miopen", "get_", "default_generator", "export", "cond", "vmap", "register", "unregister",
    "autocast", "clear_", "hsmm", "hspmm", "sspaddmm", "data_ptr", "retain", "requires",
    "backward", "pin_", "storage", "untyped", "cuda", "cpu", "xpu", "ipu", "hpu", "mtia", "fbgemm",
    "quantize", "q_per", "rand", "normal", "bernoulli", "multinomial", "poisson", "dropout",
    "alpha_", "feature_", "rrelu", "gumbel", "fractional", "log_normal", "exponential", "geometric",
    "cauchy", "uniform", "random", "native_dropout", "binomial", "new", "Tensor", "lobpcg", "pca",
    "svd_lowrank", "new_", "Generator", "Stream", "Event", "assert", "unify", "Size", "obj",
    "dtype", "sparse_",
)  # fmt: skip


def _arguments() -> dict[str, tuple[Any, ...]]:
    i = torch.tensor([3, 1, 2])
    b = torch.tensor([True, False, True])
    square = torch.tensor([[2, 1], [1, 3]])
    return {
        "3": (3,), "2,3": (2, 3), "(2,3)": ((2, 3),), "1.5": (1.5,), "[.1,2]": ([0.1, 2],),
        "[1,2]": ([1, 2],), "True": (True,), "1j": (1j,), "(2,),.3": ((2,), 0.3),
        "(2,),3": ((2,), 3), "0,1,.25": (0, 1, 0.25), "0,1,3": (0, 1, 3), "0.,1.,3": (0.0, 1.0, 3),
        "i": (i,), "b": (b,), "i,i": (i, i), "i,2": (i, 2), "i,.3": (i, 0.3), "b,.3": (b, 0.3),
        "b,i": (b, i), ".3,i": (0.3, i), "2,i": (2, i), "b,.3,.7": (b, 0.3, 0.7), "i,0": (i, 0),
        "sq": (square,), "sq,sq": (square, square), "sq,i0": (square, 0), "i,i,i": (i, i, i),
        "[i,i]": ([i, i],), "i,1j": (i, 1j), "i,1.5,2.5": (i, 1.5, 2.5),
    }  # fmt: skip


def _functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    places = {
        "torch": torch, "special": torch.special, "fft": torch.fft, "linalg": torch.linalg,
        "F": torch.nn.functional, "Tensor": torch.Tensor, "windows": torch.signal.windows,
    }  # fmt: skip
    for place, owner in places.items():
        for name in dir(owner):
            plain = name.startswith("__") and name.strip("_") in _OPERATORS
            if plain or not name.startswith(_LEFT_OUT):
                found = getattr(owner, name)
                if callable(found) and not isinstance(found, type):
                    yield f"{place}.{name}", found


_OPERATORS = {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "radd", "rsub", "rmul",
              "rtruediv", "rpow", "rfloordiv", "rdiv", "div", "rmod", "neg", "abs"}  # fmt: skip


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.layout != torch.strided else value
        kind = torch.complex128 if value.is_complex() else torch.float64
        return [str(value.dtype), list(value.shape), str(dense.to(kind).tolist())]
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return str(type(value))


def outcomes(only: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Name of a call -> what it gave, for those that gave something."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, function in _functions():
            if not only(name):
                continue
            for kind, args in _arguments().items():
                try:
                    found[f"{name}({kind})"] = _described(function(*args))
                except Exception as exc:
                    if "engine='processes'" in str(exc):
                        found[f"{name}({kind})"] = "refused"
    return found


if __name__ == "__main__":
    torch.set_default_dtype(getattr(torch, sys.argv[1]))
    json.dump(outcomes(), sys.stdout)
