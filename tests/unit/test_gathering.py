"""How long placement lets changes gather, and what the mirror knows of what lies behind executors."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from brim.core.model import Device
from brim.store.types import Changes
from brim_services.mirror import Mirror
from brim_services.placement import GATHER_S, PlacementService, gather_s


@pytest.mark.parametrize(
    ("behind", "pace", "expected_s"),
    [(6, 0.0, GATHER_S), (6, 300.0, 0.01), (6, 10.0, GATHER_S), (0, 300.0, 0.0), (60, 300.0, GATHER_S)],
)
def test_executors_do_not_run_dry_while_changes_gather(behind: int, pace: float, expected_s: float) -> None:
    assert gather_s(behind, pace) == pytest.approx(expected_s)


def test_items_gather_beside_devices_that_lack_nothing_but_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    mirror = Mirror()
    mirror.apply(Changes(0.0, [Device("GPU-a", "n", 0, "A", 24_576, 512, 0, 0, 2, 0)]))
    batches = SimpleNamespace(executors={"n.0.enc": None}, is_patient=True)
    service: Any = SimpleNamespace(mirror=mirror, batches=batches, _placed_s=5.0, _pace=300.0)
    PlacementService._gather(service)
    assert slept == [pytest.approx(GATHER_S)]


def test_the_mirror_knows_what_lies_behind_executors() -> None:
    mirror = Mirror()
    device = Device("GPU-a", "n", 0, "A", 24_576, 512, 0, 0, 2, 8)
    mirror.apply(Changes(0.0, [device, replace(device, uuid="GPU-b", index=1, busy=1)]))
    assert (mirror.behind["GPU-a"], mirror.behind["GPU-b"], mirror.hungry) == (6, 0, {"GPU-b"})
    mirror.apply(Changes(0.0, [replace(device, state="draining")]))
    assert mirror.behind.total() == 0
    mirror.apply(Changes(0.0, gone_devices=["GPU-a", "GPU-b"]))
    assert not mirror.behind
    assert not mirror.hungry
