"""When a waiting task will start, as far as what Redis knows at this moment tells."""

from __future__ import annotations

from brim.core.model import Reason, State
from brim.core.placement.expect import Ahead, Running, RunTimes, Work, expected_start
from brim.store import Store
from brim.store.types import Record
from brim_services.mirror import Mirror

from .admission import UNESTIMATED

LOOK_BACK_S = 3600
"""How far back ends tell how long tasks run."""

ENDS = 2000
"""How many of them, the latest."""


def expected(store: Store, record: Record) -> tuple[float, float] | Reason:
    """In how many seconds a waiting task is likely to start, from and to; or why that cannot be said."""
    if record.state is not State.WAITING:
        return Reason("not_waiting", f"it is {record.state}")
    mirror = Mirror.read(store, 1)
    windows = {window.lane: window for window in mirror.lanes.values() if not window.lane.startswith(UNESTIMATED)}
    own = windows.get(record.lane)
    if own is None:
        return Reason("no_demand", "it has no demand yet, or has just left its lane")
    if own.key is not None:
        return Reason("batched", "it starts with its batch, not by itself")
    lanes = [window for window in windows.values() if window.key is None and window.waiting]
    lanes.sort(key=lambda window: window.waiting[0][1])
    before = store.before(record.lane, record.task_id, [window.lane for window in lanes])
    ahead = [
        Ahead(Work(window.task, window.lane, window.demand), number)
        for window, number in zip(lanes, before, strict=True)
        if number
    ]
    work = Work(record.task, record.lane, record.demand)
    return expected_start(mirror.cluster, _running(store, mirror), ahead, work, _run_times(store), record.task_id)


def _running(store: Store, mirror: Mirror) -> list[Running]:
    """The attempts on devices; one that has not begun yet has its whole run before it."""
    now_s = store.server_ms() / 1000
    busy = [device.uuid for site in mirror.cluster for device in site.devices if device.busy]
    views = [view for view in store.books(busy)[0] if not view.executor]
    records = {record.task_id: record for record in store.records([view.task_id for view in views])}
    found = []
    for view in views:
        record = records.get(view.task_id)
        if record is not None:
            age_s = max(0.0, now_s - record.started_s) if record.started_s else 0.0
            found.append(Running(Work(record.task, record.lane, record.demand), view.devices, age_s))
    return found


def _run_times(store: Store) -> RunTimes:
    runs, until_ms = RunTimes(), store.server_ms()
    for ending in store.ends_between(until_ms - LOOK_BACK_S * 1000, until_ms, ENDS):
        if ending.ran_s is not None:
            runs.add(ending.task, ending.lane, ending.ran_s)
    return runs
