"""Redis: brim's state and its transitions. Nothing outside this package talks to Redis about it."""

from __future__ import annotations

from .attempts import AttemptSide
from .audit import AuditSide
from .base import FencedError
from .calibration import CalibrationSide
from .intake import IntakeSide
from .live import LiveSide
from .nodes import NodeSide
from .placement import PlacementSide


class Store(IntakeSide, PlacementSide, AttemptSide, NodeSide, LiveSide, AuditSide, CalibrationSide):
    """All of brim's state: ``Store(client, prefix)`` with a redis-py client that does not decode responses."""


__all__ = ["FencedError", "Store"]
