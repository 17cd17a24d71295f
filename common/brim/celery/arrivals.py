"""Messages that lie in a worker's queue, taken and claimed together: the transport takes them one at a time.

A worker of one device takes whatever placement has put into its queue (ADR 0011). So the claim of the message that
has come brings the others along in the same step, and a second round trip claims those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery.utils.log import get_logger

from brim.store.types import ClaimAnswer

from .attempts import Attempts, refusal
from .envelope import HEADER, AttemptHeader, MalformedMessage, is_genuine

log = get_logger("brim.worker")

MOST_AT_ONCE = 64


class Arrivals:
    """The messages of a worker's queue; ``alone``: nobody else takes messages from it, or needs any.

    They are claimed when the pool has them, so that an idle executor does not wait for that: it claims what it begins
    itself, and is refused what is not the live attempt (ADR 0013).
    """

    def __init__(self, attempts: Attempts, queue: str, *, alone: bool) -> None:
        self._attempts = attempts
        self._queue = queue
        self._alone = alone
        self._unclaimed: list[tuple[str, AttemptHeader]] = []
        self._taken: list[Any] = []
        self._channel: Any = None
        self._delivering = False

    def accept(self, message: Any, attempt: AttemptHeader) -> bool:
        """Notes a message to be claimed; False if brim has not made it, where there is a key to tell by.

        Call `settle` when this message has been dealt with.
        """
        genuine = may_be_taken(message, attempt, self._attempts.key)
        if genuine:
            self._unclaimed.append((message.headers["id"], attempt))
            self._channel = message.channel
        return genuine

    def claim(self, *, take: bool = False) -> None:
        """The start claims of what has come; with them, what else lies in the queue may be taken."""
        unclaimed = list(self._unclaimed)
        if not unclaimed:
            return
        pairs = [(task_id, attempt.attempt) for task_id, attempt in unclaimed]
        if take:
            answers, raw = self._attempts.claim_and_take(pairs, key_of(self._channel, self._queue), MOST_AT_ONCE)
            self._taken += decoded(raw, self._queue)
        else:
            answers = self._attempts.claim_all(pairs)
        del self._unclaimed[: len(unclaimed)]
        for (task_id, attempt), answer in zip(unclaimed, answers, strict=True):
            if answer is not ClaimAnswer.GRANTED:
                refusal(attempt, task_id, "start", answer)

    def settle(self) -> None:
        """Claim what has come, and have the consumer deal with the messages that are taken with that."""
        if self._delivering:
            return
        self.claim(take=self._alone)
        if not self._taken:
            return
        self._delivering = True
        try:
            with putting_back(self._attempts.store.client, key_of(self._channel, self._queue), self._taken):
                deliver(self._channel, self._queue, self._taken)
            self.claim()
        finally:
            self._delivering = False
            self._taken = []


def may_be_taken(message: Any, attempt: AttemptHeader, key: bytes) -> bool:
    """Whether brim has made this message, where there is a key to tell by; said in the log if not."""
    genuine = is_genuine(message, key)
    if not genuine:
        told = "task %s[%s] is refused: intake and placement have not signed it as attempt %s"
        log.warning(told, message.headers["task"], message.headers["id"], attempt.attempt)
    return genuine


def attempt_of(headers: Mapping[str, Any]) -> AttemptHeader | None:
    """The attempt that a message's headers name, None where placement has not sent it."""
    try:
        return AttemptHeader.read(headers.get(HEADER) or {})
    except MalformedMessage:
        return None


def key_of(channel: Any, queue: str) -> str:
    """The key of a queue's list, as the transport has it."""
    return f"{channel.global_keyprefix}{queue}"


def take_rest(client: Any, channel: Any, queue: str) -> None:
    """Have the consumer deal with what else lies in a queue."""
    key = key_of(channel, queue)
    messages = decoded(client.rpop(key, MOST_AT_ONCE) or (), queue)
    with putting_back(client, key, messages):
        deliver(channel, queue, messages)


def decoded(raw: Iterable[bytes], queue: str) -> list[Any]:
    """Messages as the transport reads them; what is none, and could be no task, is let go."""
    found = []
    for text in raw:
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if isinstance(message, dict):
            found.append(message)
        else:
            log.error("what lies in %s is no message: %.200r", queue, text)
    return found


@contextmanager
def putting_back(client: Any, key: str, messages: list[Any]) -> Iterator[None]:
    """What is left of the messages when this ends goes back into the queue: something has ended the connection."""
    try:
        yield
    finally:
        if messages:
            client.rpush(key, *(json.dumps(message) for message in reversed(messages)))


def deliver(channel: Any, queue: str, messages: list[Any]) -> None:
    """Hand messages that were taken from a queue to its consumer, in order."""
    while messages:
        channel.connection._deliver(messages.pop(0), queue)
