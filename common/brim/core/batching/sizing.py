"""From a profile to the memory of model executors and the limits of their batches (requirements B10, B11)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from brim.core.batching.volume import EMPTY, Limits, Load, cut
from brim.core.profiles import BatchProfile, Profile, size_class

_USEFUL = 1 / 4
"""The share of a full batch that an executor must bear to be worth its weights."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Whole reservations of a model executor, in MiB: to compute the largest waiting item alone, to be useful
    for what waits, and for full batches. None is less than the one before.
    """

    alone_mib: int
    least_mib: int
    full_mib: int


def limits_of(profile: Profile, vram_mib: int, ceiling: float = inf) -> Limits:
    """What a batch may hold in an executor that has reserved ``vram_mib``; ``ceiling`` as it has reported."""
    batch = _batch(profile)
    per_unit_mib = batch.per_unit_mib * profile.margin
    return Limits(
        max_items=batch.max_items,
        max_volume=batch.max_volume or inf,
        per_unit_mib=per_unit_mib,
        reservation_mib=vram_mib - profile.context_mib - profile.weights_mib if per_unit_mib else inf,
        ceiling=ceiling,
    )


def footprint(profile: Profile, sizes: Iterable[float]) -> Footprint:
    """The reservations that make sense for a model with items of these sizes waiting, in their order.

    Useful is an executor that bears a quarter of a full batch, or all that waits if that is less.
    """
    batch = _batch(profile)
    sizes = list(sizes)
    alone = max((EMPTY + size for size in sizes), key=_volume, default=EMPTY)
    waiting = max(cut(sizes, Limits(batch.max_items, batch.max_volume or inf)), key=_volume, default=EMPTY)
    useful = max(alone.volume, min(waiting.volume, _USEFUL * batch.full_volume))
    full = max(useful, batch.full_volume if batch.per_unit_mib else 0.0)
    return Footprint(*(_executor_mib(profile, volume) for volume in (alone.volume, useful, full)))


def _executor_mib(profile: Profile, volume: float) -> int:
    batch_mib = profile.margin * _batch(profile).per_unit_mib * volume
    return size_class(profile.context_mib + profile.weights_mib + batch_mib)


def _volume(load: Load) -> float:
    return load.volume


def _batch(profile: Profile) -> BatchProfile:
    if profile.batch is None:
        raise ValueError(f"profile {profile.name!r} has no 'batch'")
    return profile.batch
