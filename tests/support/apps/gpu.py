"""A Celery app with brim whose tasks end in every way that a task can end."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

import brim
from brim.gpu import simulated
from support.celery_app import configure

app = configure(Celery("gpu", set_as_current=False))
brim.install(app, tasks=["*"])
KEPT: list[Any] = []


class ArrayMemoryError(MemoryError):
    """As frameworks derive theirs."""


class WithHooks(Task):
    """A user's own base class, with everything overridden that brim wraps."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["called", super().__call__(*args, **kwargs)]

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if "refuse" in args:
            raise ValueError("before_start refuses")


@app.task(name="add")
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="hooked", base=WithHooks)
def hooked(value: str) -> str:
    return value


@app.task(name="inline")
def inline() -> int:
    """Calls another task and itself as functions."""
    return int(add(1, 2)) + int(add.run(3, 4))


@app.task(name="keep")
def keep(mib: int) -> int:
    """Leaves memory behind in its executor."""
    KEPT.append(simulated.allocate(mib))
    return os.getpid()


@app.task(name="progress", bind=True)
def progress(self: Any) -> str:
    """Stores a state of its own before its result."""
    self.update_state(state="HALFWAY", meta={"done": 1})
    return "all the way"


@app.task(name="fail")
def fail(text: str = "on purpose") -> None:
    raise ValueError(text)


@app.task(name="out_of_memory")
def out_of_memory() -> None:
    raise ArrayMemoryError("Out of memory allocating 1,024 bytes")


@app.task(name="unserialisable")
def unserialisable() -> Any:
    return object()


@app.task(name="ignore")
def ignore() -> None:
    raise Ignore("no result wanted")


@app.task(name="reject", bind=True)
def reject(self: Any, requeue: bool) -> str:
    marker = os.environ["BRIM_TEST_MARKERS"] + "/" + self.request.id
    if requeue and os.path.exists(marker):
        return "second time"
    open(marker, "w").close()
    raise Reject("no", requeue=requeue)


@app.task(name="retry", bind=True, max_retries=2)
def retry(self: Any, countdown: float = 0.0) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=countdown)
    return int(self.request.retries)


@app.task(name="retry_late", bind=True)
def retry_late(self: Any, seconds: float) -> None:
    time.sleep(seconds)
    raise self.retry(countdown=0)


@app.task(name="auto", autoretry_for=(ValueError,), retry_backoff=0, max_retries=1, default_retry_delay=0)
def auto() -> None:
    raise ValueError("again and again")


@app.task(name="replace", bind=True)
def replace(self: Any, name: str, queue: str | None = None) -> Any:
    return self.replace(app.signature(name, (20, 22), queue=queue))


@app.task(name="replace_chain", bind=True)
def replace_chain(self: Any) -> Any:
    return self.replace(add.s(1, 2) | add.s(10))


class SlowHook(Task):
    """Takes its time between the finish claim and the end."""

    def on_success(self, *_: Any) -> None:
        time.sleep(1.5)


@app.task(name="slow_hook", base=SlowHook)
def slow_hook() -> str:
    return "done"


@app.task(name="sleep")
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


@app.task(name="soft")
def soft() -> str:
    try:
        time.sleep(30)
    except SoftTimeLimitExceeded:
        return "stopped in time"
    return "too late"


@app.task(name="exit")
def exit_(code: int) -> None:
    os._exit(code)
