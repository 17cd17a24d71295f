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

LOOKED_AT = 2_000
"""Devices that a plan may look at to work reasons out anew: those of a few lanes, or of one lane every few plans."""

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


@dataclass(slots=True)
class _Veil:
    """What the boards' view of a promised node was made from."""

    promise: Promise
    site: Site


@dataclass(slots=True)
class _Known:
    """What is remembered about a lane."""

    demand: Demand
    row: int
    tried: dict[Board, tuple[int, int]] = field(default_factory=dict)
    """When it fitted nowhere, by board."""
    reason: Reason | None = None
    possible: tuple[int, bool] | None = None
    """Whether any node would hold it when drained, and the survey's version for which that is so."""
    hopeless: tuple[int, int] | None = None
    """Version of the survey and of promised nodes with which there was nothing to promise it."""


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
        self.boards = [board for board in (self.board, self.behind) if board is not None]
        self.survey = Survey(cluster)
        self.lanes: dict[str, _Known] = {}
        """By key, those whose reasons have been known for the longest first."""
        self.veils: dict[str, _Veil] = {}
        """By node."""
        self.looks = 0
        """Devices that may be looked at to work reasons out anew."""
        self.veilings = 0
        """Changes whenever other nodes are promised than before."""
        self.vain: dict[tuple[str, bool], Site] = {}
        """Task, and whether behind busy executors → its promised site, where it did not fit when it was tried last."""

    def known(self, lane: Lane) -> _Known:
        """What is remembered about this lane."""
        known = self.lanes.get(lane.key)
        if known is None or (known.demand is not lane.demand and known.demand != lane.demand):
            row = self.board.row(lane.demand, lane.task)
            if self.behind is not None:
                self.behind.row(lane.demand, lane.task)
            known = self.lanes[lane.key] = _Known(lane.demand, row)
        return known


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
        self.blocked: list[tuple[float, str, int]] = []
        """(score, lane, place in it) of heads that cannot start, in the order of their turns."""
        self.asleep: list[tuple[float, str, int]] = []
        """Likewise, of those that need not be tried because nothing has changed for them, in any order."""
        self.next: list[tuple[float, str, int]] = []
        """Those of them that may get a promise that is free; a heap."""
        self.still: list[tuple[float, str, int]] = []
        """And those that may not."""
        self.most_promises = settings.promises_for(len(memory.cluster.order()))
        self.entitled: set[str] | None = None
        """Lanes whose heads may get a promise; worked out when it is asked for."""

    def run(self, promises: Mapping[str, Promise], *, reasons: bool) -> Plan:
        self._keep(promises)
        for board in self.memory.boards:
            board.refresh()
        heads: list[tuple[float, str, int]] = []
        for key, lane in self.lanes.items():
            if lane.waiting:
                (heads if self._awake(lane) else self.asleep).append((lane.waiting[0].score, key, 0))
        heapq.heapify(heads)
        while True:
            if self.asleep and self._free() > 0:
                self._rouse()
            if self.next and self._free() > 0 and (not heads or self.next[0] < heads[0]):
                self._block(*heapq.heappop(self.next))
                continue
            if not heads:
                break
            score, key, position = heapq.heappop(heads)
            lane, free = self.lanes[key], self._free()
            if self.plan.placements and not position and not self._awake(lane):
                self._block(score, key, position)
                continue
            if not self._start(lane, lane.waiting[position]):
                self._block(score, key, position)
                continue
            if position + 1 < len(lane.waiting):
                heapq.heappush(heads, (lane.waiting[position + 1].score, key, position + 1))
            if self._free() > free:
                self._pass_on()
        if reasons:
            self._explain()
        self.cluster.undo(len(self.plan.placements))
        return self.plan

    def _awake(self, lane: Lane) -> bool:
        """Whether the head may start, as far as the boards tell at once; False is certain."""
        known = self.memory.lanes.get(lane.key)
        if known is None or known.demand is not lane.demand:
            known = self.memory.known(lane)
        for board in self.memory.boards:
            tried = known.tried.get(board)
            if tried is None or board.woken(known.row, known.demand.ram_mib, tried):
                return True
            known.tried[board] = board.moment()
        task_id = lane.waiting[0].task_id
        own = self.plan.promises.get(task_id)
        if own is None:
            return False
        site = self.cluster.site(own.node)
        return any([self.memory.vain.get((task_id, bool(board.ahead))) is not site for board in self.memory.boards])

    # -- promises kept -----------------------------------------------------------------------------------------

    def _keep(self, promises: Mapping[str, Promise]) -> None:
        """Carry promises over that can still be held and whose task still waits.

        Tasks of a lane are alike, so one overtaken inside its lane leaves its promise to the head.
        """
        kept: dict[str, Promise] = {}
        for task_id, promise in promises.items():
            lane = self.lanes.get(promise.lane)
            if lane is None or not any(waiting.task_id == task_id for waiting in lane.waiting):
                continue
            site = self.cluster.site(promise.node)
            veil = self.memory.veils.get(promise.node)
            same = veil is not None and veil.promise is promise and veil.site is site
            if same or (site is not None and promise.holds(site)):
                kept[promise.node] = self.plan.promises[lane.waiting[0].task_id] = promise
        for node in self.memory.veils.keys() | kept.keys():
            self._veil(node, kept.get(node))
        vain = self.memory.vain
        for gone in [tried for tried in vain if tried[0] not in self.plan.promises]:
            del vain[gone]

    def _veil(self, node: str, promise: Promise | None) -> None:
        """Let the boards see of a node what this promise leaves to others."""
        site, seen = self.cluster.site(node), self.memory.veils.get(node)
        view = None
        if promise is None or site is None:
            self.memory.veilings += self.memory.veils.pop(node, None) is not None
        elif seen is not None and seen.promise is promise and seen.site is site:
            return
        else:
            self.memory.veilings += seen is None
            self.memory.veils[node] = _Veil(promise, site)
            view = promise.view(site)
        for board in self.memory.boards:
            board.veil(node, view)

    # -- starting ----------------------------------------------------------------------------------------------

    def _start(self, lane: Lane, head: Waiting) -> bool:
        """Place the task at once, or behind busy executors if no eligible device has an idle one."""
        memory = self.memory
        known = memory.known(lane)
        spot, behind = self._spot(self.board, known, lane, head), False
        if spot is None and memory.behind is not None and not memory.survey.idle(lane.demand, lane.task):
            spot, behind = self._spot(memory.behind, known, lane, head), True
        if spot is None:
            return False
        site = self.cluster[spot.node]
        devices = tuple(site.devices[position].uuid for position in spot.positions)
        kept = self.plan.promises.pop(head.task_id, None)
        self.cluster.hold(spot.node, spot.positions, lane.demand)
        self.plan.placements.append(Placement(head.task_id, lane.key, spot.node, devices, lane.demand, behind))
        if spot.node in memory.veils:
            for task_id, promise in self.plan.promises.items():
                if promise.node == spot.node:
                    joined = promise.joined(Beside(head.task_id, devices, lane.demand))
                    self.plan.promises[task_id] = joined
                    self._veil(spot.node, joined)
                    break
        if kept is not None:
            self._veil(kept.node, None)
        for board in memory.boards:
            board.refresh()
        return True

    def _spot(self, board: Board, known: _Known, lane: Lane, head: Waiting) -> Spot | None:
        """The best place for the task; at its own promised node it may use everything."""
        spot = board.best(known.row, lane.demand.ram_mib)
        if spot is None:
            known.tried[board] = board.moment()
        own = self.plan.promises.get(head.task_id)
        if own is not None:
            site, tried = self.cluster[own.node], (head.task_id, bool(board.ahead))
            if self.memory.vain.get(tried) is site:
                return spot
            at_own = board.best_at(known.row, site) if node_shortage(site.node, lane.demand) is None else None
            if at_own is None:
                self.memory.vain[tried] = site
            elif spot is None or at_own.score >= spot.score:
                return at_own
        return spot

    # -- waiting -----------------------------------------------------------------------------------------------

    def _block(self, score: float, key: str, position: int) -> None:
        """Note that a head cannot start, and promise it devices if it is due."""
        self.blocked.append((score, key, position))
        if self._free() > 0:
            self._promise(self.lanes[key], self.lanes[key].waiting[position])

    def _rouse(self) -> None:
        """Tell apart who may get a promise of those that need not be tried."""
        entitled, promised = self._entitled(), self.plan.promises
        for turn in self.asleep:
            lane = self.lanes[turn[1]]
            due = turn[1] in entitled and lane.waiting[turn[2]].task_id not in promised
            (self.next if due else self.still).append(turn)
        self.asleep = []
        heapq.heapify(self.next)

    def _pass_on(self) -> None:
        """Give a promise that has become free to the most urgent in line, before anybody less urgent can pass it."""
        entitled = self._entitled()
        for _, key, position in self.blocked:
            if self._free() <= 0:
                break
            if key not in entitled:
                continue
            self._promise(self.lanes[key], self.lanes[key].waiting[position])

    def _free(self) -> int:
        """Promises that may still be made."""
        return self.most_promises - len(self.plan.promises)

    def _promise(self, lane: Lane, head: Waiting) -> None:
        """Promise the head devices, if it is one of those whose turn it is and there are any."""
        if head.task_id in self.plan.promises or lane.key not in self._entitled():
            return
        survey, known = self.memory.survey, self.memory.known(lane)
        state = survey.version, self.memory.veilings
        if known.hopeless == state:
            return
        mean_s = self.memory.board.mix.mean_run_s
        found = survey.nearest(lane.demand, lane.task, self.memory.veils, self.now_s, mean_s)
        if found is None:
            known.hopeless = state
            return
        site, positions = found
        devices = tuple(site.devices[position].uuid for position in positions)
        promise = Promise(lane.key, site.name, devices, lane.demand, self.now_s)
        self.plan.promises[head.task_id] = promise
        self._veil(site.name, promise)
        for board in self.memory.boards:
            board.refresh()

    def _entitled(self) -> set[str]:
        """As many lanes as there are promises: the heads that have asked for the most memory for the longest.

        Memory × wait: a large task needs a promise, for room for it never comes by itself, while small ones are mostly
        served by what becomes free anyway; and none is left out for ever, for its wait grows.
        """
        if self.entitled is None:
            claims = []
            for key, lane in self.lanes.items():
                wait_s = self.now_s - lane.waiting[0].admitted_s if lane.waiting else -1.0
                if wait_s >= self.settings.promise_after_s:
                    asked = max(1, lane.demand.gpus * lane.demand.vram_mib)
                    claims.append((-asked * wait_s, lane.waiting[0].score, key))
            heapq.heapify(claims)
            self.entitled = set()
            while claims and len(self.entitled) < self.most_promises:
                key = heapq.heappop(claims)[2]
                if self._possible(self.lanes[key]):
                    self.entitled.add(key)
        return self.entitled

    def _possible(self, lane: Lane) -> bool:
        """Whether some node would hold the demand once it is drained."""
        survey, known = self.memory.survey, self.memory.known(lane)
        survey.refresh()
        if known.possible is None or known.possible[0] != survey.version:
            known.possible = survey.version, survey.nearest(lane.demand, lane.task, (), self.now_s) is not None
        return known.possible[1]

    # -- telling why -------------------------------------------------------------------------------------------

    def _explain(self) -> None:
        """Say for each lane why its head waits, and ask for leftover that is in its way.

        What is known is said again; in each plan a few lanes are looked at anew, those that have been told the same for
        the longest.
        """
        memory, turns = self.memory, [*self.blocked, *self.asleep, *self.next, *self.still]
        waiting = {key: position for _, key, position in turns}
        for key in [key for key in memory.lanes if key not in waiting]:
            del memory.lanes[key]
        looked: list[str] = []
        size = max(1, memory.survey.size)
        memory.looks = min(memory.looks + LOOKED_AT, size * max(1, LOOKED_AT // size))
        for key, known in memory.lanes.items():
            if known.reason is None:
                looked.append(key)
            elif memory.looks >= size:
                memory.looks -= size
                looked.append(key)
        for key in looked:
            known = memory.lanes[key] = memory.lanes.pop(key)
            known.reason = self._why(self.lanes[key], self.lanes[key].waiting[waiting[key]])
        for key in waiting:
            reason = memory.lanes[key].reason
            assert reason is not None
            self.plan.waits[key] = reason

    def _why(self, lane: Lane, head: Waiting) -> Reason:
        promise = self.plan.promises.get(head.task_id)
        within = None if promise is None else promise.devices
        for uuid in self.memory.survey.recyclable(lane.demand, lane.task, within):
            if uuid not in self.plan.recycle:
                self.plan.recycle.append(uuid)
        obstacle = self.memory.survey.why(lane.demand, lane.task, memory=not self.settings.ignore_memory)
        if isinstance(obstacle, Reason):
            return obstacle
        veil = self.memory.veils.get(obstacle)
        owner = next((owner for owner, other in self.plan.promises.items() if other.node == obstacle), None)
        if veil is None or owner is None or owner == head.task_id:
            return Reason("promised", "what is free is promised to other tasks")
        device = self.cluster.device(veil.promise.devices[0])
        assert device is not None
        return Reason("promised", f"{place_name(device)} is promised to task {owner}")
