"""`brim.install`: the one line that a Celery app needs."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from celery import Celery

from .agent_link import WorkerIdentity
from .routing import IntakeRouter, check_broker


def install(app: Celery, tasks: Collection[str] = (), *, prefix: str = "brim:") -> None:
    """Route the app's GPU tasks through brim; in a worker that a node agent has started, run them for it.

    Tasks that have a profile in the published resource table, or carry a ``brim`` header, go to brim's
    intake; all others keep their queues. While no table is published yet, tasks named in ``tasks`` (names or
    globs) go to intake and wait there. ``prefix`` is the setting ``redis.prefix``. Call it once where the app is
    made; a second call replaces the first. Raises `brim.SetupError` for a broker other than Redis; where the
    app is not configured yet, publishing raises it.
    """
    router = IntakeRouter(tasks, prefix, app)
    add = partial(_add_router, app, router)
    configured: Any = app.on_after_configure
    configured.disconnect(dispatch_uid="brim.install")
    configured.connect(add, weak=False, dispatch_uid="brim.install")
    if app.configured:
        check_broker(app)
        add()
    identity = WorkerIdentity.read()
    if identity is not None:
        from .plugin import activate

        activate(app, identity)


def _add_router(app: Celery, router: IntakeRouter, source: Any = None, **_: Any) -> None:
    """Put the router before the user's own routes, once, whatever shape these have."""
    conf = app.conf if source is None else source
    routes = conf.task_routes
    if routes is None:
        routes = []
    elif not isinstance(routes, list | tuple):
        routes = [routes]
    conf.task_routes = [router, *(route for route in routes if not isinstance(route, IntakeRouter))]
