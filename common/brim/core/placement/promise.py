"""Drained promises: how a task that cannot start gets its turn while smaller ones pass it.

A promised task's devices are *drained*: whatever else is placed there afterwards counts as never ending, so
it may go there only if the promised task still fits beside it. Estimated run times are not trusted; within a
demand class they spread too far for a promise that rests on them to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from brim.core.model import Demand
from brim.core.placement.cluster import Site
from brim.core.placement.fit import UP, capacity_mib
from brim.core.placement.policy import Choice


@dataclass(frozen=True, slots=True)
class Beside:
    """A task that was placed on a promised node since the promise was made."""

    task_id: str
    devices: tuple[str, ...]
    demand: Demand


@dataclass(frozen=True, slots=True)
class Promise:
    """Devices of one node that are kept for a waiting task of ``lane`` until it starts."""

    lane: str
    node: str
    devices: tuple[str, ...]
    demand: Demand
    since_s: float
    beside: tuple[Beside, ...] = ()

    def bears(self, site: Site, extra: Beside | None = None) -> bool:
        """Whether the promised task fits on its devices once all work from before the promise has ended.

        ``extra`` is one more task to be placed on the node; False means that it would break the promise.
        """
        beside = self.beside if extra is None else (*self.beside, extra)
        known = {device.uuid: device for device in site.devices}
        for uuid in self.devices:
            device = known.get(uuid)
            if device is None or device.state != UP:
                return False
            here = [other.demand.vram_mib for other in beside if uuid in other.devices]
            room_mib = capacity_mib(device) - device.external_mib - sum(here)
            if room_mib < self.demand.vram_mib or device.executors - len(here) < 1:
                return False
        node = site.node
        cpus = node.cpus - sum(other.demand.cpus for other in beside)
        ram_mib = node.ram_mib - sum(other.demand.ram_mib for other in beside)
        return (node.cpus <= 0 or self.demand.cpus <= cpus) and (node.ram_mib <= 0 or self.demand.ram_mib <= ram_mib)

    def joined(self, other: Beside) -> Promise:
        """The promise with one more task placed beside it."""
        return replace(self, beside=(*self.beside, other))

    def relieved(self, task_id: str) -> Promise:
        """The promise after a task placed beside it has ended."""
        return replace(self, beside=tuple(other for other in self.beside if other.task_id != task_id))


def nearest(site: Site, eligible: Sequence[int], demand: Demand) -> tuple[int, Choice] | None:
    """The devices of the site that lack least for the demand, with the MiB that must come free there.

    Only devices that will hold it once drained count; None if the site has too few of them. A missing
    executor counts as an even share of the memory; leftover of idle executors does not count, for they can
    be replaced.
    """
    lacking = []
    for position in eligible:
        device = site.devices[position]
        if device.state != UP or capacity_mib(device) - device.external_mib < demand.vram_mib:
            continue
        lack_mib = max(0, demand.vram_mib - device.available_mib - device.reclaimable_mib)
        if device.busy >= device.executors:
            lack_mib = max(lack_mib, capacity_mib(device) // device.executors)
        lacking.append((lack_mib, position))
    if len(lacking) < demand.gpus:
        return None
    chosen = sorted(lacking)[: demand.gpus]
    return sum(lack for lack, _ in chosen), tuple(sorted(position for _, position in chosen))
