"""What is said of a value where it lies, on its worker: plain records of a kilobyte or two."""

__all__: list[str] = []
