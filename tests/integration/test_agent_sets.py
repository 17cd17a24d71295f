"""Workers that see several devices: started for an attempt that needs them, ended when nothing calls for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.core.model import State
from support.agent import Bench
from support.waiting import wait_until

STARTING_S = 60.0
"""How long a worker may take to start, on a machine that is busy with other things."""


@pytest.fixture
def bench(valkey_url: str, namespace: str, tmp_path: Path) -> Iterator[Bench]:
    """A bench of three devices whose sets stay for a second once they are idle."""
    settings = {
        "BRIM_PLACEMENT__START_TIMEOUT_S": "2",
        "BRIM_PLACEMENT__MAX_ATTEMPTS": "2",
        "BRIM_AGENT__SET_IDLE_S": "1",
        "BRIM_AGENT__RESTART_BACKOFF_S": "0.1",
    }
    bench = Bench(valkey_url, namespace, tmp_path, devices="sim:3x8GiB", executors=1, settings=settings)
    try:
        yield bench
        assert bench.store.audit() == []
    finally:
        bench.close()


def reasons(bench: Bench, task_id: str) -> list[str]:
    """Why a task's attempts were lost."""
    return [line["reason"]["code"] for line in bench.store.story(task_id) if line["event"] == "lost"]


def set_workers(bench: Bench) -> list[int]:
    """The main processes of workers that see several devices."""
    return [pid for pid, command in bench.processes().items() if "--hostname gpu0-2" in command]


def test_a_task_on_two_devices_sees_exactly_those_and_its_memory_is_booked_on_each(
    bench: Bench, tmp_path: Path
) -> None:
    bench.serve()
    task_id = bench.run(mib=700, until=str(tmp_path / "go"), on=(0, 2))
    one = bench.run(mib=200, until=str(tmp_path / "go"), on=(2,))

    wait_until(
        lambda: [bench.measured_mib(index) for index in range(3)] == [1000, 0, 1500],
        what="the memory and context of the process are reported on each of its devices",
    )
    assert [bench.device(index).busy for index in range(3)] == [1, 0, 2]
    (tmp_path / "go").touch()

    bench.wait_for(task_id, State.SUCCEEDED)
    bench.wait_for(one, State.SUCCEEDED)
    assert bench.told(task_id) == ["admitted", "placed", "claimed", "started", "finishing", "succeeded"]
    seen = bench.app.AsyncResult(task_id).get(timeout=5)["device"].split(",")
    assert seen == [bench.device(0).uuid, bench.device(2).uuid]
    assert bench.app.AsyncResult(one).get(timeout=5)["device"] == bench.device(2).uuid

    # Its context stays with it until it has been idle for long enough.
    wait_until(lambda: not set_workers(bench), what="the worker of the set has ended", timeout_s=STARTING_S)
    wait_until(bench.is_idle, what="the devices have no executors but their own", timeout_s=STARTING_S)
    assert bench.device(0).committed_mib == 0


def test_a_killed_executor_of_a_set_frees_each_device_and_its_task_runs_again(bench: Bench, tmp_path: Path) -> None:
    bench.serve()
    task_id = bench.run(until=str(tmp_path / "go"), on=(0, 2))

    os.kill(bench.executor(task_id), signal.SIGKILL)

    bench.wait_for(task_id, State.WAITING)
    assert (reasons(bench, task_id), bench.record(task_id).losses) == (["executor_died"], 1)
    wait_until(lambda: [bench.device(i).committed_mib for i in (0, 2)] == [0, 0], what="its memory is back")
    (tmp_path / "go").touch()
    bench.place(task_id, 0, 2)
    bench.wait_for(task_id, State.SUCCEEDED, timeout_s=STARTING_S)


@pytest.mark.large
def test_a_lost_message_to_a_set_is_not_waited_for_but_a_starting_worker_is(bench: Bench) -> None:
    bench.serve()
    task_id = bench.admit(seconds=0.0)
    bench.place(task_id, 0, 2, deliver=False)
    wait_until(lambda: set_workers(bench), what="its worker starts", timeout_s=STARTING_S)

    record = bench.wait_for(task_id, State.WAITING, timeout_s=STARTING_S)

    assert reasons(bench, task_id) == ["not_started"]
    assert record.losses == 0
    bench.place(task_id, 0, 2)
    bench.wait_for(task_id, State.SUCCEEDED, timeout_s=STARTING_S)


@pytest.mark.large
def test_a_set_that_is_ended_with_its_agent_leaves_nothing_and_its_task_goes_on(bench: Bench, tmp_path: Path) -> None:
    agent = bench.serve()
    task_id = bench.run(until=str(tmp_path / "go"), on=(0, 2))

    agent.process.kill()
    agent.process.wait()
    wait_until(lambda: not bench.processes(), what="no process of the agent's is left")

    successor = bench.start()
    bench.wait_for(task_id, State.WAITING, timeout_s=STARTING_S)
    assert reasons(bench, task_id) == ["agent_died"]
    wait_until(lambda: bench.up(successor), what="the next agent's devices are up", timeout_s=STARTING_S)
    (tmp_path / "go").touch()
    bench.place(task_id, 0, 2)
    bench.wait_for(task_id, State.SUCCEEDED, timeout_s=STARTING_S)


@pytest.mark.large
def test_a_worker_of_a_set_whose_leftover_is_wanted_back_ends_before_its_time(bench: Bench) -> None:
    bench.settings = {**bench.settings, "BRIM_AGENT__SET_IDLE_S": "600"}
    bench.serve()
    task_id = bench.admit(seconds=0.0)
    bench.place(task_id, 0, 2)
    bench.wait_for(task_id, State.SUCCEEDED, timeout_s=STARTING_S)
    wait_until(lambda: bench.device(2).reclaimable_mib == 300, what="its context is leftover")

    assert bench.store.doom(bench.epoch, bench.device(2).uuid, 300) == 1

    wait_until(bench.is_idle, what="the devices have no executors but their own", timeout_s=STARTING_S)
    assert [bench.device(index).committed_mib for index in range(3)] == [0, 0, 0]


@pytest.mark.large
def test_a_set_whose_worker_cannot_start_gives_its_task_back_with_the_reason(bench: Bench, tmp_path: Path) -> None:
    bench.serve(BRIM_TEST_NO_SETS="1")
    task_id = bench.admit()
    for state in (State.WAITING, State.DEAD):
        bench.place(task_id, 0, 2)
        record = bench.wait_for(task_id, state, timeout_s=STARTING_S)
    assert record.reason is not None
    assert (record.reason.code, record.losses) == ("worker_cannot_start", 2)
    wait_until(lambda: not set_workers(bench), what="its worker is not started any more")
    assert [bench.device(index).busy for index in range(3)] == [0, 0, 0]


def test_two_tasks_on_the_same_set_run_side_by_side(bench: Bench, tmp_path: Path) -> None:
    bench.serve()
    tasks = [bench.admit(until=str(tmp_path / "go")) for _ in range(2)]
    for task_id in tasks:
        bench.place(task_id, 0, 2)
    for task_id in tasks:
        bench.wait_for(task_id, State.RUNNING, timeout_s=STARTING_S)
    (tmp_path / "go").touch()
    for task_id in tasks:
        bench.wait_for(task_id, State.SUCCEEDED)


@pytest.mark.large
def test_a_draining_node_lets_a_set_finish(bench: Bench, tmp_path: Path) -> None:
    agent = bench.serve()
    task_id = bench.run(until=str(tmp_path / "go"), on=(0, 2))
    agent.signal(signal.SIGTERM)
    wait_until(lambda: bench.device(0).state == "draining", what="it drains")
    time.sleep(1.5)  # longer than a set may be idle

    (tmp_path / "go").touch()

    bench.wait_for(task_id, State.SUCCEEDED)
    assert agent.process.wait(30) == 0
