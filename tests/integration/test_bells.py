"""What tells intake of messages, on a real server: when one comes into an empty list, then it is heard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from brim.store import Store
from brim.store.bells import Bells
from brim.store.types import Peeked
from support.valkey import own_server, url_of
from support.waiting import wait_until


@pytest.fixture
def store(valkey_url: str, namespace: str) -> Iterator[Store]:
    with redis.Redis.from_url(valkey_url, socket_timeout=0.2) as client:
        yield Store(client, f"{namespace}brim:")
        if keys := client.keys(f"{namespace}*"):
            client.delete(*keys)


@pytest.fixture
def lists(namespace: str) -> list[str]:
    return [f"{namespace}urgent", f"{namespace}usual"]


@pytest.fixture
def bells(store: Store, lists: list[str]) -> Iterator[Bells]:
    bells = store.bells(lists)
    yield bells
    bells.close()


def test_a_message_in_any_list_is_heard_and_stays_there(bells: Bells, store: Store, lists: list[str]) -> None:
    assert bells.wait(0.01) == []
    for key in reversed(lists):
        store.client.lpush(key, "first", "second")
        assert bells.wait(20) == [Peeked(key, b"first")]
        assert store.client.lrange(key, 0, -1) == [b"second", b"first"]
        store.client.delete(key)


def test_what_was_heard_before_the_lists_were_found_empty_does_not_count(
    bells: Bells, store: Store, lists: list[str]
) -> None:
    assert bells.wait(0.0) == []
    store.client.lpush(lists[0], "old")
    assert store.client.lpop(lists[0]) == b"old"
    assert bells.wait(0.05) == []
    store.client.lpush(lists[0], "new")
    assert bells.wait(20) == [Peeked(lists[0], b"new")]


def test_a_connection_lost_while_waiting_is_told_and_then_made_anew(
    bells: Bells, store: Store, lists: list[str]
) -> None:
    assert bells.wait(0.0) == []
    waiting = [client["id"] for client in store.client.client_list() if "b" in client["flags"]]
    for number in waiting:
        store.client.client_kill_filter(_id=number)
    with pytest.raises(redis.ConnectionError):
        bells.wait(20)
    bells.close()
    store.client.lpush(lists[1], "message")
    assert bells.wait(20) == [Peeked(lists[1], b"message")]


def test_a_server_that_never_answers_is_an_outage(lists: list[str]) -> None:
    with own_server() as server, redis.Redis.from_url(url_of(server), socket_timeout=0.2) as client:
        bells = Store(client).bells(lists)
        assert bells.wait(0.0) == []
        client.client_pause(60_000)
        with pytest.raises(redis.TimeoutError):
            wait_until(lambda: bells.wait(0.2), what="a message")
        bells.close()


def test_connections_that_the_server_has_closed_while_nobody_waited_are_made_anew(lists: list[str]) -> None:
    with own_server(timeout="1") as server, redis.Redis.from_url(url_of(server)) as client:
        bells = Store(client).bells(lists)
        assert bells.wait(0.0) == []
        client.lpush(lists[0], "message")
        client.delete(lists[0])

        def alone() -> bool:
            return len(client.client_list()) == 1

        wait_until(alone, what="the server has closed all idle connections but this one")
        client.lpush(lists[0], "message")
        assert bells.wait(20) == [Peeked(lists[0], b"message")]
        bells.close()


def test_a_kept_connection_that_is_dropped_is_made_anew(store: Store, valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url, single_connection_client=True) as client:
        keeps = Store(client, store.keys.prefix)
        store.client.client_kill_filter(_id=client.client_id())
        keeps.drop_connection()
        assert keeps.signatures() == {}
