"""How the workers of one address space meet for a collective, wait, and learn that it can't be."""
