"""The decisions alone under a simulated clock: what two-level batching gives at low and at high load.

Everything but computation and staging takes no time here, so this shows what the decisions are worth; what a
real executor makes of them is measured by the benchmark.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean, median

import pytest

from brim.core.batching import BatchKey, Finished, Item, Limits, ModelKey, Stage, Start
from unit.batching_world import Job, Worker, World, task_of

MODEL = ModelKey("bert")
KEY = BatchKey("embed", MODEL)
CALL_S, ITEM_S, MAX_ITEMS = 0.100, 0.002, 32
FULL_S = CALL_S + ITEM_S * MAX_ITEMS
SATURATION = MAX_ITEMS / FULL_S
"""Items per second of one executor with full batches: 195."""
PLAIN = 1 / (CALL_S + ITEM_S)
"""Items per second one by one: 9.8."""


@dataclass
class Simulation:
    """A `World` whose jobs end after the time they take."""

    executors: int = 1
    stage_s: float = 0.0
    world: World = field(default_factory=World)
    arrived_s: dict[str, float] = field(default_factory=dict)
    finished_s: dict[str, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.events: list[tuple[float, int, object]] = []
        self.numbers = count()
        self.ended_s: dict[str, float] = {}
        for index in range(self.executors):
            name, limits = f"w{index}", Limits(max_items=MAX_ITEMS)
            self.world.add_worker(name, MODEL, limits, self.compute, stages=self.stage_s > 0)

    def compute(self, items: tuple[Item, ...]) -> Finished:
        self.finished_s |= {task_of(item.id): self.world.now for item in items}
        return Finished([item.id for item in items])

    def after(self, delay_s: float, event: object) -> None:
        heapq.heappush(self.events, (self.world.now + delay_s, next(self.numbers), event))

    def run(self, rate: float, items: int) -> Simulation:
        """Poisson arrivals at ``rate`` per second until all items are over."""
        clock = random.Random(7)
        at_s = 0.0
        for index in range(items):
            at_s += clock.expovariate(rate)
            self.after(at_s, Item(f"t{index}", 1.0, at_s))
        while self.events:
            self.world.now, _, event = heapq.heappop(self.events)
            if isinstance(event, Item):
                self.arrived_s[event.id] = self.world.now
                self.world.admit(KEY, event)
            else:
                self.end(*event)
            self.take_up()
        assert len(self.finished_s) == items
        return self

    def take_up(self) -> None:
        """Give every job that is due its time; claims and notices take none."""
        while self.world.pending:
            worker, job = self.world.pending.pop(0)
            match job:
                case Stage():
                    self.after(self.stage_s, (worker, job))
                case Start(_, items):
                    if worker.id in self.ended_s:
                        self.gaps_s.append(self.world.now - self.ended_s[worker.id])
                    self.after(CALL_S + ITEM_S * len(items), (worker, job))
                case _:
                    self.world.answer(worker, job)

    def end(self, worker: Worker, job: Job) -> None:
        if isinstance(job, Start):
            self.ended_s[worker.id] = self.world.now
        self.world.answer(worker, job)

    @property
    def latencies_s(self) -> list[float]:
        return [self.finished_s[id] - self.arrived_s[id] for id in self.finished_s]

    @property
    def batches(self) -> list[int]:
        return [len(items) for _, _, items in self.world.started]

    @property
    def throughput(self) -> float:
        return len(self.finished_s) / max(self.finished_s.values())


def test_at_rest_an_item_is_as_fast_as_unbatched():
    simulation = Simulation().run(rate=0.3 * PLAIN, items=300)
    assert median(simulation.latencies_s) <= 1.15 * (CALL_S + ITEM_S)
    assert min(simulation.latencies_s) == pytest.approx(CALL_S + ITEM_S)


def test_an_item_that_meets_an_idle_executor_starts_at_once():
    simulation = Simulation(executors=3).run(rate=2.0, items=200)
    alone = sum(latency == pytest.approx(CALL_S + ITEM_S) for latency in simulation.latencies_s)
    assert alone >= 195


@pytest.mark.parametrize("executors", [1, 3])
def test_saturated_batches_are_full(executors):
    simulation = Simulation(executors).run(rate=1.5 * SATURATION * executors, items=1500)
    steady = simulation.batches[2 * executors : -2 * executors]
    assert fmean(steady) >= 31
    assert simulation.throughput >= 0.9 * SATURATION * executors
    assert simulation.throughput >= 8 * PLAIN * executors


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_in_between_nobody_waits_for_longer_than_the_batch_under_way_and_its_own(share):
    simulation = Simulation().run(rate=share * SATURATION, items=1500)
    latencies = sorted(simulation.latencies_s)
    assert latencies[int(0.99 * len(latencies))] <= 2 * FULL_S + CALL_S
    assert simulation.throughput >= 0.9 * share * SATURATION


def test_staging_hides_behind_computation():
    # Given a stage hook that takes a third of a full batch's time, when the executor is saturated
    simulation = Simulation(stage_s=FULL_S / 3).run(rate=1.5 * SATURATION, items=1000)
    # Then it never waits for it, and batches are as full as without
    assert max(simulation.gaps_s[1:-2]) == 0
    assert fmean(simulation.batches[2:-2]) >= 28
