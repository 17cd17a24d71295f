"""The state machine of a model executor: events in, instructions out, no clock, no I/O (requirements B4–B9).

    idle ──Arrived──▶ waiting ──Staged──▶ working: Claim ──Claimed──▶ Start ──Finished──▶ the next batch,
      ▲                  ▲                                                        │       waiting, or idle
      └──────────────────┴────────────────────────────────────────────────────────┘

Items arrive into the task sets and are staged there, beside whatever is being computed. As soon as nothing is
computed and a staged item is held, the staged items of the oldest key are sealed: claimed in one go, and
computed. Nothing ever waits for a batch to fill. A spare set that is full already is sealed ahead, when the batch
before it is about to end (`Ending`): nothing can join it any more, and its claim is not waited for then. A batch
that raises is bisected and one that runs out of memory is halved, each down to one item; what is then left is
computed before anything else.

Instructions come with the critical path first: what starts the next computation stands before the outcomes of
the last, which can be published beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from brim.core.batching.items import BatchKey, Item
from brim.core.batching.sets import PAIR, TaskSets
from brim.core.batching.volume import EMPTY, Ceiling, Limits, load_of
from brim.core.model import Reason

_STORY_LENGTH = 40


class ExecutorState(StrEnum):
    """The three states of an executor (requirement B5)."""

    IDLE = "idle"
    """Nothing held."""
    WAITING = "waiting"
    """Items are held and being staged; nothing is computed."""
    WORKING = "working"
    """A batch is sealed: being claimed or computed."""


class Withdrawal(StrEnum):
    """Why an item leaves without being computed here."""

    EXPIRED = "expired"
    REVOKED = "revoked"
    REFUSED = "refused"
    """Its start claim was refused: meanwhile it was cancelled, expired, or committed to another executor."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a batch function returns in an item's place when that item alone has failed."""

    error: BaseException


class WrongResultCount(Exception):
    """A batch function returned another number of results than it was given items."""


class InvalidEvent(Exception):
    """An event that cannot happen in the machine's state; carries the events before it."""


# Events


@dataclass(frozen=True, slots=True)
class Arrived:
    """Placement committed these items of one key to this executor."""

    key: BatchKey
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """These items are ready to be computed; items that have left meanwhile are passed over."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageFailed:
    """Staging this item raised."""

    id: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to `Claim`: all of the sealed items were granted but these."""

    refused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Finished:
    """The started batch returned: one result an item, a `Failed` for each that failed by itself."""

    results: Sequence[object]


@dataclass(frozen=True, slots=True)
class Ending:
    """The started batch is expected to end soon: what would be claimed then can be claimed now if it is full."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The started batch raised."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The started batch ran out of memory."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An item expired or was revoked. One that is sealed already is computed all the same."""

    id: str
    why: Withdrawal


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what is sealed, give the rest back, take nothing more and stop."""


Event = Arrived | Staged | StageFailed | Claimed | Ending | Finished | Raised | OutOfMemory | Withdrawn | Drain


# Instructions


@dataclass(frozen=True, slots=True)
class Stage:
    """Prepare these items, which belong to one task set, and answer with `Staged` or `StageFailed`."""

    key: BatchKey
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """The batch is sealed: take the start claim of all its items in one script, answer with `Claimed`.

    ``ahead``: another one is still being computed; to be claimed beside it.
    """

    key: BatchKey
    items: tuple[Item, ...]
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Compute these items now, answer with `Finished`, `Raised` or `OutOfMemory`."""

    key: BatchKey
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Publish the item's result."""

    item: Item
    result: object


@dataclass(frozen=True, slots=True)
class Fail:
    """The item has failed, by an exception of the user's code or because it fits no batch."""

    item: Item
    error: BaseException | Reason


@dataclass(frozen=True, slots=True)
class Requeue:
    """Give the item back to level 1: it cannot be held here."""

    item: Item
    reason: Reason


@dataclass(frozen=True, slots=True)
class Discard:
    """The item is over or somebody else's: settle its message, nothing was computed."""

    item: Item
    why: Withdrawal


@dataclass(frozen=True, slots=True)
class Report:
    """The state or the learned ceiling has changed: tell placement, which may have items for the room."""

    state: ExecutorState
    ceiling: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Drained: nothing is held any more, the process may end."""


Instruction = Stage | Claim | Start | Complete | Fail | Requeue | Discard | Report | Stop

DRAINING = Reason("draining", "the executor is draining")


@dataclass(slots=True)
class _Part:
    """Items to be computed together; ``twin`` is the other half of a batch that raised.

    ``guilty`` is a part known to raise as a whole, so that it is split without another try.
    """

    items: tuple[Item, ...]
    twin: _Part | None = None
    guilty: bool = False

    def halves(self) -> tuple[_Part, _Part]:
        middle = (len(self.items) + 1) // 2
        return _Part(self.items[:middle]), _Part(self.items[middle:])


@dataclass(slots=True)
class _Batch:
    """What was sealed: first a claim under way, then parts left to compute, the next one last."""

    key: BatchKey
    items: tuple[Item, ...]
    ceiling: Ceiling
    """The ceiling when it was sealed."""
    parts: list[_Part]
    running: _Part | None = None
    ending: bool = False
    """Whether what is running is the last of it, and expected to end soon."""

    @property
    def is_claimed(self) -> bool:
        return bool(self.parts) or self.running is not None


class ExecutorMachine:
    """One model executor. Feed it events with `handle` and carry out what it answers, in order."""

    def __init__(self, limits: Limits, *, stages: bool) -> None:
        """``stages`` says whether the task has a stage hook; without one items are ready on arrival."""
        self._limits = limits
        self._stages = stages
        self._sets = TaskSets(limits)
        self._staged: set[str] = set()
        self._batch: _Batch | None = None
        self._ahead: _Batch | None = None
        """The next one, where it was sealed before this one has ended."""
        self._ceiling = Ceiling()
        self._draining = False
        self._stopped = False
        self._reported = Report(ExecutorState.IDLE, self._ceiling.volume)
        self._story: deque[Event] = deque(maxlen=_STORY_LENGTH)

    @property
    def state(self) -> ExecutorState:
        """Idle, waiting or working."""
        if self._batch is not None:
            return ExecutorState.WORKING
        return ExecutorState.WAITING if self._sets else ExecutorState.IDLE

    @property
    def is_claiming(self) -> bool:
        """Whether the next computation waits for nothing but its claim."""
        return self._batch is not None and not self._batch.is_claimed

    @property
    def holds(self) -> dict[BatchKey, tuple[Item, ...]]:
        """The items that are not sealed yet, by key, in order."""
        return {key: tuple(items) for key, items in self._sets}

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event; raises `InvalidEvent` if it cannot happen now."""
        self._story.append(event)
        outcomes: list[Instruction] = []
        match event:
            case Arrived(key, items):
                outcomes = self._arrive(key, items)
            case Staged(ids):
                held = {item.id for _, items in self._sets for item in items}
                self._staged.update(held.intersection(ids))
            case StageFailed(id, error):
                outcomes = [Fail(item, error) for item in self._release(id)]
            case Withdrawn(id, why):
                outcomes = [Discard(item, why) for item in self._release(id)]
            case Claimed(refused):
                outcomes = self._claimed(refused)
            case Ending():
                self._expect_end()
            case Finished(results):
                outcomes = self._finish(results)
            case Raised(error):
                outcomes = self._raise(error)
            case OutOfMemory(error):
                outcomes = self._run_out(error)
            case Drain():
                self._draining = True
                outcomes = self._give_back(room=0, reason=DRAINING)
        critical = self._advance()
        if not self._draining:
            excess = Reason("task_sets", "the executor's task sets hold no more than what is left in them")
            outcomes += self._give_back(room=self._room(), reason=excess)
        return [*critical, *outcomes, *self._visible()]

    # What arrives and leaves before it is sealed

    def _room(self) -> int:
        return PAIR - (self._batch is not None) - (self._ahead is not None)

    def _arrive(self, key: BatchKey, items: Iterable[Item]) -> list[Instruction]:
        held = {item.id for _, kept in self._sets for item in kept}
        held.update(item.id for batch in (self._batch, self._ahead) if batch for item in batch.items)
        answers: list[Instruction] = []
        taken: dict[int, list[Item]] = {}
        for item in items:
            if item.id in held:
                raise self._invalid(f"{item.id} is held already")
            if self._draining:
                answers.append(Requeue(item, DRAINING))
            elif (never := self._limits.shortage(EMPTY + item.size)) is not None:
                answers.append(Fail(item, never))
            elif (short := self._sets.shortage(key, item, self._room())) is not None:
                answers.append(Requeue(item, short))
            else:
                self._sets.add(key, item)
                held.add(item.id)
                taken.setdefault(self._sets.count(), []).append(item)
        if not self._stages:
            self._staged.update(item.id for group in taken.values() for item in group)
            return answers
        return [*(Stage(key, tuple(group)) for group in taken.values()), *answers]

    def _release(self, id: str) -> list[Item]:
        """Take an unsealed item out of its set; nothing if it is not held (it has left meanwhile)."""
        for key, items in self._sets:
            for item in items:
                if item.id == id:
                    self._let_go(key, [item])
                    return [item]
        return []

    def _let_go(self, key: BatchKey, items: Sequence[Item]) -> None:
        ids = [item.id for item in items]
        self._sets.remove(key, ids)
        self._staged.difference_update(ids)

    def _give_back(self, room: int, reason: Reason) -> list[Instruction]:
        excess = self._sets.beyond(room)
        for key, item in excess:
            self._let_go(key, [item])
        return [Requeue(item, reason) for _, item in excess]

    # From sealing to the end of a batch

    def _advance(self) -> list[Instruction]:
        """Start what can be started, unless a claim or a computation is under way."""
        batch = self._batch
        if batch is None:
            return self._seal()
        if batch.parts and not batch.running:
            return self._start_part(batch)
        return self._seal_ahead() if batch.ending and self._ahead is None and not self._draining else []

    def _seal(self) -> list[Instruction]:
        """Seal what is ready."""
        key, sealed = self._ready()
        if key is None:
            return []
        self._let_go(key, sealed)
        self._batch = _Batch(key, sealed, self._ceiling, parts=[])
        return [Claim(key, sealed)]

    def _seal_ahead(self) -> list[Instruction]:
        """Seal what is ready beside the batch that is computed, if no item can join it any more."""
        key, sealed = self._ready()
        if key is None or self._sets.limits.fullness(load_of(item.size for item in sealed)) < 1:
            return []
        self._let_go(key, sealed)
        self._ahead = _Batch(key, sealed, self._ceiling, parts=[])
        return [Claim(key, sealed, ahead=True)]

    def _expect_end(self) -> None:
        if self._batch is not None and self._batch.running is not None and not self._batch.parts:
            self._batch.ending = True

    def _ready(self) -> tuple[BatchKey | None, tuple[Item, ...]]:
        """The staged items of the key whose staged item is the oldest, in order, as many as fit."""
        ready = {
            key: staged for key, items in self._sets if (staged := [item for item in items if item.id in self._staged])
        }
        if not ready:
            return None, ()
        key = min(ready, key=lambda key: ready[key][0].order)
        load, sealed = EMPTY, list[Item]()
        for item in ready[key]:
            if self._sets.limits.shortage(load + item.size) is not None:
                break
            load += item.size
            sealed.append(item)
        return key, tuple(sealed)

    def _claimed(self, refused: frozenset[str]) -> list[Instruction]:
        batch = next((each for each in (self._batch, self._ahead) if each is not None and not each.is_claimed), None)
        if batch is None:
            raise self._invalid("no claim is under way")
        if granted := tuple(item for item in batch.items if item.id not in refused):
            batch.parts.append(_Part(granted))
        elif batch is self._ahead:
            self._ahead = None
        else:
            self._batch = None
        return [Discard(item, Withdrawal.REFUSED) for item in batch.items if item.id in refused]

    def _start_part(self, batch: _Batch) -> list[Instruction]:
        part = batch.parts.pop()
        while len(part.items) > 1 and (part.guilty or self._too_large(part)):
            part = self._split(batch, part, raised=part.guilty)
        batch.running = part
        return [Start(batch.key, part.items)]

    def _too_large(self, part: _Part) -> bool:
        return self._sets.limits.shortage(load_of(item.size for item in part.items)) is not None

    def _split(self, batch: _Batch, part: _Part, *, raised: bool) -> _Part:
        """Leave the second half for later and give the first.

        If a part that raised has a sound first half, the fault is in the second: hence the twin.
        """
        first, second = part.halves()
        if raised:
            first.twin = second
        batch.parts.append(second)
        return first

    def _running(self) -> tuple[_Batch, _Part]:
        """The part whose computation has just ended; it is not running any more."""
        batch = self._batch
        if batch is None or batch.running is None:
            raise self._invalid("nothing is being computed")
        part, batch.running, batch.ending = batch.running, None, False
        return batch, part

    def _finish(self, results: Sequence[object]) -> list[Instruction]:
        batch, part = self._running()
        if len(results) != len(part.items):
            error = WrongResultCount(
                f"{batch.key.task} returned {len(results)} results for {len(part.items)} items;"
                " it must return one for each, in their order (brim.Failed(exc) for one that failed)"
            )
            return self._blame(batch, part, error)
        if part.twin is not None:
            part.twin.guilty = True
        self._learn(self._ceiling.after_success(load_of(item.size for item in part.items)))
        self._close(batch)
        return [
            Fail(item, result.error) if isinstance(result, Failed) else Complete(item, result)
            for item, result in zip(part.items, results, strict=True)
        ]

    def _raise(self, error: BaseException) -> list[Instruction]:
        batch, part = self._running()
        return self._blame(batch, part, error)

    def _blame(self, batch: _Batch, part: _Part, error: BaseException) -> list[Instruction]:
        """A part raised: bisect it, down to the one item that has failed."""
        if len(part.items) > 1:
            batch.parts.append(self._split(batch, part, raised=True))
            return []
        self._close(batch)
        return [Fail(part.items[0], error)]

    def _run_out(self, error: BaseException) -> list[Instruction]:
        """A part ran out of memory: halve it, and let later batches be smaller.

        An item that runs out of memory all alone is to blame for its batch, whose size then taught nothing.
        """
        batch, part = self._running()
        if len(part.items) > 1:
            self._learn(self._ceiling.after_out_of_memory(load_of(item.size for item in part.items)))
            batch.parts.append(self._split(batch, part, raised=False))
            return []
        self._learn(batch.ceiling)
        self._close(batch)
        return [Fail(part.items[0], error)]

    def _close(self, batch: _Batch) -> None:
        if not batch.parts:
            self._batch, self._ahead = self._ahead, None
            if self._batch is not None:
                self._batch.ceiling = self._ceiling

    def _learn(self, ceiling: Ceiling) -> None:
        if ceiling.volume != self._ceiling.volume:
            self._sets.limits = replace(self._limits, ceiling=ceiling.volume)
        self._ceiling = ceiling

    # What is visible from outside

    def _visible(self) -> list[Instruction]:
        answers: list[Instruction] = []
        report = Report(self.state, self._ceiling.volume)
        if report != self._reported:
            self._reported = report
            answers.append(report)
        if self._draining and not self._stopped and self._batch is None:
            self._stopped = True
            answers.append(Stop())
        return answers

    def _invalid(self, why: str) -> InvalidEvent:
        story = "\n".join(f"  {event!r:.200}" for event in self._story)
        return InvalidEvent(f"{why}; state {self.state}, events up to this one:\n{story}")
