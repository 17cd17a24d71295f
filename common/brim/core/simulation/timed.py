"""Arrivals, run times and overflow: how long tasks wait, and how full the cluster is meanwhile."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from brim.core.model import Demand
from brim.core.placement.board import Board
from brim.core.placement.fit import claim_mib
from brim.core.placement.heads import Lane, Waiting
from brim.core.placement.mix import Mix
from brim.core.placement.planner import Planner, PlannerSettings
from brim.core.placement.policy import Policy
from brim.core.placement.promise import Promise
from brim.core.simulation.replay import bare
from brim.core.simulation.town import TASK, Job, Server, capacity_of, cluster_of

WARM_UP = 0.2
"""Part of the arrivals after which a timed simulation begins to measure."""


@dataclass(slots=True)
class Timed:
    """What a timed simulation measured.

    Waits are of the tasks that arrived after the warm-up, utilisation is of the time from there to the last arrival:
    memory that tasks had asked for and held, as a part of the capacity.
    """

    utilisation: float
    makespan_s: float
    waits_s: list[float]
    waits_by_gpus_s: dict[int, list[float]]
    """GPUs of the demand → waits."""


def resample(
    jobs: Sequence[Job], servers: Sequence[Server], *, load: float, number: int, block: int, rng: random.Random
) -> list[Job]:
    """Arrivals in blocks of consecutive jobs drawn with replacement, at a pace that offers this load throughout.

    The load is the memory that jobs hold × the time that they run, as a part of what the servers could give from the
    first arrival to the last. Every block takes equally long and jobs keep their gaps inside it in proportion: bursts
    stay bursts, while the trend over the days, which would be another load each hour, is evened out.
    """
    ordered = sorted(jobs, key=lambda job: job.arrival_s)
    drawn: list[Job] = []
    times: list[float] = []
    """Arrivals in blocks."""
    while len(drawn) < number:
        first = rng.randrange(max(1, len(ordered) - block + 1))
        chunk = ordered[first : first + block]
        begun_s, span_s = chunk[0].arrival_s, chunk[-1].arrival_s - chunk[0].arrival_s
        drawn += chunk
        times += [len(times) / block + (job.arrival_s - begun_s) / (span_s or 1.0) for job in chunk]
    del drawn[number:]
    offered = sum(job.size_mib * job.run_s for job in drawn)
    block_s = offered / (load * capacity_of(servers)) / (number / block)
    return [replace(job, arrival_s=at * block_s) for job, at in zip(drawn, times, strict=False)]


def possible(servers: Sequence[Server], jobs: Iterable[Job]) -> list[Job]:
    """The jobs that the servers could run if they were empty."""
    cluster = cluster_of(servers)
    board = Board(cluster, Policy("first-fit"), Mix())
    return [job for job in jobs if board.best(board.row(job.demand, TASK), job.demand.ram_mib) is not None]


def simulate(
    servers: Sequence[Server],
    jobs: Sequence[Job],
    policy: Policy,
    settings: PlannerSettings,
    *,
    exclusive: bool = False,
    measured_from: float = WARM_UP,
) -> Timed:
    """Let jobs (by rising arrival) come, wait, run and end.

    ``exclusive``: one task per GPU, whatever part of it the task asks for. ``measured_from``: part of the arrivals
    after which measuring begins.
    """
    return _Run(servers, policy, settings, exclusive=exclusive).through(jobs, measured_from)


@dataclass(slots=True)
class _Queue:
    """A lane's waiting tasks, in the order of their arrival."""

    lane: Lane
    waiting: deque[Waiting]


class _Run:
    """One timed simulation."""

    def __init__(
        self, servers: Sequence[Server], policy: Policy, settings: PlannerSettings, *, exclusive: bool
    ) -> None:
        self.cluster = cluster_of(servers)
        self.capacity_mib = capacity_of(servers)
        self.planner = Planner(policy, settings)
        self.exclusive = exclusive
        self.queues: dict[Demand, _Queue] = {}
        self.jobs: dict[str, Job] = {}
        self.promises: dict[str, Promise] = {}
        self.running: list[tuple[float, str, str, tuple[int, ...], tuple[int, ...], Demand]] = []
        """(end, task, node, positions, MiB held on each, demand) by end."""
        self.waits: list[tuple[int, float, float]] = []
        """(GPUs, arrival, wait)."""
        self.begun_s: dict[str, dict[str, float]] = {}
        """Device → the tasks that run there and when they started."""
        self.held_mib = 0
        self.held_since: list[tuple[float, int]] = [(0.0, 0)]

    def through(self, jobs: Sequence[Job], measured_from: float) -> Timed:
        """Run to the end and measure."""
        for number, job in enumerate(jobs):
            self._end_until(job.arrival_s)
            self._admit(str(number), job)
            self._plan(job.arrival_s)
        last_s = jobs[-1].arrival_s if jobs else 0.0
        while self.running:
            self._end_until(self.running[0][0])
        warm_s = jobs[int(len(jobs) * measured_from)].arrival_s if jobs else 0.0
        measured = [(gpus, wait) for gpus, arrival, wait in self.waits if arrival >= warm_s]
        by_gpus: dict[int, list[float]] = {}
        for gpus, wait in measured:
            by_gpus.setdefault(gpus, []).append(wait)
        return Timed(
            self._mean_held(warm_s, last_s) / self.capacity_mib,
            self.held_since[-1][0],
            [wait for _, wait in measured],
            dict(sorted(by_gpus.items())),
        )

    def _admit(self, task_id: str, job: Job) -> None:
        demand = replace(job.demand, whole=True) if self.exclusive and job.demand.gpus else job.demand
        queue = self.queues.get(demand)
        if queue is None:
            waiting: deque[Waiting] = deque()
            queue = self.queues[demand] = _Queue(Lane(str(len(self.queues)), TASK, demand, waiting), waiting)
        queue.waiting.append(Waiting(task_id, int(task_id), job.arrival_s))
        self.jobs[task_id] = job
        self.planner.mix.observe(bare(demand))

    def _end_until(self, now_s: float) -> None:
        """Let tasks end, and others start in their place, up to this time."""
        while self.running and self.running[0][0] <= now_s:
            end_s, task_id, node, positions, claims_mib, demand = heapq.heappop(self.running)
            self.cluster.release(node, positions, claims_mib, demand)
            self.planner.mix.ran(bare(demand), self.jobs[task_id].run_s)
            for uuid in self._uuids(node, positions):
                del self.begun_s[uuid][task_id]
                self.cluster.began(uuid, self.begun_s[uuid].values())
            self._hold(end_s, -self.jobs.pop(task_id).size_mib)
            for owner, promise in self.promises.items():
                if promise.node == node:
                    self.promises[owner] = promise.relieved(task_id)
            self._plan(end_s)

    def _plan(self, now_s: float) -> None:
        lanes = {queue.lane.key: queue for queue in self.queues.values() if queue.waiting}
        if not lanes:
            return
        waiting = [queue.lane for queue in lanes.values()]
        plan = self.planner.plan(self.cluster, waiting, now_s, self.promises, reasons=False)
        self.promises = plan.promises
        for placement in plan.placements:
            admitted_s = lanes[placement.lane].waiting.popleft().admitted_s
            job = self.jobs[placement.task_id]
            site = self.cluster[placement.node]
            positions = site.positions(placement.devices)
            claims = tuple([claim_mib(site.devices[position], placement.demand) for position in positions])
            self.cluster.hold(placement.node, positions, placement.demand)
            for uuid in placement.devices:
                self.begun_s.setdefault(uuid, {})[placement.task_id] = now_s
                self.cluster.began(uuid, self.begun_s[uuid].values())
            entry = now_s + job.run_s, placement.task_id, placement.node, positions, claims, placement.demand
            heapq.heappush(self.running, entry)
            self.waits.append((job.demand.gpus, admitted_s, now_s - admitted_s))
            self._hold(now_s, job.size_mib)
        self.cluster.settle()

    def _uuids(self, node: str, positions: Iterable[int]) -> list[str]:
        devices = self.cluster[node].devices
        return [devices[position].uuid for position in positions]

    def _hold(self, now_s: float, mib: int) -> None:
        self.held_mib += mib
        self.held_since.append((now_s, self.held_mib))

    def _mean_held(self, first_s: float, last_s: float) -> float:
        """Mean memory held between two times, in MiB."""
        total = 0.0
        for (since_s, mib), (until_s, _) in zip(self.held_since, [*self.held_since[1:], (last_s, 0)], strict=True):
            total += mib * max(0.0, min(until_s, last_s) - max(since_s, first_s))
        return total / (last_s - first_s) if last_s > first_s else 0.0
