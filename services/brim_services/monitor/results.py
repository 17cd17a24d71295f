"""What a task returned or raised, from the producers' own result backend."""

from __future__ import annotations

import json
from typing import Any

from celery import Celery, states
from pydantic import JsonValue

from .schemas import Failure


def outcome(app: Celery, task_id: str) -> tuple[JsonValue, Failure | None, str | None]:
    """(result, failure, note): the note says why there is nothing to show."""
    try:
        meta: dict[str, Any] = app.backend.get_task_meta(task_id, cache=False)
    except Exception as error:
        # The backend is the producers' own and may be of any kind: what it raises tells only that it cannot tell.
        return None, None, f"the result backend does not tell: {type(error).__name__}: {error}"
    if meta["status"] == states.SUCCESS:
        return _plain(meta.get("result")), None, None
    if meta["status"] in states.EXCEPTION_STATES:
        raised = meta.get("result")
        return None, Failure(type=type(raised).__name__, message=str(raised)), None
    return None, None, "the result backend has no result: it ignores results, has forgotten it, or waits for it"


def _plain(value: Any) -> JsonValue:
    """The value if JSON can carry it, else how Python shows it."""
    try:
        plain: JsonValue = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return plain
