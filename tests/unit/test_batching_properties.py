"""Two-level batching as a whole, in every order in which its parts can answer (requirements B1–B11)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from brim.core.batching import (
    BatchKey,
    Ending,
    Failed,
    Finished,
    Item,
    Limits,
    ModelKey,
    OutOfMemory,
    Phase,
    Raised,
    Withdrawal,
)
from unit.batching_world import World, fits, task_of

BUSY, RARE = ModelKey("bert", "1"), ModelKey("bert", "2")
MODELS = (BUSY, BUSY, RARE)
SHAPES = [BatchKey("embed", BUSY, shape) for shape in ("64", "64", "128")]
KEYS = [*SHAPES, BatchKey("rank", BUSY), BatchKey("embed", RARE)]
WORKERS = st.tuples(
    st.integers(1, 4), st.sampled_from([4.0, 8.0, 30.0]), st.sampled_from([3.0, 9.0, 1000.0]), st.booleans()
)
"""max_items, max_volume, the volume it bears, and whether it has a stage hook."""


class Batching(RuleBasedStateMachine):
    """Arrivals, answers, withdrawals, starts and drains in any order; `World` checks each step."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.kinds: dict[str, str] = {}
        self.launched = 0

    @initialize(first=WORKERS, second=WORKERS)
    def launch_two(self, first, second):
        self.add(BUSY, *first)
        self.add(BUSY, *second)

    @rule(model=st.sampled_from(MODELS), worker=WORKERS)
    @precondition(lambda self: len(self.world.workers) < 4)
    def launch(self, model, worker):
        self.add(model, *worker)

    def add(self, model, max_items, max_volume, bears, stages):
        """Start a worker that runs out of memory above the padded volume that it bears."""

        def compute(items):
            kinds = [self.kinds[task_of(item.id)] for item in items]
            if len(items) * max(item.size for item in items) > bears:
                return OutOfMemory(MemoryError("out of memory"))
            if "raises" in kinds:
                return Raised(ValueError("guilty"))
            return Finished([Failed(ValueError("guilty")) if kind == "fails" else kind for kind in kinds])

        self.launched += 1
        limits = Limits(max_items=max_items, max_volume=max_volume)
        self.world.add_worker(f"w{self.launched}", model, limits, compute, stages=stages)

    @rule(
        key=st.sampled_from(KEYS),
        size=st.integers(1, 6),
        priority=st.sampled_from([0, 0, 0, 3]),
        kind=st.sampled_from(["good", "good", "good", "good", "fails", "raises"]),
        count=st.integers(1, 8),
    )
    def admit(self, key, size, priority, kind, count):
        for _ in range(count):
            id = f"t{len(self.kinds)}"
            self.kinds[id] = kind
            self.world.admit(key, Item(id, size, float(len(self.kinds)), priority))

    @rule(data=st.data(), count=st.integers(1, 6))
    @precondition(lambda self: self.world.pending)
    def answer(self, data, count):
        for _ in range(min(count, len(self.world.pending))):
            index = data.draw(st.integers(0, len(self.world.pending) - 1))
            self.world.answer(*self.world.pending.pop(index))
            self.world.check()

    @rule(data=st.data(), why=st.sampled_from([Withdrawal.EXPIRED, Withdrawal.REVOKED]))
    @precondition(lambda self: self.kinds)
    def withdraw(self, data, why):
        self.world.withdraw(data.draw(st.sampled_from(sorted(self.kinds))), why)

    @rule(data=st.data())
    @precondition(lambda self: self.world.workers)
    def expect_the_end(self, data):
        self.world.feed(self.world.workers[data.draw(st.sampled_from(sorted(self.world.workers)))], Ending())

    @rule(data=st.data())
    @precondition(lambda self: any(worker.phase is Phase.UP for worker in self.world.workers.values()))
    def drain(self, data):
        up = [worker for worker in self.world.workers.values() if worker.phase is Phase.UP]
        self.world.drain(data.draw(st.sampled_from(up)))
        self.world.dispatch()

    @invariant()
    def holds(self):
        self.world.check()

    def teardown(self):
        # When everything is answered, then every item is over unless no executor can ever take it,
        self.world.settle()
        self.world.check()
        for lane, items in self.world.lanes.items():
            for worker in self.world.workers.values():
                assert worker.model != lane.model or not any(fits(worker.view(), item) for item in items)
        # exactly the guilty have failed, or what cannot be computed even alone,
        for id, outcome in self.world.outcomes.items():
            if outcome == "succeeded":
                assert self.kinds[id] == "good"
            if outcome == "failed" and self.kinds[id] == "good":
                alone = [items for _, _, items in self.world.started if [task_of(item.id) for item in items] == [id]]
                assert alone, f"{id} failed without having been tried alone"
                assert alone[-1][0].size > 3
        # and within a batch no key was mixed with another.
        for _, key, items in self.world.started:
            assert {self.world.admitted[task_of(item.id)] for item in items} == {key}


Batching.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestBatching = Batching.TestCase
