"""A client of the Debug Adapter Protocol in a few lines; each message is held against the schema.

The schema is the official one, of which debugpy (which ipykernel needs) has a copy.
"""

import functools
import importlib.util
import itertools
import json
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

_SCHEMA = "_vendored/pydevd/_pydevd_bundle/_debug_adapter/debugProtocol.json"
PATIENCE = 20.0


@functools.cache
def _schema() -> dict[str, Any]:
    spec = importlib.util.find_spec("debugpy")
    assert spec is not None
    assert spec.origin is not None
    return json.loads((Path(spec.origin).parent / _SCHEMA).read_text())


@functools.cache
def _validator(name: str) -> Any:
    import jsonschema  # takes two seconds, in each process that finds tests

    return jsonschema.Draft4Validator({**_schema(), "$ref": f"#/definitions/{name}"})


def _capital(name: str) -> str:
    return name[0].upper() + name[1:]


def check(message: dict[str, Any]) -> None:
    """Hold a message of the adapter against the official schema."""
    if message["type"] == "event":
        name = f"{_capital(message['event'])}Event"
    elif message["success"]:
        name = f"{_capital(message['command'])}Response"
    else:
        name = "ErrorResponse"
        assert message["message"]
    assert name in _schema()["definitions"], name
    _validator(name).validate(message)


class RefusedError(Exception):
    """The adapter has answered with an error."""


class AdapterClient:
    """One connection to an adapter."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []  # in the order in which they came
        self.wrong: list[Exception] = []
        self._came = threading.Condition()
        self.ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                self._read_from(stream)
        except OSError:
            pass
        with self._came:
            self.ended = True
            self._came.notify_all()

    def _read_from(self, stream: BinaryIO) -> None:
        import jsonschema

        while header := stream.readline():
            length = int(header.split(b":")[1])
            assert stream.readline() == b"\r\n"
            message = json.loads(stream.read(length))
            try:
                check(message)
            except (AssertionError, jsonschema.ValidationError) as exc:
                self.wrong.append(exc)
            with self._came:
                self.messages.append(message)
                if message["type"] == "event":
                    self.events.append(message)
                else:
                    self._of(message["request_seq"]).put(message)
                self._came.notify_all()

    def _of(self, number: int) -> queue.Queue[dict[str, Any]]:
        return self._answers.setdefault(number, queue.Queue())

    def raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        self.raw(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))

    def answer(self, number: int) -> dict[str, Any]:
        return self._of(number).get(timeout=PATIENCE)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The body of the answer."""
        number = next(self._numbers)
        message = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        self.send(message)
        found = self.answer(number)
        assert not self.wrong, self.wrong
        assert found["command"] == command
        if not found["success"]:
            raise RefusedError(found["message"])
        return found.get("body") or {}

    def event(self, name: str, patience: float = PATIENCE) -> dict[str, Any]:
        """The body of the next event of that name; those before it are left out."""
        until = time.monotonic() + patience
        with self._came:
            while True:
                for number, one in enumerate(self.events):
                    if one["event"] == name:
                        del self.events[: number + 1]
                        assert not self.wrong, self.wrong
                        return one.get("body", {})
                left = until - time.monotonic()
                assert left > 0, f"no event {name!r}; {self.events}"
                assert not self.ended, f"the adapter has closed; {self.events}"
                self._came.wait(left)

    def has_ended(self, patience: float = PATIENCE) -> bool:
        """Whether the adapter closes the connection."""
        self._thread.join(patience)
        return not self._thread.is_alive()

    def attach(self, token: str, **arguments: Any) -> dict[str, Any]:
        """Come in as VS Code does; what the adapter can do."""
        found = self.ask(
            "initialize",
            clientID="test",
            clientName="the test",
            adapterID="discolab",
            supportsInvalidatedEvent=True,
        )
        self.ask("attach", token=token, **arguments)
        self.event("initialized")
        return found

    def begin(self, token: str, **arguments: Any) -> None:
        """Come in, without breakpoints."""
        self.attach(token, **arguments)
        self.ask("configurationDone")

    # -- what tests look at ----------------------------------------------------------------------

    def stack(self, rank: int) -> list[dict[str, Any]]:
        return self.ask("stackTrace", threadId=rank + 1)["stackFrames"]

    def line(self, rank: int) -> int:
        return self.stack(rank)[0]["line"]

    def children(self, reference: int) -> dict[str, dict[str, Any]]:
        found = self.ask("variables", variablesReference=reference)["variables"]
        return {one["name"]: one for one in found}

    def scopes(self, rank: int, depth: int = 0) -> dict[str, int]:
        frame = self.stack(rank)[depth]["id"]
        found = self.ask("scopes", frameId=frame)["scopes"]
        return {one["name"]: one["variablesReference"] for one in found}

    def locals(self, rank: int, depth: int = 0) -> dict[str, dict[str, Any]]:
        return self.children(self.scopes(rank, depth)["Locals"])

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()
        self._thread.join(5)
        assert not self.wrong, self.wrong
