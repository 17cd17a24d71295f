"""What a run of many tasks came to: pure arithmetic over task records and what the devices witnessed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from brim.core.model import Device, State
from brim.store.types import Record

WAITED_S = 0.1
"""A task that was placed later than this after its admission has waited in overflow."""

Interval = tuple[float, float, int]
"""Start and end in seconds, and how much in between."""


def peak(intervals: Iterable[Interval]) -> int:
    """The largest sum over intervals that overlap; one that ends at a moment leaves before others start."""
    changes = sorted(change for start, end, amount in intervals for change in ((start, amount), (end, -amount)))
    highest = now = 0
    for _, amount in changes:
        now += amount
        highest = max(highest, now)
    return highest


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device's part in a run, in MiB; ``max_concurrent`` counts tasks that ran at the same time."""

    device: str
    peak_reserved_mib: int
    peak_measured_mib: int
    capacity_mib: int
    max_concurrent: int


@dataclass(frozen=True, slots=True)
class Overflow:
    """Tasks that waited because nothing could take them, and for how long."""

    count: int = 0
    median_wait_s: float = 0.0
    max_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run. ``breaches`` of the invariants: empty when they held."""

    tasks: Mapping[str, int]
    oom: int
    overflow: Overflow
    gpus: Sequence[Gpu]
    makespan_s: float
    exclusive_makespan_s: float
    """The best makespan possible with one task per GPU: max(longest task, Σ run times ÷ GPUs)."""
    breaches: Sequence[str] = field(default=())

    @property
    def good(self) -> bool:
        """Every task succeeded, no device ran out of memory, and the invariants held."""
        return set(self.tasks) <= {State.SUCCEEDED} and self.oom == 0 and not self.breaches

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        values = asdict(self)
        breaches = values.pop("breaches")
        return {**values, "invariants": list(breaches) or "held"}


def overflow(records: Iterable[Record]) -> Overflow:
    """How long tasks waited from admission, or from their eta, to the placement of their last attempt."""
    waits = [
        record.placed_s - max(record.admitted_s, record.eta_s or 0.0)
        for record in records
        if record.placed_s is not None
    ]
    long = [wait for wait in waits if wait > WAITED_S]
    return Overflow(len(long), round(median(long), 3), round(max(long), 3)) if long else Overflow()


def gpus(devices: Sequence[Device], records: Sequence[Record], peak_measured_mib: Mapping[str, int]) -> list[Gpu]:
    """Each device's peaks; reservations and run times come from the records of the tasks it ran."""
    found = []
    for device in devices:
        mine = [record for record in records if device.uuid in record.devices]
        reserved = [
            (record.placed_s, record.ended_s, record.demand.vram_mib)
            for record in mine
            if record.placed_s is not None and record.ended_s is not None
        ]
        running = [(start, end, 1) for start, end in (run_interval(record) for record in mine) if end > start]
        found.append(
            Gpu(
                f"{device.node}.{device.index}",
                peak(reserved),
                peak_measured_mib.get(device.uuid, 0),
                device.total_mib,
                peak(running),
            )
        )
    return found


def run_interval(record: Record) -> tuple[float, float]:
    """When the task's function began and ended; an empty interval if it did not do both."""
    if record.started_s is None:
        return (0.0, 0.0)
    return (record.started_s, record.finished_s or record.ended_s or record.started_s)


def exclusive_makespan_s(records: Iterable[Record], gpu_count: int) -> float:
    """The best makespan possible with one task per GPU (a lower bound of any such schedule)."""
    times = [end - start for start, end in map(run_interval, records)]
    return max(max(times, default=0.0), sum(times) / gpu_count)
