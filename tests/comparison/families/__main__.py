"""Write the tables of docs/compare.md: ``python -m tests.comparison.families``."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import discolab

from . import BUGS, RIGHT
from .case import bug_row, right_row, verdict

DOCS = Path(__file__).parents[3] / "docs" / "compare.md"


def main() -> None:
    """Run all cases, and write what was found between the marks."""
    with discolab.make_session(4, "threads", devices="cpu", timeout=60) as session:
        judged = {name: verdict(bug, bug.run(session)) for name, bug in BUGS.items()}
        agree = {name: right.run(session).agrees for name, right in RIGHT.items()}
    rows = [bug_row(name, bug, judged[name]) for name, bug in BUGS.items()]
    others = [right_row(name, right, agree[name]) for name, right in RIGHT.items()]
    causes = Counter(one.cause for one in judged.values())
    lines = [
        "<!-- cases -->",
        f"Of {len(rows)} bugs the first place is right for {sum(v.place for v in judged.values())},"
        " "
        f"the workers for {sum(v.workers for v in judged.values())}; the cause is right for "
        f"{causes['right']}, not known for {causes['not known']}, wrong for {causes['WRONG']}. "
        f"Of {len(others)} right programs {sum(not a for a in agree.values())} raise an alarm.",
        "",
        "| bug | parallel | shows in | found at | cause |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "| right program | parallel | |",
        "|---|---|---|",
        *others,
        "<!-- end of cases -->",
    ]
    text = DOCS.read_text(encoding="utf-8")
    pattern = r"<!-- cases -->.*<!-- end of cases -->"
    DOCS.write_text(re.sub(pattern, lambda _: "\n".join(lines), text, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    main()
