"""The picture of a DRef, from what each worker says of its value."""

__all__: list[str] = []
