"""The simulated accelerator itself: work runs late, and what is out of order is seen."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.accelerator import sim

pytestmark = pytest.mark.accelerator

A_WHILE = 0.05


def fault() -> str:
    """The only fault noted."""
    (text,) = sim.faults()
    return text


def side(device: int = 0) -> torch.Stream:
    """A stream that is not the default one."""
    return torch.Stream(f"sim:{device}")


def test_work_runs_later_and_in_order() -> None:
    """Nobody waits for a kernel but who asks for its result."""
    x = torch.zeros(1000, device="sim")
    (x + 1) * 3  # torch imports something
    sim.synchronize()
    began = time.perf_counter()
    sim.sleep(A_WHILE)
    y = (x + 1) * 3
    assert time.perf_counter() - began < A_WHILE / 2
    assert not sim.current_stream().query()
    assert y.sum().item() == 3000
    assert time.perf_counter() - began >= A_WHILE
    assert sim.current_stream().query()


def test_many_operators_say_what_the_cpu_says() -> None:
    """Shapes are known before the values; where they depend on values, the host waits."""
    host = torch.arange(24.0).reshape(4, 6) % 7 - 2
    device = host.to("sim:1")
    for run in (
        lambda x: x @ x.T,
        lambda x: x.softmax(1).sum(0, keepdim=True),
        lambda x: torch.cat([x, x.flip(0)]).sort(dim=1).values,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x[[3, 1]][:, torch.tensor([0, 5])],
        lambda x: x.topk(2).indices,
        lambda x: torch.nn.functional.conv1d(x[None], x[None, :, :3].clone()),
        lambda x: torch.stack(torch.var_mean(x, 1)),
        lambda x: x.to(torch.bfloat16).T.contiguous().float().cumsum(0),
        lambda x: torch.where(x > 1, x, 0.5).pow_(2).add_(x, alpha=2),
        lambda x: torch.view_as_complex(x.reshape(4, 3, 2)).conj().resolve_conj().imag,
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: torch.nn.functional.layer_norm(x, (6,)),
        lambda x: torch.nn.functional.cross_entropy(x, torch.zeros_like(x[:, 0]).long()),
        lambda x: x.resize_(2, 2).clone(),
    ):
        there, here = run(device.clone()), run(host.clone())
        assert there.device == device.device
        torch.testing.assert_close(there.cpu(), here)


def test_gradients_and_optimizers() -> None:
    """A network learns as on the CPU."""
    results = []
    for device in ("cpu", "sim:2"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
        net.to(device)
        x = torch.linspace(-1, 1, 64).reshape(8, 8).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(5):
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(loss.item())
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_a_read_that_waits_for_nothing_is_a_race() -> None:
    """Each time, however long the write takes."""
    x = torch.zeros(8, device="sim")
    with side() as stream:
        with pytest.raises(RuntimeError, match=r"race: aten::\w+ on sim:0 stream \d+ reads what"):
            x + 1
        assert "race" in fault()
        stream.wait_stream(sim.default_stream())
        x + 1
    x.record_stream(stream)


def test_a_write_over_what_is_read_is_a_race() -> None:
    """Also where the reader waited for the writer."""
    x = torch.zeros(8, device="sim")
    stream = side()
    stream.wait_stream(sim.current_stream())
    with stream:
        x + 1
    with pytest.raises(RuntimeError, match=r"writes what .* reads"):
        x.fill_(1)
    fault()
    sim.current_stream().wait_stream(stream)
    x.fill_(1)


def test_parts_of_a_tensor_are_apart() -> None:
    """Two streams may write to two halves."""
    x = torch.empty(8, device="sim")
    stream = side()
    x[:4].fill_(1)
    with stream:
        x[4:].fill_(2)
        with pytest.raises(RuntimeError, match="race"):
            x[3:].add_(1)
    fault()
    sim.current_stream().wait_stream(stream)
    assert x.tolist() == [1.0] * 4 + [2.0] * 4


def test_events_carry_order_through_others() -> None:
    """Who waits for a stream that has waited for a third one has waited for that too."""
    x = torch.zeros(8, device="sim:0")
    a, b = side(1), side(2)
    a.wait_event(sim.current_stream("sim:0").record_event())
    b.wait_event(a.record_event())
    sim.set_stream(b)
    y = x.to("sim:2")
    assert y.tolist() == [0.0] * 8


def test_an_event_recorded_too_early_is_none() -> None:
    """Only what was given before it counts."""
    x = torch.zeros(8, device="sim")
    event = sim.current_stream().record_event()
    x.fill_(2)
    with side() as stream:
        stream.wait_event(event)
        with pytest.raises(RuntimeError, match="fill_"):
            x.sum()
    fault()


def test_what_the_host_has_waited_for_is_ordered() -> None:
    """On all threads from then on."""
    x = torch.zeros(8, device="sim")
    event = sim.current_stream().record_event()
    event.synchronize()
    with side() as stream:
        x.record_stream(stream)
        assert (x + 1).tolist() == [1.0] * 8


def test_copies_between_devices_wait_for_both() -> None:
    """And the streams of both wait for the copy."""
    x = torch.full((1000,), 3.0, device="sim:0")
    sim.sleep(0.01)
    y = torch.zeros(1000, device="sim:3")
    y.copy_(x)
    x.zero_()
    assert y.sum().item() == 3000


def test_two_devices_in_one_operation() -> None:
    """No device sees another's memory."""
    x, y = torch.zeros(2, device="sim:0"), torch.zeros(2, device="sim:1")
    with pytest.raises(RuntimeError, match="same device"):
        x + y
    with pytest.raises(RuntimeError, match="same device"):
        torch.mm(x[None], y[:, None])
    sim.faults()
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.zeros(2)
    assert (x + torch.tensor(1.0)).tolist() == [1.0, 1.0]


def test_freed_memory_that_another_stream_uses() -> None:
    """`record_stream` keeps it from being given out."""
    for recorded in (True, False):
        x = torch.zeros(100, device="sim")
        stream = side()
        stream.wait_stream(sim.current_stream())
        with stream:
            sim.sleep(0.01)
            y = x * 2
        if recorded:
            x.record_stream(stream)
        del x
        if recorded:
            torch.zeros(100, device="sim")
        else:
            with pytest.raises(RuntimeError, match="use after free"):
                torch.empty(1, device="sim")
            assert "record_stream" in fault()
        stream.synchronize()
        del y


def test_freed_memory_is_fine_once_the_stream_has_waited() -> None:
    """Before it is given out again."""
    x = torch.zeros(100, device="sim")
    stream = side()
    stream.wait_stream(sim.current_stream())
    with stream:
        x * 2
    del x
    sim.current_stream().wait_stream(stream)
    torch.zeros(100, device="sim")


def test_out_of_memory() -> None:
    """The error says where, how much, and how much there was; other devices go on."""
    sim.synchronize()
    before = sim.memory_allocated(2)
    sim.limit_memory(2, before + 1000)
    try:
        held = torch.empty(800, dtype=torch.uint8, device="sim:2")
        assert sim.memory_allocated(2) == before + 800
        with pytest.raises(torch.OutOfMemoryError, match=r"400 bytes on sim:2, where 200 of"):
            torch.empty(100, device="sim:2")
        torch.empty(100, device="sim:1")
        del held
        torch.empty(100, device="sim:2")
    finally:
        sim.limit_memory(2, 1 << 30)


def test_copies_to_the_host_come_late() -> None:
    """Pinned memory that nobody has waited for holds nothing; memory that is not pinned waits."""
    x = torch.full((100,), 5.0, device="sim")
    sim.sleep(A_WHILE)
    pinned = torch.zeros(100, pin_memory=True)
    assert pinned.is_pinned()
    pinned.copy_(x, non_blocking=True)
    assert 0 not in pinned
    assert 5 not in pinned
    sim.synchronize()
    assert (pinned == 5).all()
    sim.sleep(A_WHILE)
    plain = torch.zeros(100)
    assert not plain.is_pinned()
    plain.copy_(x, non_blocking=True)
    assert (plain == 5).all()


def test_pinned_memory_overwritten_too_early() -> None:
    """While the device is to read it."""
    pinned = torch.zeros(100).pin_memory()
    plain = torch.zeros(100)
    sim.sleep(A_WHILE)
    x, y = pinned.to("sim", non_blocking=True), plain.to("sim", non_blocking=True)
    pinned.fill_(1)
    plain.fill_(1)
    sim.synchronize()
    assert "pinned" in fault()
    assert not y.sum().item()
    del x


def test_threads_have_a_device_and_streams_of_their_own() -> None:
    """And the default stream in common."""
    found = {}

    def look() -> None:
        found["other"] = sim.current_device(), sim.current_stream(1).stream_id
        sim.set_device(3)

    sim.set_device(1)
    sim.set_stream(side(1))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    found["here"] = sim.current_device()
    assert found == {"other": (0, 0), "here": 1}
    assert sim.current_stream(1).stream_id
    sim.set_device(0)


def test_random_numbers() -> None:
    """Fixed when the work is given; a generator for each device."""
    torch.manual_seed(3)
    first = [torch.randn(4, device=f"sim:{i}") for i in range(2)]
    state = sim.get_rng_state(0)
    then = torch.rand(4, device="sim:0")
    sim.set_rng_state(state, 0)
    assert torch.rand(4, device="sim:0").equal(then)
    torch.manual_seed(3)
    again = [torch.randn(4, device=f"sim:{i}") for i in range(2)]
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    own = torch.Generator("sim:1").manual_seed(5)
    other = torch.Generator("sim:1").manual_seed(5)
    one = torch.randperm(9, generator=own, device="sim:1")
    assert one.equal(torch.randperm(9, generator=other, device="sim:1"))
    assert not torch.rand(4, device="sim:0").equal(torch.rand(4, device="sim:0"))


def test_what_a_kernel_throws_comes_when_somebody_waits() -> None:
    """As an assertion on a GPU."""
    x = torch.zeros(3, device="sim")
    index = torch.tensor([7], device="sim")
    x.index_select(0, index)
    with pytest.raises(IndexError):
        sim.synchronize()


def test_times_between_events() -> None:
    """In milliseconds."""
    first, last = (torch.Event("sim", enable_timing=True) for _ in range(2))
    first.record()
    sim.sleep(A_WHILE)
    last.record()
    last.synchronize()
    assert 0.9 * A_WHILE <= first.elapsed_time(last) / 1e3 < 20 * A_WHILE


def test_delays_change_nothing_but_time() -> None:
    """A right program is right whatever runs late."""
    for seed in range(1, 6):
        sim.set_delays(seed)
        x = torch.zeros(100, device="sim:0")
        streams = [side(i % 4) for i in range(8)]
        last = sim.current_stream(0)
        for stream in streams * 3:
            with stream:
                stream.wait_stream(last)
                x.record_stream(stream)
                x = x.to(stream.device) + 1
            last = stream
        sim.set_stream(last)
        assert x.sum().item() == 2400
    sim.set_delays(0)


def test_a_forked_child_is_told() -> None:
    """Instead of hanging: the threads of streams are not there."""
    program = (
        "import os, torch\n"
        "from tests.accelerator import sim\n"
        "sim.load()\n"
        "x = torch.ones(2, device='sim')\n"
        "if os.fork():\n"
        "    assert os.wait()[1] == 0\n"
        "else:\n"
        "    try:\n"
        "        x + 1\n"
        "    except RuntimeError as exc:\n"
        "        os._exit('fork' not in str(exc))\n"
        "    os._exit(2)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=dict(os.environ))


def test_freed_memory_in_use_is_seen_though_nobody_allocates() -> None:
    """Before the host knows by chance that the use is over."""
    x = torch.zeros(100, device="sim")
    stream = side()
    stream.wait_stream(sim.current_stream())
    with stream:
        x * 2
    del x
    sim.synchronize()
    assert "record_stream" in fault()


def test_a_device_takes_so_much_work_and_no_more() -> None:
    """Who gives more waits: else a loop would run ahead of its device for hours."""
    x = torch.zeros(4, device="sim")
    sim.synchronize()
    sim.sleep(0.5)
    began = time.perf_counter()
    for _ in range(1000):
        x.add_(1)
    assert time.perf_counter() - began < 0.4
    for _ in range(200):
        x.add_(1)
    assert time.perf_counter() - began >= 0.4
    assert x[0].item() == 1200


def test_a_mask_says_which_devices_there_are() -> None:
    """In its order; workers take these in turn, and there are no others."""
    program = (
        "import torch\n"
        "from tests.accelerator import sim\n"
        "sim.load()\n"
        "from discolab import ArgumentError, ccl, current_worker, make_session\n"
        "assert [sim.get_device_properties(i).uuid for i in range(2)] == ['sim-3', 'sim-1']\n"
        "assert torch.accelerator.device_count() == 2\n"
        "def summed():\n"
        "    return ccl.all_reduce(torch.ones(2, device=current_worker().device)).tolist()\n"
        "for workers, library in ((4, 'local'), (2, 'simccl')):\n"
        "    with make_session(workers, 'threads', timeout=30) as sess:\n"
        "        assert [d.index for d in sess.devices] == [0, 1, 0, 1][:workers]\n"
        "        assert sess.init_ccl().startswith(library)\n"
        "        sums = sess.call_packed(summed).debug_get_from_all()\n"
        "        assert sums == [[workers] * 2] * workers\n"
        "try:\n"
        "    make_session(1, devices='sim:2')\n"
        "except ArgumentError as exc:\n"
        "    assert 'there is no sim:2: torch sees 2 GPUs' in str(exc)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    env = {**os.environ, "SIM_VISIBLE_DEVICES": "3,1"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=env)


def test_utilisation_is_the_share_of_the_time_in_which_a_device_works() -> None:
    """Of the time since somebody asked last."""
    sim.synchronize(2)
    sim.utilization(2)
    with sim.device(2):
        sim.sleep(0.1)
    sim.synchronize(2)
    assert 80 <= sim.utilization(2) <= 100
    time.sleep(0.1)
    assert sim.utilization(2) <= 5
