"""Cancelling tasks wherever they are, for the command line and the HTTP API."""

from __future__ import annotations

from collections.abc import Sequence

from celery import Celery

from brim.core.model import Reason
from brim.store import Store
from brim.store.types import CloseAnswer


def cancel(store: Store, app: Celery, task_ids: Sequence[str], reason: Reason) -> dict[str, CloseAnswer]:
    """What became of each; those that run are marked, and their workers are told to terminate them."""
    answers = {task_id: store.cancel(task_id, reason) for task_id in task_ids}
    running = [task_id for task_id, answer in answers.items() if answer is CloseAnswer.MARKED]
    if running:
        app.control.revoke(running, terminate=True)
    return answers
