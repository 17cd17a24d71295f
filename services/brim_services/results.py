"""Settling lost attempts: by the result that one has left in the result backend, if its function was over."""

from __future__ import annotations

import logging
import time
from datetime import datetime

from celery import Celery, states

from brim.core.model import AttemptView, Reason, State
from brim.store import Store
from brim.store.types import EndAnswer, LoseAnswer, Outcome, Record

log = logging.getLogger("brim.results")

TIMEOUT_S = 3.0
SLACK_S = 1.0
"""How much earlier than its finish claim a result may seem to be: clocks are set now and then, dates rounded."""

_ENDED = {states.SUCCESS: State.SUCCEEDED, states.FAILURE: State.FAILED, states.REVOKED: State.CANCELLED}
_REASON = Reason("result_found", "its executor died, or its end was lost, when its result was out already")


class Results:
    """Asks the result backend of the app, with short timeouts: an agent has a lease to renew."""

    def __init__(self, app: Celery, store: Store, max_attempts: int) -> None:
        app.conf.redis_socket_timeout = app.conf.redis_socket_connect_timeout = TIMEOUT_S
        self._app = app
        self._store = store
        self._max_attempts = max_attempts

    def settle(
        self, attempt: AttemptView, reason: Reason, *, counts: bool, over: bool = False, epoch: int | None = None
    ) -> EndAnswer | LoseAnswer:
        """End a lost attempt by the result that it has left, or else have its task placed again.

        ``over``: its function is known to be over, though the server may have forgotten the finish claim.
        ``epoch``: of the placement that says so, if it is one; see `Store.lose`.
        """
        outcome = self.outcome(attempt) if over or attempt.state is State.FINISHING else None
        if outcome is not None:
            return self._store.end(
                attempt.task_id, attempt.attempt, attempt.devices, outcome, executor=attempt.executor
            )
        return self._store.lose(attempt, reason, counts=counts, max_attempts=self._max_attempts, epoch=epoch)

    def outcome(self, attempt: AttemptView) -> Outcome | None:
        """How this attempt ended by its result; None where it has none, or that cannot be known."""
        record = self._store.record(attempt.task_id)
        if record is None:
            return None
        try:
            found = self._app.backend.get_task_meta(attempt.task_id, cache=False)
            state = _ENDED.get(found["status"])
            if state is None or not self._is_of(attempt, record, found.get("date_done")):
                return None
        except Exception as error:  # whatever a backend raises: the task is placed again
            log.warning("%s: the result backend cannot be asked: %s", attempt.task_id, error)
            return None
        return Outcome(state, _REASON, context_mib=attempt.context_mib)

    def _is_of(self, attempt: AttemptView, record: Record, done: str | datetime | None) -> bool:
        """Whether a result of this date is this attempt's; an earlier run may have left one.

        The date is by the clock of the machine that claimed the finish. Where that claim has been forgotten, only the
        agent of that machine asks.
        """
        if done is None:
            return False
        moment = datetime.fromisoformat(done) if isinstance(done, str) else done
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=self._app.timezone)
        if record.finisher_s is not None:
            return moment.timestamp() >= record.finisher_s - SLACK_S
        ahead_s = time.time() - self._store.server_ms() / 1000
        return moment.timestamp() >= (record.started_s or attempt.placed_s) + ahead_s - SLACK_S
