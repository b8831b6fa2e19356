"""The functions of Disco's ShardLoader under Disco's names: `shard_loader` does what they say.

Every worker registers them, so that importing this is cheap: the loader itself is imported when a
worker makes the first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...runtime.errors import ArgumentError
from ...runtime.functions import register_func

if TYPE_CHECKING:
    from .shard_loader import ShardLoader


@register_func("runtime.disco.ShardLoader")
def shard_loader(path: str, text: str = "", info: Any = "", module: Any = None) -> ShardLoader:
    """`shard_loader.create`: a loader of the tensor-cache at `path`, whose JSON is `text`."""
    from .shard_loader import create

    return create(path, text, info, module)


@register_func("runtime.disco.ShardLoaderLoad")
def load(loader: Any, index: Any) -> torch.Tensor:
    """`ShardLoader.load`: this worker's part of parameter `index`. All workers call it."""
    return _checked("ShardLoaderLoad", loader).load(index)


@register_func("runtime.disco.ShardLoaderLoadAll")
def load_all(loader: Any) -> list[torch.Tensor]:
    """`ShardLoader.load_all`: this worker's parts of all. All workers call it."""
    return _checked("ShardLoaderLoadAll", loader).load_all()


@register_func("runtime.disco.ShardLoaderLoadParamOnWorker0")
def load_param_on_worker0(loader: Any, index: Any) -> torch.Tensor:
    """`ShardLoader.load_param_on_worker0`: the whole parameter, on worker 0 only."""
    return _checked("ShardLoaderLoadParamOnWorker0", loader).load_param_on_worker0(index)


@register_func("runtime.disco.ShardLoaderLoadPresharded")
def load_presharded(loader: Any, index: Any) -> torch.Tensor:
    """`ShardLoader.load_presharded`: this worker's part, from a record of its own."""
    return _checked("ShardLoaderLoadPresharded", loader).load_presharded(index)


@register_func("runtime.disco.ShardLoaderLoadAllPresharded")
def load_all_presharded(loader: Any) -> list[torch.Tensor]:
    """`ShardLoader.load_all_presharded`: this worker's parts of all, from records of its own."""
    return _checked("ShardLoaderLoadAllPresharded", loader).load_all_presharded()


def _checked(function: str, loader: Any) -> ShardLoader:
    from .shard_loader import ShardLoader

    if not isinstance(loader, ShardLoader):
        raise ArgumentError(
            f"{function}: the first argument is what runtime.disco.ShardLoader gave; got "
            f"{type(loader).__name__}"
        )
    return loader
