"""Attempts that outgrow their reservation, on a real agent: a neighbour that keeps to its own never pays for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.core.model import State
from brim.gpu import simulated
from support.agent import Bench
from support.waiting import wait_until

STARTING_S = 60.0


@pytest.fixture(scope="module")
def shared_bench(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One agent of an 8 GiB device with two executors, which are replaced after every task."""
    settings = {"BRIM_SIM_CACHE": "1", "BRIM_EXECUTOR__RECYCLE": "after_task"}
    bench = Bench(valkey_url, f"guard{os.getpid()}:", tmp_path_factory.mktemp("guard"), settings=settings)
    try:
        bench.serve()
        yield bench
    finally:
        bench.close()


@pytest.fixture
def served(shared_bench: Bench) -> Iterator[Bench]:
    """The shared agent, complete and idle before, and nothing left over of the test before."""

    def ready() -> bool:
        device = shared_bench.device()
        return shared_bench.is_idle() and device.committed_mib == device.external_mib == 0

    wait_until(ready, what="the device is up, idle, complete and empty", timeout_s=STARTING_S)
    yield shared_bench
    assert shared_bench.store.audit() == []


def refused(bench: Bench) -> int:
    """How many allocations the device itself has refused so far."""
    return sum(witness.refused for witness in simulated.witness(bench.folder / "devices").values())


def outgrown(bench: Bench, task_id: str) -> list[str]:
    """What a task's story tells of its excess: "outgrown" for a warning, "lost" for an end."""
    events = bench.store.story(task_id)
    return [line["event"] for line in events if line.get("reason", {}).get("code") == "outgrew"]


def test_a_framework_refuses_what_is_beyond_the_reservation_and_the_neighbour_gets_all_of_its_own(
    served: Bench, tmp_path: Path
) -> None:
    go, before = str(tmp_path / "go"), refused(served)
    neighbour = served.run("device.creep", vram_mib=5500, mib=5000, until=go)
    greedy = served.run("device.creep", vram_mib=1500, guard="soft", mib=6000, until=go)

    failed = served.wait_for(greedy, State.FAILED, State.WAITING)
    Path(go).touch()

    assert failed.reason is not None
    assert "this process may hold 1200 MiB" in failed.reason.message
    assert served.wait_for(neighbour, State.SUCCEEDED).attempts == 1
    assert refused(served) == before


def test_the_agent_ends_what_no_framework_limits_before_its_neighbour_is_short(served: Bench, tmp_path: Path) -> None:
    go, before = str(tmp_path / "go"), refused(served)
    neighbour = served.run("device.creep", vram_mib=5500, mib=5000, until=go)
    greedy = served.run("device.creep", vram_mib=1000, guard="hard", mib=6000, step=100, outside=True, until=go)

    ended = served.wait_for(greedy, State.WAITING)
    Path(go).touch()

    assert ended.reason is not None
    assert (ended.reason.code, ended.losses) == ("outgrew", 1)
    assert ended.demand.vram_mib >= 1500, "it is placed again with what it is known to need"
    assert outgrown(served, greedy) == ["outgrown", "lost"]
    assert served.wait_for(neighbour, State.SUCCEEDED).attempts == 1
    assert refused(served) == before


def test_at_soft_the_agent_only_warns(served: Bench, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    greedy = served.run("device.creep", vram_mib=1000, guard="soft", mib=2000, step=500, outside=True, until=go)

    wait_until(lambda: outgrown(served, greedy) == ["outgrown"], what="the story tells of the excess")
    key = served.store.keys.task(greedy)
    wait_until(lambda: served.client.hget(key, "sampled_mib") == b"2000", what="the agent has seen all of it")
    Path(go).touch()

    assert served.wait_for(greedy, State.SUCCEEDED).attempts == 1
    assert served.record(greedy).peak_mib == 2000, "no framework has counted it: the agent's samples have"


def test_an_executor_is_replaced_after_its_task_and_its_leftover_is_free(served: Bench) -> None:
    task_id = served.run(mib=2000, vram_mib=2500, seconds=0.5)
    pid = served.executor(task_id)

    served.wait_for(task_id, State.SUCCEEDED)

    wait_until(lambda: pid not in served.processes(), what="the executor is gone")
    wait_until(lambda: served.device().committed_mib == 0, what="nothing is left over", timeout_s=STARTING_S)
