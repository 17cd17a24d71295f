"""Redis: brim's state and its transitions. Nothing outside this package talks to Redis about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from .audit import AuditSide
from .base import FencedError
from .calibration import CalibrationSide
from .intake import IntakeSide
from .live import LiveSide
from .nodes import NodeSide
from .placement import PlacementSide
from .residents import ResidentSide

if TYPE_CHECKING:
    from brim.settings import Settings


class Store(IntakeSide, PlacementSide, ResidentSide, NodeSide, LiveSide, AuditSide, CalibrationSide):
    """All of brim's state: ``Store(client, prefix)`` with a redis-py client that does not decode responses."""

    @classmethod
    def of(cls, settings: Settings, *, single: bool = False) -> Self:
        """The store that the settings name, with connections of its own: see `connect`."""
        from .connection import connect  # reads settings, which producers have no use for

        return cls(connect(settings.redis, single=single), settings.key_prefix)


__all__ = ["FencedError", "Store"]
