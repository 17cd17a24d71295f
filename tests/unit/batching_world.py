"""Level 1, placement's books and executor machines in memory: the whole of batching without clock or I/O.

It does what scripts, placement and workers do around the pure core. What takes time (staging, claims,
computation, notices of withdrawal) waits in ``pending`` until the test answers it, in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from brim.core.batching import (
    EMPTY,
    Arrived,
    BatchKey,
    Claim,
    Claimed,
    Complete,
    Discard,
    Drain,
    Event,
    Executor,
    ExecutorMachine,
    ExecutorState,
    Fail,
    Finished,
    Instruction,
    Item,
    Lane,
    Limits,
    ModelKey,
    OutOfMemory,
    Phase,
    Raised,
    Report,
    Requeue,
    Stage,
    Staged,
    Start,
    Stop,
    Withdrawal,
    Withdrawn,
    assign,
    cut,
    load_of,
)

Job = Stage | Claim | Start | Withdrawn
Function = Callable[[tuple[Item, ...]], Finished | Raised | OutOfMemory]


@dataclass
class Worker:
    """One model executor: its machine, and what the books say of it."""

    id: str
    model: ModelKey
    limits: Limits
    machine: ExecutorMachine
    function: Function
    phase: Phase = Phase.UP
    ceiling: float = float("inf")
    stages: bool = False
    full: bool = False
    """It gave an item back for want of room; nothing more is committed until it has moved on."""
    used_s: float = 0.0
    unsealed: dict[str, tuple[BatchKey, Item]] = field(default_factory=dict)
    """Attempts committed here and not claimed, by attempt id."""
    claimed: dict[str, BatchKey] = field(default_factory=dict)
    ahead: set[str] = field(default_factory=set)
    """Those that were claimed beside another batch."""
    staged: set[str] = field(default_factory=set)

    @property
    def learned(self) -> Limits:
        return replace(self.limits, ceiling=self.ceiling)

    def view(self) -> Executor:
        held: dict[BatchKey, list[Item]] = {}
        for key, item in self.unsealed.values():
            held.setdefault(key, []).append(item)
        return Executor(
            id=self.id,
            model=self.model,
            device="gpu",
            vram_mib=0,
            limits=self.learned,
            phase=self.phase,
            since_s=0.0,
            used_s=self.used_s,
            keep_warm_s=60.0,
            working=bool(self.claimed),
            ahead=bool(self.ahead),
            unsealed=tuple((key, tuple(items)) for key, items in held.items()),
        )


class World:
    """Everything that waits, is held or is over; every step checks what must always hold."""

    def __init__(self) -> None:
        self.now = 0.0
        self.workers: dict[str, Worker] = {}
        self.lanes: dict[BatchKey, list[Item]] = {}
        self.outcomes: dict[str, str] = {}
        self.admitted: dict[str, BatchKey] = {}
        self.pending: list[tuple[Worker, Job]] = []
        self.started: list[tuple[str, BatchKey, tuple[Item, ...]]] = []
        self.attempts = Counter[str]()

    def add_worker(self, id: str, model: ModelKey, limits: Limits, function: Function, *, stages: bool) -> None:
        machine = ExecutorMachine(limits, stages=stages)
        self.workers[id] = Worker(id, model, limits, machine, function, stages=stages)
        self.dispatch()

    def admit(self, key: BatchKey, item: Item) -> None:
        self.admitted[item.id] = key
        self.wait(key, item)
        self.dispatch()

    def wait(self, key: BatchKey, item: Item) -> None:
        lane = self.lanes.setdefault(key, [])
        lane.append(item)
        lane.sort(key=lambda item: item.order)

    def withdraw(self, task: str, why: Withdrawal) -> None:
        """An item that is not claimed yet expires or is revoked."""
        for lane in self.lanes.values():
            if any(item.id == task for item in lane):
                lane[:] = [item for item in lane if item.id != task]
                self.outcomes[task] = why
        for worker in self.workers.values():
            for attempt in [each for each in worker.unsealed if task_of(each) == task]:
                del worker.unsealed[attempt]
                self.outcomes[task] = why
                self.pending.append((worker, Withdrawn(attempt, why)))
        self.dispatch()

    def drain(self, worker: Worker) -> None:
        worker.phase = Phase.DRAINING
        self.feed(worker, Drain())

    def dispatch(self) -> None:
        """Placement: decide on the books, commit, deliver."""
        lanes = [Lane(key, tuple(items)) for key, items in self.lanes.items() if items]
        views = [worker.view() for worker in self.workers.values() if not worker.full]
        plan = assign(lanes, views)
        assert plan == assign(lanes[::-1], views[::-1]), "the plan depends on the order of the snapshot"
        deliveries: dict[str, list[tuple[BatchKey, Item]]] = {}
        for commit in plan.commits:
            task = task_of(commit.item.id)
            if commit.source is None:
                self.lanes[commit.key].remove(commit.item)
            else:
                del self.workers[commit.source].unsealed[commit.item.id]
                self.pending.append((self.workers[commit.source], Withdrawn(commit.item.id, Withdrawal.REFUSED)))
            self.attempts[task] += 1
            item = replace(commit.item, id=f"{task}#{self.attempts[task]}")
            self.workers[commit.executor].unsealed[item.id] = (commit.key, item)
            deliveries.setdefault(commit.executor, []).append((commit.key, item))
        self.check_plan(lanes, views, plan)
        for id, items in deliveries.items():
            for key in dict.fromkeys(key for key, _ in items):
                self.feed(self.workers[id], Arrived(key, tuple(item for of, item in items if of == key)))

    def answer(self, worker: Worker, job: Job) -> None:
        """What the job gives when it is done."""
        match job:
            case Stage(_, items):
                worker.staged.update(item.id for item in items)
                self.feed(worker, Staged(tuple(item.id for item in items)))
            case Claim(key, items):
                granted = [item.id for item in items if item.id in worker.unsealed]
                for attempt in granted:
                    del worker.unsealed[attempt]
                    worker.claimed[attempt] = key
                worker.ahead = set(granted) if job.ahead else set()
                self.feed(worker, Claimed(frozenset(item.id for item in items) - set(granted)))
            case Start(_, items):
                self.feed(worker, worker.function(items))
            case Withdrawn():
                self.feed(worker, job)

    def feed(self, worker: Worker, event: Event) -> None:
        instructions = worker.machine.handle(event)
        if not isinstance(event, Arrived):
            worker.full = False
        for instruction in instructions:
            self.carry_out(worker, instruction)
        if not isinstance(event, Arrived) or worker.full:
            self.dispatch()

    def carry_out(self, worker: Worker, instruction: Instruction) -> None:
        worker.used_s = self.now
        match instruction:
            case Stage():
                self.pending.append((worker, instruction))
            case Claim(key, items):
                self.check_sealed(worker, key, items)
                self.pending.append((worker, instruction))
            case Start(key, items):
                if worker.ahead.intersection(item.id for item in items):
                    worker.ahead = set()
                assert worker.limits.shortage(load_of(item.size for item in items)) is None
                assert all(worker.claimed[item.id] == key for item in items)
                assert [item.order for item in items] == sorted(item.order for item in items)
                self.started.append((worker.id, key, items))
                self.pending.append((worker, instruction))
            case Complete(item):
                self.close(worker, item, "succeeded")
            case Fail(item):
                self.close(worker, item, "failed")
            case Requeue(item, reason):
                if held := worker.unsealed.pop(item.id, None):
                    self.wait(held[0], replace(item, id=task_of(item.id)))
                worker.full = reason.code != "draining"
            case Report(_, ceiling):
                worker.ceiling = ceiling
            case Discard(item):
                assert item.id not in worker.claimed
                assert item.id not in worker.unsealed
            case Stop():
                assert not worker.unsealed
                assert not worker.claimed
                del self.workers[worker.id]

    def close(self, worker: Worker, item: Item, outcome: str) -> None:
        """An item is over; one that fits no batch was never claimed, one taken away meanwhile is not its own."""
        owned = worker.claimed.pop(item.id, None) or worker.unsealed.pop(item.id, None)
        if owned:
            assert task_of(item.id) not in self.outcomes
            self.outcomes[task_of(item.id)] = outcome

    def settle(self) -> None:
        """Answer everything until nothing is pending."""
        while self.pending:
            self.answer(*self.pending.pop(0))

    # What must hold

    def check_plan(self, lanes: list[Lane], views: list[Executor], plan) -> None:
        """Order kept within a key, and level 1 served before siblings (B7)."""
        up = {view.id: view for view in views}
        takers = {commit.executor for commit in plan.commits if commit.source is not None}
        for commit in plan.commits:
            executor = up[commit.executor]
            if commit.source is None and up[commit.executor].working:
                spared = [id for id in takers if up[id].model == executor.model and fits(up[id], commit.item)]
                assert not spared, "a sibling's items went to an idle executor before level 1 did"
            assert executor.phase is Phase.UP
            assert executor.model == commit.key.model
            for key, left in self.lanes.items():
                for item in left:
                    passed = key == commit.key and item.order < commit.item.order
                    first = commit.source is not None and key.model == executor.model
                    assert not (passed or first) or not fits(executor, item)

    def check_sealed(self, worker: Worker, key: BatchKey, items: tuple[Item, ...]) -> None:
        """A batch is what is staged of one key, oldest first, as much as the limits allow and no more."""
        load = load_of(item.size for item in items)
        assert worker.learned.shortage(load) is None
        ready = {
            of: [item for item in held if item.id in worker.staged or not worker.stages]
            for of, held in worker.machine.holds.items()
        }
        assert all(item.order > items[0].order for held in ready.values() for item in held)
        if rest := ready.get(key):
            assert rest[0].order > items[-1].order
            assert worker.learned.shortage(load + rest[0].size) is not None

    def check(self) -> None:
        """Nothing lost, nobody idle for nothing, level 1 only while all executors work (B1, B8)."""
        places = Counter(item.id for lane in self.lanes.values() for item in lane)
        places.update(self.outcomes.keys())
        for worker in self.workers.values():
            places.update(map(task_of, [*worker.unsealed, *worker.claimed]))
        assert places == Counter(self.admitted.keys())
        for view in (worker.view() for worker in self.workers.values() if worker.phase is Phase.UP):
            waiting = [
                item for key, lane in self.lanes.items() if key.model == view.model for item in lane if fits(view, item)
            ]
            if self.workers[view.id].full:
                continue
            if waiting:
                assert view.state is not ExecutorState.IDLE
                assert view.state is ExecutorState.WORKING or len(view.unsealed) == 2 or len(view.unsealed[0][1]) > 1
            if view.state is ExecutorState.IDLE:
                assert not any(
                    fits(view, item)
                    for sibling in self.workers.values()
                    if sibling.model == view.model
                    and sibling.phase is Phase.UP
                    and sibling.claimed
                    and not sibling.full
                    for _, item in sibling.unsealed.values()
                )
        for worker in self.workers.values():
            sets = [cut([item.size for item in items], worker.learned) for items in worker.machine.holds.values()]
            assert sum(map(len, sets)) <= 2 - (worker.machine.state is ExecutorState.WORKING)
            busy = any(of is worker and isinstance(job, Claim | Start) for of, job in self.pending)
            assert busy == (worker.machine.state is ExecutorState.WORKING)
            staged = not any(of is worker and isinstance(job, Stage) for of, job in self.pending)
            if staged:
                assert worker.machine.state is not ExecutorState.WAITING, "staged items wait beside an idle executor"


def fits(executor: Executor, item: Item) -> bool:
    return executor.limits.shortage(EMPTY + item.size) is None


def task_of(attempt: str) -> str:
    return attempt.partition("#")[0]
