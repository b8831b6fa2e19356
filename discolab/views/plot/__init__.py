"""One logical tensor to zoom into: regions of it, reduced on the workers that hold them."""

__all__: list[str] = []
