"""Where workers in processes of their own meet: the controller's part of the collectives.

`hub.Hub` is a service of the session (runtime/link.py). It has the same `Board` as workers of one
address space have, fed by what the workers say; each worker has a `Spoke` to it (spoke.py).
"""
