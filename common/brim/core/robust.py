"""Robust statistics of ratios: how they scatter, and what they depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np
from ddsketch.ddsketch import BaseDDSketch
from ddsketch.mapping import LogarithmicMapping
from ddsketch.store import DenseStore
from numpy.typing import NDArray

ACCURACY = 0.005
"""Relative error of a quantile's value."""
OUTLIERS = 2
"""So many values, however large, hardly move an extrapolated quantile: by some per cent from forty ratios on."""

WIDENING = 3.0
"""How much wider an extrapolation is for want of ratios: by this over the square root of their number."""

Floats = NDArray[np.float64]

_NORMAL = NormalDist()
_SLOPE_RANKS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)


class Scatter:
    """A streaming quantile sketch of positive ratios, accurate to ``ACCURACY`` of a quantile's value."""

    def __init__(self, counts: Mapping[str, float] | None = None) -> None:
        self._store = DenseStore()
        for key, count in (counts or {}).items():
            self._store.add(int(key), count)
        self._sketch = BaseDDSketch(LogarithmicMapping(ACCURACY), self._store, DenseStore(), 0.0)
        self._exceeded: dict[float, float] = {}

    def __len__(self) -> int:
        return int(self._sketch.count)

    def add(self, ratio: float) -> None:
        """Count a ratio; very far from 1 its order of magnitude is of no interest."""
        self._sketch.add(min(max(ratio, 1e-3), 1e3))
        self._exceeded.clear()

    def at(self, rank: float) -> float:
        """The quantile at a rank in [0, 1]; there must be a ratio."""
        found = self._sketch.get_quantile_value(rank)
        if found is None:
            raise ValueError("nothing has been counted yet")
        return float(found)

    def exceeded_by(self, share: float) -> float:
        """A ratio that at most this share of all ratios to come should exceed, judged by those seen so far.

        Few ratios do not reach so far. Their upper quantiles, up to the rank that ``OUTLIERS`` cannot touch, are
        extrapolated as those of a log-normal scatter (least squares over normal deviations), to half the share, and
        the wider the fewer ratios there are. What more than the share has reached already is the least.
        """
        if share not in self._exceeded:
            self._exceeded[share] = self._extrapolate(share)
        return self._exceeded[share]

    def to_json(self) -> dict[str, float]:
        """The counts by bin."""
        return {str(self._store.offset + index): count for index, count in enumerate(self._store.bins) if count}

    def _extrapolate(self, share: float) -> float:
        count = len(self)
        from_top = min(count, max(OUTLIERS, math.floor(count * share)) + 1)
        reached = self.at(min(1.0, (count - from_top + 0.5) / max(count - 1, 1)))
        median = self.at(0.5)
        within = [rank for rank in _SLOPE_RANKS if rank <= 1 - (OUTLIERS + 1) / count] or [0.75]
        deviations = [_NORMAL.inv_cdf(rank) for rank in within]
        rises = [math.log(self.at(rank) / median) for rank in within]
        slope = float(np.dot(deviations, rises) / np.dot(deviations, deviations))
        widening = 1 + WIDENING / math.sqrt(count)
        tail = median * math.exp(max(0.0, slope) * widening * _NORMAL.inv_cdf(1 - share / 2))
        return max(reached, tail) / (1 - ACCURACY)


def fit(shares: Floats, ratios: Floats) -> Floats:
    """Coefficients c ≥ 0 of ``ratios ≈ shares @ c`` by Huber's loss, drawn to their common median where open.

    ``shares`` is (samples, summands), its rows sum to 1; ``ratios`` is (samples,).
    """
    middle = float(np.median(ratios))
    pull = 1e-3 * len(ratios)
    found = np.full(shares.shape[1], middle)
    for _ in range(12):
        residuals = ratios - shares @ found
        scale = max(1.4826 * float(np.median(np.abs(residuals))), 1e-3 * middle)
        weights = np.minimum(1.0, 1.345 * scale / np.maximum(np.abs(residuals), 1e-12))
        found = _solve(shares, ratios, weights, pull, middle)
    return found


def _solve(shares: Floats, ratios: Floats, weights: Floats, pull: float, middle: float) -> Floats:
    """Weighted least squares with the pull; coefficients that would be negative are set to 0 one by one."""
    free = np.ones(shares.shape[1], dtype=bool)
    while True:
        part = shares[:, free]
        normal = part.T @ (weights[:, None] * part) + pull * np.eye(part.shape[1])
        solution = np.linalg.solve(normal, part.T @ (weights * ratios) + pull * middle)
        found = np.zeros(shares.shape[1])
        found[free] = solution
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            return found
        free[worst] = False
