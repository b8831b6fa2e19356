"""Distributed reference counting: when the value of an RRef may be dropped.

`counting` has the protocol and what one node knows of it, as pure state: `owner` is the side of a
value's owner, `holder` that of nodes that refer to values elsewhere, `records` what both are made
of. `table` keeps the values themselves and does what the counting asks for.
"""
