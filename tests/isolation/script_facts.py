"""A script that writes down in the folder of its first argument how it finds itself started."""

import atexit
import dataclasses
import inspect
import json
import os
import pickle
import signal
import sys
import typing
from pathlib import Path

import __main__


class Thing:
    """A class of the script."""


@dataclasses.dataclass
class Sizes:
    """One whose types have to be looked up in the script."""

    things: "list[Thing]"


def main() -> None:
    """Write ``RANK.json``, and ``RANK.end`` at the end."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    __main__.added = 3  # type: ignore[attr-defined]
    facts = {
        "command line": [sys.argv[0], *sys.argv[2:]],
        "working folder": os.getcwd(),
        "first of sys.path": sys.path[0],
        "__file__": __file__,
        "__main__.__file__": __main__.__file__,
        "__name__": __name__,
        "__spec__": repr(__spec__),
        "interactive": hasattr(sys, "ps1"),
        "source": inspect.getsource(Thing),
        "pickled": type(pickle.loads(pickle.dumps(Thing()))) is Thing,
        "hints": typing.get_type_hints(Sizes)["things"] == list[Thing],
        "handler": [signal.signal(signal.SIGTERM, print) is signal.SIG_DFL,
                    signal.getsignal(signal.SIGTERM) is print],
        "of __main__": ["Thing" in vars(__main__), "main" in dir(__main__), globals()["added"]],
        "environment": {
            name: value
            for name, value in os.environ.items()
            if any(word in name for word in ("RANK", "WORLD_SIZE", "TORCHELASTIC", "ROLE_NAME"))
        },
        "elastic": __import__("torch").distributed.is_torchelastic_launched(),
    }  # fmt: skip
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    atexit.register((folder / f"{rank}.end").touch)


if __name__ == "__main__":
    main()
    sys.exit(0)
