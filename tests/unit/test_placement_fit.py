"""The fit rule names the short resource (requirements A3, A8; invariant 6)."""

from __future__ import annotations

import pytest

from brim.core.model import Demand, Node
from brim.core.placement import node_shortage, shortage
from unit.placement_cases import device


def test_a_device_with_room_and_an_idle_executor_takes_the_demand():
    assert shortage(device(committed_mib=10_000, busy=3), Demand(vram_mib=14_064)) is None


@pytest.mark.parametrize(
    ("fields", "demand", "ahead", "code", "message"),
    [
        ({"committed_mib": 10_000}, Demand(14_876), 0, "memory", "memory short by 812 MiB on gpu0@a"),
        ({"external_mib": 30_000}, Demand(1), 0, "memory", "memory short by 5937 MiB on gpu0@a"),
        ({"busy": 4}, Demand(1), 0, "executors", "all 4 executors busy on gpu0@a"),
        ({"busy": 5}, Demand(1), 1, "executors", "all 4 executors busy on gpu0@a"),
        (
            {"model": "T4"},
            Demand(1, gpu_models=("A100", "H100")),
            0,
            "model",
            "gpu0@a is a T4, not A100 or H100",
        ),
        (
            {"model": "A100 MIG 1g.5gb"},
            Demand(1, gpus=2),
            0,
            "model",
            "gpu0@a is a A100 MIG 1g.5gb, not a GPU that can be combined with others",
        ),
        ({"committed_mib": 300}, Demand(1, whole=True), 0, "memory", "memory short by 300 MiB on gpu0@a"),
        ({"state": "draining", "busy": 4}, Demand(1), 0, "state", "gpu0@a is draining"),
    ],
)
def test_a_refusal_names_what_is_short(fields, demand, ahead, code, message):
    reason = shortage(device(**fields), demand, ahead)
    assert reason is not None
    assert (reason.code, reason.message) == (code, message)


def test_ahead_lets_a_task_queue_behind_busy_executors_only_if_memory_fits():
    assert shortage(device(busy=4), Demand(1000), ahead=1) is None
    reason = shortage(device(busy=4, committed_mib=23_500), Demand(1000), ahead=1)
    assert reason is not None
    assert reason.code == "memory"


def test_memory_can_be_ignored_for_the_demo_that_must_fail():
    assert shortage(device(committed_mib=24_000), Demand(9000), memory=False) is None


@pytest.mark.parametrize(
    ("node", "demand", "code"),
    [
        (Node("a"), Demand(1, labels=(("zone", "x"),)), "labels"),
        (Node("a", cpus=8, cpus_used=6), Demand(1, cpus=2.5), "cpus"),
        (Node("a", ram_mib=1000, ram_used_mib=500), Demand(1, ram_mib=501), "ram"),
    ],
)
def test_a_node_refuses_by_label_cpu_and_ram(node, demand, code):
    reason = node_shortage(node, demand)
    assert reason is not None
    assert reason.code == code


def test_what_a_node_has_not_declared_is_not_accounted():
    assert node_shortage(Node("a", labels={"zone": "x"}), Demand(1, cpus=99, labels=(("zone", "x"),))) is None
