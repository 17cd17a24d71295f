"""When a waiting task will start: the queue before it is played forward with run times that were seen.

Each play draws for every attempt how long it still runs, out of how long its like have run, and lets those who come
before the task start wherever they fit as others end, in their order. Less urgent tasks are left out: they may pass
only where they do not delay it. What comes out is a range, for run times scatter. Where nothing is known, nothing is
said.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from brim.core.model import Demand, Reason
from brim.core.placement.cluster import Cluster, Site
from brim.core.placement.fit import UP, capacity_mib, milli, suits

KEPT = 200
"""The latest run times that are kept of one kind of task."""

LEAST = 3
"""Run times that it takes to say how long a kind of task runs."""

PLAYS = 25
"""Plays for one range, and fewer for many tasks: all plays together have at most `STEPS` tasks to start."""

STEPS = 10_000

MOST_AHEAD = 2_000
"""Tasks before the one that is asked for, beyond which nothing is said."""

TAIL = 0.1
"""Part of the plays below the range, and above it."""


@dataclass(frozen=True, slots=True)
class Work:
    """A task: its name, its lane, and its demand."""

    task: str
    lane: str
    demand: Demand


@dataclass(frozen=True, slots=True)
class Running:
    """An attempt on devices (UUIDs), and for how long it has been there."""

    work: Work
    devices: tuple[str, ...]
    age_s: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """So many alike tasks that wait and come before the one that is asked for."""

    work: Work
    number: int


class RunTimes:
    """How long tasks have lately been on their devices, by lane and by name."""

    def __init__(self) -> None:
        self._by: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
        """("lane" or "task", its name) → the run times in the order of their ends, and sorted."""

    def add(self, task: str, lane: str, seconds: float) -> None:
        """Take in one that has ended."""
        for key in (("lane", lane), ("task", task)):
            latest, ordered = self._by.setdefault(key, ([], []))
            latest.append(seconds)
            insort(ordered, seconds)
            if len(latest) > KEPT:
                ordered.remove(latest.pop(0))

    def of(self, work: Work) -> Sequence[float]:
        """The run times of its like, sorted: of its lane, or where too few are known, of all tasks of its name."""
        for key in (("lane", work.lane), ("task", work.task)):
            known = self._by.get(key)
            if known is not None and len(known[1]) >= LEAST:
                return known[1]
        return ()

    def left(self, work: Work, age_s: float, rng: random.Random) -> float | None:
        """One that ran longer than this, drawn at random, less this; None where that is not known."""
        known = self.of(work)
        longer = bisect_right(known, age_s)
        return known[rng.randrange(longer, len(known))] - age_s if longer < len(known) else None


def expected_start(
    cluster: Cluster,
    running: Iterable[Running],
    ahead: Sequence[Ahead],
    own: Work,
    runs: RunTimes,
    seed: str,
) -> tuple[float, float] | Reason:
    """In how many seconds the task will start, from and to; or why that cannot be said.

    ``ahead`` in the order of their turns, those of its own lane too. The same arguments give the same range.
    """
    running, number = list(running), sum(group.number for group in ahead)
    if number > MOST_AHEAD:
        return Reason("far", f"more than {MOST_AHEAD:,} tasks come before it")
    starts = []
    for play in range(max(5, min(PLAYS, STEPS // (number + 1)))):
        start_s = _Play(cluster, running, [*ahead, Ahead(own, 1)], runs, random.Random(f"{seed} {play}")).start_s()
        if start_s is None:
            return _unknown([*(each.work for each in running), *(group.work for group in ahead)], runs)
        starts.append(start_s)
    starts.sort()
    cut = int(TAIL * len(starts))
    return starts[cut], starts[-1 - cut]


def _unknown(works: Iterable[Work], runs: RunTimes) -> Reason:
    unknown = sorted({work.task for work in works if not runs.of(work)})
    if unknown:
        return Reason("run_times", f"it is not known yet how long {', '.join(unknown)} runs")
    return Reason("run_times", "what must end first has run longer than its like, or it fits nowhere")


@dataclass(slots=True)
class _Seat:
    """What is free on a device."""

    room_mib: int
    slots: int
    held: int
    """Attempts that hold memory there; a whole GPU must have none."""
    capacity_mib: int


@dataclass(slots=True)
class _Host:
    """What is free on a node: its devices by UUID, and its CPUs and RAM."""

    seats: dict[str, _Seat]
    cpu_milli: float
    """Endless where it has not declared them."""
    ram_mib: float

    @classmethod
    def of(cls, site: Site) -> _Host:
        """As things stand; leftover of idle executors is free, for they can be replaced."""
        seats = {
            device.uuid: _Seat(
                device.available_mib + device.reclaimable_mib,
                device.executors - device.busy,
                device.busy,
                capacity_mib(device),
            )
            for device in site.devices
            if device.state == UP
        }
        node = site.node
        cpu_milli = milli(node.cpus) - milli(node.cpus_used) if node.cpus > 0 else math.inf
        return cls(seats, cpu_milli, node.ram_mib - node.ram_used_mib if node.ram_mib > 0 else math.inf)

    def find(self, demand: Demand, uuids: Iterable[str]) -> tuple[str, ...] | None:
        """As many of these devices as the demand asks for, the fullest that it fits on."""
        if milli(demand.cpus) > self.cpu_milli or demand.ram_mib > self.ram_mib:
            return None
        fitting = [
            (seat.room_mib, uuid)
            for uuid, seat in ((uuid, self.seats[uuid]) for uuid in uuids if uuid in self.seats)
            if seat.slots > 0 and seat.room_mib >= demand.vram_mib and not (demand.whole and seat.held)
        ]
        if len(fitting) < demand.gpus:
            return None
        return tuple([uuid for _, uuid in sorted(fitting)[: demand.gpus]])

    def change(self, demand: Demand, uuids: Iterable[str], sign: int) -> None:
        """Hold the demand on these devices (1), or give it back (-1)."""
        self.cpu_milli -= sign * milli(demand.cpus)
        self.ram_mib -= sign * demand.ram_mib
        for uuid in uuids:
            seat = self.seats.get(uuid)
            if seat is not None:
                seat.room_mib -= sign * (seat.capacity_mib if demand.whole else demand.vram_mib)
                seat.slots -= sign
                seat.held += sign


class _Play:
    """One play; the last of ``queue`` is the task that is asked for."""

    def __init__(
        self, cluster: Cluster, running: Iterable[Running], queue: Sequence[Ahead], runs: RunTimes, rng: random.Random
    ) -> None:
        self._runs = runs
        self._rng = rng
        self._hosts = {site.name: _Host.of(site) for site in cluster}
        home = {device.uuid: site.name for site in cluster for device in site.devices}
        self._queue = [(group.work, _places(cluster, group.work)) for group in queue]
        self._left = [group.number for group in queue]
        self._ends: list[tuple[float, int, str, Work, tuple[str, ...]]] = []
        """(When, number, node, what, its devices) of the attempts whose end is known; a heap."""
        self._number = 0
        for each in running:
            node = home.get(each.devices[0]) if each.devices else None
            if node is not None:
                self._will_end(0.0, each.age_s, node, each.work, each.devices)

    def start_s(self) -> float | None:
        """When the task starts; None if it does not before all ends are over that are known."""
        now_s = 0.0
        started = self._fill(now_s, self._hosts)
        while not started and self._ends:
            now_s, freed = self._ends[0][0], set()
            while self._ends and self._ends[0][0] <= now_s:
                _, _, node, work, devices = heapq.heappop(self._ends)
                self._hosts[node].change(work.demand, devices, -1)
                freed.add(node)
            started = self._fill(now_s, freed)
        return now_s if started else None

    def _fill(self, now_s: float, nodes: Collection[str]) -> bool:
        """Let start what fits on these nodes, in the order of the turns; whether the task that is asked for is among
        them."""
        for at, (work, places) in enumerate(self._queue):
            for node in [node for node in places if node in nodes] if self._left[at] else ():
                while self._left[at] and (devices := self._hosts[node].find(work.demand, places[node])) is not None:
                    self._left[at] -= 1
                    self._hosts[node].change(work.demand, devices, 1)
                    self._will_end(now_s, 0.0, node, work, devices)
        return not self._left[-1]

    def _will_end(self, now_s: float, age_s: float, node: str, work: Work, devices: tuple[str, ...]) -> None:
        left_s = self._runs.left(work, age_s, self._rng)
        if left_s is not None:
            self._number += 1
            heapq.heappush(self._ends, (now_s + left_s, self._number, node, work, devices))


def _places(cluster: Cluster, work: Work) -> dict[str, list[str]]:
    """Node → its devices that may take the task at all, if there are enough."""
    demand, places = work.demand, {}
    for site in cluster:
        if all(site.node.labels.get(label) == value for label, value in demand.labels):
            uuids = [each.uuid for each in site.devices if cluster.runs(each, work.task) and suits(each.model, demand)]
            if len(uuids) >= max(1, demand.gpus):
                places[site.name] = uuids
    return places
