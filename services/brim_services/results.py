"""Settling lost attempts: by the result that one has left in the result backend, if its function was over."""

from __future__ import annotations

import logging
import time
from datetime import datetime

from celery import Celery, states

from brim.core.model import AttemptView, Reason, State
from brim.store import Store
from brim.store.types import EndAnswer, LoseAnswer, Outcome

log = logging.getLogger("brim.results")

TIMEOUT_S = 3.0
SLACK_S = 1.0
"""How much earlier than its finish claim a result may seem to be, by two clocks and their rounding."""

_ENDED = {states.SUCCESS: State.SUCCEEDED, states.FAILURE: State.FAILED, states.REVOKED: State.CANCELLED}
_REASON = Reason("result_found", "its executor died when its result was out already")


class Results:
    """Asks the result backend of the app, with short timeouts: an agent has a lease to renew."""

    def __init__(self, app: Celery, store: Store, max_attempts: int) -> None:
        app.conf.redis_socket_timeout = app.conf.redis_socket_connect_timeout = TIMEOUT_S
        self._app = app
        self._store = store
        self._max_attempts = max_attempts

    def settle(
        self, attempt: AttemptView, reason: Reason, *, counts: bool, epoch: int | None = None
    ) -> EndAnswer | LoseAnswer:
        """End a lost attempt by the result that it has left, or else have its task placed again.

        ``epoch``: of the placement that says so, if it is one; see `Store.lose`.
        """
        outcome = self.outcome(attempt) if attempt.state is State.FINISHING else None
        if outcome is not None:
            return self._store.end(attempt.task_id, attempt.attempt, attempt.devices, outcome)
        return self._store.lose(attempt, reason, counts=counts, max_attempts=self._max_attempts, epoch=epoch)

    def outcome(self, attempt: AttemptView) -> Outcome | None:
        """How this attempt ended by its result; None where it has none, or that cannot be known."""
        record = self._store.record(attempt.task_id)
        if record is None or record.finished_s is None:
            return None
        try:
            found = self._app.backend.get_task_meta(attempt.task_id, cache=False)
            state = _ENDED.get(found["status"])
            if state is None or self._server_s(found.get("date_done")) < record.finished_s - SLACK_S:
                return None  # no result, or that of an earlier run
        except Exception as error:  # whatever a backend raises: the task is placed again
            log.warning("%s: the result backend cannot be asked: %s", attempt.task_id, error)
            return None
        return Outcome(state, _REASON, context_mib=attempt.context_mib)

    def _server_s(self, done: str | datetime | None) -> float:
        """When a worker of this machine wrote a result, by Redis's clock."""
        if done is None:
            return 0.0
        moment = datetime.fromisoformat(done) if isinstance(done, str) else done
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=self._app.timezone)
        return moment.timestamp() + self._store.server_ms() / 1000 - time.time()
