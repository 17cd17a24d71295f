"""How full a batch is, and how full it may get (requirement B11).

A batch is computed as if every item were as large as its largest, so volume is padded: items × largest.
Memory follows volume.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf

from brim.core.model import Reason

_PATIENCE = 8
_MOST_PATIENCE = 1024
_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class Load:
    """What a batch holds: how many items, and the size of the largest."""

    items: int = 0
    largest: float = 0.0

    def __add__(self, size: float) -> Load:
        return Load(self.items + 1, max(self.largest, size))

    @property
    def volume(self) -> float:
        """The padded volume."""
        return self.items * self.largest


EMPTY = Load()


def load_of(sizes: Iterable[float]) -> Load:
    """The load of items of these sizes."""
    load = EMPTY
    for size in sizes:
        load += size
    return load


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What running out of memory has taught about an executor: the padded volume that batches stay below.

    After a failure, half the volume that failed, or the largest that succeeded if that is more. Each time
    ``patience`` batches near the ceiling have succeeded it is raised a little, because what was short may
    have come back; every failure doubles the patience, so a real limit is run into ever more rarely.
    """

    volume: float = inf
    proven: float = 0.0
    patience: int = _PATIENCE
    streak: int = 0

    def after_success(self, load: Load) -> Ceiling:
        """The ceiling once a batch of this load has succeeded."""
        proven = max(self.proven, load.volume)
        near = self.volume < inf and 2 * load.volume > self.volume
        streak = self.streak + near
        if streak < self.patience:
            return Ceiling(self.volume, proven, self.patience, streak)
        return Ceiling(self.volume * _GROWTH, proven, self.patience)

    def after_out_of_memory(self, load: Load) -> Ceiling:
        """The ceiling once a batch of this load has run out of memory."""
        proven = self.proven if self.proven < load.volume else 0.0
        return Ceiling(max(load.volume / 2, proven), proven, min(2 * self.patience, _MOST_PATIENCE))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch of an executor may hold.

    ``max_volume`` bounds the padded volume. ``per_unit_mib`` is the memory one unit of padded volume takes,
    ``reservation_mib`` what the executor's reservation leaves for a batch (beyond context and weights).
    ``ceiling`` is a learned padded volume (see `Ceiling`); an item alone may always exceed that one.
    """

    max_items: int
    max_volume: float = inf
    per_unit_mib: float = 0.0
    reservation_mib: float = inf
    ceiling: float = inf

    def __post_init__(self) -> None:
        for name in ("max_items", "max_volume", "ceiling"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("per_unit_mib", "reservation_mib"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")

    def memory_mib(self, load: Load) -> int:
        """The memory that a batch of this load takes, in whole MiB."""
        return ceil(self.per_unit_mib * load.volume)

    def shortage(self, load: Load) -> Reason | None:
        """The limit that a batch of this load exceeds, or None if it may be computed."""
        if load.items > self.max_items:
            return Reason("max_items", f"{load.items} items, and a batch holds {self.max_items}")
        if load.volume > self.max_volume:
            return Reason(
                "max_volume",
                f"padded volume {load.items} × {load.largest:g}, and a batch holds {self.max_volume:g}",
            )
        if self.memory_mib(load) > self.reservation_mib:
            return Reason(
                "batch_memory",
                f"{self.memory_mib(load)} MiB for {load.items} × {load.largest:g} units, and the reservation"
                f" leaves {self.reservation_mib:g} MiB for a batch",
            )
        if load.items > 1 and load.volume > self.ceiling:
            return Reason(
                "ran_out_of_memory",
                f"padded volume {load.items} × {load.largest:g} came too near one that ran out of memory;"
                f" batches stay at or below {self.ceiling:g}",
            )
        return None

    def fullness(self, load: Load) -> float:
        """How full a batch of this load is: 1 when any of its limits is reached, 0 when empty."""
        by_memory = self.reservation_mib / self.per_unit_mib if self.per_unit_mib else inf
        most = min(self.max_volume, self.ceiling, by_memory)
        return max(load.items / self.max_items, load.volume / most if most else 1.0)


def cut(sizes: Iterable[float], limits: Limits) -> list[Load]:
    """Items of these sizes, in order, cut into the fewest consecutive batches that the limits allow."""
    loads: list[Load] = []
    for size in sizes:
        append(loads, size, limits)
    return loads


def append(loads: list[Load], size: float, limits: Limits) -> None:
    """Add one more item at the end of what `cut` gave: to the last batch if it fits, else to a new one."""
    if loads and limits.shortage(loads[-1] + size) is None:
        loads[-1] += size
    else:
        loads.append(EMPTY + size)
