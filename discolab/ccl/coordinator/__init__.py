"""Where workers in processes of their own meet: the controller's part of the collectives.

`coordinator.Coordinator` is a service of the session (runtime/services.py). It has the same `Board`
as workers of one address space have, fed by what the workers say; each worker has a client of it
(rendezvous/client.py).
"""
