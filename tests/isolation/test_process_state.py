"""What Python keeps for the process: each worker has its own, on threads as in processes."""

from __future__ import annotations

import calendar
import contextlib
import copy
import decimal
import io
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from warnings import simplefilter

import cloudpickle
import psutil
import pytest
import torch

from discolab import Session, ThreadedSession, WorkerError, ccl, current_worker
from discolab.isolation.thread_state import in_new_context


def together() -> int:
    """On a worker: wait for the others; gives its rank."""
    ccl.barrier()
    return current_worker().rank


def environment() -> list[str | None]:
    """A variable of one's own, one deleted, and what a child sees of both."""
    rank = together()
    os.environ["DISCOLAB_TEST"] = f"of {rank}"
    os.environ.pop("HOME")
    together()
    child = subprocess.check_output(["sh", "-c", "echo $RANK $DISCOLAB_TEST $HOME."], text=True)
    assert os.environb[b"DISCOLAB_TEST"] == os.getenvb(b"DISCOLAB_TEST") == f"of {rank}".encode()
    assert os.system(f'test "$DISCOLAB_TEST" = "of {rank}"') == 0
    assert os.system("exit 3") == 3 << 8
    return [os.getenv("DISCOLAB_TEST"), os.environ.get("HOME"), child.strip()]


def test_each_worker_has_environment_variables(sess: Session) -> None:
    home = os.environ["HOME"]
    seen = sess.call_packed(environment).debug_get_from_all()
    assert seen == [[f"of {r}", None, f"{r} of {r} ."] for r in range(4)]
    assert "DISCOLAB_TEST" not in os.environ
    assert os.environ["HOME"] == home
    sess.shutdown()
    assert subprocess.check_output(["sh", "-c", "echo $RANK$HOME"], text=True).strip() == home


def redirect() -> str:
    """Print to a text of one's own while all do."""
    rank = together()
    text = io.StringIO()
    for _ in range(20):
        with contextlib.redirect_stdout(text):
            together()
            print(rank)
    return text.getvalue()


def test_each_worker_redirects_its_own_output(
    sess: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sess.call_packed(redirect).debug_get_from_all() == [f"{r}\n" * 20 for r in range(4)]
    sess.call_packed(print, "after")
    sess.sync_all()
    assert "after" in capsys.readouterr().out


def not_interactive() -> bool:
    """Whether a worker takes itself for an interactive interpreter."""
    return hasattr(sys, "ps1")


def test_no_worker_is_interactive(sess: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert sess.call_packed(not_interactive).debug_get_from_all() == [False] * 4
    assert sys.ps1 == ">>> "


def logs_of_torch() -> list[tuple[int, bool, bool]]:
    """What torch would log on a worker, and what it remembers of that, by `set_logs`."""
    rank = together()
    logger = logging.getLogger("torch._dynamo")
    artifact = torch._logging.getArtifactLogger("torch._dynamo.output_graph", "graph_code")
    found = []
    for _ in range(10):
        if rank % 2:
            torch._logging.set_logs(dynamo=logging.DEBUG, graph_code=True)
        else:
            torch._logging.set_logs(dynamo=logging.ERROR)
        together()
        kept = torch._logging._internal.log_state.is_artifact_enabled("graph_code")
        found.append((logger.getEffectiveLevel(), artifact.isEnabledFor(logging.DEBUG), kept))
        together()
    return found


def test_each_worker_sets_logs_of_torch(sess: Session) -> None:
    before = torch._logging._internal._get_log_state()
    kept = copy.deepcopy(before)
    found = sess.call_packed(logs_of_torch).debug_get_from_all()
    even, odd = (logging.ERROR, False, False), (logging.DEBUG, True, True)
    assert found == [[even] * 10, [odd] * 10] * 2
    if sess.engine == "threads":
        sess.shutdown()
        assert torch._logging._internal.log_state is before
        assert before == kept


def log(folder: str) -> list[int]:
    """Log to a file of one's own, with a level of one's own."""
    rank = together()
    logger = logging.getLogger("discolab.test")
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    logger.propagate = False
    handler = logging.FileHandler(Path(folder) / f"{rank}.log")
    logger.addHandler(handler)
    together()
    logger.info("info of %d", rank)
    logger.error("error of %d", rank)
    together()
    handler.close()
    return [logger.getEffectiveLevel(), len(logger.handlers)]


def test_each_worker_configures_logging(sess: Session, tmp_path: Path) -> None:
    levels = sess.call_packed(log, str(tmp_path)).debug_get_from_all()
    assert levels == [[logging.INFO, 1]] + [[logging.ERROR, 1]] * 3
    texts = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    assert texts == ["info of 0\nerror of 0\n"] + [f"error of {r}\n" for r in (1, 2, 3)]
    logger = logging.getLogger("discolab.test")
    assert logger.level == logging.NOTSET
    assert not logger.handlers
    assert logger.propagate


def logs(level: int) -> bool:
    return logging.getLogger("discolab.test.levels").isEnabledFor(level)


def set_level(level: int) -> None:
    if current_worker().rank:
        logging.getLogger("discolab.test").setLevel(level)


@pytest.mark.one_process
def test_a_level_that_changes_counts_from_then_on_for_whom_it_is(sess: Session) -> None:
    parent, child = (logging.getLogger(f"discolab.test{n}") for n in ("", ".levels"))
    try:
        for _ in range(2):  # what a logger remembers is asked the second time
            assert sess.call_packed(logs, logging.INFO).debug_get_from_all() == [False] * 4
        parent.setLevel(logging.INFO)
        for _ in range(2):
            assert sess.call_packed(logs, logging.INFO).debug_get_from_all() == [True] * 4
        sess.call_packed(set_level, logging.ERROR)
        for _ in range(2):
            mixed = sess.call_packed(logs, logging.INFO).debug_get_from_all()
            assert (mixed, logs(logging.INFO)) == ([True, False, False, False], True)
        parent.setLevel(logging.DEBUG)
        mixed = sess.call_packed(logs, logging.DEBUG).debug_get_from_all()
        assert (mixed, logs(logging.DEBUG)) == ([True, False, False, False], True)
    finally:
        parent.setLevel(logging.NOTSET)
    sess.shutdown()
    assert all(type(key) is int for key in vars(child)["_cache"])


def catch(times: int) -> list[list[str]]:
    """Catch one's own warnings; every second worker ignores some for good."""
    rank = together()
    if rank % 2:
        warnings.filterwarnings("ignore", "odd")
    found = []
    for number in range(times):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            together()
            warnings.warn(f"{rank} {number}", stacklevel=1)
        found.append([str(warning.message) for warning in caught])
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("odd", stacklevel=1)
    return [*found, [str(warning.message) for warning in caught]]


# for the threads of workers too: without the interpreter lock they begin with the filters that hold
# where they are started, and do not see others set later
@pytest.mark.filterwarnings("always:odd")
def test_each_worker_catches_its_own_warnings(sess: Session) -> None:
    before = list(warnings.filters)
    caught = sess.call_packed(catch, 20).debug_get_from_all()
    for rank, found in enumerate(caught):
        assert found[:20] == [[f"{rank} {number}"] for number in range(20)]
        assert found[20] == ([] if rank % 2 else ["odd"])
    assert warnings.filters == before


def quiet() -> list[str]:
    """What becomes of warnings in blocks that a worker enters alone."""
    found = []
    for number in range(2 * current_worker().rank):
        by_action = {"action": "ignore"} if number % 2 else {}
        with warnings.catch_warnings(**by_action):
            if not by_action:
                simplefilter("ignore")
            try:
                warnings.warn(str(number), stacklevel=1)
            except UserWarning:
                found.append(str(number))
    return found


def test_what_sets_filters_is_the_worker_s_own_by_any_name(sess: Session) -> None:
    before = list(warnings.filters)
    with warnings.catch_warnings(action="error"):
        within = list(warnings.filters)
        assert sess.call_packed(quiet).debug_get_from_all() == [[]] * sess.num_workers
        assert warnings.filters == within
    assert warnings.filters == before


def signals() -> list[Any]:
    """Set a handler and raise its signal."""
    rank = together()
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append((rank, number)))
    together()
    signal.raise_signal(signal.SIGUSR1)
    mine = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return [heard, callable(mine)]


def alarm() -> None:
    """Ask for a signal of the system."""
    signal.alarm(1)
    signal.alarm(0)


def test_signals_of_a_worker(sess: Session) -> None:
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # or it could end this process
    try:
        seen = sess.call_packed(signals).debug_get_from_all()
        assert seen == [[[(rank, signal.SIGUSR1)], True] for rank in range(4)]
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, handler)


@pytest.mark.one_process
def test_a_worker_sets_no_alarm(sess: Session) -> None:
    with pytest.raises(WorkerError, match=r"threading\.Timer.*engine='processes'"):
        sess.call_packed(alarm).debug_get_from_all()


def start_method() -> list[str | None]:
    """Set the start method, once."""
    rank = together()
    multiprocessing.set_start_method("spawn" if rank % 2 else "fork")
    together()
    try:
        multiprocessing.set_start_method("spawn")
    except RuntimeError as exc:
        return [multiprocessing.get_start_method(), str(exc)]
    return []


def test_each_worker_sets_the_start_method(sess: Session) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    seen = sess.call_packed(start_method).debug_get_from_all()
    assert seen == [[m, "context has already been set"] for m in ("fork", "spawn") * 2]
    assert multiprocessing.get_start_method(allow_none=True) == before


def default_start_method() -> list[str]:
    """The platform's, of which a worker begins with no other."""
    together()
    return [multiprocessing.get_start_method(), multiprocessing.get_context()._name]


def test_a_worker_begins_with_the_platforms_start_method(sess: Session) -> None:
    if sess.engine == "ray":
        pytest.skip("its workers, which serve all tests, have been told another one for good")
    default = multiprocessing.get_all_start_methods()[0]
    assert sess.call_packed(default_start_method).debug_get_from_all() == [[default] * 2] * 4


def variables_there() -> tuple[list[str | None], int]:
    """What processes of a fork server have for variables, and the server's number."""
    os.environ["IN_A_FORK_SERVER"] = f"of {current_worker().rank}"
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        found = pool.map(os.getenv, ["RANK", "IN_A_FORK_SERVER"])
        server: Any = pool._pool[0]._popen  # type: ignore[attr-defined]
        assert type(server).__module__ == "multiprocessing.popen_forkserver"
    return found, multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


@pytest.mark.one_process  # the others' servers end with their processes
def test_a_fork_servers_processes_have_the_workers_variables(make: Callable[..., Session]) -> None:
    sess = make(2)
    found = sess.call_packed(variables_there).debug_get_from_all()
    assert [variables for variables, _ in found] == [["0", "of 0"], ["1", "of 1"]]
    sess.shutdown()
    assert not any(psutil.pid_exists(server) for _, server in found)


def settings_of_modules() -> list[Any]:
    """What the same place in a program reads there, again and again."""
    rank = together()
    sys.argv = [f"program {rank}"]
    decimal.DefaultContext.prec = 5 + rank
    return [(sys.argv, decimal.DefaultContext.prec) for _ in range(50)]


def test_settings_stay_the_workers_own_where_they_are_read_often(sess: Session) -> None:
    before = [sys.argv for _ in range(50)]
    found = sess.call_packed(settings_of_modules).debug_get_from_all()
    assert found == [[([f"program {rank}"], 5 + rank)] * 50 for rank in range(4)]
    assert [sys.argv for _ in range(50)] == before


def test_functions_that_name_such_modules_travel(sess: Session) -> None:
    def inner() -> list[str]:
        return [module.__name__ for module in (sys, warnings, os)]

    assert sess.call_packed(inner).debug_get_from_all() == [["sys", "warnings", "os"]] * 4
    assert sess.call_packed(sent_on).debug_get_from_all() == [True] * 4


def sent_on() -> bool:
    """Whether a worker can pickle such modules."""
    return all(cloudpickle.loads(cloudpickle.dumps(m)) is m for m in (sys, warnings))


def log_as_rank(folder: str) -> list[str]:
    """What a worker's records say of it, while each uses loggers of the same names."""
    import logging.config

    rank = together()
    plain = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = plain(*args, **kwargs)
        record.rank = rank
        return record

    logging.setLogRecordFactory(make)
    logging.addLevelName(15, f"LEVEL{rank}")
    logger = logging.getLogger("tests.of_rank")
    logger.addFilter(lambda record: f"of {rank}" in record.getMessage())
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(rank)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(1)
    logger.propagate = False
    together()
    for other in range(4):
        logger.log(15, "of %d", other)

    file = logging.getLogger("tests.to_file")
    file.propagate = False
    file.addHandler(logging.FileHandler(f"{folder}/{rank}.log", mode="w"))
    file.warning("one")
    together()
    if rank == 1:  # closes the handlers that there are
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    if rank == 2:
        logging.shutdown()
    together()
    file.warning("two")
    together()

    logging.captureWarnings(True)
    captured = warnings.showwarning is logging._showwarning  # type: ignore[attr-defined]
    together()
    logging.captureWarnings(False)
    return [text.getvalue(), Path(f"{folder}/{rank}.log").read_text(), str(captured)]


def test_each_workers_records_are_its_own(sess: Session, tmp_path: Path) -> None:
    before = logging.getLogRecordFactory(), logging.getLevelName(15), logging._handlerList[:]  # type: ignore[attr-defined]
    for rank, (text, file, captured) in enumerate(
        sess.call_packed(log_as_rank, str(tmp_path)).debug_get_from_all()
    ):
        assert text == f"{rank} LEVEL{rank} of {rank}\n"
        assert file == ("one\n" if rank in (1, 2) else "one\ntwo\n")
        assert captured == "True"
    sess.shutdown()
    after = logging.getLogRecordFactory(), logging.getLevelName(15), logging._handlerList[:]  # type: ignore[attr-defined]
    assert before == after


def observe_threads() -> tuple[bool, ...]:
    """Worker 0 traces its threads, worker 1 profiles its: what is set, and whether it saw one."""
    rank = together()
    marks = {0: threading.settrace, 1: threading.setprofile}
    frames: list[str] = []

    def note(frame: Any, *_: Any) -> None:
        frames.append(frame.f_code.co_name)

    if rank in marks:
        marks[rank](note)
    together()

    def watched_thread() -> None:
        pass

    thread = threading.Thread(target=watched_thread)
    thread.start()
    thread.join()
    together()
    found = threading.gettrace() is note, threading.getprofile() is note
    if rank in marks:
        marks[rank](None)
    together()
    return *found, "watched_thread" in frames, threading.gettrace() is None


def test_each_worker_observes_its_own_threads(sess: Session) -> None:
    seen = sess.call_packed(observe_threads).debug_get_from_all()
    assert seen == [
        (True, False, True, True),
        (False, True, True, True),
        (False, False, False, True),
        (False, False, False, True),
    ]
    assert threading.gettrace() is threading.getprofile() is None


def compute_decimals() -> list[Any]:
    """Digits of a third on this thread, on another, and in contexts that are made here."""
    rank = together()
    decimal.DefaultContext.prec = 4 + rank
    if rank % 2:
        decimal.DefaultContext.rounding = decimal.ROUND_UP
    together()
    found = [str(decimal.Decimal(1) / 3)]
    helper = threading.Thread(target=lambda: found.append(str(decimal.Decimal(1) / 3)))
    helper.start()
    helper.join()
    context = decimal.Context(Emax=99)
    assert isinstance(context, decimal.Context)
    assert str(pickle.loads(pickle.dumps(context))) == str(context)
    assert str(pickle.loads(pickle.dumps(decimal.getcontext()))) == str(decimal.getcontext())
    together()
    decimal.getcontext().prec = 2
    decimal.DefaultContext.prec = 9  # of no thread that has a context
    return [*found, str(context.divide(1, 3)), str(decimal.Decimal(1) / 3), decimal.Context().prec]


def test_each_worker_has_a_default_of_decimals(sess: Session) -> None:
    seen = sess.call_packed(in_new_context, compute_decimals).debug_get_from_all()
    for rank, found in enumerate(seen):
        third = "0." + "3" * (4 + rank)
        if rank % 2:
            third = third[:-1] + "4"
        assert found == [third] * 3 + [("0.34" if rank % 2 else "0.33"), 9]
    assert decimal.DefaultContext.prec == decimal.Context().prec == 28


def trap_decimals() -> list[Any]:
    """What `1 / 3` does on this thread and on another once their default traps what is inexact."""
    rank = together()
    decimal.DefaultContext.prec = 28  # a kept session may have another one of an earlier test
    traps = decimal.DefaultContext.traps
    traps[decimal.Inexact] = rank % 2 == 1
    together()
    found: list[Any] = []

    def divide() -> None:
        try:
            found.append(len(str(decimal.Decimal(1) / 3)))
        except decimal.Inexact:
            found.append("trapped")

    divide()
    helper = threading.Thread(target=divide)
    helper.start()
    helper.join()
    decimal.getcontext().traps[decimal.Inexact] = False
    decimal.DefaultContext.traps[decimal.Inexact] = True  # of no thread that has a context
    divide()
    other = decimal.Context(traps=traps)  # C takes them, too
    assert other.traps == traps.copy()  # 3.14 looks whether a trap's context is there still
    decimal.getcontext().traps = traps
    return [*found, traps[decimal.Inexact], len(traps)]


def test_each_worker_has_traps_of_decimals(sess: Session) -> None:
    seen = sess.call_packed(in_new_context, trap_decimals).debug_get_from_all()
    count = len(decimal.getcontext().traps)
    first: list[Any] = [30, "trapped"]
    assert seen == [[first[r % 2], first[r % 2], 30, True, count] for r in range(4)]
    assert not decimal.DefaultContext.traps[decimal.Inexact]


def weeks() -> Any:
    rank = together()
    calendar.setfirstweekday(rank)
    together()
    return calendar.firstweekday(), calendar.monthcalendar(2024, 2)[0].index(1)


def test_each_workers_week_begins_as_it_likes(sess: Session) -> None:
    seen = sess.call_packed(weeks).debug_get_from_all()  # the first of February is a Thursday
    assert seen == [(rank, 3 - rank) for rank in range(4)]
    assert calendar.firstweekday() == 0


def test_the_default_of_decimals_may_be_set_as_a_context() -> None:
    """As Python's documentation does it: what is set there does not reach the default."""

    def own() -> tuple[int, int, int]:
        decimal.DefaultContext.prec = 12 + current_worker().rank
        decimal.setcontext(decimal.DefaultContext)
        decimal.getcontext().prec = 50
        copied = copy.copy(decimal.DefaultContext)
        return decimal.DefaultContext.prec, decimal.Context().prec, copied.prec

    with ThreadedSession(2, devices="cpu", timeout=20) as sess:
        assert sess.call_packed(own).debug_get_from_all() == [(12,) * 3, (13,) * 3]
