"""The user's Celery app: loading it as Celery does, and checking that it and brim's settings go together."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from celery.app.utils import find_app
from celery.utils.imports import cwd_in_path
from kombu.exceptions import OperationalError
from kombu.utils.url import maybe_sanitize_url

from brim.celery.answers import answering_app, celery_url
from brim.celery.envelope import BrokerLayout
from brim.celery.errors import SetupError
from brim.celery.plugin import unpicklable_settings
from brim.celery.routing import IntakeRouter, check_broker
from brim.settings import ConfigurationError, Problem, Settings
from brim.store import Store
from brim.store.connection import address

APP = "the Celery app"
PROBE_S = 30
TIMEOUT_S = 5.0


def load_app(name: str) -> Celery:
    """The app as ``celery -A name`` finds it, with its tasks imported. Raises `ConfigurationError`."""
    try:
        with cwd_in_path():
            app = find_app(name)
            if not isinstance(app, Celery):
                raise ConfigurationError(Problem(f"-A {name}", "", f"this is no Celery app, but {type(app).__name__}"))
            app.loader.import_default_modules()
            app.finalize()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(Problem(f"-A {name}", "", f"the app cannot be loaded: {error}")) from error
    return app


def check_app(app: Celery, settings: Settings, store: Store) -> None:
    """Raises `ConfigurationError` with everything in which the app and brim's settings disagree."""
    try:
        check_broker(app)
    except SetupError as error:
        raise ConfigurationError(Problem(APP, "", str(error))) from error
    problems = [*_pickle_problems(app), *_broker_problems(app, settings), *_result_problems(app, settings)]
    problems = problems or [*_database_problems(app, settings, store)]
    if problems:
        raise ConfigurationError(*problems)


def _pickle_problems(app: Celery) -> Iterator[Problem]:
    for name, why in unpicklable_settings(app):
        yield Problem(APP, name, f"it cannot be pickled, as it must be for spawned pool processes: {why}")


def _broker_problems(app: Celery, settings: Settings) -> Iterator[Problem]:
    routes = app.conf.task_routes
    if not isinstance(routes, list | tuple) or not any(isinstance(route, IntakeRouter) for route in routes):
        yield Problem(APP, "", "brim.install(app) is missing: without it the workers do not know brim")
    options = app.conf.broker_transport_options
    theirs, ours = BrokerLayout.of(options), settings.broker
    for name in ("global_keyprefix", "sep", "priority_steps"):
        wanted, found = getattr(ours, name), getattr(theirs, name)
        if wanted != found:
            reason = f"{name} is {found!r}, but broker.{name} in brim's settings is {wanted!r}"
            yield Problem(APP, "broker_transport_options", reason)
    found_s, longest_s = options.get("visibility_timeout", 0), settings.placement.visibility_timeout_s
    if found_s > longest_s:
        reason = f"visibility_timeout is {found_s} s, longer than placement.visibility_timeout_s in brim's settings"
        yield Problem(APP, "broker_transport_options", f"{reason}, {longest_s:g} s")


def _result_problems(app: Celery, settings: Settings) -> Iterator[Problem]:
    backend, ours = app.conf.result_backend, celery_url(settings.results_backend)
    if not backend:
        return
    if _database(backend) != _database(ours):
        shown, answers = maybe_sanitize_url(backend), maybe_sanitize_url(ours)
        yield Problem(APP, "result_backend", f"it is {shown}, but brim would answer in {answers}: set results.backend")
    theirs = (app.conf.result_backend_transport_options or {}).get("global_keyprefix", "")
    wanted = (answering_app(settings).conf.result_backend_transport_options or {}).get("global_keyprefix", "")
    if theirs != wanted:
        reason = f"global_keyprefix is {theirs!r}, but brim would answer below {wanted!r}: set results.app_options"
        yield Problem(APP, "result_backend_transport_options", reason)


def _database_problems(app: Celery, settings: Settings, store: Store) -> Iterator[Problem]:
    """Whether the app's broker is brim's database, whatever the addresses look like: what one writes, both read."""
    key = f"{store.keys.prefix}probe:{secrets.token_hex(8)}"
    with app.connection_for_write() as connection:
        where = connection.as_uri()
        try:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=TIMEOUT_S)
            store.client.set(key, "1", ex=PROBE_S)
            # EXISTS is no command that kombu puts its global key prefix in front of.
            shared = connection.default_channel.client.execute_command("EXISTS", key)
        except OperationalError as error:
            yield Problem(APP, "broker_url", f"{where} does not answer: {error}")
            return
        finally:
            store.client.delete(key)
    if not shared:
        reason = f"{where} is another database than redis.url in brim's settings, {address(settings.redis.url)}"
        yield Problem(APP, "broker_url", f"{reason}: one script must be able to reserve memory and push the message")


def _database(url: str) -> tuple[Any, ...]:
    """What tells two result backends apart: for Redis host, port and database, else the whole address."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        return (url,)
    host = "127.0.0.1" if parts.hostname in (None, "localhost") else parts.hostname
    return (host, parts.port or 6379, int(parts.path.strip("/") or 0))
