"""The other machines of a `SocketSession`: who may join, who has, and what runs there.

`node` is the process on such a machine; `keys`, `launchers` and `machines` are what it and the
session know of themselves; `roster` (pure) and `gathering` are the session's side; `brood` and
`forked_zygote` are how a node has its workers.
"""
