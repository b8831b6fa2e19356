"""What `test_mpi.py` runs: a session whose nodes are started by mpirun, one case of several."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from discolab import DiscoError, Session, WorkerError, ccl, current_worker, make_session
from discolab.ccl.backends import remote_mpi
from discolab.engines.keys import default_file, load_keys

SIZE = 3


def everything() -> bool:
    """All that the backend has, as `mpi_program` checks it between mpirun's own processes."""
    import mpi_program as program  # needs mpi4py, which has begun by now

    rank = current_worker().rank
    program.SIZE, program.RANK = SIZE, rank
    program.DTYPES[:] = [torch.bfloat16, torch.float32, torch.int8, torch.bool]
    world = list(range(SIZE))
    program.check_reductions(world, "world")
    program.check_moves(world, "world")
    program.check_several()
    program.check_mistakes()
    return True


def total() -> list[float]:
    """An all-reduce of bfloat16."""
    mine = torch.full((2,), current_worker().rank + 1.0, dtype=torch.bfloat16)
    return ccl.all_reduce(mine, group="world").tolist()  # type: ignore[no-any-return]


def check(sess: Session) -> None:
    assert sess.call_packed(total).debug_get_from_all() == [[6.0, 6.0]] * SIZE


def collectives(sess: Session) -> None:
    assert all(sess.call_packed(everything).debug_get_from_all())
    sess.init_ccl("gloo")
    sess.init_ccl("mpi")


def absence(sess: Session) -> None:
    def wait(limit: float | None) -> None:
        if current_worker().rank != 1:
            ccl.all_reduce(torch.ones(3), group="world", timeout=limit)

    with pytest.raises(WorkerError, match=r"gave up after 0.3 s waiting for all_reduce"):
        sess.call_packed(wait, 0.3).debug_get_from_all()


def death(sess: Session) -> None:
    def die() -> None:
        if current_worker().rank == 1:
            os._exit(3)
        ccl.all_reduce(torch.ones(3), group="world")

    began = time.monotonic()
    with pytest.raises(DiscoError, match=r"worker 1 .* exited with status 3"):
        sess.call_packed(die).debug_get_from_all()
    sess.shutdown()
    assert time.monotonic() - began < 20


def late(sess: Session) -> None:
    """One worker does not connect: the wait ends, it is told from then on, and Gloo goes on."""

    def never_connect() -> None:
        remote_mpi.START_TIMEOUT = 1.0
        if current_worker().rank == 1:
            remote_mpi._join = lambda *_: time.sleep(1000)  # type: ignore[assignment]

    sess.call_packed(never_connect).debug_get_from_all()
    with pytest.raises(DiscoError, match=r"asked to connect, and has not answered within 1 s"):
        sess.init_ccl("mpi")
    with pytest.raises(DiscoError, match=r"has not answered; restart the process"):
        sess.init_ccl("mpi")


def main(case: str, mpirun: str) -> None:
    load_keys(default_file())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = [sys.executable, "-m", "discolab", "node", "--connect", f"tcp://127.0.0.1:{port}"]
    more = ["--stay"] if case == "stay" else []
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    nodes = subprocess.Popen(
        [mpirun, "-n", str(SIZE - 1), *node, *more],
        env={**os.environ, **as_root},
        stdout=subprocess.DEVNULL,
    )
    try:
        options = {"port": port, "timeout": 30, "start_timeout": 60, "devices": "cpu"}
        with make_session(SIZE, "sockets", nodes=SIZE, **options) as sess:
            if case != "late":
                sess.init_ccl("mpi")
                check(sess)
            if case in CASES:
                CASES[case](sess)
            if case != "death":
                check(sess)
        if case == "stay":
            with make_session(SIZE, "sockets", nodes=SIZE, **options) as sess:
                with pytest.raises(
                    DiscoError, match=r"has served a session before.*without --stay"
                ):
                    sess.init_ccl("mpi")
                check(sess)  # with Gloo
        else:
            assert nodes.wait(20) == 0
    finally:
        nodes.terminate()
        nodes.wait(20)
    print(f"{case} ok", flush=True)


CASES = {"collectives": collectives, "absence": absence, "death": death, "late": late}

if __name__ == "__main__":
    main(*sys.argv[1:])
