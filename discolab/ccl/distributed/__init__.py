"""torch.distributed inside worker threads: programs written for torchrun run unchanged.

    %%disco
    import torch.distributed as dist
    dist.all_reduce(x)                       # rank, groups and meshes are this worker's own

Nothing is called by hand. While worker threads live, the names of torch.distributed look who
calls: on a worker they are that worker's, with discolab's backend under every process group;
elsewhere they are torch's. docs/torch_distributed.md says what can't work in threads.
"""

from __future__ import annotations

import torch.distributed as _dist

if _dist.is_available():
    from . import bridge as _bridge  # registers itself with the engine

    del _bridge

__all__: list[str] = []
