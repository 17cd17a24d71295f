"""From a few measurements of one task to a formula for its row in the resource usage table (requirement A2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.core.formula import Formula

FLAT = 0.02
"""A constant that is wrong by at most this share needs no slope."""
EXACT = 1e-6
"""An error of this size is rounding."""
BETTER = 0.5
"""A further candidate has to halve the error of a simpler one to be chosen instead."""


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shape:
    """A formula, and the largest share by which it misses a measurement."""

    formula: Formula
    error: float


def shape_of(measured: Sequence[tuple[Mapping[str, float], float]]) -> Shape:
    """The simplest formula that explains measurements (attributes, MiB without context), at least one.

    Candidates are a constant and, on top of that, a multiple of one product of attributes that vary: of one, its
    square, two of them, all of them.
    """
    needs = np.array([mib for _, mib in measured])
    best = Shape(Formula.parse(f"{max(needs):.0f}"), _error(np.full(len(needs), max(needs)), needs))
    for factors in _candidates([attributes for attributes, _ in measured]) if best.error > FLAT else ():
        products = np.array([np.prod([attributes[name] for name in factors]) for attributes, _ in measured])
        constant, slope = _line(products, needs)
        error = _error(constant + slope * products, needs)
        if error < BETTER * best.error - EXACT:
            term = f"{slope:.4g} * {' * '.join(factors)}"
            best = Shape(Formula.parse(f"{constant:.0f} + {term}" if constant >= 1 else term), error)
    return best


def _candidates(attributes: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, ...]]:
    varied = [name for name in attributes[0] if len({found[name] for found in attributes}) > 1]
    for count in (1, 2):
        yield from itertools.combinations_with_replacement(varied, count)
    if len(varied) > 2:
        yield tuple(varied)


def _line(products: Floats, needs: Floats) -> tuple[float, float]:
    """Constant and slope, neither negative, by least squares."""
    ones = np.ones_like(products)
    (constant, slope), *_ = np.linalg.lstsq(np.stack([ones, products], axis=1), needs, rcond=None)
    if constant < 0:
        return 0.0, float(products @ needs / (products @ products))
    return (float(constant), float(slope)) if slope > 0 else (float(max(needs)), 0.0)


def _error(estimated: Floats, needs: Floats) -> float:
    return float(np.max(np.abs(estimated - needs) / np.maximum(needs, 1.0)))
