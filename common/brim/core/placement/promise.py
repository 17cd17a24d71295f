"""Drained promises: how a task that cannot start gets its turn while smaller ones pass it.

A promised task's devices are *drained*: whatever else is placed there afterwards counts as never ending, so
it may go there only if the promised task still fits beside it. Estimated run times are not trusted; within a
demand class they spread too far for a promise that rests on them to hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from brim.core.model import Demand, Device
from brim.core.placement.cluster import Site
from brim.core.placement.fit import UP, capacity_mib, milli


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

    def holds(self, site: Site) -> bool:
        """Whether the promised task fits on its devices once all work from before the promise has ended."""
        known = {device.uuid: device for device in site.devices}
        for uuid in self.devices:
            device = known.get(uuid)
            if device is None or device.state != UP or self._left_mib(device) < 0 or self._left_slots(device) < 0:
                return False
        node = site.node
        short_milli = milli(self._beside_cpus() + self.demand.cpus) - milli(node.cpus)
        short_mib = self._beside_ram_mib() + self.demand.ram_mib - node.ram_mib
        return (node.cpus <= 0 or short_milli <= 0) and (node.ram_mib <= 0 or short_mib <= 0)

    def view(self, site: Site) -> Site:
        """The site as others may use it: no more than what lets the promised task fit once it is drained."""
        devices = list(site.devices)
        for position, device in enumerate(devices):
            if device.uuid in self.devices:
                committed_mib = capacity_mib(device) - device.external_mib - self._left_mib(device)
                devices[position] = replace(
                    device,
                    committed_mib=max(device.committed_mib, committed_mib),
                    busy=max(device.busy, device.executors - self._left_slots(device)),
                )
        node = site.node
        node = replace(
            node,
            cpus_used=max(node.cpus_used, self._beside_cpus() + self.demand.cpus),
            ram_used_mib=max(node.ram_used_mib, self._beside_ram_mib() + self.demand.ram_mib),
        )
        return Site(node, tuple(devices), site.shape)

    def joined(self, other: Beside) -> Promise:
        """The promise with one more task placed beside it."""
        return replace(self, beside=(*self.beside, other))

    def relieved(self, task_id: str) -> Promise:
        """The promise after a task placed beside it has ended."""
        return replace(self, beside=tuple(other for other in self.beside if other.task_id != task_id))

    def _left_mib(self, device: Device) -> int:
        """Memory that is left for others on a promised device once it is drained; negative if it holds no longer."""
        if self.demand.whole:
            return -1 if any(device.uuid in other.devices for other in self.beside) else 0
        here = sum(other.demand.vram_mib for other in self.beside if device.uuid in other.devices)
        return capacity_mib(device) - device.external_mib - here - self.demand.vram_mib

    def _left_slots(self, device: Device) -> int:
        """Executors that are left for others there."""
        return device.executors - sum(device.uuid in other.devices for other in self.beside) - 1

    def _beside_cpus(self) -> float:
        return sum(other.demand.cpus for other in self.beside)

    def _beside_ram_mib(self) -> int:
        return sum(other.demand.ram_mib for other in self.beside)
