"""The demands that are likely to come, learnt from those that were seen."""

from __future__ import annotations

from collections.abc import Iterator

from brim.core.model import Demand

FORGET_BELOW = 1e-3
"""A class whose remembered count has decayed to this is dropped."""


class Mix:
    """How often each demand was seen, the past fading over ``memory`` observations.

    Each observation counts 1 and ages by the factor 1 − 1/memory with every later one. It is implemented by
    letting new observations weigh more, so that one costs O(1).
    """

    def __init__(self, memory: float = 1000.0) -> None:
        self._growth = 1.0 / (1.0 - 1.0 / memory)
        self._unit = 1.0
        self._counts: dict[Demand, float] = {}

    def observe(self, demand: Demand) -> None:
        """Count one admitted task of this demand."""
        self._unit *= self._growth
        self._counts[demand] = self._counts.get(demand, 0.0) + self._unit
        if self._unit > 1e100:
            self._rescale()

    def shares(self) -> Iterator[tuple[Demand, float]]:
        """Each demand with its share of the whole; the shares sum to 1."""
        total = sum(self._counts.values())
        for demand, count in self._counts.items():
            yield demand, count / total

    def __bool__(self) -> bool:
        return bool(self._counts)

    def _rescale(self) -> None:
        scaled = {demand: count / self._unit for demand, count in self._counts.items()}
        self._counts = {demand: count for demand, count in scaled.items() if count > FORGET_BELOW}
        self._unit = 1.0
