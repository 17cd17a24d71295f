"""Hearing of messages in several broker lists at once, in one thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from selectors import EVENT_READ, DefaultSelector, SelectorKey
from typing import Any

import redis

from .types import Peeked

ASKED_S = 1.0
"""How long the server leaves a question open before it answers that there is nothing."""


class Bells:
    """One connection per broker list, on which the server answers as soon as a message is there.

    Errors pass through to the caller, who calls `close` before it waits again.
    """

    def __init__(self, client: redis.Redis, lists: Sequence[str]) -> None:
        self._pool: Any = client.connection_pool
        self._lists = lists
        self._asked = DefaultSelector()
        """The connections on which an answer is awaited, each with its list and when it is overdue."""
        self._answered: list[SelectorKey] = []
        """Those of them on which it has come: they are seen to when the message is done with."""

    def wait(self, timeout_s: float) -> list[Peeked]:
        """The first message that comes within ``timeout_s``; call it only when the lists were empty.

        It is still in its list, unless another replica has been faster. Two that come at once are both returned.
        """
        self._release()
        self._heard(0.0)  # it came before the lists were found empty
        until_s = time.monotonic() + timeout_s
        while True:
            self._ask()
            left_s = until_s - time.monotonic()
            heard = self._heard(max(0.0, left_s))
            if heard or left_s <= 0:
                return heard

    def close(self) -> None:
        """Gives up what is asked; whoever waits again asks anew, on connections that work."""
        self._answered = list(self._asked.get_map().values())
        for given_up in self._answered:
            given_up.data[1].disconnect()
        self._release()

    def _ask(self) -> None:
        """Asks for a message of every list that is not asked for one. It moves onto itself, so nothing is moved."""
        self._release()
        now_s = time.monotonic()
        overdue_s = {key: late_s for key, _, late_s in (asked.data for asked in self._asked.get_map().values())}
        for key in self._lists:
            if key not in overdue_s:
                connection = self._pool.get_connection()
                late_s = now_s + ASKED_S + connection.socket_timeout
                self._asked.register(connection._get_socket(), EVENT_READ, (key, connection, late_s))
                connection.send_command("BLMOVE", key, key, "RIGHT", "RIGHT", ASKED_S)
            elif overdue_s[key] < now_s:
                raise redis.TimeoutError(f"no answer about {key!r}")

    def _heard(self, timeout_s: float) -> list[Peeked]:
        """The messages that the server answers with; waits for its first answers for ``timeout_s``."""
        found = []
        for answered, _ in self._asked.select(timeout_s):
            key, connection, _ = answered.data
            message = connection.read_response()
            self._answered.append(answered)
            if message is not None:
                found.append(Peeked(key, message))
        return found

    def _release(self) -> None:
        """Gives connections back to the pool, which sees to it that the one that is asked next still works."""
        for answered in self._answered:
            self._asked.unregister(answered.fileobj)
            self._pool.release(answered.data[1])
        self._answered.clear()
