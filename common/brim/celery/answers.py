"""Terminal answers that brim itself gives, written into the result backend as a worker would have done.

They are written with the full request of the task, so that ``get()`` raises, ``link_error`` fires, and chains,
groups and chords around the task end (invariant 2). Writing one again changes nothing, so the outbox may be
drained at least once.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from celery import Celery, states
from celery.exceptions import TaskRevokedError

from brim.core.model import Reason, State
from brim.settings import Settings

from .envelope import request_context
from .errors import TaskRejected
from .install import install

REVOKED = frozenset({State.CANCELLED, State.EXPIRED})
"""These are answered as Celery answers for a revoked task; the others as for a failed one."""


def answering_app(settings: Settings) -> Celery:
    """An app of no tasks that speaks to the producers' broker and result backend."""
    broker = settings.broker
    app = Celery(
        "brim",
        broker=celery_url(settings.redis.url),
        backend=celery_url(settings.results_backend),
        set_as_current=False,
    )
    master = {"master_name": settings.redis.sentinel_master} if settings.redis.sentinel_master else {}
    app.conf.broker_transport_options = {
        "global_keyprefix": broker.global_keyprefix,
        "sep": broker.sep,
        "priority_steps": list(broker.priority_steps),
        **master,
    }
    app.conf.result_backend_transport_options = master
    app.conf.update(settings.results.app_options)
    install(app, prefix=settings.redis.prefix)
    return app


class Answers:
    """Writes answers; asked twice, it writes the same answer twice."""

    def __init__(self, settings: Settings) -> None:
        self._app = answering_app(settings)

    def write(self, task_id: str, state: State, reason: Reason, head: bytes, tail: bytes) -> None:
        """Answer for a task that ended ``dead``, ``cancelled`` or ``expired``.

        Without ``head`` and ``tail`` (the message could not be read) only the result itself is written.
        Raises what the result backend or the broker raise when they are away.
        """
        request = request_context(head, tail) if head else None
        revoked = state in REVOKED
        self._app.backend.mark_as_failure(
            task_id,
            TaskRevokedError(str(reason)) if revoked else TaskRejected(reason.code, reason.message),
            request=request,
            store_result=request is None or not request.ignore_result,
            state=states.REVOKED if revoked else states.FAILURE,
        )


def celery_url(url: str) -> str:
    """The address as Celery writes it: a Unix socket's scheme and database number have other names there."""
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return url
    database = dict(parse_qsl(parts.query)).get("db", "0")
    return f"redis+socket://{parts.netloc}{parts.path}?virtual_host={database}"
