"""An app that uses what Celery offers. `build` makes it with or without brim; nothing else in it differs.

A worker reads from its environment which one it serves. Tasks say what they do by `note`, for the test to read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import redis
from celery import Celery, Task, chord, group, shared_task, signals
from celery.contrib.abortable import AbortableTask
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

import brim
from support.celery_app import BROKER_ENV, NAMESPACE_ENV

WITH_BRIM_ENV, RESULTS_ENV, VARIANT_ENV = "BRIM_TEST_WITH_BRIM", "BRIM_TEST_RESULTS", "BRIM_TEST_VARIANT"
TABLE = """
profiles:
  compat.*: {vram: 50, context_mib: 300, margin: 1.0}
"""
"""Everything has a profile but the tasks named ``plain.*``."""


def notes_key(task_id: str) -> str:
    """Where a task's notes are."""
    return f"{os.environ.get(NAMESPACE_ENV, '')}notes:{task_id}"


def note(task_id: str, what: str) -> None:
    """Tell the test that something happened."""
    with redis.Redis.from_url(os.environ[BROKER_ENV]) as client:
        client.rpush(notes_key(task_id), what)


class Base(Task):
    """A team's own base class, with every hook that Celery has."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        note(task_id, "before_start")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        note(task_id, f"on_success {retval!r}")

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        note(task_id, f"on_failure {exc!r}")

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        note(task_id, f"on_retry {exc!r}")

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        note(task_id, f"after_return {status}")


class Doubled(Task):
    """Its `__call__` adds to what the function does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.run(*args, **kwargs)


class ByClass(Task):
    """A task written as a class."""

    name = "compat.by_class"

    def run(self, x: int, *, y: int = 1) -> int:
        return x + y


@shared_task(name="compat.shared")
def shared(x: int) -> int:
    return x + 1


@shared_task(name="compat.shared_bound", bind=True)
def shared_bound(self: Task, x: int) -> list[Any]:
    return [self.name, x]


def register(app: Celery) -> None:
    """Put the tasks into an app."""

    def task(name: str, **options: Any) -> Any:
        return app.task(name=name, shared=False, **options)

    app.register_task(ByClass())

    @task("compat.add")
    def add(x: Any, y: Any) -> Any:
        return x + y

    @task("compat.total")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @task("compat.fail")
    def fail(text: str = "on purpose") -> None:
        raise ValueError(text)

    @task("plain.add")
    def plain_add(x: Any, y: Any) -> Any:
        return x + y

    @task("plain.where", bind=True)
    def where(self: Task) -> str:
        return str(self.request.delivery_info["routing_key"])

    @task("compat.bound", bind=True)
    def bound(self: Task, *args: Any, **kwargs: Any) -> dict[str, Any]:
        request = self.request
        return {
            "args": args,
            "kwargs": kwargs,
            "retries": request.retries,
            "is_eager": request.is_eager,
            "expires": bool(request.expires),
            "timelimit": request.timelimit,
            "own_root": request.root_id == request.id,
            "parent": request.parent_id is not None,
            "custom": getattr(request, "custom", None),
            "priority": request.delivery_info.get("priority"),
            "stamps": getattr(request, "stamps", None),
            "shown": getattr(request, "argsrepr", None),
            "correlated": request.correlation_id == request.id,
            "ignore_result": request.ignore_result,
        }

    @task("compat.hooked", base=Base, bind=True, max_retries=1)
    def hooked(self: Task, how: str) -> str:
        note(self.request.id, f"run {how}")
        if how == "fail":
            raise KeyError("no such thing")
        if how == "retry" and not self.request.retries:
            raise self.retry(exc=ValueError("again"), countdown=1)
        if how == "ignore":
            raise Ignore("nothing to say")
        return how

    @task("compat.doubled", base=Doubled)
    def doubled(x: int) -> int:
        return x

    @task("compat.auto", autoretry_for=(ValueError,), max_retries=2, retry_backoff=0, default_retry_delay=0, bind=True)
    def auto(self: Task, succeed_at: int) -> int:
        note(self.request.id, f"try {self.request.retries}")
        if self.request.retries < succeed_at:
            raise ValueError(f"not at {self.request.retries}")
        return int(self.request.retries)

    @task("compat.untyped", typing=False)
    def untyped(x: int) -> int:
        return x

    @task("compat.progress", bind=True)
    def progress(self: Task, until: str) -> str:
        self.update_state(state="PROGRESS", meta={"done": 3, "of": 7})
        _wait_for(until)
        return "done"

    @task("compat.reject", bind=True)
    def reject(self: Task) -> None:
        note(self.request.id, "run")
        raise Reject("unwanted", requeue=False)

    @task("compat.soft", soft_time_limit=0.3)
    def soft(catch: bool) -> str:
        try:
            time.sleep(20)
        except SoftTimeLimitExceeded:
            if catch:
                return "in time"
            raise
        return "too late"

    @task("compat.hard", time_limit=0.6)
    def hard() -> None:
        time.sleep(20)

    @task("compat.signalled", bind=True)
    def signalled(self: Task, how: str) -> str:
        if how == "fail":
            raise ValueError("on purpose")
        if how == "retry" and not self.request.retries:
            raise self.retry(countdown=0)
        return how

    @task("compat.replace", bind=True)
    def replace(self: Task, signature: dict[str, Any]) -> Any:
        return self.replace(app.signature(signature))

    @task("compat.replace_by_chord", bind=True)
    def replace_by_chord(self: Task, n: int) -> Any:
        return self.replace(chord((add.s(i, i) for i in range(n)), total.s()))

    @task("compat.grow_chord", bind=True)
    def grow_chord(self: Task, x: int) -> int:
        if x < 3:
            self.add_to_chord(add.s(x, 100))
        return x

    @task("compat.spawn", bind=True)
    def spawn(self: Task, n: int) -> str:
        group(add.s(i, i) for i in range(n)).apply_async()
        add.delay(0, n)
        return "spawned"

    @task("compat.abortable", base=AbortableTask, bind=True)
    def abortable(self: Any, until: str) -> str:
        note(self.request.id, "run")
        _wait_for(until)
        return "aborted" if self.is_aborted() else "not aborted"

    @task("compat.hold")
    def hold(until: str) -> str:
        _wait_for(until)
        return "let go"

    @task("compat.quiet", ignore_result=True, bind=True)
    def quiet(self: Task) -> str:
        note(self.request.id, "run")
        return "nobody hears this"

    @task("compat.note", bind=True)
    def take_note(self: Task, *args: Any, of: str) -> None:
        note(of, repr(args))

    @task("compat.error_note")
    def error_note(request: Any, exc: Any, traceback: Any, of: str = "") -> None:
        note(of, f"{type(request).__name__} {exc!r} {'Traceback' in str(traceback)}")

    @task("compat.old_error_note")
    def old_error_note(task_id: str, of: str = "") -> None:
        note(of, "old style")

    @task("compat.chain_in_task", bind=True)
    def chain_in_task(self: Task, x: int) -> Any:
        raise self.replace(add.s(x, 1) | add.s(10) | group(add.s(1), add.s(2)) | total.s())

    @task("compat.unserialisable")
    def unserialisable() -> Any:
        return object()

    @task("compat.unraisable")
    def unraisable() -> None:
        class LocalError(Exception):
            def __init__(self, a: int, b: int) -> None:
                super().__init__(f"{a} and {b}")

        raise LocalError(1, 2)


def _wait_for(key: str, most_s: float = 20.0) -> None:
    with redis.Redis.from_url(os.environ[BROKER_ENV]) as client:
        deadline = time.monotonic() + most_s
        while not client.exists(key) and time.monotonic() < deadline:
            time.sleep(0.02)


class PlainRouter:
    """A team's own router: what is plain has a queue of its own."""

    def route_for_task(self, task: str, *args: Any, **kwargs: Any) -> Any:
        return {"queue": "elsewhere"} if task == "plain.where" else None


class Variant(StrEnum):
    """How the app is set up."""

    REDIS = "redis"
    """Results in Redis, JSON, a separator and priority steps of its own."""
    DJANGO = "django"
    """Settings in the style of Django's, results in files, msgpack."""
    DATABASE = "database"
    """Results in a database, by SQLAlchemy."""
    RPC = "rpc"
    """Results sent to the producer as messages."""


def build(url: str, namespace: str, variant: Variant, results: str, *, with_brim: bool) -> Celery:
    """The app; ``results`` is the address of its result backend."""
    app = Celery("compat", set_as_current=False)
    prefix = {"global_keyprefix": namespace}
    settings: dict[str, Any] = {
        "broker_url": url,
        "result_backend": results,
        "broker_transport_options": prefix,
        "result_backend_transport_options": prefix,
        "broker_connection_retry_on_startup": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "task_default_queue": "compat",
        "task_routes": [PlainRouter(), {"plain.named": {"queue": "elsewhere"}}],
        "task_track_started": True,
        "task_send_sent_event": True,
        "result_extended": True,
        "accept_content": ["json", "msgpack"],
        "database_short_lived_sessions": True,
    }
    if variant is Variant.DJANGO:
        settings["task_serializer"] = "msgpack"
        names = {f"CELERY_{name.upper()}": value for name, value in settings.items()}
        app.config_from_object(SimpleNamespace(**names), namespace="CELERY")
    else:
        settings["broker_transport_options"] = {**prefix, "sep": ":", "priority_steps": [0, 5, 9]}
        app.conf.update(settings)
    if with_brim:
        brim.install(app)
    register(app)
    return app


def _signal(event: str) -> Callable[..., None]:
    def handle(sender: Any = None, task_id: str = "", **_: Any) -> None:
        if getattr(sender, "name", "") == "compat.signalled":
            note(task_id or sender.request.id, event)

    return handle


if WITH_BRIM_ENV in os.environ:
    for _name in ("prerun", "postrun", "success", "failure", "retry"):
        getattr(signals, f"task_{_name}").connect(_signal(_name), weak=False)
    app = build(
        os.environ[BROKER_ENV],
        os.environ[NAMESPACE_ENV],
        Variant(os.environ[VARIANT_ENV]),
        os.environ[RESULTS_ENV],
        with_brim=os.environ[WITH_BRIM_ENV] == "yes",
    )
