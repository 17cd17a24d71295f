"""Messages that nobody can understand, and more of them than anybody can hold."""

from __future__ import annotations

import base64
import json
import time
import uuid
from typing import Any

import psutil
import pytest

from brim.core.model import Reason, State
from faults.town import Town
from support.waiting import within_s

BURST = 100_000
LEVEL1_LIMIT = 2_000
"""Of this cluster; see conftest."""


def envelope(town: Town, **changes: Any) -> tuple[str, bytes]:
    """A good message of a task, with some of its fields replaced."""
    task_id = str(uuid.uuid4())
    body = [[], {"mib": 300, "seconds": 0.0}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    message: dict[str, Any] = {
        "body": base64.b64encode(json.dumps(body).encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": "storm.work", "id": task_id, "root_id": task_id, "retries": 0},
        "properties": {
            "correlation_id": task_id,
            "reply_to": str(uuid.uuid4()),
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "brim.intake"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }
    for path, value in changes.items():
        place = message
        *folders, name = path.split("__")
        for folder in folders:
            place = place[folder]
        place[name] = value
    return task_id, json.dumps(message).encode()


def arguments(**kwargs: Any) -> str:
    """A body with these arguments."""
    return base64.b64encode(json.dumps([[], kwargs, {}]).encode()).decode()


def deep(levels: int) -> str:
    """A body of lists in lists."""
    return base64.b64encode(b"[[" + b"[" * levels + b"]" * levels + b"],{},{}]").decode()


POISON: dict[str, dict[str, Any]] = {
    "broken base64": {"body": "%%%"},
    "unknown content type": {"content-type": "application/x-yaml"},
    "pickle": {"content-type": "application/x-python-serialize"},
    "no arguments": {"body": arguments()},
    "strings": {"body": arguments(mib="many", seconds=0)},
    "negative": {"body": arguments(mib=-5, seconds=0)},
    "NaN": {"body": arguments(mib=float("nan"), seconds=0)},
    "huge number": {"body": arguments(mib=10**400, seconds=0)},
    "infinite": {"body": arguments(mib=1e308, seconds=0)},
    "deep nesting": {"body": deep(100_000)},
    "wrong header": {"headers__retries": "often"},
    "10 MB body": {"body": base64.b64encode(b"x" * 10_000_000).decode()},
}


@pytest.mark.parametrize("poison", sorted(POISON))
def test_poison_message(town: Town, poison: str) -> None:
    task_id, raw = envelope(town, **POISON[poison])
    town.store.client.lpush(f"{town.cluster.namespace}brim.intake", raw)
    good = town.publish("work", mib=300, seconds=0.0)

    town.wait_until(lambda: town.cluster.state(task_id) in (State.DEAD, State.FAILED), "it is given up")
    record = town.store.record(task_id)
    assert record is not None
    assert record.reason is not None
    assert record.reason.message
    result = town.app.AsyncResult(task_id)
    town.wait_until(result.ready, "its producer is answered")
    assert town.get(good) == 300


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"headers": 5}', b"[" * 100_000])
def test_poison_that_is_no_message(town: Town, raw: bytes) -> None:
    queue = f"{town.cluster.namespace}brim.intake"
    town.store.client.lpush(queue, raw)
    good = town.publish("work", mib=300, seconds=0.0)

    assert town.get(good) == 300
    town.wait_until(lambda: not town.store.client.llen(queue), "the queue is empty")
    newest = town.store.list_tasks(State.DEAD, 5)
    assert any(record.task_id.startswith("malformed-") for record in newest)
    town.wait_until(lambda: not town.store.client.llen(town.store.keys.outbox), "the outbox is empty")


def test_burst_of_100_000_messages(town: Town) -> None:
    """More than level 1 may hold: the rest stays in the broker, nobody grows, and the oldest are first."""
    client, queue = town.store.client, f"{town.cluster.namespace}brim.intake"
    services = [psutil.Process(town.cluster.pid(name)) for name in town.cluster.services]
    before_mib = [process.memory_info().rss >> 20 for process in services]
    go = town.gate()
    blocked = [town.publish("hold", mib=7000, go=str(go)) for _ in range(2)]
    for result in blocked:
        town.wait_for(result, State.RUNNING)
    ids = []
    known, pattern = envelope(town, body=arguments(mib=7000, seconds=0.0))
    for _ in range(BURST // 1000):
        some = [str(uuid.uuid4()) for _ in range(1000)]
        client.lpush(queue, *(pattern.replace(known.encode(), task_id.encode()) for task_id in some))
        ids += some

    town.wait_until(lambda: town.store.counts().get(State.WAITING, 0) >= LEVEL1_LIMIT, "level 1 is full", 60.0)
    time.sleep(1.0)

    assert town.store.counts()[State.WAITING] <= LEVEL1_LIMIT + 200
    assert client.llen(queue) >= BURST - LEVEL1_LIMIT - 200
    grown_mib = [(process.memory_info().rss >> 20) - mib for process, mib in zip(services, before_mib, strict=True)]
    assert max(grown_mib) < 100
    [lane] = town.store.lane_depths()
    assert town.store.lane_ids(lane, 50) == ids[:50]

    client.delete(queue)
    since = time.monotonic()
    for task_id in town.store.ids_in(State.WAITING):
        town.store.cancel(task_id, Reason("cancelled", "by the test"))
    town.wait_until(lambda: not client.llen(town.store.keys.outbox), "all have been answered", 60.0)
    assert time.monotonic() - since < within_s(60.0)
