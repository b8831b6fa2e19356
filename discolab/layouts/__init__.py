"""How a tensor lies over workers: the one layer that plans, views and comparisons share.

`layout` has what there is: a `Layout` says what each axis of a mesh does to a tensor, as a rule of
a loader's plan does; a `ShardLayout` is a layout on a mesh of `Workers`, and cuts. `text` reads
them, `infer` finds them where nobody says them, `join` goes back from shards to the whole.
"""

from .join import ShardMap, join_shards
from .layout import ShardLayout

__all__ = ["ShardLayout", "ShardMap", "join_shards"]
