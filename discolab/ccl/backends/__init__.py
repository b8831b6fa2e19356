"""Who moves the tensors: `local`, and Gloo, NCCL and MPI behind the same interface."""
