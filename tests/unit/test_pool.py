"""The pool is written to when an executor is idle and a task waits, and left alone otherwise."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from celery.concurrency.asynpool import AsynPool

from brim.celery.pool import begin_waiting


def consumer(waiting: int, executors: set[int], busy: set[int], error: Exception | None = None) -> Any:
    pool: Any = object.__new__(AsynPool)
    pool.outbound_buffer, pool._all_inqueues, pool._busy_workers = deque(range(waiting)), executors, busy
    written: list[list[int]] = []

    def write(idle: list[int]) -> None:
        written.append(sorted(idle))
        if error is not None:
            raise error

    return SimpleNamespace(
        pool=SimpleNamespace(_pool=pool), hub=SimpleNamespace(consolidate_callback=write), written=written
    )


@pytest.mark.parametrize(
    ("waiting", "busy", "written"), [(1, {5}, [[6, 7]]), (0, {5}, []), (1, {5, 6, 7}, []), (2, set(), [[5, 6, 7]])]
)
def test_tasks_are_written_to_idle_executors(waiting: int, busy: set[int], written: list[list[int]]) -> None:
    worker = consumer(waiting, {5, 6, 7}, busy)
    begin_waiting(worker)
    assert worker.written == written


def test_an_executor_that_is_gone_is_the_pools_business() -> None:
    worker = consumer(1, {5}, set(), BrokenPipeError())
    begin_waiting(worker)
    assert worker.written == [[5]]


def test_a_pool_that_is_not_listening_yet_is_left_alone() -> None:
    worker = consumer(1, {5}, set())
    worker.hub.consolidate_callback = None
    begin_waiting(worker)
    begin_waiting(SimpleNamespace(pool=SimpleNamespace(), hub=worker.hub))
    assert worker.written == []
