"""The demands that are likely to come, learnt from those that were seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from brim.core.model import Demand

FORGET_BELOW = 1e-3
"""A class whose remembered count has decayed to this is dropped."""


@dataclass(slots=True)
class _Seen:
    count: float = 0.0
    run_s: float = 0.0
    runs: float = 0.0


class Mix:
    """How often each demand was seen and how long it ran, the past fading over ``memory`` observations.

    Each observation counts 1 and ages by the factor 1 − 1/memory with every later one. It is implemented by
    letting new observations weigh more, so that one costs O(1).
    """

    def __init__(self, memory: float = 1000.0) -> None:
        self._growth = 1.0 / (1.0 - 1.0 / memory)
        self._unit = 1.0
        self._seen: dict[Demand, _Seen] = {}
        self.version = 0
        """Grows by 1 with every observation."""

    @classmethod
    def of(cls, counts: Iterable[tuple[Demand, float]]) -> Mix:
        """A mix that is known beforehand."""
        mix = cls()
        for demand, count in counts:
            mix._seen.setdefault(demand, _Seen()).count += count
        return mix

    def observe(self, demand: Demand) -> None:
        """Count one admitted task of this demand."""
        self._entry(demand).count += self._unit

    def ran(self, demand: Demand, seconds: float) -> None:
        """Count one ended task of this demand that had run so long."""
        entry = self._entry(demand)
        entry.run_s += self._unit * seconds
        entry.runs += self._unit

    @property
    def mean_run_s(self) -> float:
        """Mean run time of all tasks; 0 as long as none is known."""
        runs = sum(entry.runs for entry in self._seen.values())
        return sum(entry.run_s for entry in self._seen.values()) / runs if runs else 0.0

    def shares(self) -> list[tuple[Demand, float]]:
        """Each demand with its share of the whole, largest first; the shares sum to 1.

        Where run times are known, a demand weighs by GPUs × mean run time × count: what it will occupy. A demand
        without a known run time takes the mean of all. As long as none is known, demands weigh by count.
        """
        mean_s, weighed = self.mean_run_s, []
        for demand, entry in self._seen.items():
            weight = entry.count
            if mean_s > 0:
                weight *= max(1, demand.gpus) * (entry.run_s / entry.runs if entry.runs else mean_s)
            weighed.append((demand, weight))
        total = sum(weight for _, weight in weighed)
        weighed.sort(key=lambda pair: -pair[1])
        return [(demand, weight / total) for demand, weight in weighed if weight > 0]

    def __bool__(self) -> bool:
        return any(entry.count > 0 for entry in self._seen.values())

    def _entry(self, demand: Demand) -> _Seen:
        self.version += 1
        self._unit *= self._growth
        if self._unit > 1e100:
            self._rescale()
        return self._seen.setdefault(demand, _Seen())

    def _rescale(self) -> None:
        for demand, entry in list(self._seen.items()):
            entry.count /= self._unit
            entry.run_s /= self._unit
            entry.runs /= self._unit
            if entry.count < FORGET_BELOW:
                del self._seen[demand]
        self._unit = 1.0
