"""When a task's result may be stored with its end (ADR 0012): what else follows, and where the result backend is."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from celery import Celery, signals

from brim.celery.executor import follows
from brim.celery.results import Results


@pytest.mark.parametrize(
    ("backend", "store", "is_kept"),
    [
        ("redis://host", "redis://host:6379/0", True),
        ("redis://host:6380/2", "redis://host:6380/2", True),
        ("redis://me:word@host/1", "redis://me:word@host/1", True),
        ("redis://host/1", "redis://host/0", False),
        ("redis://host:6380", "redis://host", False),
        ("redis://other", "redis://host", False),
        ("redis://me:word@host", "redis://host", False),
        ("redis+socket:///run/redis.sock", "unix:///run/redis.sock?db=0", True),
        ("cache+memory://", "redis://host", False),
        ("rpc://", "redis://host", False),
    ],
)
def test_a_result_is_kept_only_where_its_backend_is_the_store_itself(backend: str, store: str, is_kept: bool) -> None:
    app = Celery("kept", broker="memory://", backend=backend, set_as_current=False)
    with redis.Redis.from_url(store) as client, Results(app).kept("1", client) as kept:
        assert (kept is not None) == is_kept


@pytest.mark.parametrize("name", ["callbacks", "errbacks", "chain", "chord"])
def test_whatever_a_message_has_to_be_called_follows(name: str) -> None:
    assert follows({name: [{"task": "next"}]})
    assert not follows({name: None})


@pytest.mark.parametrize("signal", [signals.task_success, signals.task_postrun])
def test_a_receiver_may_look_for_the_result(signal: Any) -> None:
    def receive(**_: Any) -> None:
        pass

    signal.connect(receive)
    try:
        assert follows({})
    finally:
        signal.disconnect(receive)
    assert not follows({})
