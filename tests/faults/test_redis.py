"""Redis dies, refuses, forgets its scripts or cannot be reached, in the middle of tasks."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
import redis

from brim.core.model import State
from faults.conftest import TRANSPORT
from faults.town import Town


@contextmanager
def one_line_for_down_and_one_for_back(town: Town) -> Iterator[None]:
    """Each service that notices says once that Redis is away, and once that it is back; meanwhile none spins."""
    names = [*town.cluster.services, *town.cluster.node_names]
    before = {name: len(town.log(name)) for name in names}
    processes = {name: psutil.Process(town.cluster.pid(name)) for name in names}
    since_s, used_s = time.monotonic(), {name: _cpu_s(process) for name, process in processes.items()}
    yield
    most_s = 1.0 + 0.5 * (time.monotonic() - since_s)
    spinning = {name for name, process in processes.items() if _cpu_s(process) - used_s[name] > most_s}
    assert spinning == set()

    def said(name: str) -> tuple[int, int]:
        text = town.log(name)[before[name] :]
        return len(re.findall("Redis at .* is away", text)), len(re.findall("Redis at .* is back", text))

    for name in names:
        town.wait_until(lambda name=name: said(name) in ((0, 0), (1, 1)), f"{name} says away once, and back once")
    assert any(said(name) == (1, 1) for name in names)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.parametrize("appendfsync", ["everysec", "always"])
def test_redis_killed_and_restarted(town: Town, appendfsync: str) -> None:
    town.store.client.config_set("appendfsync", appendfsync)
    go, results = town.hold(2)
    if appendfsync == "everysec":
        town.store.client.waitaof(1, 0, 5000)
    with one_line_for_down_and_one_for_back(town):
        town.cluster.kill("valkey")
        town.wait_until(town.cluster.answers, "it is there again")
    later = town.publish("work", mib=300, seconds=0.0)
    go.touch()

    assert [town.get(result) for result in results] == ["held"] * 2
    assert town.get(later) == 300
    assert [town.begun(go, result) for result in results] == [1, 1]


def test_redis_killed_between_ends_and_their_answers(town: Town) -> None:
    """The processes are free for their next tasks by then, whose beginnings wait for these ends."""
    go, results = town.hold(2)
    town.store.client.waitaof(1, 0, 5000)
    town.cluster.signal("valkey", signal.SIGSTOP)
    go.touch()

    def returned() -> bool:
        said = "".join(path.read_text() for path in (town.cluster.folder / "logs").rglob("*.log"))
        return all(f"{result.id}] succeeded in" in said for result in results)

    try:
        town.wait_until(returned, "the functions have returned")
    finally:
        town.cluster.kill("valkey")
    town.wait_until(town.cluster.answers, "it is there again")
    later = [town.publish("work", mib=300, seconds=0.0) for _ in range(8)]

    assert [town.get(result) for result in results] == ["held"] * 2
    assert [town.get(result) for result in later] == [300] * 8
    assert [town.begun(go, result) for result in results] == [1, 1]


def test_script_flush(town: Town) -> None:
    go, [result] = town.hold()
    town.store.client.script_flush()
    go.touch()
    assert town.get(result) == "held"


def test_connections_dropped_in_mid_task(town: Town) -> None:
    go, results = town.hold(2)
    for kind in ("pubsub", "normal"):
        town.store.client.client_kill_filter(_type=kind, skipme=True)
    later = town.publish("work", mib=300, seconds=0.0)
    assert town.get(later) == 300
    go.touch()

    assert [town.get(result) for result in results] == ["held"] * 2
    assert [town.begun(go, result) for result in results] == [1, 1]


def test_redis_unreachable_longer_than_a_lease(town: Town) -> None:
    """Nobody's running task is started twice: no node is lost before it could have been heard.

    A lease is 5 s here, and the socket timeout 10 s; 30 s with a lease of 15 s: tests/faults/test_half_a_minute.py.
    """
    town.is_without_redis(12.0)


def test_redis_is_loading(town: Town) -> None:
    """It is there again, and takes its time to read what it knows."""
    go, results = town.hold(2)
    refusals = set()

    def loaded() -> bool:
        with suppress(redis.ConnectionError):
            try:
                town.store.client.ping()
            except redis.BusyLoadingError as error:
                refusals.add(str(error))
        return town.cluster.answers()

    with one_line_for_down_and_one_for_back(town), town.cluster.server_is_slow(2.0):
        town.cluster.kill("valkey")
        town.wait_until(loaded, "it has loaded everything")
    assert refusals
    later = town.publish("work", mib=300, seconds=0.0)
    go.touch()

    assert town.get(later) == 300
    assert [town.get(result) for result in results] == ["held"] * 2
    assert [town.begun(go, result) for result in results] == [1, 1]


def busy(town: Town) -> Iterator[None]:
    """A script of somebody else's takes its time."""
    client = town.store.client
    client.config_set("busy-reply-threshold", 50)
    other = redis.Redis.from_url(town.cluster.url)

    def block() -> None:
        with suppress(redis.RedisError):
            other.eval("while true do end", 0)

    thread = threading.Thread(target=block, daemon=True)
    thread.start()
    yield
    client.script_kill()
    thread.join(10.0)
    other.close()
    client.config_set("busy-reply-threshold", 5000)


def readonly(town: Town) -> Iterator[None]:
    """The server has been made a replica."""
    town.store.client.replicaof("127.0.0.1", 1)
    yield
    town.store.client.replicaof("no", "one")


def full(town: Town) -> Iterator[None]:
    """The server has no memory left for writes."""
    town.store.client.config_set("maxmemory", "1mb")
    yield
    town.store.client.config_set("maxmemory", 0)


@pytest.mark.parametrize("state", [busy, readonly, full])
def test_redis_refuses_for_a_while(town: Town, state: object) -> None:
    go, results = town.hold(2)
    with one_line_for_down_and_one_for_back(town), contextmanager(state)(town):  # type: ignore[arg-type]
        time.sleep(2.0)
    later = town.publish("work", mib=300, seconds=0.0)
    go.touch()

    assert [town.get(result, 40.0) for result in results] == ["held"] * 2
    assert town.get(later, 40.0) == 300
    assert [town.begun(go, result) for result in results] == [1, 1]


def test_pubsub_messages_lost(town: Town) -> None:
    """Reports reach the table by the same script: nobody needs the channel to converge."""
    go, [result] = town.hold(mib=900)
    town.store.client.client_kill_filter(_type="pubsub", skipme=True)
    device = town.record(result).devices[0]

    town.wait_until(lambda: town.store.measured_mib([device])[device]["measured"] >= 1200, "its memory is in the table")
    go.touch()
    town.wait_for(result, State.SUCCEEDED)
    town.wait_until(lambda: town.store.measured_mib([device])[device]["measured"] <= 600, "and has gone from it")


def test_task_runs_longer_than_the_visibility_timeout(town: Town) -> None:
    go, results = town.hold(2)
    attempts = [town.record(result).attempt for result in results]
    time.sleep(TRANSPORT["visibility_timeout"] * 2.5)
    assert [town.record(result).attempt for result in results] == attempts
    go.touch()

    assert [town.get(result) for result in results] == ["held"] * 2
    assert [town.begun(go, result) for result in results] == [1, 1]
