"""Which waiting tasks start where: order, backfill and promises (DESIGN, "Overflow feeds executors").

`Planner.plan` decides from its arguments alone: same cluster, lanes, promises and ``now`` → same placements. What a
planner remembers between calls only saves it from working out again what has not changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import is_
from types import MappingProxyType

import numpy as np

from brim.core.model import Demand, Reason
from brim.core.placement.board import Board, Spot
from brim.core.placement.cluster import Cluster, Site
from brim.core.placement.fit import node_shortage, place_name
from brim.core.placement.mix import Mix
from brim.core.placement.outlook import Ints
from brim.core.placement.policy import Policy
from brim.core.placement.promise import Beside, Promise
from brim.core.placement.survey import Survey

NEVER = (-1, 0)
"""A moment of a board that it has not had."""

LOOKED_AT = 500
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
        waiting = {lane.key: lane for lane in lanes if lane.waiting}
        return _Pass(self.settings, self._memory, waiting, now_s).run(promises, reasons=reasons)


@dataclass(slots=True)
class _Veil:
    """What the boards' view of a promised node was made from."""

    promise: Promise
    site: Site
    vain: set[Board] = field(default_factory=set)
    """By whose rule the promised task has been tried there, and did not fit."""


@dataclass(slots=True)
class _Known:
    """What is remembered about a lane."""

    demand: Demand
    row: int
    asked_mib: int
    """Memory of all its GPUs, at least 1."""
    possible: bool = False
    """Whether any node would hold it when drained, as it was at the survey's version ``judged``."""
    judged: int = -1
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
        self.reasons: dict[str, Reason] = {}
        """Why the head of each lane waits, as it was told last."""
        self.of_row: dict[int, set[str]] = {}
        """The lanes of each row of the boards."""
        self.asleep: set[str] = set()
        """Lanes that fitted nowhere on any board when the boards were as they were at ``slept``."""
        self.slept: dict[Board, tuple[int, int]] = {}
        self.seen: list[Lane] = []
        """The lanes of the last plan."""
        self._fitting: tuple[object, set[str] | None] = None, None
        """What `fitting` found, and for which moments."""
        self.veils: dict[str, _Veil] = {}
        """By node."""
        self.looks = 0
        """Devices that may be looked at to work reasons out anew."""
        self.veilings = 0
        """Changes whenever other nodes are promised than before."""

    def known(self, lane: Lane) -> _Known:
        """What is remembered about this lane."""
        known = self.lanes.get(lane.key)
        if known is None or (known.demand is not lane.demand and known.demand != lane.demand):
            self.forget(lane.key)
            row = self.board.row(lane.demand, lane.task)
            if self.behind is not None:
                self.behind.row(lane.demand, lane.task)
            asked_mib = max(1, lane.demand.gpus * lane.demand.vram_mib)
            known = self.lanes[lane.key] = _Known(lane.demand, row, asked_mib)
            self.of_row.setdefault(row, set()).add(lane.key)
        known.demand = lane.demand
        return known

    def forget(self, key: str) -> None:
        """Remember nothing about this lane."""
        known = self.lanes.pop(key, None)
        if known is not None:
            self.of_row[known.row].discard(key)
            self.asleep.discard(key)
            self.reasons.pop(key, None)

    def fitting(self) -> set[str] | None:
        """The lanes that fitted nowhere at ``slept`` and fit somewhere now, perhaps with others; None if that cannot
        be told."""
        moments = [(self.slept.get(board, NEVER), board.moment()) for board in self.boards]
        if self._fitting[0] != moments:
            self._fitting = moments, self._fit_now()
        return self._fitting[1]

    def _fit_now(self) -> set[str] | None:
        most: Ints | None = None
        for board in self.boards:
            room = board.room_since(self.slept.get(board, NEVER))
            if room is None:
                return None
            most = room if most is None else np.maximum(most, room)
        assert most is not None
        rows = np.flatnonzero(most >= 0)
        found, lanes = set(), self.lanes
        for row, mib in zip(rows.tolist(), most[rows].tolist(), strict=True):
            for key in self.of_row.get(row, ()):
                if lanes[key].demand.ram_mib <= mib:
                    found.add(key)
        return found

    def look(self, lanes: Mapping[str, Lane]) -> None:
        """Begin to remember those of the lanes that are new."""
        if len(lanes) == len(self.seen) == len(self.lanes) and all(map(is_, lanes.values(), self.seen)):
            return
        for key, lane in lanes.items():
            known = self.lanes.get(key)
            if known is None or known.demand is not lane.demand:
                self.known(lane)
        self.seen = list(lanes.values())

    def sleep(self, sleepers: set[str], tried: Iterable[str]) -> None:
        """Take over who sleeps now: of those that have slept before, and of those that were ``tried`` for the first
        time since, the ones that fit nowhere."""
        fitting = self.fitting()
        self.asleep = set() if fitting is None else sleepers - fitting
        for key in tried:
            known = self.lanes[key]
            if not any(board.best(known.row, known.demand.ram_mib) for board in self.boards):
                self.asleep.add(key)
        self.slept = {board: board.moment() for board in self.boards}


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
        self.heads: list[tuple[float, str, int]] = []
        """(score, lane, place in it) of heads that may start, in the order of their turns; a heap."""
        self.sleepers: set[str] = set()
        """Lanes that fitted nowhere before something changed since the last plan."""
        self.eager: set[str] = set()
        """Lanes whose heads are promised a node that has changed since they were tried there."""
        self.blocked: dict[str, int] = {}
        """Lanes whose heads cannot start → the head's place in its lane, of those that were not asleep all along."""
        self.spent: set[str] = set()
        """Lanes whose tasks have all been placed."""
        self.line: list[tuple[float, str, int]] | None = None
        """Turns of heads that cannot start and may get a promise that is free; a heap, made when it is asked for."""
        self.most_promises = settings.promises_for(len(memory.cluster.order()))
        self.entitled: set[str] | None = None
        """Lanes whose heads may get a promise; worked out when it is asked for."""

    def run(self, promises: Mapping[str, Promise], *, reasons: bool) -> Plan:
        self._keep(promises)
        for board in self.memory.boards:
            board.refresh()
        self._wake()
        while True:
            due = self._due()
            if due is not None and (not self.heads or due[0] < self.heads[0]):
                _, key, position = heapq.heappop(due)
                self._promise(self.lanes[key], self.lanes[key].waiting[position])
                continue
            if not self.heads:
                break
            turn = heapq.heappop(self.heads)
            key, position = turn[1:]
            lane, free = self.lanes[key], self._free()
            if not self._start(lane, lane.waiting[position]):
                self._block(turn)
                continue
            if position + 1 < len(lane.waiting):
                heapq.heappush(self.heads, (lane.waiting[position + 1].score, key, position + 1))
            else:
                self.spent.add(key)
            if self._free() > free:
                self.line = None
            self._doze()
        self.memory.sleep(self.sleepers | self.memory.asleep, self.blocked.keys() - self.sleepers)
        if reasons:
            self._explain()
        self.cluster.undo(len(self.plan.placements))
        return self.plan

    def _wake(self) -> None:
        """Tell apart which heads may start; of those that sleep on it is certain that they cannot."""
        memory, lanes = self.memory, self.lanes
        memory.look(lanes)
        fitting = memory.fitting()
        if fitting is None:
            memory.asleep.clear()
        else:
            self.sleepers = memory.asleep & fitting
            memory.asleep -= self.sleepers
        awake = (lanes.keys() - memory.asleep) | self.eager
        self.heads = [(lanes[key].waiting[0].score, key, 0) for key in awake]
        heapq.heapify(self.heads)

    def _doze(self) -> None:
        """Let those heads sleep on that could have started before the last placement."""
        fitting = self.memory.fitting() if self.sleepers else None
        if fitting is None:
            return
        awake = fitting | self.eager
        asleep = [turn for turn in self.heads if turn[1] in self.sleepers and turn[1] not in awake]
        if asleep:
            self.heads = [turn for turn in self.heads if turn[1] not in self.sleepers or turn[1] in awake]
            heapq.heapify(self.heads)
            for turn in asleep:
                self._block(turn)

    # -- promises kept -----------------------------------------------------------------------------------------

    def _keep(self, promises: Mapping[str, Promise]) -> None:
        """Carry promises over that can still be held and whose task still waits.

        Tasks of a lane are alike, so one overtaken inside its lane leaves its promise to the head.
        """
        memory, kept, changed = self.memory, self.plan.promises, set(self.memory.veils)
        lanes, veils, boards, at = self.lanes, memory.veils, len(memory.boards), self.cluster.site
        for task_id, promise in promises.items():
            node, lane = promise.node, lanes.get(promise.lane)
            site, veil = at(node), veils.get(node)
            if lane is None or site is None:
                continue
            head = lane.waiting[0].task_id
            if head != task_id and not any(waiting.task_id == task_id for waiting in lane.waiting):
                continue
            if veil is None or veil.promise is not promise or veil.site is not site:
                if not promise.holds(site):
                    continue
                veil = self._veil(node, promise)
            changed.discard(node)
            kept[head] = promise
            if len(veil.vain) < boards:
                self.eager.add(lane.key)
        for node in changed:
            self._unveil(node)

    def _veil(self, node: str, promise: Promise) -> _Veil:
        """Let the boards see of a node what this promise leaves to others."""
        site = self.cluster[node]
        self.memory.veilings += node not in self.memory.veils
        veil = self.memory.veils[node] = _Veil(promise, site)
        view = promise.view(site)
        for board in self.memory.boards:
            board.veil(node, view)
        return veil

    def _unveil(self, node: str) -> None:
        """Let the boards see all of a node again."""
        self.memory.veilings += 1
        del self.memory.veils[node]
        for board in self.memory.boards:
            board.veil(node, None)

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
            self._unveil(kept.node)
        for board in memory.boards:
            board.refresh()
        return True

    def _spot(self, board: Board, known: _Known, lane: Lane, head: Waiting) -> Spot | None:
        """The best place for the task; at its own promised node it may use everything."""
        spot = board.best(known.row, lane.demand.ram_mib)
        own = self.plan.promises.get(head.task_id)
        if own is not None:
            site, veil = self.cluster[own.node], self.memory.veils[own.node]
            if board in veil.vain and veil.site is site:
                return spot
            at_own = board.best_at(known.row, site) if node_shortage(site.node, lane.demand) is None else None
            if at_own is None:
                veil.vain.add(board)
            elif spot is None or at_own.score >= spot.score:
                return at_own
        return spot

    # -- waiting -----------------------------------------------------------------------------------------------

    def _block(self, turn: tuple[float, str, int]) -> None:
        """Note that a head cannot start; if it is due, it may get a promise in its turn."""
        _, key, position = turn
        self.blocked[key] = position
        if self.line is not None and key in self._entitled():
            heapq.heappush(self.line, turn)

    def _due(self) -> list[tuple[float, str, int]] | None:
        """The turns of those who may get a promise that is free, if there are any; the most urgent one comes first."""
        if self._free() <= 0:
            return None
        if self.line is None:
            self.line, promised = [], self.plan.promises
            for key in self._entitled() - {turn[1] for turn in self.heads} - self.spent:
                place = self.blocked.get(key, 0)
                head = self.lanes[key].waiting[place]
                if head.task_id not in promised:
                    self.line.append((head.score, key, place))
            heapq.heapify(self.line)
        return self.line or None

    def _free(self) -> int:
        """Promises that may still be made."""
        return self.most_promises - len(self.plan.promises)

    def _promise(self, lane: Lane, head: Waiting) -> None:
        """Promise the head devices, if it is one of those whose turn it is and there are any."""
        if head.task_id in self.plan.promises or lane.key not in self._entitled():
            return
        survey, known = self.memory.survey, self.memory.lanes[lane.key]
        survey.refresh()
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
            now_s, longest_s, known = self.now_s, self.now_s - self.settings.promise_after_s, self.memory.lanes
            heads = [(key, lane.waiting[0]) for key, lane in self.lanes.items()]
            claims = [
                (known[key].asked_mib * (head.admitted_s - now_s), head.score, key)
                for key, head in heads
                if head.admitted_s <= longest_s
            ]
            claims.sort()
            self.memory.survey.refresh()
            possible = (key for _, _, key in claims if self._possible(key))
            self.entitled = set(islice(possible, self.most_promises))
        return self.entitled

    def _possible(self, key: str) -> bool:
        """Whether some node would hold the lane's demand once it is drained."""
        survey, known = self.memory.survey, self.memory.lanes[key]
        if known.judged != survey.version:
            lane = self.lanes[key]
            known.judged = survey.version
            known.possible = survey.nearest(lane.demand, lane.task, (), self.now_s) is not None
        return known.possible

    # -- telling why -------------------------------------------------------------------------------------------

    def _explain(self) -> None:
        """Say for each lane why its head waits, and ask for leftover that is in its way.

        What is known is said again; in each plan a few lanes are looked at anew, those that have been told the same for
        the longest.
        """
        memory = self.memory
        for key in memory.lanes.keys() - (self.lanes.keys() - self.spent):
            memory.forget(key)
        size = max(1, memory.survey.size)
        memory.looks = min(memory.looks + LOOKED_AT, size * max(1, LOOKED_AT // size))
        again = list(islice(memory.lanes, memory.looks // size))
        memory.looks -= len(again) * size
        if len(memory.reasons) < len(memory.lanes):
            again = list(dict.fromkeys([*again, *(key for key in memory.lanes if key not in memory.reasons)]))
        for key in again:
            memory.lanes[key] = memory.lanes.pop(key)
            memory.reasons[key] = self._why(self.lanes[key], self.lanes[key].waiting[self.blocked.get(key, 0)])
        self.plan.waits = memory.reasons.copy()

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
