"""Write the table into docs/isolation.md of this checkout: ``python -m discolab.isolation``."""

from __future__ import annotations

from pathlib import Path

from .page import MARK, page


def main() -> None:
    """Replace what stands below the mark; what stands above it is written by hand."""
    path = Path(__file__).parents[2] / "docs" / "isolation.md"
    above, _, _ = path.read_text(encoding="utf-8").partition(MARK)
    path.write_text(above + page(), encoding="utf-8")


main()
