"""What a program of these writes for its rank, so that runs can be compared."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def plain(value: Any) -> Any:
    """For JSON, which keeps every digit of a float."""
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return plain(value.detach().double().tolist())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def norms(model: torch.nn.Module) -> dict[str, Any]:
    """The norm of each parameter, whole."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().double().norm()
        for name, p in model.named_parameters()
    }


def write(**facts: Any) -> None:
    """To the folder that is the program's first argument, as ``<rank>.json``."""
    path = Path(sys.argv[1]) / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps({"rank": int(os.environ["RANK"]), **plain(facts)}))
    if os.environ.get("ENDS_AT_ONCE"):  # at torchrun, where Gloo may abort or hang as it ends
        dist.barrier()
        os._exit(0)
