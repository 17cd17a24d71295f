"""brim: a GPU-memory-aware scheduler for Celery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brim.celery.batch_task import BatchTask, Item
    from brim.celery.errors import PublishRefused, SetupError, TaskOutOfMemory, TaskRejected
    from brim.celery.install import install
    from brim.core.batching import Failed

__version__ = "0.1.0"

__all__ = [
    "BatchTask",
    "Failed",
    "Item",
    "PublishRefused",
    "SetupError",
    "TaskOutOfMemory",
    "TaskRejected",
    "install",
]

_HOMES = {
    "BatchTask": "brim.celery.batch_task",
    "Failed": "brim.core.batching",
    "Item": "brim.celery.batch_task",
    "install": "brim.celery.install",
}


def __getattr__(name: str) -> Any:
    """Import Celery only when one of the names above is used: the pure core needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_HOMES.get(name, "brim.celery.errors"))
    return getattr(module, name)
