"""Looking into frames: variables, values of expressions, and giving variables other values."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from discolab.debugger import frames
from discolab.runtime.errors import ArgumentError
from tests.debugger.scripted import Program, make_worker

FUNCTION = """
    import torch

    SCALE = 10

    def outer(a, *rest, key=1, **more):
        b = a * 2
        def inner(c):
            nonlocal b
            d = b + c
            return d + b
        squares = [k * a for k in range(3)]
        result = inner(5)
        return result, a, b, squares

    x = outer(3, 4, other=7)
    y = x
"""


def at(program: Program, line: int, look: Callable[[FrameType], Any]) -> Any:
    """What `look` gives in the frame that comes to `line`; the program goes on to its end."""
    found: list[Any] = []

    def asked(frame: FrameType, arrival: Any) -> None:
        found.append(look(frame))

    program.run(asked, mode="continue", breaks=[program.stop(line)])
    return found[0]


# -- the stack -----------------------------------------------------------------------------------


def test_the_stack_is_that_of_the_program_alone() -> None:
    stack = at(Program(FUNCTION), 9, frames.stack_of)
    assert [(spot.function, spot.line) for spot in stack] == [
        ("<module>", 15), ("outer", 12), ("inner", 9),
    ]  # fmt: skip
    assert stack[1].loops == ()


def test_a_frame_that_is_not_the_users_stands_for_itself() -> None:
    names: dict[str, Any] = {"sys": sys}
    exec("def f(): return sys._getframe()", names)
    frame = names["f"]()
    spots = frames.stack_of_frames([frame], [3])
    assert [(spot.function, spot.line, spot.loops) for spot in spots] == [("f", 3, ())]


# -- variables -----------------------------------------------------------------------------------


def test_variables_of_a_function_are_in_the_order_in_which_they_appear() -> None:
    found = at(Program(FUNCTION), 13, frames.variables)
    assert list(found) == ["a", "key", "rest", "more", "squares", "result", "b", "inner"]
    assert found["a"] == {"kind": "object", "type": "int", "repr": "3"}


def test_variables_of_a_cell_are_those_that_the_user_made() -> None:
    program = Program("""
        import torch
        from math import sqrt
        def f(): pass
        class C: pass
        loss = torch.zeros(2)
        _private = 1
        __hidden__ = 2
        rank_of = rank
        stop = 1
    """)
    program.namespace.update(earlier=1, rank=0, world_size=4, worker=make_worker(), RANK=0)
    found = at(program, 9, frames.variables)
    assert list(found) == ["loss", "_private", "rank_of", "earlier"]


def test_names_may_be_chosen() -> None:
    chosen = ["b", "SCALE", "nothing"]
    found = at(Program(FUNCTION), 9, lambda frame: frames.variables(frame, chosen))
    assert list(found) == ["b", "SCALE"]


def test_no_more_than_200_names_are_told() -> None:
    program = Program("\n".join(f"x{i} = {i}" for i in range(300)))
    assert len(at(program, 300, frames.variables)) == 200


def test_of_large_tensors_and_many_of_them_no_data_is_read() -> None:
    program = Program("""
        import torch
        small = torch.ones(8)
        large = torch.ones(2**18 + 1)
        many = [torch.ones(2**17) for _ in range(16)]
        a, b, c, d, e = (torch.ones(2**18) for _ in range(5))
        last = torch.ones(2)
        stop = 1
    """)
    found = at(program, 7, frames.variables)
    assert [name for name in found if "stats" in found[name]] == ["small", "a", "b", "c", "last"]
    assert not any("digest" in item["value"] for item in found["many"]["items"])
    all_of_them = at(program, 7, lambda frame: frames.variables(frame, stats=True))
    assert "stats" in all_of_them["large"]


def test_hostile_values_are_told_as_far_as_they_let() -> None:
    program = Program("""
        class Bad:
            def __repr__(self): raise ValueError("no")
            __class__ = property(lambda self: 1 / 0)
            __eq__ = __hash__ = __repr__
        bad = Bad()
        gone = 1
        del gone
        x = 2
    """)
    found = at(program, 8, frames.variables)
    assert "gone" not in found
    assert "bad" in found


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("a + SCALE", 13),
        ("  b\n", 6),
        ("rest + (key,)", (4, 1)),
        ("more['other']", 7),
        ("sum(k * a for k in range(3) if k < b)", 9),
        ("[i + j + a for i in range(2) for j in range(b - 5)]", [3, 4]),
        ("(lambda q: q + a)(SCALE)", 13),
        ("inner(1)", 13),
        ("torch.ones(a).sum().item()", 3.0),
        ("(a := 99) and a", 99),
    ],
)
def test_an_expression_sees_what_the_frame_sees(expression: str, value: Any) -> None:
    program = Program(FUNCTION)
    assert at(program, 12, lambda frame: frames.evaluate(frame, expression)) == value
    assert program.namespace["x"] == (17, 3, 6, [0, 3, 6])


def test_free_variables_and_those_around_a_comprehension_are_seen() -> None:
    program = Program(FUNCTION)
    assert at(program, 9, lambda frame: frames.evaluate(frame, "b + c")) == 11
    assert at(program, 11, lambda frame: frames.evaluate(frame, "a + b")) == 9

    def look(frame: FrameType, arrival: Any) -> Any:
        seen.append((arrival.here.function, frames.evaluate(frame, "a")))

    seen: list[Any] = []
    program.run(look, look, mode="continue", breaks=[program.stop(11)])
    assert {value for _, value in seen} == {3}


def test_an_expression_binds_no_name_of_a_cell() -> None:
    program = Program("a = 1\nb = 2")
    assert at(program, 2, lambda frame: frames.evaluate(frame, "(a := 5)")) == 5
    assert program.namespace["a"] == 1


def test_what_an_expression_raises_is_raised() -> None:
    def look(frame: FrameType) -> str:
        with pytest.raises(NameError) as caught:
            frames.evaluate(frame, "nothing + 1")
        return str(caught.value)

    assert at(Program(FUNCTION), 12, look) == "name 'nothing' is not defined"


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("", "nothing to evaluate"),
        ("a = 1", "'a = 1' is a statement, and eval takes an expression.*set"),
        ("import os", "is a statement"),
        ("a +", r"can't read 'a \+': invalid syntax"),
        ("a\0", "can't read"),
    ],
)
def test_what_is_no_expression_is_refused(expression: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        frames.evaluate(sys._getframe(), expression)


# -- giving other values -------------------------------------------------------------------------


def set_at(line: int, *pairs: tuple[str, str]) -> Program:
    program = Program(FUNCTION)

    def assign(frame: FrameType) -> None:
        for name, expression in pairs:
            frames.assign(frame, name, expression)

    at(program, line, assign)
    return program


def test_a_local_variable_really_changes() -> None:
    assert set_at(11, ("a", "a + 1")).namespace["x"] == (17, 4, 6, [0, 4, 8])
    # seen at once by what is evaluated next, and not undone by it
    assert set_at(11, ("a", "5"), ("b", "a * 2")).namespace["x"] == (25, 5, 10, [0, 5, 10])


def test_a_variable_that_has_no_value_yet_gets_one() -> None:
    assert set_at(12, ("result", "1"), ("squares", "result")).namespace["x"][3] == 1


def test_cell_and_free_variables_change_for_all_who_share_them() -> None:
    assert set_at(12, ("b", "100")).namespace["x"][:3] == (205, 3, 100)
    assert set_at(9, ("b", "100"), ("c", "1")).namespace["x"][:3] == (201, 3, 100)


def test_a_variable_of_a_caller_changes_too() -> None:
    program = Program(FUNCTION)
    at(program, 9, lambda frame: frames.assign(frames.user_frames(frame)[-2], "a", "42"))
    assert program.namespace["x"][1] == 42


def test_global_variables_and_names_of_a_cell_change() -> None:
    program = set_at(9, ("SCALE", "SCALE + 1"))
    assert program.namespace["SCALE"] == 11
    program = set_at(16, ("x", "1"), ("new", "x + 1"))
    assert (program.namespace["y"], program.namespace["new"]) == (1, 2)


def test_items_and_attributes_can_be_set() -> None:
    program = set_at(13, ("squares[0]", "a * 100"), ("inner.note", "'here'"))
    assert program.namespace["x"][3][0] == 300


def test_a_tensor_in_a_class_body_or_method_can_be_set() -> None:
    program = Program("""
        import torch
        class Layer:
            size = 2
            wide = size * 2
            def forward(self, x):
                y = x + 1
                return y
        out = Layer().forward(torch.zeros(2))
    """)
    program.run(
        lambda frame, arrival: frames.assign(frame, "size", "8"),
        lambda frame, arrival: frames.assign(frame, "x", "torch.ones(2) * self.wide"),
        mode="continue",
        breaks=[program.stop(4), program.stop(6, number=2)],
    )
    assert torch.equal(program.namespace["out"], torch.full((2,), 17.0))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("resullt", "inner has no variable 'resullt'"),
        ("SCALEE", "inner has no variable 'SCALEE': did you mean SCALE"),
        ("zzzzzz", "it can't get new ones"),
        ("a + 1", "can't be set: name a variable"),
        ("a, b", "can't be set"),
        ("a = b", "can't be set"),
        ("a) = (b", "can't be set"),
        ("", "can't be set"),
        ("1", "can't be set"),
    ],
)
def test_what_can_not_be_set_is_refused(name: str, says: str) -> None:
    def look(frame: FrameType) -> None:
        with pytest.raises(ArgumentError, match=says):
            frames.assign(frame, name, "1")

    program = Program(FUNCTION)
    at(program, 9, look)
    assert program.namespace["x"] == (17, 3, 6, [0, 3, 6])
