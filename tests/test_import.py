"""What `import discolab` brings along, and that what it leaves for later comes when asked for."""

import subprocess
import sys

import discolab

LEFT_FOR_LATER = {"debugger", "notebook", "rpc", "trace", "views"}


def run(program: str) -> str:
    """Run a program in a fresh interpreter; give what it prints."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_what_few_programs_use_is_not_imported() -> None:
    program = """
import sys, torch
before = set(sys.modules)
import discolab
print(*sorted(name for name in set(sys.modules) - before))
"""
    names = run(program).split()
    assert not LEFT_FOR_LATER & {name.removeprefix("discolab.").partition(".")[0] for name in names}
    others = {name.partition(".")[0] for name in names} - {"discolab", *sys.stdlib_module_names}
    assert {name for name in others if "cython" not in name} <= {"torch", "numpy", "cloudpickle"}


def test_every_name_is_there_when_it_is_asked_for() -> None:
    program = """
import discolab
assert set(discolab.__all__) <= set(dir(discolab))
for name in discolab.__all__:
    assert getattr(discolab, name) is getattr(discolab, name), name
print("all")
"""
    assert run(program) == "all\n"
    assert discolab.compare.__module__.startswith("discolab.comparison")


def test_a_value_is_drawn_where_nothing_else_was_imported() -> None:
    program = """
import sys, torch, discolab
with discolab.make_session(2, devices="cpu") as sess:
    ref = sess.call_packed(torch.ones, 3)
    assert "discolab.views" not in sys.modules
    print(*sorted(ref._repr_mimebundle_()), *sorted(sess._repr_mimebundle_()))
    assert sess.compare(ref, ref).equal
"""
    assert run(program).split() == ["text/html", "text/plain"] * 2


def test_the_garbage_of_torch_is_not_collected_meanwhile() -> None:
    program = """
import gc, sys, torch
collected = []
def note(phase, info):
    if not hasattr(sys.modules.get("discolab"), "SERVICES"):  # the last name that it imports
        collected.append(info["generation"])
gc.callbacks.append(note)
import discolab
assert gc.isenabled() and discolab.SERVICES
print(*collected)
"""
    assert 2 not in map(int, run(program).split())
