"""The node agent with real workers on simulated devices: whatever dies, attempts end and tasks go on.

What a whole cluster makes of it is tested in tests/faults.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.core.model import State
from brim.gpu import simulated
from brim_services.keeper import members
from support.agent import Bench
from support.waiting import wait_until, within_s

STARTING_S = 60.0
"""How long a worker may take to start, on a machine that is busy with other things."""
FAST = {"BRIM_PLACEMENT__START_TIMEOUT_S": "2", "BRIM_PLACEMENT__MAX_ATTEMPTS": "2"}


@pytest.fixture
def bench(valkey_url: str, namespace: str, tmp_path: Path) -> Iterator[Bench]:
    """A bench on which a test starts its own agent."""
    bench = Bench(valkey_url, namespace, tmp_path, settings=FAST)
    try:
        yield bench
        assert bench.store.audit() == []
    finally:
        bench.close()


@pytest.fixture(scope="module")
def shared_bench(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One agent of a device with two executors, for all tests that leave it as they found it."""
    settings = {**FAST, "BRIM_SIM_CACHE": "1"}
    bench = Bench(valkey_url, f"agent{os.getpid()}:", tmp_path_factory.mktemp("agent"), settings=settings)
    try:
        bench.serve()
        yield bench
    finally:
        bench.close()


@pytest.fixture
def served(shared_bench: Bench) -> Iterator[Bench]:
    """The shared agent, complete and idle before and after."""
    wait_until(shared_bench.is_idle, what="the device is up, idle and complete", timeout_s=STARTING_S)
    yield shared_bench
    wait_until(shared_bench.is_idle, what="the device is up, idle and complete", timeout_s=STARTING_S)
    assert shared_bench.store.audit() == []


def reasons(bench: Bench, task_id: str) -> list[str]:
    """Why a task's attempts were lost."""
    return [line["reason"]["code"] for line in bench.store.story(task_id) if line["event"] == "lost"]


def test_a_task_runs_on_its_device_and_its_memory_is_reported(served: Bench, tmp_path: Path) -> None:
    task_id = served.run(mib=700, until=str(tmp_path / "go"))

    wait_until(lambda: served.measured_mib() == 1000, what="the task's memory and its context are reported")
    (tmp_path / "go").touch()

    served.wait_for(task_id, State.SUCCEEDED)
    assert served.told(task_id) == ["admitted", "placed", "claimed", "started", "finishing", "succeeded"]
    assert served.app.AsyncResult(task_id).get(timeout=5)["device"] == served.device().uuid


def test_memory_of_outside_processes_is_external(served: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SIM_DIR", str(served.folder / "devices"))
    with simulated.hold(served.device().uuid, 300):
        wait_until(lambda: served.device().external_mib == 300, what="it is reported")
    wait_until(lambda: served.device().external_mib == 0, what="it is gone from the reports")


def test_a_killed_workers_tasks_are_placed_again_and_nothing_of_it_is_left(served: Bench, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    running, placed = served.run(until=go), served.run(until=go)
    behind = served.admit(until=go)
    served.place(behind)
    worker = served.worker_pid()
    assert len(members([worker])) >= 3

    since = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    for task_id in (running, placed, behind):
        served.wait_for(task_id, State.WAITING)
    assert time.monotonic() - since < within_s(2.0)
    assert served.device().state == "starting"
    assert members([worker]) == []

    assert reasons(served, running) == ["worker_died"]
    assert (served.record(running).losses, served.record(behind).losses) == (1, 0)
    wait_until(lambda: served.device().state == "up", what="the worker is there again", timeout_s=STARTING_S)
    Path(go).touch()
    for task_id in (running, placed, behind):
        served.place(task_id)
        served.wait_for(task_id, State.SUCCEEDED)


def remembered(bench: Bench) -> dict[bytes, bytes]:
    """All that the server knows for brim now."""
    return {key: bench.client.dump(key) for key in bench.client.scan_iter(f"{bench.namespace}brim:*")}


def rolled_back(bench: Bench, earlier: dict[bytes, bytes], *more: str) -> None:
    """The server is as it was then, and these keys are gone: as after a crash, with ``appendfsync everysec``."""
    transaction = bench.client.pipeline()
    transaction.delete(*remembered(bench), *more)
    for key, value in earlier.items():
        transaction.restore(key, 0, value)
    transaction.execute()


@pytest.mark.parametrize("result_too", [False, True])
def test_an_end_that_the_server_has_lost_is_noticed(served: Bench, tmp_path: Path, result_too: bool) -> None:
    """Its executor lives and is idle; the task ends by its result, or is placed again if that is lost, too."""
    task_id = served.run(until=str(tmp_path / "go"))
    earlier = remembered(served)
    (tmp_path / "go").touch()
    served.wait_for(task_id, State.SUCCEEDED)

    rolled_back(served, earlier, *([f"{served.namespace}celery-task-meta-{task_id}"] if result_too else []))

    if result_too:
        served.wait_for(task_id, State.WAITING)
        assert (reasons(served, task_id), served.record(task_id).losses) == (["end_lost"], 0)
        served.place(task_id)
    assert served.wait_for(task_id, State.SUCCEEDED).attempts == 1 + result_too
    assert served.app.AsyncResult(task_id).get(timeout=5)["device"] == served.device().uuid


def test_a_message_that_is_lost_on_its_way_is_not_waited_for(served: Bench) -> None:
    task_id = served.admit(seconds=0.0)
    served.place(task_id, deliver=False)

    since = time.monotonic()
    served.wait_for(task_id, State.WAITING)

    assert 1.5 < time.monotonic() - since < within_s(4.0)
    assert (reasons(served, task_id), served.record(task_id).losses) == (["not_started"], 0)
    served.place(task_id)
    served.wait_for(task_id, State.SUCCEEDED)


def test_a_lost_message_is_not_waited_for_on_a_device_that_is_never_idle(served: Bench, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    before, lost = served.run(until=go), served.admit(seconds=0.0)
    served.place(lost, deliver=False)
    after = served.run(until=go)

    served.wait_for(lost, State.WAITING)

    assert (reasons(served, lost), served.record(lost).losses) == (["not_started"], 0)
    Path(go).touch()
    for task_id in (before, after):
        served.wait_for(task_id, State.SUCCEEDED)
        assert reasons(served, task_id) == []


def test_a_worker_that_takes_no_messages_is_started_anew(served: Bench) -> None:
    worker = served.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    task_id = served.admit(seconds=0.0)
    for _ in range(2):
        served.place(task_id)
        served.wait_for(task_id, State.WAITING)

    wait_until(lambda: served.device().state == "starting", what="the worker is ended")
    wait_until(lambda: served.device().state == "up", what="another one is there", timeout_s=STARTING_S)
    assert members([worker]) == []
    served.place(task_id)
    assert served.wait_for(task_id, State.SUCCEEDED).losses == 0


def test_an_idle_executor_is_replaced_to_get_its_leftover_back(served: Bench) -> None:
    task_id = served.admit(mib=2000, vram_mib=2500, seconds=0.0)
    served.place(task_id)
    served.wait_for(task_id, State.SUCCEEDED)
    wait_until(lambda: served.device().reclaimable_mib >= 2300, what="its cache is reported")

    assert served.store.doom(served.epoch, served.device().uuid, 2000) == 1

    wait_until(lambda: served.device().committed_mib < 2300, what="its memory is free")
    wait_until(served.is_idle, what="a fresh executor is there", timeout_s=STARTING_S)


def test_a_result_that_was_out_when_its_executor_died_is_the_tasks_end(served: Bench) -> None:
    task_id = served.admit("device.die_after_result")
    served.place(task_id)

    record = served.wait_for(task_id, State.SUCCEEDED)

    assert record.attempts == 1
    assert record.reason is not None
    assert record.reason.code == "result_found"
    assert served.app.AsyncResult(task_id).get(timeout=5) == "out"


def test_a_finished_task_whose_result_was_not_out_is_placed_again(served: Bench, tmp_path: Path) -> None:
    task_id = served.admit("device.die_before_result", marker=str(tmp_path / "died"))
    served.place(task_id)
    served.wait_for(task_id, State.WAITING)
    served.place(task_id)
    assert served.wait_for(task_id, State.SUCCEEDED).attempts == 2


def test_a_second_agent_for_the_node_or_its_devices_is_refused(served: Bench) -> None:
    same_node = served.start()
    other_name = served.start(BRIM_AGENT__NODE="n2")

    assert [agent.process.wait(30) for agent in (same_node, other_name)] == [1, 1]
    pid = served.agents[0].process.pid
    assert f"another agent serves node n1 and is alive: process {pid} of this machine" in same_node.log
    assert f"another agent serves device {served.device().uuid} (as node n1)" in other_name.log


def test_a_killed_agents_workers_end_and_the_next_one_goes_on(bench: Bench, tmp_path: Path) -> None:
    agent = bench.serve()
    task_id = bench.run(until=str(tmp_path / "go"))

    agent.signal(signal.SIGKILL)
    wait_until(lambda: not bench.processes(), what="no process of it is left")
    bench.start()

    bench.wait_for(task_id, State.WAITING)
    assert reasons(bench, task_id) == ["agent_died"]
    wait_until(lambda: bench.up(bench.agents[-1]), what="the next agent serves the device", timeout_s=STARTING_S)
    (tmp_path / "go").touch()
    bench.place(task_id)
    assert bench.wait_for(task_id, State.SUCCEEDED).attempts == 2


def test_a_drained_node_finishes_what_runs_hands_back_the_rest_and_leaves(bench: Bench, tmp_path: Path) -> None:
    agent = bench.serve()
    go = str(tmp_path / "go")
    running = [bench.run(until=go), bench.run(until=go)]
    behind = bench.admit(until=go)
    bench.place(behind)

    agent.signal(signal.SIGTERM)
    bench.wait_for(behind, State.WAITING)
    assert reasons(bench, behind) == ["node_draining"]
    assert bench.device().state == "draining"
    Path(go).touch()

    assert agent.process.wait(30) == 0, agent.log
    assert [bench.record(task_id).state for task_id in running] == [State.SUCCEEDED] * 2
    assert (bench.store.devices(), bench.store.nodes()) == ([], [])
    assert bench.processes() == {}
    assert bench.admit_all() == {}


def test_a_drain_ends_when_its_grace_is_over(bench: Bench) -> None:
    agent = bench.serve(BRIM_AGENT__DRAIN_GRACE_S="0.5")
    task_id = bench.run()

    assert agent.stop() == 0, agent.log

    record = bench.record(task_id)
    assert (record.state, record.losses) == (State.WAITING, 0)
    assert reasons(bench, task_id) == ["node_draining"]
    assert bench.processes() == {}
