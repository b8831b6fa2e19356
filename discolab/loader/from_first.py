"""Where only worker 0 has the files: it reads, and the others get their shards from it.

All workers go through the parameters in one order. One that all hold whole is broadcast; of any
other, worker 0 reads each worker's shard and sends it, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import ccl
from ..layouts.layout import Cut
from ..runtime.worker import Worker
from .plans.resolved import Resolved
from .read import Files, fill, read_entry

AHEAD = 64 << 20  # bytes that worker 0 may have sent before all have come as far


def share(
    resolved: Resolved,
    files: Files,
    worker: Worker,
    dtype_of: Callable[[str], torch.dtype],
    make: Callable[[str, Cut], torch.Tensor],
    keep: Callable[[str, torch.Tensor], None],
) -> None:
    """Fill the tensors of this worker from what worker 0 reads; all workers must call it.

    Parameters
    ----------
    files
        Of the catalog; only worker 0 opens them.
    dtype_of
        What a parameter is once it is loaded.
    make
        Gives this worker's tensor for a parameter.
    keep
        Takes it once it is filled.
    """
    first = worker.worker_id == 0
    ranks = range(worker.num_workers)
    sent = 0
    for name in resolved.layouts:
        entry = resolved.catalog.entries[name]
        cuts = [resolved.cut(name, rank) for rank in ranks]
        mine = cuts[worker.worker_id]
        tensor = None if mine is None else make(name, mine)
        if first and mine is not None and tensor is not None:
            fill(files, entry, mine, tensor)
        if all(cut == cuts[0] for cut in cuts) and tensor is not None:
            ccl.broadcast_(tensor, group="world")
        else:
            for rank in ranks[1:]:
                cut = cuts[rank]
                if cut is None or not cut.numel:
                    continue
                if first:
                    ccl.send(read_entry(files, entry, cut, dtype_of(name), worker.device), rank)
                elif rank == worker.worker_id and tensor is not None:
                    ccl.recv(tensor, 0)
                sent += cut.numel * entry.dtype.itemsize
            if sent > AHEAD:
                ccl.barrier(group="world")
                sent = 0
        if tensor is not None:
            keep(name, tensor)
