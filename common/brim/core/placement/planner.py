"""Which waiting tasks start where: order, backfill and promises (DESIGN, "Overflow feeds executors").

`Planner.plan` decides from its arguments alone: same cluster, lanes, promises and ``now`` → same placements. What a
planner remembers between calls only saves it from working out again what has not changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from brim.core.model import Demand, Reason
from brim.core.placement.board import Board, Spot
from brim.core.placement.cluster import Cluster, Site
from brim.core.placement.fit import node_shortage, place_name
from brim.core.placement.mix import Mix
from brim.core.placement.policy import Policy
from brim.core.placement.promise import Beside, Promise
from brim.core.placement.survey import Survey

RENEWED = 4
"""Reasons of lanes that waited before that are worked out anew in each plan, the oldest first."""

PROMISED_SHARE = 0.06
"""Promises for each node, where their number is not set."""

SMALL_CLUSTER = 8
"""Up to so many nodes there is one promise, where their number is not set; above, at least two."""


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

    ``ahead``: tasks that may be placed behind the busy executors of a device. ``promises``: how many waiting tasks
    hold a promise at a time; None: about 6 % of the nodes, at least 2, but one in a cluster of up to 8 nodes.
    ``promise_after_s``: how long a task waits before it may get one. ``ignore_memory``: place without looking at
    memory; for the demo that must fail.
    """

    ahead: int = 1
    promises: int | None = None
    promise_after_s: float = 0.0
    ignore_memory: bool = False

    def promises_for(self, nodes: int) -> int:
        """The number of promises in a cluster of so many nodes."""
        if self.promises is not None:
            return self.promises
        return 1 if nodes <= SMALL_CLUSTER else max(2, round(PROMISED_SHARE * nodes))


@dataclass(frozen=True, slots=True)
class Placement:
    """One task and the devices of one node that it goes to; ``behind`` busy executors or at once."""

    task_id: str
    lane: str
    node: str
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

    Feed ``mix`` with every admitted task and every run time.
    """

    def __init__(self, policy: Policy, settings: PlannerSettings | None = None, mix: Mix | None = None) -> None:
        self.policy = policy
        self.settings = settings or PlannerSettings()
        self.mix = Mix() if mix is None else mix
        self._memory: _Memory | None = None

    def plan(
        self,
        cluster: Cluster,
        lanes: Iterable[Lane],
        now_s: float,
        promises: Mapping[str, Promise] = NO_PROMISES,
        *,
        reasons: bool = True,
    ) -> Plan:
        """Decide for every lane, most urgent head first; the cluster is left as it was found.

        ``promises`` are those of the last plan whose placements were all committed. After a refused commit,
        refresh the cluster and plan again with the promises from before. ``reasons=False`` leaves out ``waits``.
        """
        if self._memory is None or self._memory.cluster is not cluster:
            self._memory = _Memory(self, cluster)
        return _Pass(self.settings, self._memory, {lane.key: lane for lane in lanes}, now_s).run(
            promises, reasons=reasons
        )


class _Memory:
    """What a planner remembers about one cluster: scores, what stands in the way, and reasons given lately."""

    def __init__(self, planner: Planner, cluster: Cluster) -> None:
        memory = not planner.settings.ignore_memory
        self.cluster = cluster
        self.board = Board(cluster, planner.policy, planner.mix, memory=memory)
        self.behind = (
            Board(cluster, planner.policy, planner.mix, planner.settings.ahead, memory=memory)
            if planner.settings.ahead
            else None
        )
        self.survey = Survey(cluster)
        self.reasons: dict[str, tuple[str, Reason]] = {}
        """Lane → (head, reason), the longest known first."""
        self.veils: dict[str, tuple[Promise | None, Site | None]] = {}
        """Node → the promise and the site from which the boards' view of it was made."""


class _Pass:
    """One call of `Planner.plan`."""

    def __init__(self, settings: PlannerSettings, memory: _Memory, lanes: dict[str, Lane], now_s: float) -> None:
        self.settings = settings
        self.memory = memory
        self.cluster = memory.cluster
        self.board = memory.board
        self.lanes = lanes
        self.now_s = now_s
        self.plan = Plan()
        self.blocked: list[tuple[Lane, Waiting]] = []
        self.most_promises = settings.promises_for(len(memory.cluster.order()))

    def run(self, promises: Mapping[str, Promise], *, reasons: bool) -> Plan:
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
        if reasons:
            self._explain()
        self.cluster.undo(len(self.plan.placements))
        return self.plan

    # -- promises kept -----------------------------------------------------------------------------------------

    def _keep(self, promises: Mapping[str, Promise]) -> None:
        """Carry promises over that can still be held and whose task still waits.

        Tasks of a lane are alike, so one overtaken inside its lane leaves its promise to the head.
        """
        for task_id, promise in promises.items():
            lane = self.lanes.get(promise.lane)
            if lane is None or not any(waiting.task_id == task_id for waiting in lane.waiting):
                continue
            if promise.node in self.cluster and promise.holds(self.cluster[promise.node]):
                self.plan.promises[lane.waiting[0].task_id] = promise
        for node in self.memory.veils.keys() | {promise.node for promise in self.plan.promises.values()}:
            self._veil(node)

    def _veil(self, node: str) -> None:
        """Let the boards see of a node what its promise leaves to others."""
        promise = next((promise for promise in self.plan.promises.values() if promise.node == node), None)
        site = self.cluster.site(node)
        seen = self.memory.veils.pop(node, (None, None))
        if promise is not None:
            self.memory.veils[node] = promise, site
        if seen[0] is promise and seen[1] is site:
            return
        view = None if promise is None or site is None else promise.view(site)
        self.board.veil(node, view)
        if self.memory.behind is not None:
            self.memory.behind.veil(node, view)

    # -- starting ----------------------------------------------------------------------------------------------

    def _start(self, lane: Lane, head: Waiting) -> bool:
        """Place the task at once, or behind busy executors if no eligible device has an idle one."""
        spot, behind = self._spot(self.board, lane, head), False
        if spot is None and self.memory.behind is not None and not self.board.idle(lane.demand, lane.task):
            spot, behind = self._spot(self.memory.behind, lane, head), True
        if spot is None:
            return False
        site = self.cluster[spot.node]
        devices = tuple(site.devices[position].uuid for position in spot.positions)
        kept = self.plan.promises.pop(head.task_id, None)
        self.cluster.hold(spot.node, spot.positions, lane.demand)
        self.plan.placements.append(Placement(head.task_id, lane.key, spot.node, devices, lane.demand, behind))
        for task_id, promise in self.plan.promises.items():
            if promise.node == spot.node:
                self.plan.promises[task_id] = promise.joined(Beside(head.task_id, devices, lane.demand))
                self._veil(spot.node)
        if kept is not None:
            self._veil(kept.node)
            # The turn goes to the most urgent head in line before anybody less urgent can pass it.
            for waiting_lane, waiting in self.blocked:
                self._promise(waiting_lane, waiting)
        return True

    def _spot(self, board: Board, lane: Lane, head: Waiting) -> Spot | None:
        """The best place for the task; at its own promised node it may use everything."""
        board.refresh()
        row = board.row(lane.demand, lane.task)
        spot = board.best(row, lane.demand.ram_mib)
        own = self.plan.promises.get(head.task_id)
        if own is not None:
            site = self.cluster[own.node]
            at_own = board.best_at(row, site) if node_shortage(site.node, lane.demand) is None else None
            if at_own is not None and (spot is None or at_own.score >= spot.score):
                return at_own
        return spot

    # -- waiting -----------------------------------------------------------------------------------------------

    def _block(self, lane: Lane, head: Waiting) -> None:
        """Promise the head devices if it is due, and ask for leftover that is in its way."""
        self.blocked.append((lane, head))
        self._promise(lane, head)
        promise = self.plan.promises.get(head.task_id)
        within = None if promise is None else promise.devices
        for uuid in self.memory.survey.recyclable(lane.demand, lane.task, within):
            if uuid not in self.plan.recycle:
                self.plan.recycle.append(uuid)

    def _explain(self) -> None:
        """Say for each lane why its head waits; of those that have been told before, a few are told anew."""
        known, blocked = self.memory.reasons, {lane.key: (lane, head) for lane, head in self.blocked}
        for key in [key for key in known if key not in blocked]:
            del known[key]
        again = [key for key in known if known[key][0] == blocked[key][1].task_id]
        for key in set(again[RENEWED:]):
            self.plan.waits[key] = known[key][1]
        for key, (lane, head) in blocked.items():
            if key not in self.plan.waits:
                known.pop(key, None)
                known[key] = head.task_id, self._why(lane, head)
                self.plan.waits[key] = known[key][1]

    def _why(self, lane: Lane, head: Waiting) -> Reason:
        reason = self.memory.survey.why(lane.demand, lane.task, memory=not self.settings.ignore_memory)
        return self._promised(lane, head) if reason is None else reason

    def _promised(self, lane: Lane, head: Waiting) -> Reason:
        """The reason of a head that fits somewhere, but only at the cost of a promise."""
        for task_id, promise in self.plan.promises.items():
            if task_id != head.task_id and self.board.best_at(
                self.board.row(lane.demand, lane.task), self.cluster[promise.node]
            ):
                device = self.cluster.device(promise.devices[0])
                assert device is not None
                return Reason("promised", f"{place_name(device)} is promised to task {task_id}")
        return Reason("promised", "what is free is promised to other tasks")

    def _promise(self, lane: Lane, head: Waiting) -> None:
        due = self.now_s - head.admitted_s >= self.settings.promise_after_s
        if not due or len(self.plan.promises) >= self.most_promises or head.task_id in self.plan.promises:
            return
        taken = {promise.node for promise in self.plan.promises.values()}
        found = self.memory.survey.nearest(lane.demand, lane.task, taken)
        if found is not None:
            site, positions = found
            devices = tuple(site.devices[position].uuid for position in positions)
            self.plan.promises[head.task_id] = Promise(lane.key, site.name, devices, lane.demand, self.now_s)
            self._veil(site.name)
