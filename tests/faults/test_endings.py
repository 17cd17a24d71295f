"""How tasks end that misbehave, are revoked, or take too long."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from brim.core.model import State
from brim.gpu import simulated
from brim.store.runner import sources
from faults.app import FOREIGN
from faults.conftest import SETTINGS
from faults.skew import COMPILER, SKEW_S
from faults.town import Town
from support.waiting import within_s


def revoked(town: Town, result: Any) -> None:
    """It has been cancelled, holds nothing, and its producer knows."""
    town.wait_for(result, State.CANCELLED)
    town.wait_until(result.ready, "its producer is answered")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)


def test_revoke_scheduled(town: Town) -> None:
    result = town.publish("work", mib=300, seconds=0.0, options={"countdown": 300})
    town.wait_for(result, State.SCHEDULED)
    result.revoke()
    revoked(town, result)


def test_revoke_waiting(town: Town) -> None:
    result = town.publish("work", mib=7500, seconds=0.0)
    go, _ = town.hold(2, mib=3000)
    behind = [town.publish("hold", mib=7000, go=str(go)) for _ in range(3)]
    town.wait_until(lambda: town.cluster.state(behind[-1].id) is State.WAITING, "one has to wait")
    behind[-1].revoke()
    revoked(town, behind[-1])
    assert town.get(result, 40.0) == 7500


def test_revoke_before_it_is_admitted(town: Town) -> None:
    pid = town.cluster.pid("intake1")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    result = town.publish("work", mib=300, seconds=0.0)
    result.revoke()
    time.sleep(0.2)
    os.kill(pid, signal.SIGCONT)
    # Intake may admit before it hears, or hear before it admits; it has not been placed and ended by then only if it
    # was cancelled in time.
    record = town.wait_for(result, State.CANCELLED, State.SUCCEEDED)
    assert record.state is State.CANCELLED or record.attempts == 1


def test_revoke_placed(town: Town) -> None:
    workers = list(town.cluster.workers())
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        result = town.publish("work", mib=300, seconds=0.0)
        town.wait_for(result, State.PLACED)
        result.revoke()
        revoked(town, result)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def test_revoke_running_with_terminate(town: Town) -> None:
    _, [result] = town.hold()
    result.revoke(terminate=True)
    revoked(town, result)


def test_revoke_running_without_terminate_lets_it_end(town: Town) -> None:
    """Celery's other workers may answer at once that it was revoked, as they do without brim."""
    go, [result] = town.hold()
    result.revoke()
    time.sleep(0.3)
    go.touch()
    assert town.wait_for(result, State.SUCCEEDED).attempts == 1


def test_soft_time_limit(town: Town) -> None:
    result = town.publish("patient", mib=300, seconds=30.0, options={"soft_time_limit": 1.5})
    assert town.get(result) == "stopped in time"


def test_hard_time_limit(town: Town) -> None:
    result = town.publish("patient", mib=300, seconds=30.0, options={"time_limit": 1.0})
    record = town.wait_for(result, State.FAILED)
    assert record.reason is not None
    assert record.reason.code == "time_limit"
    with pytest.raises(TimeLimitExceeded):
        town.get(result)


def test_expires(town: Town) -> None:
    go, _ = town.hold(4, mib=3000)
    result = town.publish("work", mib=7000, seconds=0.0, options={"expires": 1.0})
    assert town.wait_for(result, State.EXPIRED).attempts == 0
    go.touch()
    town.wait_until(result.ready, "its producer is answered")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)


def test_eta_far_away_waits_in_no_worker(town: Town) -> None:
    result = town.publish("work", mib=300, seconds=0.0, options={"countdown": 86_400})
    assert town.wait_for(result, State.SCHEDULED).attempts == 0
    result.revoke()
    revoked(town, result)


@pytest.mark.skipif(COMPILER is None, reason="the library that shifts a process's clock is built with cc")
def test_clock_skew_of_30_s_between_nodes(town: Town) -> None:
    """Leases and expiry are judged by the server's clock: no script is given a client's.

    The second node of this cluster is ahead in all tests.
    """
    assert not [name for name, text in sources().items() if "os.time" in text or "os.clock" in text]
    go, results = town.hold(2, expires=20.0)
    clocks = dict(line.split() for line in Path(f"{go}.log").read_text().splitlines())
    apart_s = [float(clocks[result.id]) - town.store.server_ms() / 1000 for result in results]
    assert max(apart_s) - min(apart_s) > SKEW_S - 5

    since_ms, longer_ms = town.store.server_ms(), 1000 * (SETTINGS["placement__lease_timeout_s"] + 1)
    town.wait_until(lambda: town.store.server_ms() - since_ms > longer_ms, "more than a lease has passed")
    assert abs(town.store.nodes()[-1].renewed_s - town.store.server_ms() / 1000) < within_s(2.0)
    go.touch()

    assert [town.get(result) for result in results] == ["held"] * 2
    assert [town.begun(go, result) for result in results] == [1, 1]


@pytest.mark.parametrize(("name", "said"), [("raise", "ValueError: with 300 MiB"), ("unserialisable", "serializ")])
def test_task_raises_or_returns_something_not_serializable(town: Town, name: str, said: str) -> None:
    result = town.publish(name, mib=300)
    record = town.wait_for(result, State.FAILED)
    assert record.reason is not None
    assert said.lower() in str(record.reason).lower()
    town.wait_until(result.ready, "its producer is answered")


def test_task_leaks_a_child_process(town: Town) -> None:
    """The leaked process's memory is external until it is gone."""
    go = town.gate()
    result = town.publish("leak", mib=700, child_mib=900, go=str(go))
    town.get(result)
    device = town.record(result).devices[0]

    def external_mib() -> int:
        return next(d.external_mib for d in town.store.devices() if d.uuid == device)

    town.wait_until(lambda: external_mib() == 1200, "it is counted as external")
    go.touch()
    town.wait_until(lambda: external_mib() == 0, "it is gone")


def test_task_allocates_far_beyond_its_demand(town: Town) -> None:
    """It outgrows its own reservation: its demand is raised until it suffices; its neighbour runs on."""
    go, [neighbour] = town.hold(mib=900)
    result = town.publish("grow", mib=900, to_mib=7200)

    assert town.get(result, 40.0) == 7200
    record = town.record(result)
    assert set(town.losses(result)) <= {"oom"}
    assert record.demand.vram_mib >= 1200
    go.touch()
    assert town.get(neighbour) == "held"
    assert town.record(neighbour).attempts == 1


def test_out_of_memory_without_end_fails(town: Town) -> None:
    """No device can give what it wants."""
    result = town.publish("grow", mib=2000, to_mib=20_000)

    record = town.wait_for(result, State.FAILED, timeout_s=40.0)

    assert record.reason is not None
    assert record.reason.code == "out_of_memory"
    assert record.attempts <= 3
    town.wait_until(result.ready, "its producer is answered")
    assert "OutOfMemoryError" in type(result.result).__name__


@pytest.mark.parametrize("framework", sorted(FOREIGN))
def test_out_of_memory_in_frameworks(town: Town, framework: str) -> None:
    workers = town.cluster.workers()
    result = town.publish("foreign", mib=1000, framework=framework, enough_mib=1800)

    assert town.get(result) >= 1300 * 1.5

    assert town.losses(result) == ["oom"]
    assert town.record(result).attempts == 2
    assert town.cluster.workers() == workers


def test_out_of_memory_inside_its_reservation_keeps_its_demand(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that brim has not started takes what was reserved for the task, on every device.

    The task asks for it once the outsiders' memory is in the books: having been robbed, it waits for a device with
    room until they have gone, and is not robbed again, whatever the timing.
    """
    go = town.gate()
    victim = town.publish("grow_later", mib=2000, go=str(go))
    demanded = town.wait_for(victim, State.RUNNING).demand
    with ExitStack() as outsiders:
        for device in town.store.devices():
            monkeypatch.setenv("BRIM_SIM_DIR", str(town.cluster.folder / "devices" / device.node))
            outsiders.enter_context(simulated.hold(device.uuid, 7000))
        town.wait_until(lambda: all(d.external_mib == 7000 for d in town.store.devices()), "they are in the books")
        go.touch()
        town.wait_until(lambda: town.losses(victim), "it was robbed")
        assert town.losses(victim) == ["oom"]
        assert town.record(victim).demand == demanded

    assert town.get(victim) == 2000
    assert town.losses(victim) == ["oom"]
    assert town.record(victim).demand == demanded


def test_result_backend_away_at_the_end_of_a_task(town: Town) -> None:
    """The result is tried again as Celery does; if that is in vain, the attempt ends all the same."""
    late = town.publish("backend_away", mib=300, tries=2)
    assert town.get(late) == 300
    never = town.publish("backend_away", mib=300, tries=6)
    town.results.remove(never)  # Celery has given its result up

    record = town.wait_for(never, State.SUCCEEDED, State.FAILED)

    assert record.attempts == 1
    assert not any(device.busy for device in town.store.devices())
    if record.state is State.FAILED:
        assert record.reason is not None
