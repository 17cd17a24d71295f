"""What stands in the way of a demand, at every site at once: reasons, promises, and leftover to recycle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brim.core.model import Demand, Device, Reason
from brim.core.placement.cluster import EVERYTHING, Cluster, Shape, Site
from brim.core.placement.fit import UP, capacity_mib, milli, missing_mib, node_shortage, place_name, shortage, suits
from brim.core.placement.outlook import Bools, Floats, Ints, Kind

NEARNESS = ("fits", "promised", "executors", "memory", "cpus", "ram", "state", "too_large", "model", "labels")
"""Obstacles by how near they are to going away; the nearest one is the reason a user reads."""

_RANK = {code: rank for rank, code in enumerate(NEARNESS)}
_AMOUNT = 1 << 40
_END = 1 << 24
_MOST = (1 << 33) - 1
_LONGEST_MIN = 1 << 22
"""Sums of ages above this (8 years) are all alike."""

_NEVER = np.iinfo(np.int64).max

REMEMBERED = 1000
"""Classes whose obstacles are remembered for each site."""

DRAINABLE = 200
"""Classes for which it is remembered what could hold them when drained."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a site cannot take a demand: the obstacle of the least hindered devices that are enough."""

    rank: int
    amount: int
    reason: Reason | None
    """None if the site could take it."""


@dataclass(slots=True)
class _Codes:
    """What is remembered about a class: its code at each site, as things stood when so many changes had been seen."""

    state: tuple[int, int]
    codes: Ints
    until: int = 0


class Survey:
    """All devices of a cluster as arrays [S, D], each written anew when its site has changed and it is asked for."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._changed = cluster.watch()
        self._names: tuple[str, ...] = ()
        self._places: dict[str, int] = {}
        self._started = False
        self._idle: Counter[Kind] = Counter()
        """Devices with an idle executor."""
        self._era = 0
        self._seen = 0
        """Changes of sites in this era."""
        self._known: dict[tuple[Demand, str, bool], _Codes] = {}
        """By class, those asked for longest ago first."""
        self.version = 0
        """Changes whenever something changes that decides what devices could hold when drained."""

    def refresh(self) -> None:
        """Take over what has changed in the cluster."""
        if self._started and not self._changed:
            return
        widest = max((len(self.cluster[name].devices) for name in self._changed if name in self.cluster), default=0)
        if not self._started or self._names is not self.cluster.order() or widest > self._there.shape[1]:
            self._start()
        for name, bits in self._changed.items():
            if name in self._places:
                self._write(self._places[name], self.cluster[name], bits)
        self._changed.clear()

    @property
    def size(self) -> int:
        """Devices that there is room for in the arrays."""
        if not self._started or self._names is not self.cluster.order():
            self.refresh()
        return self._there.size

    def why(self, demand: Demand, task: str, *, memory: bool = True) -> Reason | str:
        """What the site that comes nearest to taking the demand is short of; the site's name if nothing is."""
        self.refresh()
        codes = self._codes(demand, task, memory=memory)
        if not len(codes) or codes.min() == _NEVER:
            return Reason("no_worker", f"no worker has registered {task}")
        site = self.cluster[self._names[int(codes.argmin())]]
        return miss(self.cluster, site, demand, task, memory=memory).reason or site.name

    def idle(self, demand: Demand, task: str) -> bool:
        """Whether a device that takes the task has an idle executor, promised or not, whatever its memory."""
        self.refresh()
        digests = {digest for digest, names in self.cluster.tasksets.items() if task in names}
        return any([number and kind.tasks in digests and kind.suits(demand) for kind, number in self._idle.items()])

    def nearest(
        self, demand: Demand, task: str, taken: Collection[str], now_s: float, mean_run_s: float = 0.0
    ) -> tuple[Site, tuple[int, ...]] | None:
        """The devices (positions) of one node that will hold the demand soonest once they are drained.

        Nodes in ``taken`` are left out. What has run for long will mostly run for long, so of each attempt that must
        end it is supposed that it runs on for as long as it has run, and for ``mean_run_s``; where an attempt's age is
        not known, for that alone. As many must end as hold what is missing, as if a device's attempts were all alike.
        The devices with the least of this in sum are chosen; of equal ones, those where the fewest attempts must end,
        then those that lack the least memory. Leftover of idle executors does not count, for they can be replaced.
        """
        self.refresh()
        wanted = max(1, demand.gpus)
        if not self._names or wanted > self._there.shape[1]:
            return None
        able, never = self._able(demand, task)
        minutes = self._minutes(demand, now_s, mean_run_s)
        np.maximum(minutes, never, out=minutes)
        total = self._sums(minutes, wanted)
        total[[self._places[name] for name in taken if name in self._places]] = np.inf
        while (soonest := total.min()) < np.inf:
            places = np.flatnonzero(total == soonest)
            found = self._least(places, able, minutes[places], demand)
            if found is not None:
                return found
            total[places] = np.inf
        return None

    def _able(self, demand: Demand, task: str) -> tuple[Bools, Floats]:
        """[S, D] devices that could hold the demand once they are drained; and 0 at those on nodes with enough of
        them, elsewhere infinity."""
        key = demand, task
        known = self._drainable.get(key)
        if known is None or known[0] != self.version:
            need = self._capacity if demand.whole else demand.vram_mib
            able = self._eligible(task) & self._up & self._allowed(demand) & (self._drained >= need)
            if demand.whole:
                able &= self._capacity >= demand.vram_mib
            enough = np.count_nonzero(able, axis=1) >= max(1, demand.gpus)
            never = np.where(able & enough[:, None], 0.0, np.inf)
            if len(self._drainable) >= DRAINABLE:
                self._drainable.clear()
            known = self._drainable[key] = self.version, able, never
        return known[1:]

    def _minutes(self, demand: Demand, now_s: float, mean_run_s: float) -> Floats:
        """[S, D] how long the attempts that must end are supposed to run on, in sum, in whole minutes."""
        need = self._capacity if demand.whole else demand.vram_mib
        missing = need - self._spare
        minutes: Floats = self._counted * now_s
        minutes -= self._placed_s
        np.maximum(minutes, 0.0, out=minutes)
        if mean_run_s:
            minutes += self._busy * mean_run_s
        part = missing / self._held
        np.maximum(part, self._least_part, out=part)
        minutes *= np.minimum(part, 1.0, out=part)
        minutes /= 60
        np.floor(minutes, out=minutes)
        minutes *= (missing > 0) | self._full
        return minutes

    def _sums(self, minutes: Floats, wanted: int) -> Floats:
        """[S] the sum over the ``wanted`` devices of each node with the least."""
        if wanted == 1:
            least: Floats = minutes.min(axis=1)
            return least
        if wanted < minutes.shape[1]:
            minutes = np.partition(minutes, wanted - 1, axis=1)[:, :wanted]
        return minutes @ np.ones(wanted)

    def _least(self, places: Ints, able: Bools, minutes: Floats, demand: Demand) -> tuple[Site, tuple[int, ...]] | None:
        """Of nodes where as much is to be waited for, the devices with the fewest ends, then the least missing."""
        wanted = max(1, demand.gpus)
        need = self._capacity[places] if demand.whole else demand.vram_mib
        missing = np.maximum(need - self._spare[places].astype(np.int64), 0)
        held = self._held[places].astype(np.int64)
        ends = np.maximum(-(-self._busy[places] * missing // held), (missing > 0) | self._full[places])
        lack = np.minimum(ends * _END + missing, _MOST)
        key = np.where(able[places], np.minimum(minutes, _LONGEST_MIN).astype(np.int64) * _AMOUNT + lack, _NEVER)
        order = np.argsort(key, axis=1, kind="stable")[:, :wanted] if wanted > 1 else key.argmin(axis=1)[:, None]
        total = np.take_along_axis(lack, order, axis=1).sum(axis=1)
        for at in np.argsort(total, kind="stable").tolist():
            site = self.cluster[self._names[int(places[at])]]
            if _holds_when_drained(site, demand):
                return site, tuple(sorted(order[at].tolist()))
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

        def table(dtype: type[np.generic]) -> NDArray[Any]:
            # A site has few devices: what is asked for of each site is found faster with all first ones side by side.
            return np.zeros(shape, dtype, order="F")

        self._there, self._up, self._full = (table(np.bool_) for _ in range(3))
        self._taskset, self._model = (table(np.int64) for _ in range(2))
        self._available, self._committed, self._reclaimable = (table(np.int64) for _ in range(3))
        self._capacity, self._drained, self._busy = (table(np.int64) for _ in range(3))
        self._spare = table(np.float64)
        """Memory available once leftover is replaced."""
        self._held, self._least_part = table(np.float64) + 1, table(np.float64) + 1
        """Memory that attempts hold, at least 1; and the part of it that one of them holds."""
        self._counted, self._placed_s = table(np.float64), table(np.float64)
        self._cpu, self._ram, self._cpus, self._rams = (np.zeros(len(self._names), dtype=np.int64) for _ in range(4))
        self._numbers: dict[str, int] = {}
        self._runs: dict[str, tuple[tuple[int, int], Bools]] = {}
        self._models: dict[tuple[tuple[str, ...], bool], tuple[int, Bools]] = {}
        self._drainable: dict[tuple[Demand, str], tuple[int, Bools, Floats]] = {}
        self._idle.clear()
        self._idle_at: dict[int, dict[int, Kind]] = {}
        """Place → position → kind of the devices with an idle executor."""
        self._constants: list[tuple[Shape, int] | None] = [None] * len(self._names)
        self._latest = np.zeros(len(self._names), dtype=np.int64)
        """The number of each site's latest change."""
        self._changed.update(dict.fromkeys(self._names, EVERYTHING))
        self.version += 1
        self._era += 1
        self._seen = 0
        self._known.clear()

    def _write(self, place: int, site: Site, changed: int) -> None:
        """Take over a site of which this has changed (`Changes`)."""
        self._seen += 1
        self._latest[place] = self._seen
        node = site.node
        self._cpu[place] = milli(node.cpus) - milli(node.cpus_used) if node.cpus > 0 else _AMOUNT
        self._ram[place] = node.ram_mib - node.ram_used_mib if node.ram_mib > 0 else _AMOUNT
        if changed == EVERYTHING:
            self._write_all(place, site)
            return
        while changed:
            position = changed.bit_length() - 1
            self._write_free(place, position, site.devices[position])
            changed ^= 1 << position

    def _write_all(self, place: int, site: Site) -> None:
        node = site.node
        self._cpus[place] = milli(node.cpus) if node.cpus > 0 else _AMOUNT
        self._rams[place] = node.ram_mib if node.ram_mib > 0 else _AMOUNT
        before = self._lasting(place)
        self._constants[place], constants = (site.shape, node.ram_mib), self._constants[place]
        self._there[place] = False
        for kind in self._idle_at.pop(place, {}).values():
            self._idle[kind] -= 1
        for position, device in enumerate(site.devices):
            at = place, position
            self._there[at] = True
            self._up[at] = device.state == UP
            self._taskset[at] = self._numbers.setdefault(device.tasks, len(self._numbers))
            self._model[at] = self._numbers.setdefault(device.model, len(self._numbers))
            self._capacity[at] = capacity_mib(device)
            self._drained[at] = capacity_mib(device) - device.external_mib
            self._write_free(place, position, device)
        self.version += constants != self._constants[place] or self._lasting(place) != before

    def _write_free(self, place: int, position: int, device: Device) -> None:
        """Take over what is free on a device."""
        at = place, position
        reclaimable_mib, busy = device.reclaimable_mib, device.busy
        self._available[at] = device.available_mib
        self._committed[at] = device.committed_mib
        self._reclaimable[at] = reclaimable_mib
        self._spare[at] = device.available_mib + reclaimable_mib
        self._held[at] = max(device.committed_mib - reclaimable_mib, 1)
        self._busy[at] = busy
        self._least_part[at] = 1 / max(busy, 1)
        placed_s = self.cluster.placed_s.get(device.uuid, ())
        self._counted[at], self._placed_s[at] = len(placed_s), sum(placed_s)
        self._full[at] = full = device.busy >= device.executors
        idle_at = self._idle_at.setdefault(place, {})
        kind = idle_at.get(position)
        if kind is None and not full and device.state == UP:
            kind = idle_at[position] = Kind(device.model, self.cluster[device.node].shape.labels, device.tasks)
            self._idle[kind] += 1
        elif kind is not None and full:
            self._idle[idle_at.pop(position)] -= 1

    def _lasting(self, place: int) -> tuple[bytes, ...]:
        """What decides, apart from the node's constants, what a site's devices could hold when drained."""
        return tuple([values[place].tobytes() for values in (self._there, self._up, self._taskset, self._drained)])

    def _eligible(self, task: str) -> Bools:
        """[S, D] devices whose worker has registered the task."""
        tasksets = self.cluster.tasksets
        state = self.version, len(tasksets)
        known = self._runs.get(task)
        if known is None or known[0] != state:
            holding = [number for text, number in self._numbers.items() if task in tasksets.get(text, ())]
            known = self._runs[task] = state, self._there & np.isin(self._taskset, holding)
        return known[1]

    def _allowed(self, demand: Demand) -> Bools:
        """[S, D] devices whose model may take the demand."""
        key = demand.gpu_models, demand.gpus > 1
        known = self._models.get(key)
        if known is None or known[0] != self.version:
            unsuited = [number for model, number in self._numbers.items() if not suits(model, demand)]
            known = self._models[key] = self.version, ~np.isin(self._model, unsuited)
        return known[1]

    def _codes(self, demand: Demand, task: str, *, memory: bool) -> Ints:
        """[S] rank and amount of each site's `miss`, to be compared; `_NEVER` where no worker knows the task.

        Remembered for each class: only sites that have changed since are looked at again.
        """
        key, state = (demand, task, memory), (self._era, len(self.cluster.tasksets))
        known = self._known.pop(key, None)
        if known is None or known.state != state:
            known = _Codes(state, np.zeros(len(self._names), dtype=np.int64))
            places = np.arange(len(self._names))
        else:
            places = np.flatnonzero(self._latest > known.until)
        if len(places):
            known.codes[places] = self._codes_at(places, demand, task, memory=memory)
        known.until = self._seen
        if len(self._known) >= REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[key] = known
        return known.codes

    def _codes_at(self, places: Ints, demand: Demand, task: str, *, memory: bool) -> Ints:
        eligible, committed = self._eligible(task)[places], self._committed[places]
        missing = np.maximum(demand.vram_mib - self._available[places], committed if demand.whole else 0)
        over = demand.vram_mib - self._capacity[places]
        code = np.where(self._full[places], _RANK["executors"] * _AMOUNT, 0)
        if memory:
            code = np.where(missing > 0, _RANK["memory"] * _AMOUNT + missing, code)
            code = np.where(over > 0, _RANK["too_large"] * _AMOUNT + over, code)
        code = np.where(self._allowed(demand)[places], code, _RANK["model"] * _AMOUNT)
        code = np.where(self._up[places], code, _RANK["state"] * _AMOUNT)
        code = np.where(eligible, code, _NEVER)
        number = eligible.sum(axis=1)
        enough = number >= demand.gpus
        limiting = min(max(1, demand.gpus), code.shape[1]) - 1
        code = np.partition(code, limiting, axis=1)[:, limiting] if limiting else code.min(axis=1)
        code = np.where(enough, code, _RANK["too_large"] * _AMOUNT + demand.gpus - number)
        code = np.where(number > 0, code, _NEVER)
        host = np.where(self._ram[places] < demand.ram_mib, _RANK["ram"], 0)
        host = np.where(self._cpu[places] < milli(demand.cpus), _RANK["cpus"], host) * _AMOUNT
        code = np.where(code == 0, host, code)
        never = (self._cpus[places] < milli(demand.cpus)) | (self._rams[places] < demand.ram_mib)
        code = np.where((number > 0) & enough & never, _RANK["too_large"] * _AMOUNT, code)
        if demand.labels:
            names = [self._names[place] for place in places.tolist()]
            unlabelled = [not self.cluster[name].shape.labels.issuperset(demand.labels) for name in names]
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
    whole = replace(site.node, cpus_used=0.0, ram_used_mib=0)
    never = node_shortage(whole, demand)
    if never is not None:
        return Miss(_RANK["too_large"], 0, Reason("too_large", f"{never.message}, even if nothing runs there"))
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
