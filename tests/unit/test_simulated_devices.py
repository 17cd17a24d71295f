"""Simulated devices hold what GPUs hold: capacity across processes, contexts, the memory of the dead."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from brim.core.model import Reason
from brim.gpu import simulated
from brim.gpu.probe import DeviceFault, NodeFault, Sample, open_probe
from brim.gpu.process import is_alive, proc_id
from brim.gpu.simulated import OutOfMemoryError
from support.waiting import wait_until

CONTEXT_MIB = 300


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Two devices of 1000 MiB, the first of them visible to this process."""
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path))
    probe = open_probe("sim:2x1000MiB:SIM-1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", probe.devices()[0].uuid)
    return probe


@pytest.fixture
def uuid(probe):
    return probe.devices()[0].uuid


def sample(probe, uuid) -> Sample:
    found = probe.sample()[uuid]
    assert isinstance(found, Sample)
    return found


@contextmanager
def another_process(code: str):
    """A process that runs `code` after importing simulated, says "ready" and waits; killed at the end."""
    program = f"from brim.gpu import simulated\n{code}\nprint('ready', flush=True)\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(simulated.__file__).parents[2])},
    )
    try:
        assert process.stdout.readline().strip() == "ready"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


# --- the setting -------------------------------------------------------------------------------------------


def test_a_mixed_setting_names_every_device(monkeypatch, tmp_path):
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path))

    devices = open_probe("sim:2x24GiB,1x80GiB:H80").devices()

    assert [(d.index, d.model, d.total_mib) for d in devices] == [
        (0, "SIM-24GiB", 24576),
        (1, "SIM-24GiB", 24576),
        (2, "H80", 81920),
    ]


def test_the_same_setting_in_the_same_folder_names_the_same_devices(probe, tmp_path, monkeypatch):
    assert open_probe("sim:2x1000MiB:SIM-1").devices() == probe.devices()

    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "other"))
    others = {d.uuid for d in open_probe("sim:2x1000MiB:SIM-1").devices()}
    assert others.isdisjoint(d.uuid for d in probe.devices())


@pytest.mark.parametrize("setting", ["sim:", "sim:4", "sim:4x24", "sim:x24GiB", "sim:0x24GiB", "cuda", "sim:4x24GB"])
def test_a_wrong_setting_is_refused_with_the_setting_in_the_message(setting):
    with pytest.raises(NodeFault, match="BRIM_DEVICES=") as fault:
        open_probe(setting)
    assert fault.value.reason.code == "devices_setting"


# --- one process -------------------------------------------------------------------------------------------


def test_an_allocation_takes_memory_and_a_context_that_stays(probe, uuid):
    with simulated.allocate(200) as block:
        assert block.uuid == uuid
        assert sample(probe, uuid) == Sample(1000, 500, 500, {os.getpid(): 500})
    assert sample(probe, uuid).processes == {os.getpid(): CONTEXT_MIB}


def test_more_than_the_device_has_is_refused_with_the_numbers(probe, uuid):
    with pytest.raises(OutOfMemoryError, match="allocate 800 MiB, 700 MiB of 1000 MiB are free"):
        simulated.allocate(800)
    assert sample(probe, uuid).used_mib == CONTEXT_MIB
    assert simulated.witness()[uuid].refused == 1


def test_a_refused_resize_keeps_what_was_held(probe, uuid):
    block = simulated.allocate(500)
    with pytest.raises(OutOfMemoryError):
        block.resize(701)
    assert block.mib == 500
    block.resize(700)
    assert sample(probe, uuid).free_mib == 0
    block.free()
    block.free()
    assert sample(probe, uuid).used_mib == CONTEXT_MIB


def test_the_context_is_set_by_argument_or_environment(probe, uuid, monkeypatch):
    monkeypatch.setenv("BRIM_SIM_CONTEXT_MIB", "100")
    simulated.allocate(0)
    assert sample(probe, uuid).used_mib == 100
    other = probe.devices()[1].uuid
    simulated.allocate(0, other, context_mib=40)
    assert sample(probe, other).used_mib == 40


def test_a_caching_allocator_keeps_freed_memory_for_its_next_allocation(probe, uuid):
    simulated.allocate(400, cache=True).free()
    assert sample(probe, uuid).used_mib == CONTEXT_MIB + 400

    with simulated.allocate(450, cache=True):
        assert sample(probe, uuid).used_mib == CONTEXT_MIB + 450
    simulated.empty_cache()
    assert sample(probe, uuid).used_mib == CONTEXT_MIB


def test_the_peak_of_a_process_starts_anew_and_is_unknown_before_first_use(probe):
    assert simulated.peak_mib() is None
    with simulated.allocate(400):
        pass
    assert simulated.peak_mib() == 400
    simulated.reset_peak()
    with simulated.allocate(100):
        assert simulated.peak_mib() == 100


def test_a_limit_refuses_the_process_before_its_device_is_full(probe, uuid):
    simulated.set_limit(100)
    with pytest.raises(OutOfMemoryError, match="may hold 100 MiB"):
        simulated.allocate(101)
    simulated.allocate(100).free()
    simulated.set_limit(None)
    simulated.allocate(101).free()
    witness = simulated.witness()[uuid]
    assert (witness.refused, witness.limited) == (0, 1)


def test_a_negative_amount_is_refused(probe):
    with pytest.raises(ValueError, match="mib=-1"):
        simulated.allocate(-1)


def test_without_a_visible_device_the_variables_are_named(probe, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES or BRIM_DEVICE"):
        simulated.allocate(1)


def test_an_unknown_device_is_named_with_its_folder(probe, tmp_path):
    with pytest.raises(RuntimeError, match=f"GPU-sim-nothing.*{tmp_path}"):
        simulated.allocate(1, "GPU-sim-nothing")


def test_a_faulty_device_is_reported_as_such_and_comes_back(probe, uuid):
    lost = Reason("device_lost", "the GPU is lost")
    simulated.set_fault(uuid, lost)
    assert probe.sample()[uuid] == DeviceFault(uuid, lost)
    simulated.set_fault(uuid, None)
    assert sample(probe, uuid).free_mib == 1000


# --- several processes -------------------------------------------------------------------------------------


def test_capacity_holds_across_processes_and_each_is_reported_by_its_pid(probe, uuid):
    with another_process("simulated.allocate(300)") as other:
        with pytest.raises(OutOfMemoryError, match="100 MiB of 1000 MiB are free"):
            simulated.allocate(200)
        assert sample(probe, uuid).processes == {other.pid: 600, os.getpid(): 300}


def test_what_a_killed_process_held_is_free_again(probe, uuid):
    with another_process("simulated.allocate(600)") as other:
        assert sample(probe, uuid).used_mib == 900
        other.send_signal(signal.SIGKILL)
        other.wait()

        assert sample(probe, uuid) == Sample(1000, 0, 1000, {})
        simulated.allocate(700).free()


def test_a_neighbour_within_its_reservation_never_dies_of_anothers_excess(probe, uuid):
    """With the guard on, what each process may hold is its reservation: excess is refused to whoever exceeds."""
    # given: reservations that fit the device, contexts included; the other process takes all it can get
    greedy = """
simulated.set_limit(250)
for mib in (250, 600, 251):
    try:
        block = simulated.allocate(mib)
    except simulated.OutOfMemoryError:
        continue
"""
    with another_process(greedy) as other:
        assert sample(probe, uuid).processes == {other.pid: CONTEXT_MIB + 250}

        # when: this one takes all of its reservation, again and again
        simulated.set_limit(150)
        for _ in range(20):
            simulated.allocate(150).free()

    # then: only the excess was refused
    witness = simulated.witness()[uuid]
    assert (witness.refused, witness.limited) == (0, 2)


def test_an_outside_process_takes_memory_but_is_no_task(probe, uuid):
    with another_process(f"simulated.hold({uuid!r}, 800)") as other:
        assert sample(probe, uuid).processes == {other.pid: 800}
        with pytest.raises(OutOfMemoryError):
            simulated.allocate(100)
    simulated.allocate(100).free()

    witness = simulated.witness()[uuid]
    assert witness == simulated.Witness(1000, peak_mib=800, refused=1, limited=0, most_tasks=1)


def test_the_witness_counts_processes_that_hold_more_than_their_context(probe, uuid, monkeypatch):
    monkeypatch.setenv("BRIM_SIM_CONTEXT_MIB", "100")
    with (
        another_process("simulated.allocate(0)"),
        another_process("simulated.allocate(1)"),
        simulated.allocate(1),
    ):
        pass
    assert simulated.witness()[uuid].most_tasks == 2


def test_memory_does_not_survive_a_fork(probe, uuid):
    block = simulated.allocate(100)
    pid = os.fork()
    if pid == 0:
        try:
            block.free()
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert sample(probe, uuid).used_mib == CONTEXT_MIB + 100


def test_threads_of_one_process_share_its_books(probe, uuid):
    def work():
        for _ in range(50):
            with simulated.allocate(10):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sample(probe, uuid).used_mib == CONTEXT_MIB


def _contend(uuid: str, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    held: list[simulated.Allocation] = []
    for _ in range(rounds):
        try:
            if held and draw.random() < 0.4:
                held.pop(draw.randrange(len(held))).free()
            elif held and draw.random() < 0.3:
                draw.choice(held).resize(draw.randrange(0, 400))
            else:
                held.append(simulated.allocate(draw.randrange(0, 300), uuid, context_mib=20))
        except OutOfMemoryError:
            continue


def test_contending_processes_never_exceed_the_capacity_and_leave_nothing(probe, uuid):
    # given: four processes that allocate, resize and free at random, one of them killed at some point
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_contend, args=(uuid, seed, 400)) for seed in range(4)]
    victim = spawn.Process(target=_contend, args=(uuid, 99, 10**9))
    for worker in [*workers, victim]:
        worker.start()

    # when: they contend
    wait_until(lambda: victim.pid in sample(probe, uuid).processes, what="the victim's first memory")
    while any(worker.is_alive() for worker in workers):
        seen = sample(probe, uuid)
        assert seen.used_mib == sum(seen.processes.values()) <= seen.total_mib
        time.sleep(0.005)
    victim.kill()
    for worker in [*workers, victim]:
        worker.join()

    # then: nothing was over-committed, and nothing is left
    assert [worker.exitcode for worker in workers] == [0] * 4
    witness = simulated.witness()[uuid]
    assert witness.refused > 0
    assert witness.peak_mib <= 1000
    assert sample(probe, uuid).used_mib == 0


def test_a_process_killed_at_any_point_of_a_change_leaves_readable_books(probe, uuid):
    spawn = multiprocessing.get_context("spawn")
    for delay_ms in range(0, 30, 5):
        victim = spawn.Process(target=_contend, args=(uuid, delay_ms, 10**9))
        victim.start()
        wait_until(lambda victim=victim: victim.pid in sample(probe, uuid).processes, what="its first memory")
        time.sleep(delay_ms / 1000)
        victim.kill()
        victim.join()
        assert sample(probe, uuid).used_mib == 0


# --- the books against a model -----------------------------------------------------------------------------


class OneProcess(RuleBasedStateMachine):
    """Random allocations of one process agree with plain arithmetic."""

    def __init__(self):
        super().__init__()
        self.probe = open_probe("sim:1x1000MiB")
        (self.device,) = self.probe.devices()
        simulated.reset_peak(self.device.uuid)
        self.blocks: list[simulated.Allocation] = []
        self.used = sample(self.probe, self.device.uuid).used_mib

    @rule(mib=st.integers(0, 600))
    def allocate(self, mib):
        context = 0 if self.used else CONTEXT_MIB
        try:
            self.blocks.append(simulated.allocate(mib, self.device.uuid))
            self.used += context + mib
        except OutOfMemoryError:
            assert self.used + context + mib > 1000
            self.used += context

    @precondition(lambda self: self.blocks)
    @rule(mib=st.integers(0, 600), which=st.integers(0))
    def resize(self, mib, which):
        block = self.blocks[which % len(self.blocks)]
        before = block.mib
        try:
            block.resize(mib)
            self.used += mib - before
        except OutOfMemoryError:
            assert self.used + mib - before > 1000

    @precondition(lambda self: self.blocks)
    @rule(which=st.integers(0))
    def free(self, which):
        block = self.blocks.pop(which % len(self.blocks))
        self.used -= block.mib
        block.free()

    @invariant()
    def agrees(self):
        seen = sample(self.probe, self.device.uuid)
        assert seen.used_mib == self.used <= 1000
        assert seen.free_mib == 1000 - self.used

    def teardown(self):
        for block in self.blocks:
            block.free()


def test_random_allocations_agree_with_arithmetic(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path))
    run_state_machine_as_test(OneProcess, settings=settings(max_examples=30, stateful_step_count=20, deadline=None))


# --- process names -----------------------------------------------------------------------------------------


def test_a_process_is_named_by_pid_and_start_and_is_gone_as_a_zombie():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = proc_id(process.pid)
    assert name is not None
    assert name.startswith(f"{process.pid}.")
    assert is_alive(name)
    assert not is_alive(f"{process.pid}.1")

    process.kill()
    wait_until(lambda: proc_id(process.pid) is None, what="the process is gone")
    assert not is_alive(name)
    process.wait()
    process.stdin.close()


def test_a_pid_namespace_of_its_own_is_told_from_the_hosts():
    code = "from brim.gpu.process import pids_are_the_hosts as ask; print(ask())"
    environment = os.environ | {"PYTHONPATH": str(Path(simulated.__file__).parents[2])}
    inside = subprocess.run(
        ["unshare", "--user", "--pid", "--fork", sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if inside.returncode != 0:
        pytest.skip(f"no namespaces here: {inside.stderr.strip()}")
    assert inside.stdout.strip() == "False"
