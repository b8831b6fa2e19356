"""Command line: ``python -m discolab demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .runtime import DiscoError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="discolab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a tensor-parallel MLP on several workers")
    demo.add_argument("--workers", type=int, default=4, help="how many (default 4)")
    demo.add_argument("--steps", type=int, default=150, help="of gradient descent (default 150)")
    args = parser.parse_args(argv)
    from .demo import run

    try:
        return 0 if run(args.workers, args.steps) else 1
    except DiscoError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
