"""The whole pipeline with demands of every kind on four simulated GPUs: sets, whole GPUs, CPUs and RAM of the host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from brim.core.model import TERMINAL, State
from brim.gpu import simulated
from brim.store.types import Record
from brim_services.invariants import check_invariants
from support.agent import Bench
from support.waiting import wait_until

TABLE = """
defaults: {context_mib: 300, margin: 1.0}
profiles:
  device.hold: {vram: "mib"}
  device.train: {vram: "mib", gpus: 2}
"""
POLICY = Path(__file__).parents[2] / "configs" / "placement.yaml"


@pytest.fixture
def bench(valkey_url: str, namespace: str, tmp_path: Path) -> Iterator[Bench]:
    """Four devices of 24 GiB behind intake and placement."""
    table = tmp_path / "resources.yaml"
    table.write_text(TABLE)
    settings = {"BRIM_RESOURCES__TABLE": str(table), "BRIM_PLACEMENT__POLICY_FILE": str(POLICY)}
    bench = Bench(valkey_url, namespace, tmp_path, devices="sim:4x24GiB", executors=2, settings=settings)
    bench.store.resign("test")
    for service in ("intake", "placement"):
        bench.service(service)
    bench.serve()
    try:
        yield bench
        witnesses = simulated.witness(bench.folder / "devices")
        assert check_invariants(bench.store, settled=True, witness=witnesses) == []
    finally:
        bench.close()


def publish(bench: Bench, task: str, brim: dict[str, Any] | None = None, **kwargs: Any) -> str:
    """Publish a task as a producer does; its id."""
    headers = {"brim": brim} if brim else None
    return str(bench.app.send_task(task, kwargs=kwargs, queue="brim.intake", headers=headers).id)


def ended(bench: Bench, ids: Sequence[str]) -> list[Record]:
    """The records of these tasks once all of them have succeeded."""

    def over() -> bool:
        records = bench.store.records(ids)
        return len(records) == len(ids) and all(record.state in TERMINAL for record in records)

    wait_until(over, what=f"{len(ids)} tasks have ended", timeout_s=180)
    records = bench.store.records(ids)
    assert [(record.state, str(record.reason)) for record in records if record.state is not State.SUCCEEDED] == []
    return records


def seen(bench: Bench, task_id: str) -> list[str]:
    """The devices that a task saw."""
    devices: list[str] = bench.app.AsyncResult(task_id).get(timeout=5)["device"].split(",")
    return devices


def held(bench: Bench, task_id: str) -> tuple[int, int]:
    """From when to when (server ms) the one attempt of a task held its devices."""
    story = bench.store.story(task_id)
    return next(line["t"] for line in story if line["event"] == "placed"), story[-1]["t"]


def test_tasks_on_two_gpus_and_on_one_share_four_and_each_sees_exactly_its_own(bench: Bench) -> None:
    ids = []
    for number in range(8):
        ids.append(publish(bench, "device.train", mib=9_000 + 500 * (number % 3), seconds=0.4))
        ids += [publish(bench, "device.hold", mib=3_000 + 700 * (i % 4), seconds=0.2) for i in range(5)]

    records = ended(bench, ids)

    for record in records:
        assert len(record.devices) == (2 if record.task == "device.train" else 1)
        assert seen(bench, record.task_id) == list(record.devices)
        assert record.losses == 0
    assert {uuid for record in records for uuid in record.devices} == {device.uuid for device in bench.store.devices()}


def test_a_whole_gpu_is_shared_with_nobody_and_comes_back_when_its_task_has_ended(bench: Bench) -> None:
    ids = [publish(bench, "device.hold", mib=4_000, seconds=0.3) for _ in range(12)]
    whole = [publish(bench, "device.hold", {"vram_mib": "all"}, mib=20_000, seconds=0.3) for _ in range(2)]
    pair = publish(bench, "device.train", {"vram_mib": "all"}, mib=20_000, seconds=0.3)
    ids += [publish(bench, "device.hold", mib=4_000, seconds=0.3) for _ in range(12)]

    records = {record.task_id: record for record in ended(bench, [*ids, *whole, pair])}

    assert len(records[pair].devices) == 2
    times = {task_id: held(bench, task_id) for task_id in records}
    for alone in (*whole, pair):
        assert records[alone].demand.whole
        for task_id, other in records.items():
            if task_id != alone and set(other.devices) & set(records[alone].devices):
                apart = times[task_id][1] <= times[alone][0] or times[alone][1] <= times[task_id][0]
                assert apart, f"{task_id} held a device that {alone} had to itself"


@pytest.mark.parametrize(
    ("brim", "code"),
    [
        ({"cpus": 0.6 * len(os.sched_getaffinity(0))}, "cpus"),
        pytest.param(
            {"ram_mib": round(0.6 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20)},
            "ram",
            marks=pytest.mark.large,
        ),
        pytest.param({"gpus": 4, "vram_mib": "all"}, "memory", marks=pytest.mark.large),
    ],
)
def test_what_of_a_node_is_short_is_the_reason_why_a_task_waits(
    bench: Bench, tmp_path: Path, brim: dict[str, Any], code: str
) -> None:
    first = publish(bench, "device.hold", brim, mib=500, until=str(tmp_path / "go"))
    bench.wait_for(first, State.RUNNING, timeout_s=60)
    second = publish(bench, "device.hold", brim, mib=500, seconds=0.0)

    def reason() -> str:
        record = bench.store.record(second)
        return "" if record is None or record.reason is None else record.reason.code

    wait_until(lambda: reason() == code, what=f"the second waits for {code}")
    (tmp_path / "go").touch()
    ended(bench, [first, second])
