"""Programs for `torch.distributed.rpc`; test_compat.py runs them with it and with discolab's."""
