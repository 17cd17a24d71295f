"""Which tasks go through brim: the router that `brim.install` adds to an app's ``task_routes``."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import redis
from celery import Celery, current_app
from celery.signals import before_task_publish
from kombu.compression import get_encoder
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.serialization import registry

from brim.core.attributes import BrimHeader, EstimateError
from brim.core.patterns import best_match
from brim.store import Store

from .envelope import COMPRESSIONS, HEADER, INTAKE_QUEUE, MEDIA_TYPES, BrokerLayout
from .errors import PublishRefused, SetupError

log = logging.getLogger("brim")

REFRESH_S = 5.0
"""How long a process believes the published profile names that it has read."""

_publishing: ContextVar[Celery | None] = ContextVar("brim_publishing", default=None)
"""The app whose message is being published; Celery's signal does not say."""


class IntakeRouter:
    """Sends tasks that have a profile, or carry a ``brim`` header, to the queue of brim's intake.

    The names of profiles are read from Redis, so that a producer needs no copy of the table. A queue or an
    exchange that the caller names wins. Picklable, because a worker's pool processes get the app's settings.
    """

    def __init__(self, tasks: Collection[str] = (), prefix: str = "brim:", app: Celery | None = None) -> None:
        self._tasks = tuple(tasks)
        self._prefix = prefix
        self._app = weakref.ref(app) if app is not None else None
        self._names: list[str] | None = None
        self._read_s = 0.0
        self._routes: dict[str, bool] = {}
        self._warned = False
        self._readable: set[tuple[Any, Any]] = set()
        """Serializer and compression, as options say them, of messages that the app's settings let intake read."""

    def __reduce__(self) -> tuple[type[IntakeRouter], tuple[tuple[str, ...], str]]:
        return (type(self), (self._tasks, self._prefix))

    def __call__(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        options: Mapping[str, Any],
        task: Any = None,
        **_: Any,
    ) -> dict[str, Any] | None:
        """Celery's question for the route of one message; None where the app's other routes decide.

        Raises `PublishRefused` for a brim task that intake could not read, `SetupError` for another broker.
        """
        app = self._app_of(task)
        _publishing.set(app)
        if options.get("queue") or options.get("exchange"):
            return None
        header = (options.get("headers") or {}).get(HEADER)
        if header is None and not self._is_ours(app, name):
            return None
        form = options.get("serializer"), options.get("compression")
        if form not in self._readable:
            check_form(app, name, *form)
            self._readable.add(form)
        if header is not None:
            check_header(name, header)
        declare_intake(app)
        return {"queue": INTAKE_QUEUE}

    def _app_of(self, task: Any) -> Celery:
        if task is not None:
            found: Celery = task.app
        else:
            found = (self._app() if self._app is not None else None) or current_app._get_current_object()
        return found

    def _is_ours(self, app: Celery, name: str) -> bool:
        if self._names is None or time.monotonic() - self._read_s > REFRESH_S:
            self._refresh(app)
        if name not in self._routes:
            self._routes[name] = best_match(name, self._names or self._tasks) is not None
            if not self._names and not self._warned:
                self._warned = True
                log.warning(
                    "no resource profiles are published yet: only tasks named in brim.install(app, tasks=...) "
                    "or carrying a %r header go through brim, the others keep their queues",
                    HEADER,
                )
        return self._routes[name]

    def _refresh(self, app: Celery) -> None:
        """Read the published names; old ones stand while the broker is away, then publishing fails anyway."""
        try:
            names = published_names(app, self._prefix)
        except (redis.RedisError, OperationalError, OSError):
            if self._names is None:
                raise
        else:
            if names != self._names:
                self._names, self._routes = names, {}
        self._read_s = time.monotonic()


def published_names(app: Celery, prefix: str) -> list[str]:
    """Names and globs of the profiles in the app's broker, read the way the app reaches its broker."""
    check_broker(app)
    layout = BrokerLayout.of(app.conf.broker_transport_options)
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0)
        # kombu's pool has everything that the app says about its broker: TLS, Sentinel, credentials, timeouts.
        client = redis.Redis(connection_pool=connection.default_channel.pool)
        return Store(client, layout.global_keyprefix + prefix).profile_names()


def check_broker(app: Celery) -> None:
    """Raises `SetupError` unless the app's broker is Redis, by a transport that kombu has for it."""
    connection = app.connection_for_write()
    if connection.transport.driver_type != "redis":
        raise SetupError(
            f"broker_url: brim needs Redis or Valkey as the broker (redis://, rediss:// or sentinel://), "
            f"not {connection.as_uri()}"
        )


def check_form(app: Celery, name: str, serializer: str | None, compression: str | None) -> None:
    """Raises `PublishRefused` if intake could not read the message, before it is published; None: as the app says."""
    serializer = serializer or app.conf.task_serializer
    if registry.name_to_type.get(serializer, serializer) not in MEDIA_TYPES:
        raise PublishRefused(
            f"{name}: serializer is {serializer!r}, but brim reads JSON and msgpack: set serializer='json' on the "
            f"task (or task_serializer in the app)"
        )
    compression = compression or app.conf.task_compression
    if compression and not _can_unpack(compression):
        raise PublishRefused(f"{name}: compression is {compression!r}, but brim reads gzip, bzip2 and lzma")
    if app.conf.task_protocol != 2:
        raise PublishRefused(f"{name}: task_protocol is {app.conf.task_protocol}, but brim reads protocol 2")


def check_header(name: str, header: object) -> None:
    """Raises `PublishRefused` for a ``brim`` header that says what it may not."""
    try:
        BrimHeader.parse(header)
    except EstimateError as error:
        raise PublishRefused(f"{name}: {error.reason.message}") from None


def _can_unpack(compression: str) -> bool:
    try:
        return get_encoder(compression)[1] in COMPRESSIONS
    except KeyError:
        return False


def declare_intake(app: Celery) -> None:
    """Make the intake queue known to an app, also one that must not create queues; no worker consumes it."""
    if INTAKE_QUEUE not in app.amqp.queues:
        app.amqp.queues.add(Queue(INTAKE_QUEUE, Exchange(INTAKE_QUEUE, type="direct"), routing_key=INTAKE_QUEUE))


def _give_times_an_offset(headers: dict[str, Any], routing_key: str, **_: Any) -> None:
    """Say in the message what a worker of the app would take for granted: a time without offset is the app's."""
    app = _publishing.get()
    _publishing.set(None)
    if app is None or routing_key != INTAKE_QUEUE:
        return
    for name in ("eta", "expires"):
        if headers.get(name):
            moment = datetime.fromisoformat(headers[name])
            if moment.tzinfo is None:
                headers[name] = moment.replace(tzinfo=app.timezone).isoformat()


before_task_publish.connect(_give_times_an_offset, dispatch_uid="brim.routing")
