"""The untimed protocol of Weng et al., "Beware of Fragmentation", ATC'23.

Tasks arrive one at a time and never leave; what fits nowhere is dropped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from brim.core.model import Demand
from brim.core.placement.board import Board, Spot
from brim.core.placement.cluster import Cluster, Site
from brim.core.placement.fit import capacity_mib
from brim.core.placement.mix import Mix
from brim.core.placement.outlook import STEPS, look
from brim.core.placement.policy import Policy
from brim.core.placement.rooms import Reading
from brim.core.simulation.town import TASK, Job, Server, capacity_of, cluster_of


@dataclass(slots=True)
class Replay:
    """What a replay measured, by load: memory asked for so far as a rounded per cent of the capacity.

    Per cent of the capacity, each the mean over all steps of that load; where a large task leaves a load out, as things
    stood before it.
    """

    allocated: dict[int, float] = field(default_factory=dict)
    fragmentation: dict[int, float] = field(default_factory=dict)
    decisions: int = 0
    decision_s: float = 0.0
    """Time taken by decisions and their bookkeeping, by the clock that was given; 0 without one."""


def replay(
    servers: Sequence[Server],
    jobs: Sequence[Job],
    policy: Policy,
    *,
    seed: int,
    load: float,
    online: bool = False,
    clock: Callable[[], float] = lambda: 0.0,
) -> Replay:
    """Place jobs that never leave, in the order of this seed on servers in the order of this seed.

    The policy knows the mix of ``jobs``, or with ``online`` learns it from the arrivals so far.
    """
    rng = random.Random(seed)
    order = list(servers)
    rng.shuffle(order)
    cluster, known = cluster_of(order), known_mix(jobs)
    queue = arrivals(jobs, capacity_of(servers), load, rng)
    mix = Mix() if online else known
    board = Board(cluster, policy, mix)
    board.learn((job.demand, TASK) for job in jobs)
    meter, result = Meter(cluster, known), Replay()
    for job, row in zip(queue, rows(board, queue), strict=True):
        began_s = clock()
        if online:
            mix.observe(bare(job.demand))
        spot = place(board, job, row)
        result.decision_s += clock() - began_s
        result.decisions += 1
        meter.arrived(job, spot)
    result.allocated, result.fragmentation = meter.means()
    return result


def arrivals(jobs: Sequence[Job], capacity_mib: int, load: float, rng: random.Random) -> list[Job]:
    """The jobs in random order, filled up to ``load`` with jobs drawn with replacement, or thinned out to it.

    As in the protocol, the next job is too much if the memory of *one* of its GPUs goes beyond the load.
    """
    chosen = list(jobs)
    rng.shuffle(chosen)
    limit, total = load * capacity_mib, sum(job.size_mib for job in jobs)
    if total > limit:
        while total > limit:
            place = rng.randrange(len(chosen))
            total -= chosen[place].size_mib
            chosen[place] = chosen[-1]
            chosen.pop()
        rng.shuffle(chosen)
        return chosen
    while any(job.size_mib for job in jobs):
        job = rng.choice(jobs)
        if total + job.demand.vram_mib > limit:
            break
        total += job.size_mib
        chosen.append(job)
    return chosen


def known_mix(jobs: Iterable[Job]) -> Mix:
    """The mix of the jobs: specs as the protocol counts them."""
    return Mix.of((bare(job.demand), 1.0) for job in jobs)


def bare(demand: Demand) -> Demand:
    """The demand without host RAM: as the protocol counts specs, and as scores see it."""
    return replace(demand, ram_mib=0)


def rows(board: Board, jobs: Iterable[Job]) -> list[int]:
    """The rows of jobs on a board that knows their classes already; a lane of waiting tasks knows its own as well."""
    return [board.row(job.demand, TASK) for job in jobs]


def place(board: Board, job: Job, row: int) -> Spot | None:
    """Place a job of this row for good; None if it fits nowhere."""
    board.refresh()
    spot = board.best(row, job.demand.ram_mib)
    if spot is not None:
        board.cluster.hold(spot.node, spot.positions, job.demand)
        board.cluster.settle()
    return spot


class Meter:
    """Allocated memory and fragmentation of a cluster, followed placement by placement.

    Fragmentation (Weng et al.): free memory that a task drawn from the mix could not use, in expectation; tasks
    without GPU use none.
    """

    def __init__(self, cluster: Cluster, mix: Mix) -> None:
        self.cluster = cluster
        self._outlook, self._forms = look(cluster, mix.shares())
        self._known: dict[tuple[int, ...], float] = {}
        self._of_site = {site.name: self._fragments(site) for site in cluster}
        self._fragmented = sum(self._of_site.values())
        self._capacity_mib = sum(capacity_mib(device) for site in cluster for device in site.devices)
        self._arrived_mib = self._allocated_mib = 0
        self._load = 0
        self._sums: dict[int, tuple[float, float, int]] = {}

    def arrived(self, job: Job, spot: Spot | None) -> None:
        """Count one job, placed here or dropped."""
        self._arrived_mib += job.size_mib
        load = int(100 * self._arrived_mib / self._capacity_mib + 0.5)
        for passed in range(self._load + 1, load):
            self._sums[passed] = self._allocated_mib, self._fragmented, 1
        self._load = load
        if spot is not None:
            self._allocated_mib += job.size_mib
            fragments = self._fragments(self.cluster[spot.node])
            self._fragmented += fragments - self._of_site[spot.node]
            self._of_site[spot.node] = fragments
        allocated, fragmented, steps = self._sums.get(load, (0.0, 0.0, 0))
        self._sums[load] = allocated + self._allocated_mib, fragmented + self._fragmented, steps + 1

    def means(self) -> tuple[dict[int, float], dict[int, float]]:
        """Allocated and fragmented per cent of the capacity, by load."""
        whole = self._capacity_mib / 100
        step_mib = self._outlook.step_mib
        return (
            {load: allocated / steps / whole for load, (allocated, _, steps) in self._sums.items()},
            {load: fragmented * step_mib / steps / whole for load, (_, fragmented, steps) in self._sums.items()},
        )

    def _fragments(self, site: Site) -> float:
        """Steps of the site's free memory that are fragments."""
        form = self._forms[site.shape]
        reading = Reading.of(site, 0, 1, memory=True)
        key = form.sort, reading.cpu, *reading.codes
        if key not in self._known:
            free = [min((code >> 2) // self._outlook.step_mib, STEPS) for code in reading.codes]
            of_devices = [form.kinds[position] for position in reading.order]
            self._known[key] = sum(free) - self._outlook.usable_likely.at(of_devices, free, reading.cpu)
        return self._known[key]
