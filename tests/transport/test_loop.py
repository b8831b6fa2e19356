"""The event loop: a callback gets what happened to its own descriptor."""

import os

from discolab.transport.loop import EventLoop


def test_a_number_used_again_gets_nothing_that_was_meant_for_the_closed_descriptor() -> None:
    loop = EventLoop()
    pipes = [os.pipe() for _ in range(2)]
    readers = [reader for reader, _ in pipes]
    called: list[str] = []
    opened: list[int] = []

    def close_the_other(mine: int) -> None:
        (other,) = set(readers) - {mine}
        called.append("closes the other")
        loop.forget(other)
        os.close(other)
        opened.extend(os.pipe())
        assert other in opened  # the system gives the least number that is free
        loop.watch(other, lambda _: called.append("nothing has happened to this one"))

    for reader in readers:
        loop.watch(reader, lambda _, reader=reader: close_the_other(reader))
    for _, writer in pipes:
        os.write(writer, b"both are ready at once")
    loop.turn(1)
    assert called == ["closes the other"]
    loop.close()
    for fd in {*readers, *opened, *(writer for _, writer in pipes)}:
        os.close(fd)
