"""A simulated accelerator, and tests on it: ``pytest -m accelerator``."""
