"""Processes that die or stop: executors, workers, agents, whole nodes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from brim.core.model import State
from brim.gpu.process import proc_id
from brim_services.keeper import members
from faults.cut import Line, Namespace
from faults.town import Town
from support.waiting import within_s


def test_executor_child_killed(town: Town) -> None:
    go, [killed, neighbour] = town.hold(2)
    pid = town.executor(killed)
    killed_ms = town.store.server_ms()
    os.kill(pid, signal.SIGKILL)

    town.wait_until(lambda: len(town.losses(killed)) == 1, "its attempt is ended")
    lost_ms = next(line["t"] for line in town.store.story(killed.id) if line["event"] == "lost")
    assert lost_ms - killed_ms < within_s(1.0) * 1000
    town.wait_until(lambda: town.begun(go, killed) == 2, "the next attempt has begun")
    go.touch()

    assert [town.get(killed), town.get(neighbour)] == ["held", "held"]
    assert (town.record(killed).attempts, town.record(neighbour).attempts) == (2, 1)
    assert town.losses(killed) == ["executor_died"]


def test_executor_child_killed_again_and_again_is_dead_lettered_with_its_story(town: Town) -> None:
    result = town.publish("exit", mib=300)

    record = town.wait_for(result, State.DEAD, timeout_s=40.0)

    assert town.losses(result) == ["executor_died"] * 3
    assert record.reason is not None
    assert "exited with code 3" in record.reason.message
    town.wait_until(result.ready, "its producer is answered")
    assert "exited with code 3" in str(result.result)


def test_gpu_workers_main_process_killed(town: Town) -> None:
    go, results = town.hold(2)
    worker = next(iter(town.cluster.workers()))
    struck = [r for r in results if town.executor(r) in members([worker])]
    killed_ms = town.store.server_ms()
    os.kill(worker, signal.SIGKILL)

    for result in struck:
        town.wait_until(lambda result=result: town.losses(result), "its attempt is ended")
        lost_ms = next(line["t"] for line in town.store.story(result.id) if line["event"] == "lost")
        assert lost_ms - killed_ms < within_s(2.0) * 1000
    assert members([worker]) == []
    go.touch()
    assert [town.get(result) for result in results] == ["held"] * 2
    town.settle()


def test_node_agent_killed(town: Town) -> None:
    go, results = town.hold(2)
    node = town.record(results[0]).node
    assert node is not None
    executor = town.executor(results[0])
    town.cluster.kill(node)

    town.wait_until(lambda: proc_id(executor) is None, "its workers have ended with it")
    town.wait_until(lambda: town.losses(results[0]), "its attempt is ended")
    assert town.losses(results[0])[0] in ("agent_died", "node_lost")
    go.touch()
    assert [town.get(result) for result in results] == ["held"] * 2


def test_node_agent_paused_past_the_lease(town: Town) -> None:
    go, [result] = town.hold()
    node = town.record(result).node
    assert node is not None
    stale = town.executor(result)
    town.cluster.signal(node, signal.SIGSTOP)
    try:
        town.wait_until(lambda: town.losses(result) == ["node_lost"], "its lease has run out")
        town.wait_until(lambda: town.begun(go, result) == 2, "it runs elsewhere")
        # Both attempts now come to their end; the stale one, still alive, may not say so.
        assert proc_id(stale) is not None
        go.touch()
        assert town.get(result) == "held"
    finally:
        town.cluster.signal(node, signal.SIGCONT)

    town.wait_until(lambda: proc_id(stale) is None, "the agent has ended what was no longer its own")
    town.settle()
    assert town.told(result).count("succeeded") == 1
    assert (town.record(result).attempts, town.record(result).node != node) == (2, True)


def test_message_lost_between_placement_and_executor(town: Town) -> None:
    """Its worker is killed when it has taken the message, and has not claimed the attempt.

    That a message is not waited for which nobody has taken is tested with the agent (tests/integration/test_agent.py).
    """
    queues = [f"{town.cluster.namespace}{device.queue}" for device in town.store.devices()]
    for _ in range(10):
        workers = list(town.cluster.workers())
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        result = town.publish("work", mib=300, seconds=0.1)
        town.wait_for(result, State.PLACED)
        # A paused worker waits for its queue all the same: the server hands the message to its connection, unless that
        # has waited for so long that it would have had to ask again.
        with suppress(AssertionError):
            town.wait_until(lambda: not any(map(town.store.client.llen, queues)), "it is taken", 1.0)
            break
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        assert town.get(result, 60.0) == 300
    for pid in workers:
        os.kill(pid, signal.SIGKILL)

    assert town.get(result, 60.0) == 300
    assert set(town.losses(result)) <= {"worker_down", "not_started"}
    assert town.record(result).losses == 0


def test_whole_node_gone(town: Town) -> None:
    """Everything of a node stops at once."""
    go, results = town.hold(2)
    node = town.record(results[0]).node
    struck = [result for result in results if town.record(result).node == node]
    assert node is not None
    frozen = [town.cluster.pid(node), *(pid for pid, of in town.cluster.workers().items() if of == node)]
    frozen += [pid for pid, of in town.cluster.executors().items() if of == node]
    since = time.monotonic()
    for pid in frozen:
        os.kill(pid or 0, signal.SIGSTOP)
    try:
        for result in struck:
            town.wait_until(lambda result=result: town.losses(result) == ["node_lost"], "it is lost with its node")
        assert 3.0 < time.monotonic() - since < within_s(12.0)
        lost = [device for device in town.store.devices() if device.node == node]
        assert [device.state for device in lost] == ["lost"]
        for result in struck:
            town.wait_until(lambda result=result: town.begun(go, result) == 2, "it runs elsewhere")
        go.touch()
        assert [town.get(result) for result in results] == ["held"] * 2
    finally:
        for pid in frozen:
            os.kill(pid or 0, signal.SIGCONT)

    town.settle()
    for result in struck:
        assert town.told(result).count("succeeded") == 1


@pytest.mark.parametrize("link", [Namespace, pytest.param(Line, marks=pytest.mark.large)])
def test_whole_node_cut_off(town: Town, link: type[Line | Namespace]) -> None:
    """Its tasks go on computing behind the cut line; they may not say so when it is mended."""
    supervisor, name = town.cluster.supervisor, town.cluster.node_names[-1]
    with link(town.cluster) as line:
        supervisor.stop(name)
        supervisor.start(line.node(name))
        try:
            town.settle()
            go, results = town.hold(2)
            [struck] = [result for result in results if town.record(result).node == name]
            stale = town.executor(struck)
            line.cut()
            town.wait_until(lambda: town.losses(struck) == ["node_lost"], "it is lost with its node")
            town.wait_until(lambda: town.begun(go, struck) == 2, "it runs elsewhere")
            assert proc_id(stale) is not None
            go.touch()
            assert [town.get(result) for result in results] == ["held"] * 2
            line.mend()
            town.settle()
            assert proc_id(stale) is None
            assert town.told(struck).count("succeeded") == 1
        finally:
            line.mend()
            supervisor.stop(name)
            supervisor.start(town.cluster.node(name))
            town.settle()
