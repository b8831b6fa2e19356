"""Every request, against a session whose program stands, on threads and on processes."""

import linecache
import time

import pytest

from discolab import WorkerError
from discolab.dap.teller import worked_out
from discolab.runtime.interpreter_lock import is_on

from .adapter_client import RefusedError
from .conftest import PROGRAM


def at(text: str) -> int:
    """The line of the program that has this text."""
    (found,) = [n for n, line in enumerate(PROGRAM.splitlines(), 1) if text in line]
    return found


def stopped(client, reason):
    body = client.event("stopped")
    assert body["reason"] == reason, body
    assert body["allThreadsStopped"]
    return body


def test_the_whole_flow(client, dbg, module, server):
    file, program = module
    threads = client.ask("threads")["threads"]
    assert threads == [{"id": rank + 1, "name": f"worker {rank}"} for rank in range(4)]
    placed = client.ask(
        "setBreakpoints", source={"path": file}, breakpoints=[{"line": at("x = inner")}]
    )["breakpoints"]
    assert placed[0]["verified"]
    assert placed[0]["line"] == at("x = inner")
    dbg.start(program)
    body = stopped(client, "breakpoint")
    assert body["hitBreakpointIds"] == [placed[0]["id"]]
    assert "breakpoint" in body["description"]
    for rank in range(4):
        (frame,) = client.stack(rank)
        assert (frame["name"], frame["line"]) == ("program", at("x = inner"))
        assert frame["source"]["path"] == file
    assert client.ask("stepIn", threadId=1) == {}
    stopped(client, "step")
    assert [frame["name"] for frame in client.stack(3)] == ["inner", "program"]
    assert client.locals(3)["x"]["value"] == "float32[2, 3] mean 3, 3 to 3"
    assert client.locals(3, depth=1)["i"]["value"] == "0"
    assert client.ask("next", threadId=1) == {}
    stopped(client, "step")
    assert client.line(0) == at("if rank == 2")
    client.ask("next", threadId=2)
    assert stopped(client, "step")["threadId"] == 2, "the editor stays where it was"
    assert [client.line(rank) for rank in range(4)] == [at("return y")] * 2 + [
        at("y = y + 1"), at("return y")]  # fmt: skip
    client.ask("stepOut", threadId=1)
    stopped(client, "step")
    assert client.stack(0)[0]["name"] == "program"
    client.ask("setBreakpoints", source={"path": file}, breakpoints=[])
    assert not dbg.breaks
    assert client.ask("continue", threadId=1) == {"allThreadsContinued": True}
    assert client.event("continued")["allThreadsContinued"]
    assert dbg.program.result(20).debug_get_from_remote(0) is not None
    client.ask("disconnect")
    assert client.has_ended()
    assert server.client is None


def test_a_stop_is_told_after_the_answer_to_the_request_that_led_to_it(client, dbg, module):
    dbg.start(module[1], step=True)
    stopped(client, "entry")
    for _ in range(10):
        client.ask("next", threadId=1)
        stopped(client, "step")
    kinds = [
        "answer" if one.get("command") == "next" else "stop"
        for one in client.messages
        if one.get("command") == "next" or one.get("event") == "stopped"
    ]
    assert kinds == ["stop"] + ["answer", "stop"] * 10


def test_conditions_hits_and_logs(client, dbg, module):
    file, program = module
    line = at("x = inner")
    wanted = [
        {"line": line, "condition": "rank == 1", "hitCondition": "2"},
        {"line": line + 1, "logMessage": "i is {i}"},
        {"line": line, "condition": "rank ="},
        {"line": line, "hitCondition": "often"},
        {"line": 3},
        {"line": 999},
    ]
    placed = client.ask("setBreakpoints", source={"path": file}, breakpoints=wanted)["breakpoints"]
    assert [one["verified"] for one in placed] == [True, True, False, False, True, False]
    assert placed[4]["line"] == at("def inner"), "the next line with code"
    assert "can't be compiled" in placed[2]["message"]
    assert "hit condition" in placed[3]["message"]
    dbg.start(program)
    stopped(client, "breakpoint")
    assert client.locals(1)["i"]["value"] == "1"
    again = client.ask("setBreakpoints", source={"path": file}, breakpoints=wanted)["breakpoints"]
    assert [one.get("id") for one in again] == [one.get("id") for one in placed]
    client.ask("continue", threadId=1)
    client.event("continued")
    dbg.wait(20)
    assert not dbg.is_active


def test_breakpoints_at_functions(client, dbg, module, sess):
    file, program = module
    sess.call_packed(_define, file).debug_get_from_remote(0)
    wanted = [{"name": "discolab_test_inner"}, {"name": "nosuch"}]
    placed = client.ask("setFunctionBreakpoints", breakpoints=wanted)["breakpoints"]
    assert [one["verified"] for one in placed] == [True, False]
    assert "nosuch" in placed[1]["message"]
    dbg.start(program)
    stopped(client, "breakpoint")
    assert client.line(0) == at("y = x * 2")
    assert client.ask("setFunctionBreakpoints", breakpoints=wanted[:1])["breakpoints"][0][
        "id"] == placed[0]["id"]  # fmt: skip
    client.ask("setFunctionBreakpoints", breakpoints=[])
    assert not dbg.breaks
    client.ask("continue", threadId=1)


def _define(file):
    from discolab import current_worker

    names = {}
    with open(file) as source:
        exec(compile(source.read(), file, "exec"), names)
    current_worker().namespace["discolab_test_inner"] = names["inner"]


def test_the_lines_that_can_have_breakpoints(client, module):
    found = client.ask("breakpointLocations", source={"path": module[0]}, line=5, endLine=9)
    assert [one["line"] for one in found["breakpoints"]] == [5, 6, 7, 8, 9]


def test_variables_open_level_by_level(client, dbg, module):
    dbg.start(module[1], breaks=[str(at("print"))], file=module[0])
    stopped(client, "breakpoint")
    found = client.locals(1)
    assert found["rank"] == {
        "name": "rank", "value": "1", "type": "int", "evaluateName": "rank",
        "variablesReference": 0,
    }  # fmt: skip
    tensor = client.children(found["x"]["variablesReference"])
    assert tensor["shape"]["value"] == "[2, 3]"
    assert tensor["dtype"]["value"] == "float32"
    assert tensor["device"]["value"] == "cpu"
    assert tensor["values"]["value"].startswith("[2.0, 2.0")
    assert tensor["mean"]["value"] == "2"
    assert len(tensor["digest"]["value"]) == 16
    nested = client.children(found["nested"]["variablesReference"])
    assert nested["'b'"]["value"] == "None"
    inner = client.children(nested["'a'"]["variablesReference"])
    assert inner["1"]["evaluateName"] == "nested['a'][1]"
    deepest = client.children(inner["1"]["variablesReference"])
    assert deepest["1"]["value"].startswith("float32[2, 3]")
    values = client.children(deepest["1"]["variablesReference"])
    assert values["mean"]["value"] == "1"
    many = client.children(found["many"]["variablesReference"])
    assert len(many) == 41
    rest = client.children(many["[40:]"]["variablesReference"])
    assert rest["9"]["value"] == "49"
    assert rest["9"]["evaluateName"] == "many[40:][9]"
    page = client.ask(
        "variables", variablesReference=found["many"]["variablesReference"], start=2, count=3
    )["variables"]
    assert [one["value"] for one in page] == ["2", "3", "4"]


def test_modules_and_objects_open(client, dbg):
    source = """\
import torch
class Thing:
    def __init__(self):
        self.size = 3
        self.weight = torch.ones(2)
def program():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    thing = Thing()
    return 1
"""
    linecache.cache["parts.py"] = (len(source), None, source.splitlines(True), "parts.py")
    names = {"__name__": "parts"}
    exec(compile(source, "parts.py", "exec"), names)
    dbg.start(names["program"], breaks=["9"], file="parts.py")
    stopped(client, "breakpoint")
    found = client.locals(2)
    layers = client.children(found["net"]["variablesReference"])
    assert list(layers) == ["0", "1"]
    linear = client.children(layers["0"]["variablesReference"])
    assert linear["weight"]["value"].startswith("Parameter float32[3, 2]")
    weight = client.children(linear["weight"]["variablesReference"])
    assert weight["grad"]["value"] == "None"
    thing = client.children(found["thing"]["variablesReference"])
    assert thing["size"]["value"] == "3"
    assert client.children(thing["weight"]["variablesReference"])["mean"]["value"] == "1"
    source_of = client.stack(0)[0]["source"]
    assert source_of["name"] == "parts.py"
    text = client.ask("source", source=source_of, sourceReference=source_of["sourceReference"])
    assert text["content"] == source
    placed = client.ask("setBreakpoints", source=source_of, breakpoints=[{"line": 8}])
    assert placed["breakpoints"][0]["verified"]
    with pytest.raises(RefusedError, match="no source has the number 99"):
        client.ask("source", sourceReference=99)


def test_workers_beside_each_other(client, dbg, module):
    dbg.start(module[1], breaks=[str(at("print"))], file=module[0])
    stopped(client, "breakpoint")
    beside = client.children(client.scopes(0)["All workers"])
    assert beside["i"]["value"] == "= 0"
    assert beside["x"]["value"] == "≠ 4 different values"
    workers = client.children(beside["x"]["variablesReference"])
    assert list(workers) == [f"worker {rank}" for rank in range(4)]
    mean = client.children(workers["worker 3"]["variablesReference"])["mean"]
    assert mean["value"] == "6"


def test_evaluate_hover_and_watch(client, dbg, module):
    dbg.start(module[1], breaks=[str(at("y = x * 2"))], file=module[0])
    stopped(client, "breakpoint")
    inner, outer = (frame["id"] for frame in client.stack(3))
    assert client.ask("evaluate", expression="rank + 1", frameId=inner)["result"] == "4"
    for context in ("watch", "hover", "repl"):
        found = client.ask("evaluate", expression="i", frameId=outer, context=context)
        assert (found["result"], found["type"]) == ("0", "int")
    opened = client.ask("evaluate", expression="x + 1", frameId=inner)
    assert client.children(opened["variablesReference"])["mean"]["value"] == "4"
    opened = client.ask("evaluate", expression="[x + 1, 2]", frameId=inner)
    item = client.children(opened["variablesReference"])["0"]
    assert client.children(item["variablesReference"])["mean"]["value"] == "4"
    with pytest.raises(RefusedError, match="NameError"):
        client.ask("evaluate", expression="nosuch", frameId=inner)
    with pytest.raises(RefusedError, match="statement"):
        client.ask("evaluate", expression="a = 1", frameId=inner, context="repl")
    with pytest.raises(RefusedError, match="no value after"):
        client.ask("evaluate", expression="[0 for _ in iter(int, 1)]", frameId=inner)
    assert client.ask("evaluate", expression="rank")["result"] == "0", "without a frame"


def test_the_console_takes_the_words_of_the_magics(client, dbg, module):
    dbg.start(module[1], step=True)
    stopped(client, "entry")
    client.ask("evaluate", expression="%next -r 2", context="repl")
    stopped(client, "step")
    assert [client.line(rank) for rank in range(4)] == [13, 13, 14, 13]
    shown = client.ask("evaluate", expression="%eval world_size", context="repl")["result"]
    assert "4" in shown
    assert "model.py" in client.ask("evaluate", expression="%where", context="repl")["result"]
    with pytest.raises(RefusedError, match="%step, %next"):
        client.ask("evaluate", expression="%fly", context="repl")


def test_variables_are_set(client, dbg, module):
    dbg.start(module[1], breaks=[str(at("print"))], file=module[0])
    stopped(client, "breakpoint")
    scope = client.scopes(1)["Locals"]
    set_ = client.ask("setVariable", variablesReference=scope, name="i", value="7 * 6")
    assert (set_["value"], set_["type"]) == ("42", "int")
    assert client.event("invalidated")["areas"] == ["variables"]
    assert client.locals(1)["i"]["value"] == "42"
    assert client.locals(0)["i"]["value"] == "0", "on that worker alone"
    many = client.locals(1)["many"]["variablesReference"]
    client.ask("setVariable", variablesReference=many, name="1", value="-5")
    frame = client.stack(1)[0]["id"]
    client.ask("setExpression", expression="nested['b']", value="rank", frameId=frame)
    assert client.ask("evaluate", expression="[many[1], nested['b']]", frameId=frame)[
        "result"] == "[-5, 1]"  # fmt: skip
    tensor = client.locals(1)["x"]["variablesReference"]
    with pytest.raises(RefusedError, match="can't be set"):
        client.ask("setVariable", variablesReference=tensor, name="shape", value="3")
    with pytest.raises(RefusedError, match="ZeroDivisionError"):
        client.ask("setVariable", variablesReference=scope, name="i", value="1 / 0")


def test_one_worker_alone(client, dbg, module):
    dbg.start(module[1], step=True)
    stopped(client, "entry")
    client.ask("next", threadId=3, singleThread=True)
    stopped(client, "step")
    assert [client.line(rank) for rank in range(4)] == [13, 13, 14, 13]
    client.ask("next", threadId=1)
    body = stopped(client, "step")
    assert [client.line(rank) for rank in range(4)] == [14] * 4, "those behind catch up"
    assert body["threadId"] == 1
    answer = client.ask("continue", threadId=2, singleThread=True)
    assert answer == {"allThreadsContinued": False}
    body = stopped(client, "pause")
    assert client.ask("threads")["threads"][1]["name"] == "worker 1 · waits"
    label, frame = client.stack(1)[:2]
    assert label["presentationHint"] == "label"
    assert "all_reduce" in label["name"]
    assert frame["line"] == at("return ccl")
    if is_on():  # else such frames can't be looked into: docs/pythons.md
        assert client.locals(1)["i"]["value"] == "2", "of one that waits, too"


def test_pause(client, dbg, module):
    with pytest.raises(RefusedError, match="no program"):
        client.ask("pause", threadId=1)
    dbg.start(module[1], 10**6, step=False)
    client.ask("pause", threadId=1)
    stopped(client, "pause")
    assert client.stack(0)


def test_failures_stop_and_are_told(client, dbg, module):
    file, _ = module
    source = PROGRAM.replace("x * 2", "x * 2 if rank else nosuch")
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {"__name__": "model"}
    exec(compile(source, file, "exec"), names)
    filters = client.ask("setExceptionBreakpoints", filters=["raised", "odd"])["breakpoints"]
    assert [one["verified"] for one in filters] == [True, False]
    dbg.start(names["program"], step=False)
    body = stopped(client, "exception")
    assert body["threadId"] == 1
    assert "NameError" in body["text"]
    info = client.ask("exceptionInfo", threadId=1)
    assert info["exceptionId"] == "NameError"
    assert "nosuch" in info["description"]
    assert client.line(0) == at("y = x * 2")
    with pytest.raises(RefusedError, match="does not stand at a failure"):
        client.ask("exceptionInfo", threadId=2)
    with pytest.raises(RefusedError, match="failed here"):
        client.ask("next", threadId=1, singleThread=True)
    client.ask("continue", threadId=1)
    while "NameError" not in (told := client.event("output"))["output"]:
        pass
    assert told["category"] == "important"
    dbg.wait(20)
    with pytest.raises(WorkerError, match="NameError"):
        dbg.program.result()


def test_terminate_ends_the_program_and_not_the_session(client, dbg, module, sess):
    dbg.start(module[1], step=True)
    stopped(client, "entry")
    client.ask("terminate")
    client.event("terminated")
    assert not dbg.is_active
    assert sess.call_packed(_three).debug_get_from_all() == [3] * 4


def _three():
    return 3


@pytest.mark.parametrize("path", ["/no\0such.py", "/\ud800.py", "/tmp", "/no/such.py"])
def test_a_path_without_source_has_no_breakpoints(client, path):
    placed = client.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": 3}])
    (found,) = placed["breakpoints"]
    assert not found["verified"]
    assert "can't be" in found["message"]
    assert client.ask("setBreakpoints", source={"path": path}, breakpoints=[]) == {
        "breakpoints": []
    }


def test_a_pause_says_who_does_not_stop_for_a_condition_that_never_ends(client, dbg, module):
    line, condition = at("x = inner"), "rank == 1 and [0 for _ in iter(int, 1)]"
    client.ask(
        "setBreakpoints",
        source={"path": module[0]},
        breakpoints=[{"line": line, "condition": condition}],
    )
    dbg.start(module[1])
    until = time.monotonic() + 10
    while not dbg.session.look(worked_out, ranks=[1]).get(1) and time.monotonic() < until:
        time.sleep(0.01)
    client.ask("pause", threadId=1)
    told = client.event("output")["output"]
    number = dbg.all_breaks()[0].number
    assert told == (
        "worker 1 can't pause before it comes to a line: "
        f"the condition of breakpoint {number} is worked out\n"
    )
    client.ask("terminate")
    client.event("terminated")
