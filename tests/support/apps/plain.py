"""An ordinary Celery app without brim whose default queue happens to be brim's intake queue."""

from __future__ import annotations

from typing import Any

from celery import Celery

from support.celery_app import configure

app = configure(Celery("plain", set_as_current=False))
app.conf.task_default_queue = "brim.intake"


@app.task(name="add", shared=False)
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="total", shared=False)
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="fail", shared=False)
def fail() -> None:
    raise ValueError("on purpose")


@app.task(name="note", bind=True, shared=False)
def note(self: Any, *args: Any) -> dict[str, Any]:
    """What the task sees of its own message."""
    request = self.request
    return {
        "id": request.id,
        "root_id": request.root_id,
        "priority": request.delivery_info["priority"],
        "expires": request.expires,
        "timelimit": request.timelimit,
        "headers": request.headers,
        "eta": request.eta,
        "routing_key": request.delivery_info["routing_key"],
        "args": args,
    }
