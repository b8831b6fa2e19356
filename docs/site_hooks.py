"""What `make docs` adds to mkdocs: the help of every magic on one page, see mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

_MARK = "<!-- magics: {} -->"
_GROUPS = {
    "first": ("disco_session", "disco", "disco_run", "disco_load", "disco_show", "disco_debug"),
    "show": (
        "disco_registers", "disco_devices", "disco_timeline", "disco_status", "disco_doctor",
        "disco_whos",
    ),
    "rest": (
        "disco_push", "disco_pull", "disco_mesh", "disco_snapshot", "disco_restart",
        "disco_shutdown",
    ),
}  # fmt: skip


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of the magics in place of the comments that ask for it."""
    if "<!-- magics: " not in markdown:
        return markdown
    from discolab.notebook import debug_magics, magics  # noqa: F401 - enter themselves
    from discolab.notebook.magic import MAGICS, help_of

    groups = {group: list(names) for group, names in _GROUPS.items()}
    done = {name for names in groups.values() for name in names}
    groups["debug"] = [n for n, magic in MAGICS.items() if n not in done and n == magic.name]
    for group, names in groups.items():
        sections = []
        for name in names:
            magic = MAGICS[name]
            text = re.sub(r"^", "    ", help_of(magic.parser()), flags=re.MULTILINE)
            head = f"### `{'%%' if name == 'disco' else '%'}{name}`"
            also = f"Also `%{magic.aliases[0]}`.\n\n" if magic.aliases else ""
            sections.append(f"{head}\n\n{magic.help.splitlines()[0]}\n\n{also}{text}\n")
        markdown = markdown.replace(_MARK.format(group), "\n".join(sections))
    return markdown
