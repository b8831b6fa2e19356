"""Model families with planted bugs, and right programs: the tables of docs/compare.md."""

from . import conv, gpt, moe, others

FAMILIES = {"gpt": gpt, "moe": moe, "conv": conv, "others": others}
BUGS = {
    f"{name}: {bug.name}": bug for name in ("gpt", "moe", "conv") for bug in FAMILIES[name].BUGS
}
RIGHT = {f"{name}: {one.name}": one for name, family in FAMILIES.items() for one in family.RIGHT}
