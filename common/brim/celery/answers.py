"""Terminal answers that brim itself gives, written into the result backend as a worker would have done.

The request is rebuilt from the task's envelope, so that ``get()`` raises, ``link_error`` fires, and chains,
groups and chords end (invariant 2).
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.exceptions import TaskRevokedError
from celery.states import FAILURE, READY_STATES, REVOKED

from brim.celery.envelope import MalformedMessage, request_context
from brim.celery.errors import TaskRejected
from brim.core.model import Reason, State
from brim.settings import Settings


def answering_app(settings: Settings) -> Celery:
    """An app of no tasks that speaks to the producers' broker and result backend."""
    app = Celery("brim", broker=settings.redis.url, backend=settings.results_backend, set_as_current=False)
    prefix = {"global_keyprefix": settings.broker.global_keyprefix} if settings.broker.global_keyprefix else {}
    app.conf.update(
        broker_transport_options={
            **prefix,
            "sep": settings.broker.sep,
            "priority_steps": list(settings.broker.priority_steps),
        },
        result_backend_transport_options=prefix,
    )
    app.conf.update(settings.results.app_options)
    return app


class Answers:
    """Writes answers; asked twice, it writes the same answer twice."""

    def __init__(self, settings: Settings) -> None:
        self._app = answering_app(settings)

    def write(self, task_id: str, state: State, reason: Reason, head: bytes, tail: bytes) -> None:
        """Answers for a task that ended ``dead``, ``cancelled`` or ``expired``. Raises what the backend raises."""
        request = _context(task_id, head, tail)
        if state is State.DEAD:
            error: Exception = TaskRejected(reason.code, reason.message)
            self._app.backend.mark_as_failure(task_id, error, request=request, state=FAILURE)
        else:
            word = "expired" if state is State.EXPIRED else str(reason)
            self._app.backend.mark_as_failure(task_id, TaskRevokedError(word), request=request, state=REVOKED)

    def stored(self, task_id: str) -> str | None:
        """The final state that the result backend has for a task, or None while it has none."""
        found: Any = self._app.backend.get_task_meta(task_id, cache=False)
        return str(found["status"]) if found["status"] in READY_STATES else None


def _context(task_id: str, head: bytes, tail: bytes) -> Context:
    """The full request, or at least the id where the message could not be read."""
    try:
        return request_context(head, tail)
    except MalformedMessage:
        return Context({"id": task_id, "delivery_info": {}})
