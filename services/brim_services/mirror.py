"""The mirror: what of the availability table and of overflow is known in memory, kept up to date by changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from brim.core.model import Device
from brim.core.placement import Cluster, Lane, Placement, Waiting
from brim.store import Store
from brim.store.types import Changes, LaneWindow, NodeView

from .admission import UNESTIMATED

WINDOW = 64
"""How many tasks of a lane the mirror holds; more are fetched when these are placed."""


@dataclass(slots=True)
class Mirror:
    """What the active placement knows of the cluster and of overflow."""

    cluster: Cluster = field(default_factory=Cluster)
    lanes: dict[str, LaneWindow] = field(default_factory=dict)
    nodes: dict[str, NodeView] = field(default_factory=dict)
    hungry: set[str] = field(default_factory=set)
    """Devices in service that have less behind their busy executors than one task for each."""
    behind: Counter[str] = field(default_factory=Counter)
    """How many tasks lie behind the busy executors of each device in service."""
    _as_lane: dict[str, tuple[LaneWindow, Lane]] = field(default_factory=dict)
    """Windows as the planner takes them: made again only when they have changed."""

    @classmethod
    def read(cls, store: Store, window: int) -> Mirror:
        """A mirror of this moment, with the first ``window`` tasks of each lane, for whoever only looks."""
        changes, mirror = store.snapshot(window), cls()
        mirror.apply(changes)
        mirror.cluster.tasksets.update(store.tasksets({device.tasks for device in changes.devices}))
        return mirror

    def apply(self, changes: Changes) -> None:
        """Takes over what has changed; a lane that is empty now is dropped."""
        for name in changes.gone_nodes:
            self.cluster.remove_node(name)
            self.nodes.pop(name, None)
        for view in changes.nodes:
            self.nodes[view.node.name] = view
        for device in changes.devices:
            self.cluster.update(device)
            self._weigh(device)
            if not device.busy:
                self.cluster.began(device.uuid, ())
        for uuid_ in changes.gone_devices:
            self.cluster.remove(uuid_)
            self.hungry.discard(uuid_)
            del self.behind[uuid_]
        for name in {view.node.name for view in changes.nodes} | {device.node for device in changes.devices}:
            self._count_host(name)
        for window in changes.lanes:
            if window.waiting:
                self.lanes[window.lane] = window
            else:
                self.lanes.pop(window.lane, None)

    def _weigh(self, device: Device) -> None:
        """Says whether a device may soon have an idle executor."""
        behind = device.busy - device.executors if device.state == "up" else 0
        self.behind[device.uuid] = max(0, behind)
        if device.state == "up" and behind < device.executors:
            self.hungry.add(device.uuid)
        else:
            self.hungry.discard(device.uuid)

    def _count_host(self, name: str) -> None:
        """What the attempts on a node's devices hold of its CPUs and RAM, as the table says."""
        if name in self.nodes:
            devices = self.cluster[name].devices if name in self.cluster else ()
            cpus, ram_mib = sum(d.cpus_used for d in devices), sum(d.ram_used_mib for d in devices)
            self.cluster.update_node(replace(self.nodes[name].node, cpus_used=cpus, ram_used_mib=ram_mib))

    def waiting_lanes(self) -> Iterator[Lane]:
        """The lanes whose tasks can be placed, as the planner takes them."""
        for window in self.lanes.values():
            if window.key is None and not window.lane.startswith(UNESTIMATED):
                known = self._as_lane.get(window.lane)
                if known is None or known[0] is not window:
                    waiting = [Waiting(*task) for task in window.waiting]
                    known = self._as_lane[window.lane] = window, Lane(window.lane, window.task, window.demand, waiting)
                yield known[1]
        for gone in self._as_lane.keys() - self.lanes.keys():
            del self._as_lane[gone]

    def batch_windows(self) -> list[LaneWindow]:
        """The lanes of batched tasks."""
        return [window for window in self.lanes.values() if window.key is not None]

    def placed(self, placement: Placement, now_s: float) -> None:
        """Debits a committed placement, until the table's own word arrives."""
        self.cluster.reserve(placement.devices, placement.demand)
        for uuid_ in placement.devices:
            self.cluster.began(uuid_, (*self.cluster.placed_s.get(uuid_, ()), now_s))
            if (device := self.cluster.device(uuid_)) is not None:
                self._weigh(device)
        self.cluster.settle()
        self.drop(placement.lane, placement.task_id)

    def drop(self, lane: str, task_id: str) -> None:
        """Takes one task out of a lane's window."""
        window = self.lanes.get(lane)
        if window is not None:
            waiting = [task for task in window.waiting if task[0] != task_id]
            depth = max(len(waiting), window.depth - 1)
            self.lanes[lane] = replace(window, waiting=waiting, depth=depth)

    def exhausted(self) -> list[str]:
        """Lanes whose window is used up while more tasks wait in them; lanes without any are dropped."""
        for lane in [lane for lane, window in self.lanes.items() if not window.depth]:
            del self.lanes[lane]
        return [lane for lane, window in self.lanes.items() if not window.waiting]
