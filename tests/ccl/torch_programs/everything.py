"""All areas of the catalogue: to import this enters all programs. It takes some seconds."""

from . import (
    checkpoints,
    collectives,
    ddp,
    dtensor,
    fsdp,
    functional,
    meshes,
    pipelines,
    tensor_parallel,
)

AREAS = [
    checkpoints,
    collectives,
    ddp,
    dtensor,
    fsdp,
    functional,
    meshes,
    pipelines,
    tensor_parallel,
]
