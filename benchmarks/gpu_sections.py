"""The sections of gpu_check.py, each in a process of its own; a record is a JSON line.

Started by gpu_check.py. The main thread is the controller of each session; what workers run is
in gpu_programs.py. No state outlives a section.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import time
import traceback
from collections.abc import Callable

import torch
from collectives_report import show_size
from gpu_places import WAIT, Place, Setting, make_known
from gpu_programs import COLLECTIVES, DISTRIBUTED, STREAM_OPS, Program, stream_program
from gpu_speed import speed

from discolab import DiscoError, ThreadedSession, WorkerError, ccl, current_worker

STOP_WITHIN = 2.0  # seconds from an interrupt to a usable session


def tell(setting: Setting, where: str, check: str, do: Callable[[], str | None]) -> None:
    """Do one check and print its record; what `do` returns is the detail."""
    record = {"kind": "check", "section": setting.section, "where": where, "check": check}
    try:
        detail, verdict = do() or "", "ok"
    except Skipped as exc:
        detail, verdict = str(exc), "not run"
    except Exception as exc:
        traceback.print_exc()
        text = " ".join(f"{type(exc).__name__}: {exc}".split())
        detail, verdict = (text if len(text) < 300 else text[:299] + "…"), "FAILED"
    print(json.dumps({**record, "verdict": verdict, "detail": detail}), flush=True)


class Skipped(Exception):
    """A check that this machine can't do; the text says what it would take."""


# -- the sections --------------------------------------------------------------------------------


def check_local(setting: Setting) -> None:
    """Every collective of the backend `local`."""
    for place in setting.places():
        check_programs(setting, place, "local", COLLECTIVES)


def check_distributed(setting: Setting) -> None:
    """torch.distributed inside worker threads."""
    for place in setting.places():
        check_programs(setting, place, "local", DISTRIBUTED)


def check_nccl(setting: Setting) -> None:
    """NCCL with a worker for each GPU, and what it refuses. On the CPU: Gloo."""
    place, backend = setting.spread_place(), setting.process_groups()
    check_programs(setting, place, backend, COLLECTIVES)
    tell(setting, place.name, f"{backend}: interrupt", lambda: stop(place, backend, "all_reduce"))
    crowded = Place(f"2 workers on {place.devices[0]}", (place.devices[0],) * 2)
    library = setting.library()
    refused = functools.partial(refuse, crowded, library)
    tell(setting, crowded.name, f"{library} is refused, with a way out", refused)


def check_programs(
    setting: Setting, place: Place, backend: str, programs: dict[str, Program]
) -> None:
    """Programs with each dtype, in one session."""
    with place.session() as sess:
        try:
            sess.init_ccl(backend)
        except DiscoError as exc:
            error = exc
            tell(setting, place.name, f"init_ccl({backend!r})", functools.partial(_raise, error))
            return
        for name, program in programs.items():
            do = functools.partial(run_dtypes, sess, program, setting.dtypes)
            tell(setting, place.name, f"{backend}: {name}", do)


def run_dtypes(
    sess: ThreadedSession, program: Program, dtypes: tuple[torch.dtype, ...]
) -> str | None:
    """A program once for each dtype; the dtypes."""
    for dtype in dtypes:
        try:
            sess.call_packed(program, dtype).debug_get_from_all()
        except WorkerError as exc:
            exc.add_note(f"with {dtype}")
            raise
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def refuse(place: Place, library: str) -> str:
    """Two workers on one GPU, or on the CPU, must be told which backend to take."""
    sess = place.session()
    try:
        sess.init_ccl(library)
    except DiscoError as exc:
        text = " ".join(str(exc).split())
        if "'local'" not in text or not re.search("cuda|gpu", text, re.IGNORECASE):
            raise AssertionError(f"the error must speak of GPUs and name 'local': {text}") from exc
        return text
    finally:
        sess.shutdown(cancel=True)
    raise AssertionError(f"init_ccl({library!r}) was accepted")


def check_streams(setting: Setting) -> None:
    """Order on streams, with no synchronisation by the host."""
    times = 8 if setting.quick else 100
    for place in setting.places():
        with place.session() as sess:
            for others in (False, True):
                streams = "two streams by turns" if others else "the worker's stream"
                for op in STREAM_OPS:
                    do = functools.partial(run_streams, sess, op, others, times)
                    tell(setting, place.name, f"{op}, {streams}", do)


def run_streams(sess: ThreadedSession, op: str, others: bool, times: int) -> str:
    """No result may be wrong."""
    wrong = sess.call_packed(stream_program, op, others, times).debug_get_from_all()
    assert not any(wrong), f"wrong results by rank, of {times}: {wrong}"
    return f"{times} times"


def check_interrupts(setting: Setting) -> None:
    """Stop in the middle of a collective that worker 0 never joins."""
    for place in setting.places():
        for op in ("all_reduce", "all_gather", "broadcast", "barrier", "recv"):
            do = functools.partial(stop, place, "local", op)
            tell(setting, place.name, f"interrupt of {op}", do)


def stop(place: Place, backend: str, op: str) -> str:
    """Interrupt the session and use it again; how long that took."""
    if len(place.devices) < 2:
        raise Skipped("needs two workers, so two GPUs")
    sess = place.session()
    try:
        sess.init_ccl(backend)
        sess.call_packed(one_sum).debug_get_from_all()
        ref = sess.call_packed(join_but_for_worker_0, op)
        deadline = time.monotonic() + WAIT
        while not all(status.state == "waiting" for status in sess.status()):
            assert time.monotonic() < deadline, f"not waiting: {list(map(str, sess.status()))}"
            time.sleep(0.01)
        begin = time.monotonic()
        late = sess.interrupt(timeout=10)
        usable = sess.call_packed(one_sum).debug_get_from_all()
        taken = time.monotonic() - begin
        assert not late, f"workers {late} did not stop within 10 s"
        assert usable == [float(sum(range(len(place.devices))))] * len(place.devices)
        try:
            ref.debug_get_from_all()
        except WorkerError:
            pass
        else:
            raise AssertionError("the interrupted call has a result")
        assert taken < STOP_WITHIN, f"usable after {taken:.2f} s, wanted {STOP_WITHIN:g} s"
        return f"usable after {taken * 1e3:.0f} ms"
    finally:
        sess.shutdown(cancel=True)


def one_sum() -> float:
    """On a worker: the sum of all ranks."""
    worker = current_worker()
    x = torch.full((1 << 10,), float(worker.worker_id), device=worker.device)
    return float(ccl.all_reduce(x)[-1])


def join_but_for_worker_0(op: str) -> None:
    """On a worker: a collective that can't complete while worker 0 sleeps."""
    worker = current_worker()
    x = torch.ones(1 << 10, device=worker.device)
    if worker.worker_id == 0:
        time.sleep(10 * WAIT)
    elif op == "recv":
        ccl.recv(x, 0)
    elif op == "barrier":
        ccl.barrier()
    else:
        getattr(ccl, op)(x)


def check_speed(setting: Setting) -> None:
    """Time collectives beside copies."""
    cases = [(setting.shared_place(), "local")]
    if setting.gpus > 1:
        cases += [(setting.spread_place(), "local"), (setting.spread_place(), setting.library())]
    sizes = (1 << 16, 1 << 20) if setting.quick else (1 << 20, 1 << 26, 1 << 28)
    for place, backend in cases:
        for size in sizes:
            do = functools.partial(speed, place, backend, size, setting.quick)
            tell(setting, place.name, f"{backend}: {show_size(size)}", do)


def _raise(error: Exception) -> None:
    raise error


def main() -> None:
    """Run the section that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sections: dict[str, Callable[[Setting], None]] = {
        "local": check_local,
        "streams": check_streams,
        "interrupts": check_interrupts,
        "distributed": check_distributed,
        "nccl": check_nccl,
        "speed": check_speed,
    }
    parser.add_argument("section", choices=sections)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    make_known(args.device)
    sections[args.section](Setting(args.section, args.device, args.quick))


if __name__ == "__main__":
    main()
