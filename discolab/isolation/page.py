"""The table as a page for readers: the part of docs/isolation.md below its mark.

``python -m discolab.isolation`` writes it anew.
"""

from __future__ import annotations

from .table import Row, Treatment, rows

MARK = "<!-- From here on the table writes this page: python -m discolab.isolation -->\n"

_HEADINGS = {
    Treatment.PER_WORKER: (
        "Per worker",
        "Each worker has its own, and the notebook has its own, as processes would.",
    ),
    Treatment.IN_TURNS: (
        "In turns",
        "One worker at a time; the others wait, can be stopped meanwhile, and say what they wait "
        "for.",
    ),
    Treatment.REFUSED: (
        "Refused",
        "It can't be right where workers share a process: an error that says so when it is used. "
        "All of it works with `--engine processes`.",
    ),
    Treatment.SHARED: (
        "Shared",
        "One for all workers and the notebook, and here is why that is right or what to do.",
    ),
}


def page() -> str:
    """The sections of docs/isolation.md, one for each treatment that has rows, as Markdown."""
    parts = [MARK]
    for treatment, (heading, text) in _HEADINGS.items():
        chosen = [row for row in rows() if row.treatment is treatment]
        if chosen:
            parts.append(f"\n## {heading}\n\n{text}\n\n")
            parts.append("| whose | what | in a worker thread |\n|---|---|---|\n")
            parts += [_line(row) for row in sorted(chosen, key=lambda row: row.library.lower())]
    return "".join(parts)


def _line(row: Row) -> str:
    meaning = row.meaning.replace("|", "\\|")
    return f"| {row.library} | {row.state} | {meaning} |\n"
