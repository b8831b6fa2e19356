"""Connections between a controller and its worker processes.

`controller_side` sends commands to all workers of a session and receives what they say;
`worker_side` is its counterpart in a worker's process. `messages` is what the two say to each
other, `interface` what a transport must do, and `local` and `tcp` are the two transports.
"""
