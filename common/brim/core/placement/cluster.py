"""A mirror of the availability table that decisions are made on (requirements A3, A5)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from brim.core.model import Demand, Device, Node
from brim.core.placement.fit import capacity_mib, claim_mib, milli

EVERYTHING = -1
"""The change of a node of which more has changed than what attempts hold of some of its devices."""

Changes = dict[str, int]
"""Nodes that have changed: a bit for each device (by position) of which no more than what attempts hold there has, or
`EVERYTHING`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What stays the same at a site whatever runs there."""

    labels: frozenset[tuple[str, str]]
    cpu_milli: int
    """Thousandths of a CPU; 0 where the server has not declared any."""
    devices: tuple[tuple[str, str, int], ...]
    """(model, digest of registered tasks, capacity in MiB) of each."""


@dataclass(slots=True)
class Site:
    """A worker server and its devices (by index) at one moment; a value like them, a change makes a new one."""

    node: Final[Node]
    devices: Final[tuple[Device, ...]]
    shape: Final[Shape]

    @classmethod
    def of(cls, node: Node, devices: Iterable[Device]) -> Site:
        """A site with these devices in their order."""
        ordered = tuple(sorted(devices, key=lambda each: (each.index, each.uuid)))
        each = tuple((device.model, device.tasks, capacity_mib(device)) for device in ordered)
        return cls(node, ordered, Shape(frozenset(node.labels.items()), milli(node.cpus), each))

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
            devices[position] = device.holding(claim_mib(device, demand) if demand.whole else demand.vram_mib)
        node = self.node
        if demand.cpus or demand.ram_mib:
            node = Node(
                node.name,
                node.labels,
                node.cpus,
                node.ram_mib,
                node.cpus_used + demand.cpus,
                node.ram_used_mib + demand.ram_mib,
            )
        return Site(node, tuple(devices), self.shape)

    def without(self, positions: Iterable[int], claims_mib: Iterable[int], demand: Demand) -> Site:
        """The site after an attempt that held these amounts on these devices has ended."""
        devices = list(self.devices)
        for position, mib in zip(positions, claims_mib, strict=True):
            device = devices[position]
            devices[position] = replace(device, committed_mib=device.committed_mib - mib, busy=device.busy - 1)
        node = self.node
        if demand.cpus or demand.ram_mib:
            cpus_used, ram_used_mib = node.cpus_used - demand.cpus, node.ram_used_mib - demand.ram_mib
            node = replace(node, cpus_used=cpus_used, ram_used_mib=ram_used_mib)
        return Site(node, tuple(devices), self.shape)


class Cluster:
    """The mirror: what the table last said of every device and node, plus reservations on trial.

    ``tasksets`` maps the digest that devices carry to the task names behind it. Iteration is by node name
    (numbers in it by value, so that node-2 comes before node-10), whatever order updates came in: every
    decision is deterministic.
    """

    def __init__(self, tasksets: Mapping[str, frozenset[str]] | None = None) -> None:
        self.tasksets: dict[str, frozenset[str]] = dict(tasksets or {})
        self.placed_s: dict[str, tuple[float, ...]] = {}
        """Device → when the attempts on it were placed, as far as is known; told by `began`."""
        self._sites: dict[str, Site] = {}
        self._home: dict[str, str] = {}
        self._ordered: tuple[str, ...] | None = None
        self._journal: list[tuple[Site, int, Collection[int], Demand]] = []
        """Sites as they were before each reservation, which devices it changed, and the reservation."""
        self._undone: dict[int, tuple[Site, Collection[int], Demand, Site]] = {}
        """What was taken back last, with the sites before and after; by the identity of the one before."""
        self._watchers: list[Changes] = []

    def __iter__(self) -> Iterator[Site]:
        for name in self.order():
            yield self._sites[name]

    def __getitem__(self, node: str) -> Site:
        return self._sites[node]

    def site(self, node: str) -> Site | None:
        """The node's site; None if it is unknown."""
        return self._sites.get(node)

    def __contains__(self, node: str) -> bool:
        return node in self._sites

    def order(self) -> tuple[str, ...]:
        """The names of all nodes in the fixed order; the same object until a node comes or goes."""
        if self._ordered is None:
            self._ordered = tuple(sorted(self._sites, key=natural))
        return self._ordered

    def watch(self) -> Changes:
        """What will collect the changes from now on; whoever reads it empties it."""
        changed = dict.fromkeys(self._sites, EVERYTHING)
        self._watchers.append(changed)
        return changed

    def device(self, uuid: str) -> Device | None:
        """The device as last seen; None if it is unknown."""
        if uuid not in self._home:
            return None
        return next(device for device in self._sites[self._home[uuid]].devices if device.uuid == uuid)

    def update(self, device: Device) -> None:
        """Take over what the table says of one device; it replaces whatever was known or tried."""
        if self._home.get(device.uuid, device.node) != device.node:
            self.remove(device.uuid)
        site = self._sites.get(device.node) or Site.of(Node(device.node), ())
        others = [other for other in site.devices if other.uuid != device.uuid]
        if len(others) < len(site.devices) and device in site.devices:
            return
        self._home[device.uuid] = device.node
        self._put(Site.of(site.node, [*others, device]))

    def remove(self, uuid: str) -> None:
        """Forget a device; unknown ones are no error."""
        name = self._home.pop(uuid, None)
        self.placed_s.pop(uuid, None)
        if name is None:
            return
        site = self._sites[name]
        self._put(Site.of(site.node, [device for device in site.devices if device.uuid != uuid]))

    def update_node(self, node: Node) -> None:
        """Take over what the table says of a worker server; its devices stay."""
        site = self._sites.get(node.name)
        if site is not None and site.node == node:
            return
        self._put(Site.of(node, site.devices if site else ()))

    def remove_node(self, name: str) -> None:
        """Forget a node and its devices; unknown ones are no error."""
        site = self._sites.pop(name, None)
        if site is None:
            return
        self._ordered = None
        for device in site.devices:
            del self._home[device.uuid]
        for changed in self._watchers:
            changed[name] = EVERYTHING

    def runs(self, device: Device, task: str) -> bool:
        """Whether the device's worker has registered the task (only then it is eligible)."""
        return task in self.tasksets.get(device.tasks, frozenset())

    def began(self, uuid: str, placed_s: Iterable[float]) -> None:
        """Take over when the attempts that are on a device were placed."""
        placed_s = tuple(placed_s)
        if placed_s == self.placed_s.get(uuid, ()) or uuid not in self._home:
            return
        self.placed_s[uuid] = placed_s
        name = self._home[uuid]
        position = self._sites[name].positions([uuid])[0]
        for changed in self._watchers:
            changed[name] = changed.get(name, 0) | 1 << position

    def reserve(self, uuids: Iterable[str], demand: Demand) -> None:
        """Hold the demand on these devices of one node; `undo` takes it back."""
        uuids = tuple(uuids)
        site = self._sites[self._home[uuids[0]]]
        self.hold(site.name, site.positions(uuids), demand)

    def hold(self, node: str, positions: Collection[int], demand: Demand) -> None:
        """The same by positions in the node's devices; a demand without GPUs takes host resources alone."""
        site, bits = self._sites[node], 0
        for position in positions:
            bits |= 1 << position
        self._journal.append((site, bits, positions, demand))
        undone = self._undone.get(id(site)) if self._undone else None
        if undone is not None and undone[1] == positions and undone[2] == demand:
            held = undone[3]
        else:
            held = site.holding(positions, demand)
        self._put(held, bits)

    def release(self, node: str, positions: Iterable[int], claims_mib: Iterable[int], demand: Demand) -> None:
        """An attempt that held these amounts has ended; this settles all earlier reservations."""
        self.settle()
        positions = tuple(positions)
        bits = sum(1 << position for position in positions)
        self._put(self._sites[node].without(positions, claims_mib, demand), bits)

    def undo(self, steps: int = 1) -> None:
        """Take back the last reservations; nothing else may have changed in between.

        What is held in the same way again is the same site again, so that whoever has looked at it need not do so anew.
        """
        self._undone.clear()
        for _ in range(steps):
            site, bits, positions, demand = self._journal.pop()
            self._undone[id(site)] = site, positions, demand, self._sites[site.node.name]
            self._put(site, bits)

    def settle(self) -> None:
        """Keep every reservation made so far; they can no longer be undone."""
        self._journal.clear()

    def _put(self, site: Site, bits: int = EVERYTHING) -> None:
        name = site.node.name
        if name not in self._sites:
            self._ordered = None
        self._sites[name] = site
        for changed in self._watchers:
            changed[name] = changed.get(name, 0) | bits


def natural(name: str) -> tuple[tuple[str | int, ...], str]:
    """A sort key that compares digits by value: node-2 before node-10."""
    parts = re.split(r"(\d+)", name)
    return tuple(int(part) if position % 2 else part for position, part in enumerate(parts)), name
