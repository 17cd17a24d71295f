"""The worker's pool, made to begin a waiting task at once; by itself it does so in the next turn of its loop."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery.concurrency.asynpool import AsynPool


def begin_waiting(consumer: Any) -> None:
    """Write tasks that wait in the pool to executors that are idle, if there are such tasks and executors."""
    pool = getattr(consumer.pool, "_pool", None)
    if not isinstance(pool, AsynPool) or not pool.outbound_buffer or consumer.hub.consolidate_callback is None:
        return  # nothing waits, or the pool is not in the loop (yet)
    idle = list(pool._all_inqueues - pool._busy_workers)
    if idle:
        with suppress(OSError):  # that executor is gone: the pool is about to see it, and gives the task to another one
            consumer.hub.consolidate_callback(idle)
