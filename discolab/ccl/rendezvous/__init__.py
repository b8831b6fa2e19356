"""How a worker joins the others and waits: in one address space, and from a process of its own."""
