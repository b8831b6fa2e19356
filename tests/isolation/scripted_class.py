"""A class for torch.jit whose annotations name what is local where it is compiled."""

import torch


def compiled() -> int:
    """Compile a class within a function, and use it."""
    Number = int

    class Holder:
        def __init__(self, value: "Number") -> None:
            self.value = value

    kind = torch.jit.script(Holder)

    @torch.jit.script
    def use(x: int) -> int:
        return kind(x).value

    return use(7)
