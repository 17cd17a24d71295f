"""Which waiting item goes to which model executor: what placement decides about level 1 and level 2.

Pure: a snapshot in, a plan out, deterministic. An item is left in level 1 only if no executor of its model
can hold it (requirements B1, B2); level 1 is served before anything is taken from a sibling (B7); an executor
that is still idle then takes what a working sibling has not sealed yet (B8).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush

from brim.core.batching.executor import ExecutorState
from brim.core.batching.items import BatchKey, Item, ModelKey
from brim.core.batching.sets import PAIR, TaskSets
from brim.core.batching.volume import EMPTY, Limits
from brim.core.model import Reason


class Phase(StrEnum):
    """Where a model executor is in its life."""

    STARTING = "starting"
    """Wanted, or loading its model; it takes nothing yet."""
    UP = "up"
    DRAINING = "draining"
    """Finishing what it has sealed; it takes nothing more and then stops."""


@dataclass(frozen=True, slots=True)
class Executor:
    """One model executor as placement sees it in its books.

    ``limits`` includes the ceiling that it has reported. ``working`` says whether any of its items is claimed,
    ``ahead`` whether it has claimed a batch beside the one that it computes; ``unsealed`` holds the items that are not
    claimed, by key. ``since_s`` is when it came up (or was wanted, while it is starting), ``used_s`` when it last had
    an item.
    """

    id: str
    model: ModelKey
    device: str
    vram_mib: int
    limits: Limits
    phase: Phase
    since_s: float
    used_s: float
    keep_warm_s: float
    working: bool = False
    ahead: bool = False
    unsealed: tuple[tuple[BatchKey, tuple[Item, ...]], ...] = ()

    @property
    def state(self) -> ExecutorState:
        """Idle, waiting or working (requirement B5)."""
        if self.working:
            return ExecutorState.WORKING
        return ExecutorState.WAITING if self.unsealed else ExecutorState.IDLE


@dataclass(frozen=True, slots=True)
class Lane:
    """The level-1 task set of one key, in order; ``limit`` is the profile's ``level1_limit``."""

    key: BatchKey
    items: tuple[Item, ...]
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Give the item to this executor; ``source`` is the sibling that holds it unsealed, None for level 1."""

    item: Item
    key: BatchKey
    executor: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The item ends here: level 1 of its key is full."""

    item: Item
    key: BatchKey
    reason: Reason


@dataclass(frozen=True, slots=True)
class Plan:
    """What `assign` decided, to be committed in this order."""

    commits: tuple[Commit, ...] = ()
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """An executor as a place for one item; ``obstacle`` is why it cannot take it now, None if it can."""

    executor: str
    obstacle: Reason | None = None


def assign(lanes: Sequence[Lane], executors: Iterable[Executor]) -> Plan:
    """Serve level 1, then let executors that are still idle take from siblings, then bound level 1."""
    takers = [_Taker(executor) for executor in executors if executor.phase is Phase.UP]
    waiting = {lane.key: list(lane.items) for lane in lanes}
    commits = _serve_level1(waiting, takers)
    commits += _take_from_siblings(takers)
    refusals = [
        Refusal(item, lane.key, _full(lane))
        for lane in lanes
        if lane.limit is not None
        for item in waiting[lane.key][lane.limit :]
    ]
    return Plan(tuple(commits), tuple(refusals))


def choices(key: BatchKey, item: Item, executors: Iterable[Executor]) -> list[Choice]:
    """What `assign` makes of each executor of one item's model: the one of choice first, those that cannot last."""
    takers = [_Taker(executor) for executor in executors if executor.model == key.model]
    takers.sort(key=lambda taker: taker.rank(key, item))
    found = [Choice(taker.executor.id, taker.obstacle(key, item)) for taker in takers]
    return sorted(found, key=lambda choice: choice.obstacle is not None)


@dataclass(slots=True)
class _Taker:
    """An executor and the room that is left in it while the plan grows."""

    executor: Executor
    sets: TaskSets = field(init=False)

    def __post_init__(self) -> None:
        self.sets = TaskSets(self.executor.limits, dict(self.executor.unsealed))

    @property
    def idle(self) -> bool:
        return not self.executor.working and not self.sets

    @property
    def room(self) -> int:
        executor = self.executor
        return PAIR - executor.working - (executor.working and executor.ahead)

    def fits_alone(self, item: Item) -> bool:
        return self.executor.limits.shortage(EMPTY + item.size) is None

    def next_of(self, key: BatchKey, items: Iterable[Item]) -> Item | None:
        """The first of the lane's items that it may ever compute, if it has room for that one now."""
        item = next((item for item in items if self.fits_alone(item)), None)
        if item is None or self.sets.shortage(key, item, self.room) is not None:
            return None
        return item

    def obstacle(self, key: BatchKey, item: Item) -> Reason | None:
        """Why it cannot take the item now, if there were no other."""
        if self.executor.phase is not Phase.UP:
            what = "is loading its model" if self.executor.phase is Phase.STARTING else "is about to stop"
            return Reason(f"executor_{self.executor.phase}", f"it {what}")
        if (alone := self.executor.limits.shortage(EMPTY + item.size)) is not None:
            return Reason(alone.code, f"too large for any batch of it: {alone.message}")
        if not self.room:
            return Reason("task_sets", "it computes a batch and has claimed the next one")
        full = self.sets.shortage(key, item, self.room)
        if full is None or full.code == "task_sets":
            return full
        which = "its task sets are" if self.room == PAIR else "the task set behind the one that it computes is"
        return Reason(full.code, f"{which} full: {full.message}")

    def rank(self, key: BatchKey, item: Item) -> tuple[int, float, str]:
        """How well it suits the item, lower is better.

        An idle executor starts it at once. A set that is being filled costs no batch of its own, best one that
        starts soon; of others the sooner is that behind a batch under way. Of idle executors the last used, so
        that the others can cool down; otherwise the fullest set.
        """
        if self.idle:
            return (0, -self.executor.used_s, self.executor.id)
        working = self.executor.working
        last = self.sets.last(key)
        if last is None or self.executor.limits.shortage(last + item.size) is not None:
            return (3 if working else 4, 0.0, self.executor.id)
        return (2 if working else 1, -self.executor.limits.fullness(last), self.executor.id)

    def fill(self, key: BatchKey, items: Iterable[Item]) -> list[Item]:
        """Take items in order, no more than one task set's worth; what never fits here is passed over."""
        taken: list[Item] = []
        most = 0
        for item in items:
            if not self.fits_alone(item):
                continue
            if self.sets.shortage(key, item, most or self.room) is not None:
                break
            self.sets.add(key, item)
            most = most or self.sets.count()
            taken.append(item)
        return taken


def _serve_level1(waiting: dict[BatchKey, list[Item]], takers: Sequence[_Taker]) -> list[Commit]:
    """Give out level 1 a task set at a time, always for the lane whose head comes first in order."""
    commits = []
    heads = [(items[0].order, key) for key, items in waiting.items() if items]
    heapify(heads)
    while heads:
        _, key = heappop(heads)
        lane = waiting[key]
        able = [
            (taker.rank(key, item), index)
            for index, taker in enumerate(takers)
            if taker.executor.model == key.model and (item := taker.next_of(key, lane)) is not None
        ]
        if not able:
            continue
        taker = takers[min(able)[1]]
        taken = taker.fill(key, lane)
        gone = {item.id for item in taken}
        waiting[key] = [item for item in lane if item.id not in gone]
        commits += [Commit(item, key, taker.executor.id) for item in taken]
        if waiting[key]:
            heappush(heads, (waiting[key][0].order, key))
    return commits


def _take_from_siblings(takers: Sequence[_Taker]) -> list[Commit]:
    """Fill each executor that is still idle, with items of one key that working siblings have not sealed."""
    commits = []
    idle = [taker for taker in takers if taker.idle]
    for taker in sorted(idle, key=lambda taker: (-taker.executor.used_s, taker.executor.id)):
        held = [
            (item.order, key, item, sibling)
            for sibling in takers
            if sibling.executor.working and sibling.executor.model == taker.executor.model
            for key, items in sibling.sets
            for item in items
            if taker.fits_alone(item)
        ]
        if not held:
            continue
        held.sort(key=lambda entry: entry[0])
        key = held[0][1]
        holders = {item.id: (item, sibling) for _, of, item, sibling in held if of == key}
        for item in taker.fill(key, [item for item, _ in holders.values()]):
            sibling = holders[item.id][1]
            sibling.sets.remove(key, [item.id])
            commits.append(Commit(item, key, taker.executor.id, sibling.executor.id))
    return commits


def _full(lane: Lane) -> Reason:
    return Reason("level1_full", f"{lane.limit} items of {lane.key} wait already, which is the profile's level1_limit")
