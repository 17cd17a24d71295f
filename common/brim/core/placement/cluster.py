"""A mirror of the availability table that decisions are made on (requirements A3, A5)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from brim.core.model import Demand, Device, Node


@dataclass(frozen=True, slots=True)
class Site:
    """A worker server and its devices (by index) at one moment; a change makes a new one."""

    node: Node
    devices: tuple[Device, ...]

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    def positions(self, uuids: Iterable[str]) -> tuple[int, ...]:
        """Where these devices stand in ``devices``."""
        where = {device.uuid: position for position, device in enumerate(self.devices)}
        return tuple(where[uuid] for uuid in uuids)

    def holding(self, positions: Iterable[int], demand: Demand) -> Site:
        """The site after one more attempt was reserved on these devices."""
        devices = list(self.devices)
        for position in positions:
            device = devices[position]
            devices[position] = replace(
                device, committed_mib=device.committed_mib + demand.vram_mib, busy=device.busy + 1
            )
        node = self.node
        if demand.cpus or demand.ram_mib:
            node = replace(
                node, cpus_used=node.cpus_used + demand.cpus, ram_used_mib=node.ram_used_mib + demand.ram_mib
            )
        return Site(node, tuple(devices))


class Cluster:
    """The mirror: what the table last said of every device and node, plus reservations on trial.

    ``tasksets`` maps the digest that devices carry to the task names behind it. Iteration is by node name
    (numbers in it by value, so that node-2 comes before node-10), whatever order updates came in: every
    decision is deterministic.
    """

    def __init__(self, tasksets: Mapping[str, frozenset[str]] | None = None) -> None:
        self.tasksets: dict[str, frozenset[str]] = dict(tasksets or {})
        self._sites: dict[str, Site] = {}
        self._home: dict[str, str] = {}
        self._ordered: list[str] | None = None
        self._journal: list[Site] = []

    def __iter__(self) -> Iterator[Site]:
        for name in self._order():
            yield self._sites[name]

    def __getitem__(self, node: str) -> Site:
        return self._sites[node]

    def __contains__(self, node: str) -> bool:
        return node in self._sites

    def device(self, uuid: str) -> Device | None:
        """The device as last seen; None if it is unknown."""
        if uuid not in self._home:
            return None
        return next(device for device in self._sites[self._home[uuid]].devices if device.uuid == uuid)

    def update(self, device: Device) -> None:
        """Take over what the table says of one device; it replaces whatever was known or tried."""
        if self._home.get(device.uuid, device.node) != device.node:
            self.remove(device.uuid)
        site = self._sites.get(device.node)
        if site is None:
            site = self._add(Site(Node(device.node), ()))
        others = [other for other in site.devices if other.uuid != device.uuid]
        devices = sorted([*others, device], key=lambda each: (each.index, each.uuid))
        self._sites[device.node] = Site(site.node, tuple(devices))
        self._home[device.uuid] = device.node

    def remove(self, uuid: str) -> None:
        """Forget a device; unknown ones are no error."""
        name = self._home.pop(uuid, None)
        if name is None:
            return
        site = self._sites[name]
        self._sites[name] = Site(site.node, tuple(device for device in site.devices if device.uuid != uuid))

    def update_node(self, node: Node) -> None:
        """Take over what the table says of a worker server; its devices stay."""
        site = self._sites.get(node.name)
        if site is None:
            self._add(Site(node, ()))
        else:
            self._sites[node.name] = Site(node, site.devices)

    def remove_node(self, name: str) -> None:
        """Forget a node and its devices; unknown ones are no error."""
        site = self._sites.pop(name, None)
        if site is None:
            return
        self._ordered = None
        for device in site.devices:
            del self._home[device.uuid]

    def runs(self, device: Device, task: str) -> bool:
        """Whether the device's worker has registered the task (only then it is eligible)."""
        return task in self.tasksets.get(device.tasks, frozenset())

    def reserve(self, uuids: Iterable[str], demand: Demand) -> None:
        """Hold the demand on these devices of one node; `undo` takes it back."""
        uuids = tuple(uuids)
        site = self._sites[self._home[uuids[0]]]
        self._journal.append(site)
        self._sites[site.name] = site.holding(site.positions(uuids), demand)

    def undo(self, steps: int = 1) -> None:
        """Take back the last reservations; nothing else may have changed in between."""
        for _ in range(steps):
            site = self._journal.pop()
            self._sites[site.name] = site

    def settle(self) -> None:
        """Keep every reservation made so far; they can no longer be undone."""
        self._journal.clear()

    def _add(self, site: Site) -> Site:
        self._sites[site.name] = site
        self._ordered = None
        return site

    def _order(self) -> list[str]:
        if self._ordered is None:
            self._ordered = sorted(self._sites, key=natural)
        return self._ordered


def natural(name: str) -> tuple[tuple[str | int, ...], str]:
    """A sort key that compares digits by value: node-2 before node-10."""
    parts = re.split(r"(\d+)", name)
    return tuple(int(part) if position % 2 else part for position, part in enumerate(parts)), name
