"""The answerer: writes brim's own terminal answers into the result backend, at least once (invariant 2)."""

from __future__ import annotations

import logging
import threading

from tenacity import RetryCallState, Retrying, stop_when_event_set, wait_exponential_jitter
from tenacity.nap import sleep_using_event

from brim.celery.answers import Answers
from brim.settings import Settings
from brim.store import Store
from brim.store.connection import connect

log = logging.getLogger("brim.placement")

BATCH = 100
LOOK_S = 0.1


class Answerer:
    """A thread beside the active placement; a result backend that is away delays answers and nothing else."""

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        self.stop = stop
        self.active = threading.Event()
        self._store = Store(connect(settings.redis), settings.broker.global_keyprefix + settings.redis.prefix)
        self._answers = Answers(settings)

    def run(self) -> None:
        """Drains the outbox until ``stop``, while this placement is the active one."""
        patiently = Retrying(
            wait=wait_exponential_jitter(multiplier=0.1, max=5.0),
            stop=stop_when_event_set(self.stop),
            sleep=sleep_using_event(self.stop),
            before_sleep=lambda state: (
                log.warning("answers are delayed: %s", state.outcome and state.outcome.exception())
                if state.attempt_number == 1
                else None
            ),
        )
        while not self.stop.is_set():
            if not self.active.wait(1.0):
                continue
            if not patiently(self.drain):
                self.stop.wait(LOOK_S)

    def drain(self) -> int:
        """Writes the oldest answers; returns how many. Raises what the backend raises."""
        owed = self._store.owed(BATCH)
        for answer in owed:
            self._answers.write(answer.task_id, answer.state, answer.reason, answer.head, answer.tail)
            self._store.answered(answer)
        return len(owed)


def _say_once(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        log.warning("answers are delayed: %s", state.outcome.exception())
