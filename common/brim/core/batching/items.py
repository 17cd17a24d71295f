"""What waits and what is batched: items, and the keys that keep unlike items apart."""

from __future__ import annotations

from dataclasses import dataclass

PRIORITY_STEP_S = 10.0
"""What one step of priority is worth, in seconds of waiting."""


@dataclass(frozen=True, slots=True, order=True)
class ModelKey:
    """A model in one version: what a model executor keeps resident (requirement B10)."""

    model: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.model}@{self.version}" if self.version else self.model


@dataclass(frozen=True, slots=True, order=True)
class BatchKey:
    """What the items of one batch have in common; each key has its own level-1 lane (requirement B10)."""

    task: str
    model: ModelKey
    shape: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.task, str(self.model), self.shape) if part)


@dataclass(frozen=True, slots=True)
class Batched:
    """What decides with what a batched task is computed, and how much of a batch it takes.

    ``shape`` and ``size`` are what its profile's ``shape_bucket`` and ``volume`` came to.
    """

    model: str
    version: str
    shape: str
    size: float

    def lane(self, task: str) -> str:
        """The level-1 lane of a task: one for each model, version and shape bucket (requirement B10)."""
        model = f"{self.model}@{self.version}" if self.version else self.model
        return "|".join(part for part in (task, "batch", model, self.shape) if part)


@dataclass(frozen=True, slots=True)
class Item:
    """One task on its way into a batch.

    ``id`` is the task's id in level 1 and the attempt's in an executor: what is committed there, taken away
    and committed again is another item, so an answer to the one is never mistaken for the other's.
    ``size`` is its volume by the profile's formula (1 without one). ``since_s`` says when it was admitted,
    on a clock that never gives two items the same time, so that it also settles who came first.
    ``priority`` counts as Celery's does on Redis: 0 is the most urgent.
    """

    id: str
    size: float
    since_s: float
    priority: int = 0

    @property
    def order(self) -> float:
        """Its place in every queue, lower first.

        Priority is a head start and waiting makes up for it: all items age equally fast, so the order of two
        never changes, and nothing waits for ever behind what is more urgent.
        """
        return self.since_s + PRIORITY_STEP_S * self.priority
