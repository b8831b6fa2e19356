"""Writing checkpoints: which bytes go where, and how a new one takes the place of an old one."""
