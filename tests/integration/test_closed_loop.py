"""The whole pipeline on a simulated device with a table that is wrong: what tasks truly use puts it right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from brim.core.model import TERMINAL
from brim.gpu import simulated
from brim_services.invariants import check_invariants
from support.agent import Bench
from support.waiting import wait_until

HALF_OF_THE_TRUTH = """
profiles:
  device.hold: {vram: "0.5 * mib", context_mib: 300, margin: 1.0, calibration: "on"}
"""
POLICY = Path(__file__).parents[2] / "configs" / "placement.yaml"
SIZES_MIB = (1500, 2500, 3500)


@pytest.fixture
def bench(valkey_url: str, namespace: str, tmp_path: Path) -> Iterator[Bench]:
    """One device of 8 GiB with three executors, and a table that declares half of what tasks use."""
    table = tmp_path / "resources.yaml"
    table.write_text(HALF_OF_THE_TRUTH)
    settings = {"BRIM_RESOURCES__TABLE": str(table), "BRIM_PLACEMENT__POLICY_FILE": str(POLICY)}
    bench = Bench(valkey_url, namespace, tmp_path, executors=3, settings=settings)
    try:
        yield bench
    finally:
        bench.close()


def publish(bench: Bench, count: int, **kwargs: Any) -> list[str]:
    """Publish tasks of all sizes."""
    sizes = [SIZES_MIB[number % len(SIZES_MIB)] for number in range(count)]
    return [
        str(bench.app.send_task("device.hold", kwargs={"mib": mib, **kwargs}, queue="brim.intake").id) for mib in sizes
    ]


def run(bench: Bench, count: int) -> list[str]:
    """Publish tasks that take a moment, and wait for their ends."""
    ids = publish(bench, count, seconds=0.2)
    wait_for_ends(bench, ids)
    return ids


def wait_for_ends(bench: Bench, ids: Sequence[str]) -> None:
    """Wait until all of them have ended."""

    def ended() -> bool:
        records = bench.store.records(ids)
        return len(records) == len(ids) and all(record.state in TERMINAL for record in records)

    wait_until(ended, what=f"{len(ids)} tasks have ended", timeout_s=90)


def refused(bench: Bench) -> int:
    """How many allocations the device has refused so far."""
    return sum(witness.refused for witness in simulated.witness(bench.folder / "devices").values())


def test_a_wrong_table_is_put_right_and_tasks_stop_running_out_of_memory(bench: Bench, tmp_path: Path) -> None:
    bench.store.resign("test")
    for service in ("intake", "placement"):
        bench.service(service)
    bench.serve()

    # One of each size at once: the table says that the device has room for them, and it has not.
    together = publish(bench, len(SIZES_MIB), until=str(tmp_path / "go"))
    wait_until(lambda: refused(bench), what="the device refuses one of them")
    (tmp_path / "go").touch()
    wait_for_ends(bench, together)
    run(bench, 21)
    wait_until(lambda: not bench.store.peaks(1), what="everything that was measured has been learned")
    wait_until(lambda: bench.record(run(bench, 1)[0]).demand.vram_mib >= 1800, what="intake reserves what was learned")
    refused_until_now = refused(bench)
    later = run(bench, 15)

    assert refused(bench) == refused_until_now
    for record in bench.store.records(later):
        assert record.peak_mib is not None
        assert record.peak_mib <= record.demand.vram_mib <= 1.25 * record.peak_mib
    assert check_invariants(bench.store, settled=True) == []
