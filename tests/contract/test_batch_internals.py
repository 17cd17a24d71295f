"""What model executors use of kombu's and Celery's insides: private names whose meaning could change under them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from celery import Celery
from celery.backends.redis import RedisBackend
from celery.states import FAILURE, SUCCESS
from kombu import Queue

from brim.celery.arrivals import take_rest
from brim.celery.consumer import flush
from brim.celery.results import Results
from support.celery_app import configure


@pytest.fixture
def app(valkey_url: str, namespace: str) -> Iterator[Celery]:
    app = configure(Celery("executor", set_as_current=False), valkey_url, namespace)
    yield app
    app.close()


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        yield client


def at_once(call: Any) -> Any:
    return call()


class TestMessages:
    """`Channel.global_keyprefix`, `Connection._deliver`: messages that the transport has not taken itself."""

    def test_the_rest_of_a_queue_reaches_the_consumer_in_order(self, app: Celery, client: redis.Redis) -> None:
        queue = Queue("rest", no_declare=False)
        got: list[Any] = []
        with app.connection_for_write() as connection:
            channel = connection.channel()
            producer = connection.Producer(channel)
            for number in range(3):
                producer.publish(number, routing_key="rest", declare=[queue], serializer="json")
            with connection.Consumer(
                [queue], channel=channel, callbacks=[lambda body, _: got.append(body)], no_ack=True
            ):
                take_rest(client, channel, "rest")
        assert got == [0, 1, 2]

    def test_what_was_not_delivered_stays_in_the_queue(self, app: Celery, client: redis.Redis, namespace: str) -> None:
        queue = Queue("rest")

        def fail(body: Any, _: Any) -> None:
            if body == 1:
                raise ConnectionError("gone")

        with app.connection_for_write() as connection:
            channel = connection.channel()
            producer = connection.Producer(channel)
            for number in range(4):
                producer.publish(number, routing_key="rest", declare=[queue], serializer="json")
            with (
                connection.Consumer([queue], channel=channel, callbacks=[fail], no_ack=True),
                pytest.raises(ConnectionError, match="gone"),
            ):
                take_rest(client, channel, "rest")
        left = [json.loads(raw)["body"] for raw in client.lrange(f"{namespace}rest", 0, -1)]  # type: ignore[union-attr]
        assert len(left) == 2


class TestEvents:
    """`EventDispatcher.on_send_buffered`, `._group_buffer`: events of many items are sent together."""

    def test_events_gather_until_they_are_flushed(self, app: Celery) -> None:
        sent: list[Any] = []
        with app.connection_for_write() as connection:
            dispatcher = app.events.Dispatcher(
                connection, hostname=socket.gethostname(), buffer_group={"task"}, buffer_limit=1000
            )
            dispatcher._publish = lambda events, *_, **__: sent.append(len(events))
            dispatcher.on_send_buffered = None
            for number in range(5):
                dispatcher.send("task-started", uuid=str(number))
            assert sent == []
            flush(dispatcher)
            flush(dispatcher)
            assert sent == [5]
            dispatcher.close()


class TestResults:
    """`RedisBackend.get`, `._set`, `._set_with_state`, `.expires`: what `Results.together` stands in for."""

    def listened(self, client: redis.Redis, keys: list[Any]) -> Any:
        pubsub = client.pubsub(ignore_subscribe_messages=True)
        pubsub.subscribe(*keys)
        for _ in keys:
            pubsub.get_message(timeout=5)
        return pubsub

    def test_they_are_stored_and_announced_as_one_by_one(self, app: Celery, client: redis.Redis) -> None:
        backend = app.backend
        keys = [backend.get_key_for_task(task_id) for task_id in ("a", "b", "c")]
        pubsub = self.listened(client, keys)
        with Results(app).together(["a", "b"], at_once):
            backend.mark_as_done("a", 1)
            backend.mark_as_failure("b", ValueError("no"))
            backend.mark_as_done("c", 3)
            assert [client.exists(key) for key in keys] == [0, 0, 1]
            assert backend.get_state("a") == SUCCESS
        assert [backend.get_state(task_id) for task_id in "abc"] == [SUCCESS, FAILURE, SUCCESS]
        assert backend.get_result("a") == 1
        assert [client.ttl(key) for key in keys[:2]] == [client.ttl(keys[2])] * 2
        told = [message["channel"] for _ in keys if (message := pubsub.get_message(timeout=5))]
        assert sorted(told) == sorted(keys)
        pubsub.close()

    def test_one_that_has_succeeded_already_is_not_overwritten(self, app: Celery) -> None:
        app.backend.mark_as_done("a", "first")
        with Results(app).together(["a"], at_once):
            app.backend.mark_as_failure("a", ValueError("late"))
        assert app.backend.get_result("a") == "first"

    def test_one_that_others_wait_for_is_stored_at_once(self, app: Celery, client: redis.Redis) -> None:
        results = Results(app)
        with results.together(["a"], at_once), results.apart(True):
            app.backend.mark_as_done("a", 1)
            assert client.exists(app.backend.get_key_for_task("a"))

    def test_they_are_stored_even_if_something_is_raised(self, app: Celery) -> None:
        with suppress(KeyError), Results(app).together(["a"], at_once):
            app.backend.mark_as_done("a", 1)
            raise KeyError
        assert app.backend.get_state("a") == SUCCESS

    def test_nothing_changes_outside(self, app: Celery, client: redis.Redis) -> None:
        with Results(app).together(["a"], at_once):
            pass
        assert isinstance(app.backend, RedisBackend)
        app.backend.mark_as_done("a", 1)
        assert client.exists(app.backend.get_key_for_task("a"))

    def test_other_backends_stay_as_they_are(self) -> None:
        app = Celery("m", backend="cache+memory://", broker="memory://", set_as_current=False)
        with app, Results(app).together(["a"], at_once):
            app.backend.mark_as_done("a", 1)
            assert app.backend.get_state("a") == SUCCESS
