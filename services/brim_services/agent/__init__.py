"""The node agent, ``brim worker``: one Celery worker per GPU, and an eye on every process of theirs."""

from __future__ import annotations

from .agent import run

__all__ = ["run"]
