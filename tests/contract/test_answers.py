"""Answers that brim gives itself, read back by the real Celery of a producer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

import brim
from brim.celery.answers import Answers
from brim.celery.envelope import INTAKE_QUEUE, parse, split
from brim.core.model import Reason, State
from brim.settings import Settings
from support.celery_app import configure, worker
from support.valkey import own_server

DEAD = Reason("unknown_profile", "no profile names the task 'segment'")
Reject = Callable[..., None]


@pytest.fixture
def settings(valkey_url: str, namespace: str) -> Settings:
    prefix = {"global_keyprefix": namespace}
    results = {"backend": valkey_url, "app_options": {"result_backend_transport_options": prefix}}
    return Settings.model_validate({"redis": {"url": valkey_url}, "broker": prefix, "results": results})


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture
def app(valkey_url: str, namespace: str) -> Iterator[Celery]:
    """A producer whose tasks all go to intake."""
    app = configure(Celery("producer", set_as_current=False), valkey_url, namespace)
    brim.install(app, tasks=["*"])
    yield app
    app.close()


@pytest.fixture
def reject(settings: Settings, client: redis.Redis, namespace: str) -> Reject:
    """Stand in for intake and the answerer: answer every message in the intake queue, twice, as an outbox may."""
    answers = Answers(settings)

    def reject(state: State = State.DEAD, reason: Reason = DEAD, only: str | None = None) -> None:
        messages: list[bytes] = client.lrange(f"{namespace}{INTAKE_QUEUE}", 0, -1)  # type: ignore[assignment]
        chosen = [raw for raw in reversed(messages) if only in (None, parse(raw).task)]
        assert chosen
        for raw in chosen:
            prepared = split(parse(raw))
            for _ in range(2):
                answers.write(parse(raw).identity.task_id, state, reason, prepared.head, prepared.tail)

    return reject


def test_get_raises_the_rejection_with_its_reason(app: Celery, reject: Reject) -> None:
    result = app.send_task("segment")

    reject()

    with pytest.raises(brim.TaskRejected, match="no profile names the task") as raised:
        result.get(timeout=5)
    assert raised.value.code == "unknown_profile"
    assert result.state == "FAILURE"


@pytest.mark.parametrize("state", [State.CANCELLED, State.EXPIRED])
def test_what_was_cancelled_or_expired_is_revoked(app: Celery, reject: Reject, state: State) -> None:
    result = app.send_task("segment")

    reject(state, Reason("test", "nobody wants it any more"))

    with pytest.raises(TaskRevokedError, match="nobody wants it any more"):
        result.get(timeout=5)
    assert result.state == "REVOKED"


def test_a_message_that_could_not_be_read_is_answered_by_its_id(app: Celery, settings: Settings) -> None:
    result = app.AsyncResult("t-1")

    Answers(settings).write("t-1", State.DEAD, Reason("malformed", "message: not JSON"), b"", b"")

    with pytest.raises(brim.TaskRejected, match="not JSON"):
        result.get(timeout=5)


def test_a_result_that_was_stored_already_stands(app: Celery, reject: Reject) -> None:
    result = app.send_task("segment")
    app.backend.store_result(result.id, 42, "SUCCESS")

    reject()

    assert result.get(timeout=5) == 42


def test_ignored_results_stay_ignored(app: Celery, reject: Reject) -> None:
    result = app.send_task("segment", ignore_result=True)

    reject()

    assert result.state == "PENDING"


def test_a_server_behind_a_unix_socket_is_reached(tmp_path: Path) -> None:
    socket = tmp_path / "v.sock"
    url = f"unix://{socket}?db=3"
    with own_server(unixsocket=str(socket)):
        answers = Answers(Settings.model_validate({"redis": {"url": url}}))

        answers.write("t-1", State.DEAD, DEAD, b"", b"")

        with redis.Redis.from_url(url) as client:
            assert client.exists("celery-task-meta-t-1")


def test_a_chain_ends_at_its_last_result(app: Celery, reject: Reject) -> None:
    result = chain(app.signature("segment"), app.signature("add", (1,)), app.signature("add", (2,))).apply_async()

    reject()

    with pytest.raises(brim.TaskRejected):
        result.get(timeout=5)
    assert result.parent.state == "FAILURE"


def test_a_group_ends(app: Celery, reject: Reject) -> None:
    results = group(app.signature("segment", (i,)) for i in range(3)).apply_async()

    reject()

    with pytest.raises(brim.TaskRejected):
        results.get(timeout=5)
    assert results.completed_count() == 0
    assert results.failed()


def test_a_chord_ends_when_its_parts_are_answered(app: Celery, reject: Reject) -> None:
    header = [app.signature("segment"), app.signature("other", (1,)), app.signature("other", (2,))]
    result = chord(header, app.signature("total")).apply_async()

    reject(only="other", state=State.CANCELLED)
    reject(only="segment")

    with pytest.raises(brim.TaskRejected):
        result.get(timeout=10)
    assert isinstance(result.result, ChordError)


def test_link_error_fires(
    app: Celery, reject: Reject, client: redis.Redis, valkey_url: str, namespace: str, tmp_path: Path
) -> None:
    errback: Any = app.signature("note", queue="errbacks", task_id=f"{namespace}errback")
    result = app.send_task("segment", link_error=[errback])

    reject()

    log = tmp_path / "plain.log"
    with worker("support.apps.plain", ["errbacks"], url=valkey_url, namespace=namespace, log_path=log):
        seen = app.AsyncResult(errback.options["task_id"]).get(timeout=20)
    assert seen["args"] == [result.id]
    assert json.loads(json.dumps(seen))["root_id"] == result.id
