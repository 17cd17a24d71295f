"""Why a task waits: placement notes the reason on the first of each lane, and it holds for those behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from brim.core.model import Reason, State
from brim.store import Store
from brim.store.types import Record

NOT_TRIED = Reason("not_tried", "placement has not tried it yet")


def explained(store: Store, records: Iterable[Record]) -> list[Record]:
    """The records, each waiting one with a reason (invariant 6)."""

    @cache
    def first(lane: str) -> Record | None:
        found = store.records(store.lane_ids(lane, 1))
        return found[0] if found else None

    return [
        replace(record, reason=_reason(record, first(record.lane)))
        if record.state is State.WAITING and record.reason is None
        else record
        for record in records
    ]


def _reason(record: Record, first: Record | None) -> Reason:
    if first is None or first.reason is None or first.task_id == record.task_id:
        return NOT_TRIED
    return behind(first.task_id, first.reason)


def behind(first_id: str, reason: Reason) -> Reason:
    """Why a task waits that is not the first of its lane."""
    return Reason(reason.code, f"behind {first_id} in its lane: {reason.message}")
