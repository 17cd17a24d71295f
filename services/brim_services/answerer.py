"""The answerer: writes brim's own terminal answers into the result backend, at least once (invariant 2)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from tenacity import RetryCallState, RetryError, Retrying, stop_when_event_set, wait_exponential_jitter
from tenacity.nap import sleep_using_event

from brim.celery.answers import Answers, answering_app
from brim.core.model import AttemptView, Reason, State
from brim.settings import Settings
from brim.store import FencedError, Store

from .results import Results

log = logging.getLogger("brim.placement")

BATCH = 100
LOOK_S = 0.1


class Answerer:
    """A thread beside the active placement, and the only one that talks to the result backend.

    A backend that is away delays answers and nothing else. ``told`` hears of each answer that was written.
    """

    def __init__(
        self, settings: Settings, stop: threading.Event, told: Callable[[str, State, Reason], None] = lambda *_: None
    ) -> None:
        self.stop = stop
        self._told = told
        self.active = threading.Event()
        self._store = Store.of(settings)
        self._answers = Answers(settings)
        self._results = Results(answering_app(settings), self._store, settings.placement.max_attempts)
        self._lost: dict[str, tuple[AttemptView, Reason, int]] = {}

    def settle_later(self, attempt: AttemptView, reason: Reason, epoch: int) -> None:
        """Notes an attempt that was lost after its finish claim: its result may be out already."""
        self._lost[attempt.attempt] = (attempt, reason, epoch)

    def run(self) -> None:
        """Drains the outbox until ``stop``, while this placement is the active one."""
        patiently = Retrying(
            wait=wait_exponential_jitter(multiplier=0.1, max=5.0),
            stop=stop_when_event_set(self.stop),
            sleep=sleep_using_event(self.stop),
            before_sleep=_say_once,
        )
        while not self.stop.is_set():
            if not self.active.wait(1.0):
                continue
            with suppress(RetryError):  # told to stop while the backend was away
                if not patiently(self.drain):
                    self.stop.wait(LOOK_S)

    def drain(self) -> int:
        """Writes the oldest answers and settles lost attempts; returns how many.

        One that cannot be written does not hold up the others. Raises what the backend raised last.
        """
        failure: Exception | None = None
        owed = self._store.owed(BATCH)
        for answer in owed:
            try:
                self._answers.write(answer.task_id, answer.state, answer.reason, answer.head, answer.tail)
            except Exception as error:
                log.debug("%s could not be answered: %s", answer.task_id, error)
                failure = error
            else:
                self._store.answered(answer)
                self._told(answer.task_id, answer.state, answer.reason)
        lost = list(self._lost)
        for name in lost:
            self._settle(name)
        if failure is not None:
            raise failure
        return len(owed) + len(lost)

    def _settle(self, name: str) -> None:
        attempt, reason, epoch = self._lost[name]
        with suppress(FencedError):
            self._results.settle(attempt, reason, counts=True, epoch=epoch)
        del self._lost[name]


def _say_once(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        log.warning("answers are delayed: %s", state.outcome.exception())
