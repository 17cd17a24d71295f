"""What `brim.celery.pool` relies on in Celery's pool, which says nothing of it in its documentation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.concurrency.asynpool import AsynPool
from kombu.asynchronous import Hub

from brim.celery.pool import begin_waiting


@pytest.fixture
def consumer() -> Iterator[Any]:
    """A pool of one process in a loop of its own, as a worker's consumer has them."""
    hub = Hub()
    pool = AsynPool(processes=1, synack=False, threads=False)
    pool.register_with_event_loop(hub)
    try:
        yield SimpleNamespace(hub=hub, pool=SimpleNamespace(_pool=pool))
    finally:
        pool.terminate()
        hub.close()


def test_a_waiting_task_is_written_to_the_idle_process_before_the_loop_goes_on(consumer: Any) -> None:
    pool, loop = consumer.pool._pool, consumer.hub.create_loop()
    deadline = time.monotonic() + 20
    while not pool._all_inqueues:
        assert time.monotonic() < deadline
        next(loop)
    answers: list[Any] = []
    for number in (-1, -2):
        pool.apply_async(abs, (number,), callback=answers.append)
    assert (len(pool.outbound_buffer), len(pool._busy_workers)) == (2, 0)

    begin_waiting(consumer)

    assert (len(pool.outbound_buffer), len(pool._busy_workers)) == (1, 1)
    begin_waiting(consumer)
    assert len(pool.outbound_buffer) == 1  # nobody is idle
    while len(answers) < 2:
        assert time.monotonic() < deadline
        next(loop)
    assert answers == [1, 2]
