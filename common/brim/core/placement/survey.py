"""What stands in the way of a demand, at every site at once: reasons, promises, and leftover to recycle."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from brim.core.model import Demand, Device, Reason
from brim.core.placement.cluster import Cluster, Site
from brim.core.placement.fit import UP, capacity_mib, milli, missing_mib, node_shortage, place_name, shortage
from brim.core.placement.outlook import Bools, Ints

NEARNESS = ("fits", "promised", "executors", "memory", "cpus", "ram", "state", "too_large", "model", "labels")
"""Obstacles by how near they are to going away; the nearest one is the reason a user reads."""

_RANK = {code: rank for rank, code in enumerate(NEARNESS)}
_AMOUNT = 1 << 40
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a site cannot take a demand: the obstacle of the least hindered devices that are enough."""

    rank: int
    amount: int
    reason: Reason | None
    """None if the site could take it."""


class Survey:
    """All devices of a cluster as arrays [S, D], each written anew when its site has changed and it is asked for."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._changed = cluster.watch()
        self._names: tuple[str, ...] = ()
        self._places: dict[str, int] = {}
        self._started = False

    def refresh(self) -> None:
        """Take over what has changed in the cluster."""
        widest = max((len(self.cluster[name].devices) for name in self._changed if name in self.cluster), default=0)
        if not self._started or self._names is not self.cluster.order() or widest > self._there.shape[1]:
            self._start()
        for name in self._changed:
            if name in self._places:
                self._write(self._places[name], self.cluster[name])
        self._changed.clear()

    def why(self, demand: Demand, task: str, *, memory: bool = True) -> Reason | None:
        """What the site that comes nearest to taking the demand is short of; None if it is a promise alone."""
        self.refresh()
        codes = self._codes(demand, task, memory=memory)
        if not len(codes) or codes.min() == _NEVER:
            return Reason("no_worker", f"no worker has registered {task}")
        return miss(self.cluster, self.cluster[self._names[int(codes.argmin())]], demand, task, memory=memory).reason

    def nearest(self, demand: Demand, task: str, taken: Collection[str]) -> tuple[Site, tuple[int, ...]] | None:
        """The devices (positions) of one node that lack least for the demand and will hold it once drained.

        Nodes in ``taken`` are left out. Lacking is the memory that must come free; a missing executor counts as an
        even share of the device's memory, and leftover of idle executors does not count, for they can be replaced.
        """
        self.refresh()
        if not self._names:
            return None
        need = self._capacity if demand.whole else demand.vram_mib
        able = self._eligible(task) & self._up & self._allowed(demand) & (self._drained >= need)
        if demand.whole:
            able &= self._capacity >= demand.vram_mib
        lack = np.maximum(need - self._available - self._reclaimable, 0)
        lack = np.where(self._full, np.maximum(lack, self._share), lack)
        lack = np.where(able, lack, _AMOUNT)
        order = np.argsort(lack, axis=1, kind="stable")[:, : max(1, demand.gpus)]
        if order.shape[1] < demand.gpus:
            return None
        total = np.take_along_axis(lack, order, axis=1).sum(axis=1)
        for place in np.argsort(total, kind="stable").tolist():
            if total[place] >= _AMOUNT:
                return None
            site = self.cluster[self._names[place]]
            if site.name not in taken and _holds_when_drained(site, demand):
                return site, tuple(sorted(order[place].tolist()))
        return None

    def recyclable(self, demand: Demand, task: str, within: Collection[str] | None) -> list[str]:
        """Devices where replacing idle executors alone would let the demand start: enough of one node, else none.

        ``within``: only these devices count.
        """
        self.refresh()
        if not self._names or not self._reclaimable.any():
            return []
        able = self._eligible(task) & self._up & self._allowed(demand) & ~self._full
        missing = np.maximum(demand.vram_mib - self._available, self._committed if demand.whole else 0)
        able &= missing <= self._reclaimable
        for place in np.flatnonzero(able.sum(axis=1) >= max(1, demand.gpus)).tolist():
            site = self.cluster[self._names[place]]
            if node_shortage(site.node, demand) is not None:
                continue
            useful = [
                (max(0, int(missing[place, position])), device.uuid)
                for position, device in enumerate(site.devices)
                if able[place, position] and (within is None or device.uuid in within)
            ]
            if len(useful) >= demand.gpus:
                return [uuid for lack, uuid in sorted(useful)[: demand.gpus] if lack]
        return []

    # -- arrays ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._started = True
        self._names = self.cluster.order()
        self._places = {name: place for place, name in enumerate(self._names)}
        shape = len(self._names), max([1, *(len(site.devices) for site in self.cluster)])
        self._there, self._up, self._full = (np.zeros(shape, dtype=bool) for _ in range(3))
        self._taskset, self._model = (np.zeros(shape, dtype=np.int64) for _ in range(2))
        self._available, self._committed, self._reclaimable = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self._capacity, self._drained, self._share = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self._cpu, self._ram = (np.zeros(len(self._names), dtype=np.int64) for _ in range(2))
        self._numbers: dict[str, int] = {}
        self._changed.update(self._names)

    def _write(self, place: int, site: Site) -> None:
        node = site.node
        self._cpu[place] = milli(node.cpus) - milli(node.cpus_used) if node.cpus > 0 else _AMOUNT
        self._ram[place] = node.ram_mib - node.ram_used_mib if node.ram_mib > 0 else _AMOUNT
        self._there[place] = False
        for position, device in enumerate(site.devices):
            at = place, position
            self._there[at] = True
            self._up[at] = device.state == UP
            self._full[at] = device.busy >= device.executors
            self._taskset[at] = self._numbers.setdefault(device.tasks, len(self._numbers))
            self._model[at] = self._numbers.setdefault(device.model, len(self._numbers))
            self._available[at] = device.available_mib
            self._committed[at] = device.committed_mib
            self._reclaimable[at] = device.reclaimable_mib
            self._capacity[at] = capacity_mib(device)
            self._drained[at] = capacity_mib(device) - device.external_mib
            self._share[at] = capacity_mib(device) // max(1, device.executors)

    def _eligible(self, task: str) -> Bools:
        tasksets = self.cluster.tasksets
        holding = [number for text, number in self._numbers.items() if task in tasksets.get(text, ())]
        eligible: Bools = self._there & np.isin(self._taskset, holding)
        return eligible

    def _allowed(self, demand: Demand) -> Bools:
        if not demand.gpu_models:
            return np.ones((1, 1), dtype=bool)
        return np.isin(self._model, [self._numbers.get(model, -1) for model in demand.gpu_models])

    def _codes(self, demand: Demand, task: str, *, memory: bool) -> Ints:
        """[S] rank and amount of each site's `miss`, to be compared; `_NEVER` where no worker knows the task."""
        if not self._names:
            return np.zeros(0, dtype=np.int64)
        eligible = self._eligible(task)
        missing = np.maximum(demand.vram_mib - self._available, self._committed if demand.whole else 0)
        over = demand.vram_mib - self._capacity
        code = np.where(self._full, _RANK["executors"] * _AMOUNT, 0)
        if memory:
            code = np.where(missing > 0, _RANK["memory"] * _AMOUNT + missing, code)
            code = np.where(over > 0, _RANK["too_large"] * _AMOUNT + over, code)
        code = np.where(self._allowed(demand), code, _RANK["model"] * _AMOUNT)
        code = np.where(self._up, code, _RANK["state"] * _AMOUNT)
        code = np.where(eligible, code, _NEVER)
        number = eligible.sum(axis=1)
        enough = number >= demand.gpus
        limiting = min(max(1, demand.gpus), code.shape[1]) - 1
        code = np.partition(code, limiting, axis=1)[:, limiting]
        code = np.where(enough, code, _RANK["too_large"] * _AMOUNT + demand.gpus - number)
        code = np.where(number > 0, code, _NEVER)
        host = np.where(self._ram < demand.ram_mib, _RANK["ram"], 0)
        host = np.where(self._cpu < milli(demand.cpus), _RANK["cpus"], host) * _AMOUNT
        code = np.where(code == 0, host, code)
        if demand.labels:
            unlabelled = [not self.cluster[name].shape.labels.issuperset(demand.labels) for name in self._names]
            code = np.where((number > 0) & np.array(unlabelled), _RANK["labels"] * _AMOUNT, code)
        return code


def miss(cluster: Cluster, site: Site, demand: Demand, task: str, *, memory: bool = True) -> Miss:
    """Why this site, where a worker knows the task, cannot take the demand."""
    host = node_shortage(site.node, demand)
    if host is not None and host.code == "labels":
        return Miss(_RANK["labels"], 0, host)
    eligible = [device for device in site.devices if cluster.runs(device, task)]
    if len(eligible) < demand.gpus:
        text = f"{demand.gpus} GPUs on one node asked for, {site.name} has {len(eligible)}"
        return Miss(_RANK["too_large"], demand.gpus - len(eligible), Reason("too_large", text))
    misses = [_miss(device, demand, memory=memory) for device in eligible]
    limiting = sorted(misses, key=lambda each: (each.rank, each.amount))[max(1, demand.gpus) - 1]
    if limiting.reason is None and host is not None:
        return Miss(_RANK[host.code], 0, host)
    return limiting


def _miss(device: Device, demand: Demand, *, memory: bool) -> Miss:
    reason = shortage(device, demand, memory=memory)
    if reason is None:
        return Miss(_RANK["fits"], 0, None)
    over_mib = demand.vram_mib - capacity_mib(device)
    if reason.code == "memory" and over_mib > 0:
        text = f"too large for {place_name(device)} by {over_mib} MiB"
        return Miss(_RANK["too_large"], over_mib, Reason("too_large", text))
    return Miss(_RANK[reason.code], missing_mib(device, demand) if reason.code == "memory" else 0, reason)


def _holds_when_drained(site: Site, demand: Demand) -> bool:
    node = site.node
    return (
        all(node.labels.get(label) == value for label, value in demand.labels)
        and (node.cpus <= 0 or demand.cpus <= node.cpus)
        and (node.ram_mib <= 0 or demand.ram_mib <= node.ram_mib)
    )
