"""What every side of the store shares: the client, the key names and the script runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from .keys import Keys
from .runner import Runner


class FencedError(Exception):
    """Another placement has taken over: stop deciding."""


class Base:
    """One connection pool, one set of key names. Redis errors pass through to the caller."""

    def __init__(self, client: redis.Redis, prefix: str = "brim:") -> None:
        # redis-py annotates its answers for decoded and undecoded clients at once; ours are always bytes.
        self.client: Any = client
        self.keys = Keys(prefix)
        self.runner = Runner(client)

    def drop_connection(self) -> None:
        """The connection that a ``single`` client keeps is made anew at its next use: it may be an old server's."""
        if self.client.connection is not None:
            self.client.connection.disconnect()

    def books_of(self, devices: Sequence[str], executor: str = "") -> list[str]:
        """Keys of the books that hold an attempt: those of its devices, or of the model executor whose item it is."""
        return [self.keys.executor(executor)] if executor else [self.keys.book(uuid) for uuid in devices]

    def server_ms(self) -> int:
        """The server's clock in ms: the only clock that leases are judged by."""
        whole, micros = self.client.time()
        return int(whole) * 1000 + int(micros) // 1000
