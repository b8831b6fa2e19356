"""How parameters are laid out: layouts, plans of them, and what a plan makes of a checkpoint."""
