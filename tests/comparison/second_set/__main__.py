"""Write the second table of docs/compare.md: ``python -m tests.comparison.second_set``."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path

import discolab

from . import BUGS, HARMLESS, RIGHT
from .planted import plant, row

DOCS = Path(__file__).parents[3] / "docs" / "compare.md"
PATTERN = r"<!-- second set -->.*<!-- end of second set -->"


def main() -> None:
    """Run all, and write what was found between the marks."""
    with (
        tempfile.TemporaryDirectory() as folder,
        discolab.make_session(4, "threads", devices="cpu", timeout=60) as sess,
    ):
        judged = {}
        for name, (family, bug) in BUGS.items():
            comparison = getattr(plant(family, bug, Path(folder)), bug.program)(sess)
            judged[name] = bug.judged(comparison)
        agree = [getattr(f, name.partition(": ")[2])(sess).agrees for name, f in RIGHT.items()]
        for family, change in HARMLESS.values():
            agree.append(getattr(plant(family, change, Path(folder)), change.program)(sess).agrees)
    causes = Counter(one.cause for one in judged.values())
    lines = [
        "<!-- second set -->",
        f"After mending: of {len(judged)} bugs the first place is right for "
        f"{sum(v.place for v in judged.values())}, the workers for "
        f"{sum(v.workers for v in judged.values())}; the cause is right for {causes['right']}, "
        f"not known for {causes['not known']}, wrong for {causes['WRONG']}. "
        f"Of {len(agree)} right programs {sum(not a for a in agree)} raise an alarm.",
        "",
        "| bug | program | found at | cause |",
        "|---|---|---|---|",
        *(row(*BUGS[name], judged[name]) for name in BUGS),
        "<!-- end of second set -->",
    ]
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(re.sub(PATTERN, lambda _: "\n".join(lines), text, flags=re.S), "utf-8")


if __name__ == "__main__":
    main()
