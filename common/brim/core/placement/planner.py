"""Which waiting tasks start where: order, backfill and promises (DESIGN, "Overflow feeds executors").

`Planner.plan` decides from its arguments alone: same cluster, lanes, promises and ``now`` → same placements. What a
planner remembers between calls only saves it from working out again what has not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import MappingProxyType
from typing import Final

import numpy as np

from brim.core.model import Demand, Device, Reason
from brim.core.placement.board import Board, Spot
from brim.core.placement.cluster import Cluster, Site
from brim.core.placement.fit import node_shortage, place_name
from brim.core.placement.heads import Heads, Lane, Waiting
from brim.core.placement.mix import Mix
from brim.core.placement.outlook import Bools, Floats, Ints
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
class PlannerSettings:
    """What the owner chooses about overflow.

    ``ahead``: tasks that may be placed behind the busy executors of a device. ``promises``: how many waiting tasks
    hold a promise at a time; None: about 6 % of the nodes, at least 2, but one in a cluster of up to 8 nodes.
    ``promise_after_s``: how long a task waits before it may get one. ``ignore_memory``: place without looking at
    memory; for the demo that must fail. ``keeps_leftover``: idle executors are never replaced for theirs.
    """

    ahead: int = 1
    promises: int | None = None
    promise_after_s: float = 0.0
    ignore_memory: bool = False
    keeps_leftover: bool = False

    def promises_for(self, nodes: int) -> int:
        """The number of promises in a cluster of so many nodes."""
        if self.promises is not None:
            return self.promises
        return 1 if nodes <= SMALL_CLUSTER else max(2, round(PROMISED_SHARE * nodes))


@dataclass(slots=True)
class Placement:
    """One task and the devices of one node that it goes to; ``behind`` busy executors or at once.

    A value like a `Waiting`.
    """

    task_id: Final[str]
    lane: Final[str]
    node: Final[str]
    devices: Final[tuple[str, ...]]
    demand: Final[Demand]
    behind: Final[bool] = False


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
        memory = self._memory
        if memory is None or memory.cluster is not cluster:
            memory = self._memory = _Memory(self, cluster)
        given = [lane for lane in lanes if lane.waiting]
        if not given and not memory.veils:
            memory.rest()
            return Plan()
        memory.look(given)
        return _Pass(self.settings, memory, now_s).run(promises, reasons=reasons)


@dataclass(slots=True)
class _Veil:
    """What the boards' view of a promised node was made from."""

    promise: Promise
    site: Site
    holds: bool = True
    """Whether it can still be held; if not, the next plan gives it up."""
    vain: set[Board] = field(default_factory=set)
    """By whose rule the promised task has been tried there, and did not fit."""


@dataclass(slots=True)
class _Known:
    """What is remembered about a lane."""

    lane: Lane
    """As it was when it became known."""
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
        self.heads = Heads()
        """The lanes of the plan; their places are those of all arrays here."""
        self.known: dict[str, _Known] = {}
        """By lane."""
        self.of_place: list[_Known] = []
        """The same by place."""
        self.rows: Ints = np.zeros(0, dtype=np.int64)
        self.ram_mib: Ints = np.zeros(0, dtype=np.int64)
        self.asked_mib: Floats = np.zeros(0)
        """[L] of the lanes."""
        self.nobody: Bools = np.zeros(0, dtype=bool)
        """[L] all False; never changed in place."""
        self.reasons: dict[str, Reason] = {}
        """Why the head of each lane waits, as it was told last; those that were told the longest ago first."""
        self.asleep: Bools = np.zeros(0, dtype=bool)
        """[L] lanes that fitted nowhere on any board when the boards were as they were at ``slept``."""
        self.slept: dict[Board, tuple[int, int]] = {}
        self._fitting: tuple[object, Bools | None] = None, None
        """What `fitting` found, and for which moments."""
        self.veils: dict[str, _Veil] = {}
        """By node."""
        self.looks = 0
        """Devices that may be looked at to work reasons out anew."""
        self.veilings = 0
        """Changes whenever other nodes are promised than before."""

    def rest(self) -> None:
        """Nothing waits: take over what has changed. What is known of the lanes stays, for they may be used again."""
        self.reasons.clear()
        self.refresh()

    def refresh(self) -> None:
        """Take over what has changed in the cluster and in the mix."""
        for board in self.boards:
            board.refresh()

    def look(self, lanes: list[Lane]) -> None:
        """Take over the lanes of a plan and their heads; new ones are awake."""
        before = self.of_place
        if not self.heads.look(lanes):
            return
        asleep = {id(known) for known, asleep in zip(before, self.asleep.tolist(), strict=True) if asleep}
        for key in self.known.keys() - self.heads.places.keys():
            self.forget(key)
        for lane in lanes:
            self._know(lane)
        self.of_place = [self.known[key] for key in self.heads.places]
        self.rows = np.array([known.row for known in self.of_place], dtype=np.int64)
        self.ram_mib = np.array([known.lane.demand.ram_mib for known in self.of_place], dtype=np.int64)
        self.asked_mib = np.array([known.asked_mib for known in self.of_place], dtype=np.float64)
        self.asleep = np.array([id(known) in asleep for known in self.of_place], dtype=bool)
        self.nobody = np.zeros_like(self.asleep)
        self._fitting = None, None

    def _know(self, lane: Lane) -> None:
        """Begin to remember a lane that is new, or asks for something else than before."""
        known = self.known.get(lane.key)
        if known is None or not known.lane.asks_like(lane):
            self.forget(lane.key)
            row = self.board.row(lane.demand, lane.task)
            if self.behind is not None:
                self.behind.row(lane.demand, lane.task)
            asked_mib = max(1, lane.demand.gpus * lane.demand.vram_mib)
            self.known[lane.key] = _Known(lane, row, asked_mib)

    def forget(self, key: str) -> None:
        """Remember nothing about this lane."""
        self.known.pop(key, None)
        self.reasons.pop(key, None)

    def fitting(self) -> Bools | None:
        """[L] lanes that fitted nowhere at ``slept`` and fit somewhere now, perhaps with others; None if that cannot
        be told."""
        self.refresh()
        moments = [(self.slept.get(board, NEVER), board.moment()) for board in self.boards]
        if self._fitting[0] != moments:
            self._fitting = moments, self._fit_now()
        return self._fitting[1]

    def _fit_now(self) -> Bools | None:
        most: Ints | None = None
        for board in self.boards:
            room = board.room_since(self.slept.get(board, NEVER))
            if room is None:
                return None
            most = room if most is None else np.maximum(most, room)
        assert most is not None
        fit: Bools = most[self.rows] >= self.ram_mib
        return fit

    def sleep(self, sleepers: Bools, tried: Sequence[int]) -> None:
        """Take over who sleeps now: of those that have slept before, and of those that were ``tried`` for the first
        time since, the ones that fit nowhere."""
        fitting = self.fitting() if np.count_nonzero(sleepers) else None
        self.asleep = np.zeros_like(sleepers) if fitting is None else sleepers & ~fitting
        if tried:
            self.refresh()
        for place in tried:
            known = self.of_place[place]
            if not any(board.best(known.row, known.lane.demand.ram_mib) for board in self.boards):
                self.asleep[place] = True
        self.slept = {board: board.moment() for board in self.boards}


class _Pass:
    """One call of `Planner.plan`."""

    def __init__(self, settings: PlannerSettings, memory: _Memory, now_s: float) -> None:
        self.settings = settings
        self.memory = memory
        self.cluster = memory.cluster
        self.board = memory.board
        self.heads = memory.heads
        self.now_s = now_s
        self.plan = Plan()
        self.most_promises = settings.promises_for(len(memory.cluster.order()))
        none = memory.nobody
        self.passed: dict[int, int] = {}
        """By place, how many of the lane's tasks have been placed."""
        self.scores = self.heads.scores.copy()
        """[L] of the heads that there are now."""
        self.asleep: Bools = none
        """[L] lanes that fitted nowhere before something changed since the last plan."""
        self.coming: Bools = ~none
        """[L] lanes whose turn has not come yet."""
        self.turns: Bools = none
        """[L] of these, the ones whose heads may start."""
        self.eager: Bools = none.copy()
        """[L] lanes whose heads are promised a node that has changed since they were tried there."""
        self.tried: list[int] = []
        """Places of lanes whose heads had their turn and cannot start."""
        self.spent: Bools = none.copy()
        """[L] lanes whose tasks have all been placed."""
        self.unspent = len(none)
        """How many others there are."""
        self.promised: Bools = none.copy()
        """[L] lanes whose heads have a promise."""
        self.vain: Bools = none.copy()
        """[L] lanes for whose heads no promise was found since one more became free."""
        self.entitled: Bools | None = None
        """[L] lanes whose heads may get a promise; worked out when it is asked for."""

    def run(self, promises: Mapping[str, Promise], *, reasons: bool) -> Plan:
        self._keep(promises)
        memory = self.memory
        memory.refresh()
        if np.count_nonzero(memory.asleep) and memory.fitting() is not None:
            self.asleep = memory.asleep
        self._wake()
        while self.unspent:
            turn, due = self._first(self.turns), self._due()
            if due is not None and (turn is None or (self.scores[due], due) < (self.scores[turn], turn)):
                self._promise(due)
            elif turn is not None:
                self._turn(turn)
            else:
                break
        if not self.unspent:
            memory.asleep = memory.nobody
            memory.reasons.clear()
        else:
            memory.sleep(self.asleep, [place for place in self.tried if not self.asleep[place]])
            if reasons:
                self._explain()
        self.cluster.undo(len(self.plan.placements))
        return self.plan

    def _first(self, among: Bools) -> int | None:
        """Of these lanes the one whose head comes first."""
        number = np.count_nonzero(among)
        if number < 2:
            return int(among.argmax()) if number else None
        return int(np.where(among, self.scores, np.inf).argmin())

    def _head(self, place: int) -> Waiting:
        """The lane's first task that has not been placed."""
        return self.heads.lanes[place].waiting[self.passed.get(place, 0)]

    def _wake(self) -> None:
        """Tell apart whose turn comes; of those that sleep on it is certain that they cannot start."""
        fitting = self.memory.fitting() if np.count_nonzero(self.asleep) else None
        self.turns = self.coming.copy() if fitting is None else self.coming & (fitting | self.eager | ~self.asleep)

    def _turn(self, place: int) -> None:
        """Start a lane's head if it fits; the next one's turn may come later."""
        lane, free, score = self.heads.lanes[place], self._free(), self.scores[place]
        if not self._start(place, lane, self._head(place)):
            self.coming[place] = self.turns[place] = False
            self.tried.append(place)
            return
        passed = self.passed[place] = self.passed.get(place, 0) + 1
        if passed < len(lane.waiting):
            self.scores[place] = lane.waiting[passed].score
        else:
            self.spent[place], self.coming[place] = True, False
            self.unspent -= 1
            if not self.unspent:
                return
        self.coming &= self.scores >= score
        self.coming[:place] &= self.scores[:place] > score
        if self._free() > free:
            self.vain[:] = False
        self._wake()

    # -- promises kept -----------------------------------------------------------------------------------------

    def _keep(self, promises: Mapping[str, Promise]) -> None:
        """Carry promises over that can still be held and whose task still waits.

        Tasks of a lane are alike, so one overtaken inside its lane leaves its promise to the head.
        """
        if not promises and not self.memory.veils:
            return
        memory, kept, places, first = self.memory, self.plan.promises, self.heads.places, self.heads.first
        veils, boards, at = memory.veils, len(memory.boards), self.cluster.site
        promised, eager = [], []
        for task_id, promise in promises.items():
            node, place = promise.node, places.get(promise.lane)
            site, veil = at(node), veils.get(node)
            if place is None or site is None:
                continue
            head = first[place].task_id
            if head != task_id and all(waiting.task_id != task_id for waiting in self.heads.lanes[place].waiting):
                continue
            if veil is None or veil.promise is not promise or veil.site is not site:
                if not promise.holds(site):
                    continue
                veil = self._veil(node, promise)
            elif not veil.holds:
                continue
            kept[head] = promise
            promised.append(place)
            if len(veil.vain) < boards:
                eager.append(place)
        self.promised[promised] = True
        self.eager[eager] = True
        if len(kept) != len(veils):
            for node in veils.keys() - {promise.node for promise in kept.values()}:
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

    def _start(self, place: int, lane: Lane, head: Waiting) -> bool:
        """Place the task at once, or behind busy executors if no eligible device has an idle one."""
        memory = self.memory
        known = memory.of_place[place]
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
                    self._veil(spot.node, joined).holds = joined.holds(self.cluster[spot.node])
                    break
        if kept is not None:
            self.promised[place] = False
            self._unveil(kept.node)
        return True

    def _spot(self, board: Board, known: _Known, lane: Lane, head: Waiting) -> Spot | None:
        """The best place for the task; at its own promised node it may use everything."""
        board.refresh()
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

    def _due(self) -> int | None:
        """The lane whose head is the first to get a promise that is free, if there is one for anybody."""
        if self._free() <= 0 or np.count_nonzero(self.turns) == self.unspent:
            return None
        left = ~(self.turns | self.spent | self.promised | self.vain)
        if not np.count_nonzero(left):
            return None
        if self.entitled is None:
            self.entitled = self._entitled()
        return self._first(self.entitled & left)

    def _free(self) -> int:
        """Promises that may still be made."""
        return self.most_promises - len(self.plan.promises)

    def _promise(self, place: int) -> None:
        """Promise the lane's head devices, if there are any."""
        self.vain[place] = True
        lane, known, survey = self.heads.lanes[place], self.memory.of_place[place], self.memory.survey
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
        self.plan.promises[self._head(place).task_id] = promise
        self.promised[place] = True
        self._veil(site.name, promise)

    def _entitled(self) -> Bools:
        """[L] as many lanes as there are promises: the heads that have asked for the most memory for the longest.

        Memory × wait: a large task needs a promise, for room for it never comes by itself, while small ones are mostly
        served by what becomes free anyway; and none is left out for ever, for its wait grows.
        """
        heads, entitled = self.heads, np.zeros(len(self.turns), dtype=bool)
        claims = self.memory.asked_mib * (heads.admitted_s - self.now_s)
        order = np.lexsort((heads.scores, claims))
        order = order[heads.admitted_s[order] <= self.now_s - self.settings.promise_after_s]
        self.memory.survey.refresh()
        version, of_place = self.memory.survey.version, self.memory.of_place
        chosen: list[int] = []
        for place in order.tolist():
            if len(chosen) == self.most_promises:
                break
            known = of_place[place]
            if known.possible if known.judged == version else self._possible(place):
                chosen.append(place)
        entitled[chosen] = True
        return entitled

    def _possible(self, place: int) -> bool:
        """Whether some node would hold the lane's demand once it is drained; remembered until that may change."""
        survey, known, lane = self.memory.survey, self.memory.of_place[place], self.heads.lanes[place]
        known.judged = survey.version
        known.possible = survey.nearest(lane.demand, lane.task, (), self.now_s) is not None
        return known.possible

    # -- telling why -------------------------------------------------------------------------------------------

    def _explain(self) -> None:
        """Say for each lane why its head waits, and ask for leftover that is in its way.

        What is known is said again; in each plan a few lanes are looked at anew, those that have been told the same for
        the longest.
        """
        memory, reasons = self.memory, self.memory.reasons
        spent = {self.heads.lanes[place].key for place in np.flatnonzero(self.spent).tolist()}
        for key in spent:
            reasons.pop(key, None)
        untold: list[str] = []
        if len(reasons) + len(spent) < len(self.heads.lanes):
            untold = [lane.key for lane in self.heads.given if lane.key not in reasons and lane.key not in spent]
        size = max(1, memory.survey.size)
        memory.looks = min(memory.looks + LOOKED_AT, size * max(1, LOOKED_AT // size))
        again = list(islice(chain(reasons, untold), memory.looks // size))
        memory.looks -= len(again) * size
        for key in dict.fromkeys([*again, *untold]):
            reasons.pop(key, None)
            place = self.heads.places[key]
            reasons[key] = self._why(self.heads.lanes[place], self._head(place))
        self.plan.waits = memory.reasons.copy()

    def _why(self, lane: Lane, head: Waiting) -> Reason:
        promise = self.plan.promises.get(head.task_id)
        within = None if promise is None else promise.devices
        recyclable = self.memory.survey.recyclable(lane.demand, lane.task, within)
        if recyclable and self.settings.keeps_leftover:
            return _kept_leftover(self.cluster.device(recyclable[0]))
        for uuid in recyclable:
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


def _kept_leftover(device: Device | None) -> Reason:
    assert device is not None
    what = f"what idle executors keep on {place_name(device)}, {device.reclaimable_mib} MiB, is all that is in the way"
    return Reason("leftover", f"{what}, and executor.recycle: never leaves it there until the worker is started anew")
