"""What a worker in a process of its own does to take part in collectives: its spoke to the hub
(`discolab.ccl.hub`), the lanes over which it gives and takes tensors, and the backends on them.
"""
