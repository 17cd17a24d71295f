"""brim: a GPU-memory-aware scheduler for Celery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brim.celery.errors import PublishRefused, SetupError, TaskOutOfMemory, TaskRejected
    from brim.celery.install import install

__version__ = "0.1.0"

__all__ = ["PublishRefused", "SetupError", "TaskOutOfMemory", "TaskRejected", "install"]


def __getattr__(name: str) -> Any:
    """Import Celery only when one of the names above is used: the pure core needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    from importlib import import_module

    module = import_module("brim.celery.install" if name == "install" else "brim.celery.errors")
    return getattr(module, name)
