"""Which waiting tasks start where: order, backfill and promises (DESIGN, "Overflow feeds executors").

`Planner.plan` is a pure function of its arguments: same cluster, lanes, promises and ``now`` → same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from brim.core.model import Demand, Device, Reason
from brim.core.placement.cluster import Cluster, Site
from brim.core.placement.fit import UP, capacity_mib, node_shortage, place_name, shortage
from brim.core.placement.mix import Mix
from brim.core.placement.policy import Choice, Policy
from brim.core.placement.promise import Beside, Promise, nearest


@dataclass(frozen=True, slots=True)
class Waiting:
    """One task in overflow; the lower its ``score`` (priority, then age), the earlier its turn."""

    task_id: str
    score: float
    admitted_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """Waiting tasks with one name and one demand, by score; ``waiting`` may be only the lane's front."""

    key: str
    task: str
    demand: Demand
    waiting: Sequence[Waiting]


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What the owner chooses about overflow.

    ``ahead``: tasks that may be placed behind the busy executors of a device. ``promises``: how many waiting
    tasks hold a promise at a time. ``promise_after_s``: how long a task waits before it may get one.
    ``ignore_memory``: place without looking at memory; for the demo that must fail.
    """

    ahead: int = 1
    promises: int = 1
    promise_after_s: float = 0.0
    ignore_memory: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """One task and the devices of one node that it goes to; ``behind`` busy executors or at once."""

    task_id: str
    lane: str
    devices: tuple[str, ...]
    demand: Demand
    behind: bool = False


@dataclass(slots=True)
class Plan:
    """What to do now.

    ``waits`` says for every lane whose head cannot start which resource is short. ``promises`` (by task id)
    replaces the promises that were passed in. ``recycle`` names devices whose idle executors hold the
    leftover that alone keeps a lane's head from starting.
    """

    placements: list[Placement] = field(default_factory=list)
    waits: dict[str, Reason] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)
    recycle: list[str] = field(default_factory=list)


NO_PROMISES: Mapping[str, Promise] = MappingProxyType({})


class Planner:
    """Plans with one policy, one set of settings and the mix of demands seen so far.

    Feed ``mix`` with every admitted task; nothing else about a planner ever changes.
    """

    def __init__(self, policy: Policy, settings: PlannerSettings | None = None, mix: Mix | None = None) -> None:
        self.policy = policy
        self.settings = settings or PlannerSettings()
        self.mix = mix or Mix()

    def plan(
        self,
        cluster: Cluster,
        lanes: Iterable[Lane],
        now_s: float,
        promises: Mapping[str, Promise] = NO_PROMISES,
    ) -> Plan:
        """Decide for every lane, most urgent head first; the cluster is left as it was found.

        ``promises`` are those of the last plan whose placements were all committed. After a refused commit,
        refresh the cluster and plan again with the promises from before.
        """
        return _Pass(self, cluster, {lane.key: lane for lane in lanes}, now_s).run(promises)


class _Pass:
    """One call of `Planner.plan`."""

    def __init__(self, planner: Planner, cluster: Cluster, lanes: dict[str, Lane], now_s: float) -> None:
        self.policy = planner.policy
        self.settings = planner.settings
        self.mix = planner.mix
        self.cluster = cluster
        self.lanes = lanes
        self.now_s = now_s
        self.plan = Plan()
        self.blocked: list[tuple[Lane, Waiting]] = []

    def run(self, promises: Mapping[str, Promise]) -> Plan:
        self._keep(promises)
        heads = [(lane.waiting[0].score, key, 0) for key, lane in self.lanes.items() if lane.waiting]
        heapq.heapify(heads)
        while heads:
            _, key, position = heapq.heappop(heads)
            lane = self.lanes[key]
            if not self._start(lane, lane.waiting[position]):
                self._block(lane, lane.waiting[position])
            elif position + 1 < len(lane.waiting):
                heapq.heappush(heads, (lane.waiting[position + 1].score, key, position + 1))
        self.cluster.undo(len(self.plan.placements))
        return self.plan

    def _keep(self, promises: Mapping[str, Promise]) -> None:
        """Carry promises over that can still be held and whose task still waits.

        Tasks of a lane are alike, so one overtaken inside its lane leaves its promise to the head.
        """
        for task_id, promise in promises.items():
            lane = self.lanes.get(promise.lane)
            if lane is None or all(waiting.task_id != task_id for waiting in lane.waiting):
                continue
            if promise.node in self.cluster and promise.bears(self.cluster[promise.node]):
                self.plan.promises[lane.waiting[0].task_id] = promise

    def _start(self, lane: Lane, head: Waiting) -> bool:
        """Place the task at once, or behind busy executors if no eligible device has an idle one."""
        if self._place(lane, head, ahead=0):
            return True
        if self.settings.ahead == 0 or any(device.busy < device.executors for device in self._takers(lane)):
            return False
        return self._place(lane, head, ahead=self.settings.ahead)

    def _place(self, lane: Lane, head: Waiting, ahead: int) -> bool:
        best: tuple[int, Site, Choice] | None = None
        for site in self.cluster:
            for choice in self._choices(site, lane, head, ahead):
                rating = self.policy.rate(site, choice, lane.demand, self.mix)
                if best is None or rating > best[0]:
                    best = rating, site, choice
        if best is None:
            return False
        _, site, choice = best
        behind = any(site.devices[position].busy >= site.devices[position].executors for position in choice)
        devices = tuple(site.devices[position].uuid for position in choice)
        kept = self.plan.promises.pop(head.task_id, None)
        self._join(site, Beside(head.task_id, devices, lane.demand))
        self.cluster.reserve(devices, lane.demand)
        self.plan.placements.append(Placement(head.task_id, lane.key, devices, lane.demand, behind))
        if kept is not None:
            # The turn goes to the most urgent head in line before anybody less urgent can pass it.
            for waiting_lane, waiting in self.blocked:
                self._promise(waiting_lane, waiting)
        return True

    def _choices(self, site: Site, lane: Lane, head: Waiting, ahead: int) -> Iterator[Choice]:
        """The device sets of the site that could take the task: neighbours in free memory, fullest first."""
        demand = lane.demand
        if node_shortage(site.node, demand) is not None:
            return
        fitting = [
            position for position in self._eligible(site, lane) if self._fits(site.devices[position], demand, ahead)
        ]
        fitting.sort(key=lambda position: (site.devices[position].available_mib, position))
        for first in range(len(fitting) - demand.gpus + 1):
            choice = tuple(sorted(fitting[first : first + demand.gpus]))
            if self._breaks(site, choice, lane, head) is None:
                yield choice

    def _fits(self, device: Device, demand: Demand, ahead: int) -> bool:
        return shortage(device, demand, ahead, memory=not self.settings.ignore_memory) is None

    def _eligible(self, site: Site, lane: Lane) -> list[int]:
        return [position for position, device in enumerate(site.devices) if self.cluster.runs(device, lane.task)]

    def _takers(self, lane: Lane) -> Iterator[Device]:
        """The devices that take the lane's tasks at all, whatever is on them now."""
        for site in self.cluster:
            for position in self._eligible(site, lane):
                device = site.devices[position]
                allowed = not lane.demand.gpu_models or device.model in lane.demand.gpu_models
                labels = site.node.labels
                if device.state == UP and allowed and all(labels.get(k) == v for k, v in lane.demand.labels):
                    yield device

    def _breaks(self, site: Site, choice: Choice, lane: Lane, head: Waiting) -> str | None:
        """The task whose promise a placement here would break, if any."""
        extra = Beside(head.task_id, tuple(site.devices[position].uuid for position in choice), lane.demand)
        for task_id, promise in self.plan.promises.items():
            if task_id != head.task_id and promise.node == site.name and not promise.bears(site, extra):
                return task_id
        return None

    def _join(self, site: Site, placed: Beside) -> None:
        for task_id, promise in self.plan.promises.items():
            if promise.node == site.name:
                self.plan.promises[task_id] = promise.joined(placed)

    def _block(self, lane: Lane, head: Waiting) -> None:
        """Say why the head waits, promise it devices if it is due, and ask for leftover in its way."""
        self.blocked.append((lane, head))
        self.plan.waits[lane.key] = self._why(lane, head)
        self._promise(lane, head)
        self._recycle(lane, head)

    def _promise(self, lane: Lane, head: Waiting) -> None:
        due = self.now_s - head.admitted_s >= self.settings.promise_after_s
        if not due or len(self.plan.promises) >= self.settings.promises or head.task_id in self.plan.promises:
            return
        best: tuple[int, Site, Choice] | None = None
        for site in self.cluster:
            if not _holds_when_drained(site, lane.demand) or self._breaks_any(site):
                continue
            found = nearest(site, self._eligible(site, lane), lane.demand)
            if found is not None and (best is None or found[0] < best[0]):
                best = found[0], site, found[1]
        if best is not None:
            _, site, choice = best
            devices = tuple(site.devices[position].uuid for position in choice)
            self.plan.promises[head.task_id] = Promise(lane.key, site.name, devices, lane.demand, self.now_s)

    def _breaks_any(self, site: Site) -> bool:
        """Whether the node keeps a promise already; each promise has a node of its own."""
        return any(promise.node == site.name for promise in self.plan.promises.values())

    def _recycle(self, lane: Lane, head: Waiting) -> None:
        """Name the devices where replacing idle executors would let the head start."""
        promise = self.plan.promises.get(head.task_id)
        sites = self.cluster if promise is None else [self.cluster[promise.node]]
        for site in sites:
            if node_shortage(site.node, lane.demand) is not None:
                continue
            short: dict[str, int] = {}
            for position in self._eligible(site, lane):
                device = site.devices[position]
                blocked = shortage(device, lane.demand, memory=False)
                if blocked is None and device.available_mib + device.reclaimable_mib >= lane.demand.vram_mib:
                    short[device.uuid] = max(0, lane.demand.vram_mib - device.available_mib)
            if promise is not None:
                short = {uuid: lack for uuid, lack in short.items() if uuid in promise.devices}
            chosen = sorted(short, key=lambda uuid: short[uuid])[: lane.demand.gpus]
            if len(chosen) == lane.demand.gpus:
                self.plan.recycle += [uuid for uuid in chosen if short[uuid] and uuid not in self.plan.recycle]
                return

    def _why(self, lane: Lane, head: Waiting) -> Reason:
        """Why the head waits: what the place that comes nearest to taking it is short of."""
        nearest_miss: tuple[int, int, Reason] | None = None
        for site in self.cluster:
            for miss in self._misses(site, lane, head):
                if nearest_miss is None or miss[:2] < nearest_miss[:2]:
                    nearest_miss = miss
        if nearest_miss is None:
            return Reason("no_worker", f"no worker has registered {lane.task}")
        return nearest_miss[2]

    def _misses(self, site: Site, lane: Lane, head: Waiting) -> Iterator[tuple[int, int, Reason]]:
        """(rank of the obstacle, amount, reason) for the places of one site; the smallest comes nearest."""
        demand = lane.demand
        eligible = self._eligible(site, lane)
        if not eligible:
            return
        host = node_shortage(site.node, demand)
        if host is not None and host.code == "labels":
            yield _RANK["labels"], 0, host
            return
        if len(eligible) < demand.gpus:
            text = f"{demand.gpus} GPUs on one node asked for, {site.name} has {len(eligible)}"
            yield _RANK["too_large"], demand.gpus - len(eligible), Reason("too_large", text)
            return
        misses: list[tuple[int, int, Reason | None]] = []
        for position in eligible:
            device = site.devices[position]
            over_mib = demand.vram_mib - capacity_mib(device)
            reason = shortage(device, demand, memory=not self.settings.ignore_memory)
            if reason is None:
                misses.append((-1, 0, reason))
            elif reason.code == "memory" and over_mib > 0:
                text = f"too large for {place_name(device)} by {over_mib} MiB"
                misses.append((_RANK["too_large"], over_mib, Reason("too_large", text)))
            else:
                amount = demand.vram_mib - device.available_mib if reason.code == "memory" else 0
                misses.append((_RANK[reason.code], amount, reason))
        rank, amount, reason = sorted(misses, key=lambda miss: miss[:2])[demand.gpus - 1]
        if reason is not None:
            yield rank, amount, reason
        elif host is not None:
            yield _RANK[host.code], 0, host
        else:
            yield _RANK["promised"], 0, self._promised(site, lane, head)

    def _promised(self, site: Site, lane: Lane, head: Waiting) -> Reason:
        """The reason at a site where the head fits, but only at the cost of a promise."""
        for device in site.devices:
            for task_id, promise in self.plan.promises.items():
                if task_id != head.task_id and device.uuid in promise.devices:
                    return Reason("promised", f"{place_name(device)} is promised to task {task_id}")
        return Reason("promised", f"node {site.name} is promised to another task")


_RANK = {
    code: rank
    for rank, code in enumerate(
        ("promised", "executors", "memory", "cpus", "ram", "state", "too_large", "model", "labels")
    )
}
"""How near an obstacle is to going away; the nearest one is the reason a user reads."""


def _holds_when_drained(site: Site, demand: Demand) -> bool:
    node = site.node
    return (
        all(node.labels.get(label) == value for label, value in demand.labels)
        and (node.cpus <= 0 or demand.cpus <= node.cpus)
        and (node.ram_mib <= 0 or demand.ram_mib <= node.ram_mib)
    )
