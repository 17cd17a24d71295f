"""brim in a device's worker: what `brim.install` adds where a node agent has started the process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery, current_app
from celery.signals import celeryd_init, worker_init, worker_process_init, worker_shutting_down
from celery.utils.log import get_logger

from brim.core.attributes import TaskSignature
from brim.settings import Settings

from . import consumer, executor
from .agent_link import EXECUTOR, WorkerIdentity, WorkerSide
from .attempts import Attempts
from .batch_task import BatchTask
from .model_executor import ModelExecutor

log = get_logger("brim.worker")

MAIN_PATIENCE_S = 10.0
"""How long the main process waits for Redis before it gives an attempt up to its agent."""

CHILD_START_S = 300.0
"""A spawned executor imports the user's code, often a whole framework; Celery would give it four seconds."""


def activate(app: Celery, identity: WorkerIdentity) -> None:
    """Make this process a part of the device's worker: its main process or one of its executors."""
    WorkerSide(identity).attach()
    handlers = ((celeryd_init, _on_configured), (worker_init, _on_worker), (worker_process_init, _on_executor))
    for signal, handler in handlers:
        signal.connect(_or_exit(partial(handler, identity)), weak=False, dispatch_uid=f"brim.{handler.__name__}")


def registration(app: Celery) -> tuple[list[str], dict[str, TaskSignature]]:
    """The names of an app's tasks, and the signatures of those that have one that can be read."""
    app.loader.import_default_modules()
    names = sorted(app.tasks)
    signatures: dict[str, TaskSignature] = {}
    for name in names:
        try:
            signatures[name] = _signature(app.tasks[name])
        except (TypeError, ValueError):
            continue
    return names, signatures


def _signature(task: Any) -> TaskSignature:
    return task.parameters() if isinstance(task, BatchTask) else TaskSignature.from_callable(task.run)


def unpicklable_settings(app: Celery) -> list[tuple[str, str]]:
    """What of an app cannot be sent to spawned pool processes: (setting, why), for an error message."""
    app.conf.task_routes  # noqa: B018  (reads the configuration)
    parts = app.__reduce_keys__()
    settings = parts.pop("changes")
    parts["config_from_object(...)"] = parts.pop("config_source")
    return [
        (name, why) for name, value in {**parts, **settings}.items() if (why := _why_unpicklable(value)) is not None
    ]


def _why_unpicklable(value: Any) -> str | None:
    try:
        pickle.dumps(value)
    except Exception as error:  # any code of the value's own may run here
        return f"{type(error).__name__}: {error}"
    return None


def _or_exit(handler: Callable[..., None]) -> Callable[..., None]:
    """Celery goes on when a signal's handler fails; without brim's claims a worker must not take a task."""

    def handle(**arguments: Any) -> None:
        try:
            handler(**arguments)
        except Exception as error:
            log.exception("brim cannot work in this process")
            raise SystemExit(f"brim cannot work in this process: {error}") from None

    return handle


def _on_configured(identity: WorkerIdentity, conf: Any, **_: Any) -> None:
    """Settings of the worker, whatever the user's app says; its pool processes get them as well."""
    queue = identity.queue
    if Settings.load().executor.recycle == "after_task":
        conf.worker_max_tasks_per_child = 1
    conf.update(
        worker_proc_alive_timeout=max(conf.worker_proc_alive_timeout or 0.0, CHILD_START_S),
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_enable_prefetch_count_reduction=False,
        broker_transport_options={
            **conf.broker_transport_options,
            "unacked_key": f"unacked.{queue}",
            "unacked_index_key": f"unacked_index.{queue}",
            "unacked_mutex_key": f"unacked_mutex.{queue}",
        },
    )


def _on_worker(identity: WorkerIdentity, sender: Any, **_: Any) -> None:
    """The worker's main process: options that the command line's own defaults would win over, and brim's step."""
    sender.pool_start_method = "spawn"
    sender.task_events = True
    sender.disable_rate_limits = True
    name = os.environ.get(EXECUTOR)
    if name is not None:
        _become_executor(identity, name, sender)
        return
    sender.prefetch_multiplier = 1
    fields = _fields(identity, Attempts(identity, Settings.load(), MAIN_PATIENCE_S))
    sender.app.steps["consumer"].add(type("BrimStep", (consumer.BrimStep,), fields))


def _fields(identity: WorkerIdentity, attempts: Attempts) -> dict[str, Any]:
    """What brim's step in the consumer knows of this worker."""
    return {
        "attempts": attempts,
        "queue": identity.queue,
        "devices": identity.devices,
        "__module__": consumer.__name__,
    }


def _become_executor(identity: WorkerIdentity, name: str, sender: Any) -> None:
    """This worker is a model executor: it loads its model now, and takes items when it consumes."""
    # As many as placement commits: both task sets, and what is computed.
    sender.prefetch_multiplier = 0
    attempts = Attempts(identity, Settings.load())
    model = ModelExecutor(sender.app, name, identity.queue, identity.boot, attempts, sender.hostname)
    model.begin()
    worker_shutting_down.connect(lambda **_: model.drain(), weak=False, dispatch_uid="brim.drain")
    fields = {**_fields(identity, attempts), "executor": model}
    sender.app.steps["consumer"].add(type("BrimStep", (consumer.ExecutorStep,), fields))


def _on_executor(identity: WorkerIdentity, sender: str, **_: Any) -> None:
    """A pool process is up."""
    app: Celery = current_app._get_current_object()
    executor.prepare(app, sender, Attempts(identity, Settings.load(), alone=True))
