"""Why a task goes where it goes, or waits: ``brim explain`` on the state that placement mirrors."""

from __future__ import annotations

from rich.table import Table

from brim.core.model import Reason
from brim.core.placement import Explanation, Planner, explain
from brim.store import Store
from brim.store.types import Record
from brim_services.mirror import Mirror


def explanation(store: Store, planner: Planner, record: Record) -> Explanation:
    """What placement would say about the task if its turn were now, promises left aside.

    The mix of demands is that of the tasks that wait now. A placement that has run for a while knows more, the demands
    that have been and how long they ran, so what its scores make of the mix may differ from this.
    """
    mirror = Mirror.read(store, 1)
    for window in mirror.lanes.values():
        for _ in range(window.depth):
            planner.mix.observe(window.demand)
    memory = not planner.settings.ignore_memory
    return explain(mirror.cluster, planner.policy, planner.mix, record.demand, record.task, memory=memory)


def start_line(start: tuple[float, float] | Reason) -> str:
    """When a task will start, for people."""
    if isinstance(start, Reason):
        return f"nobody knows when: {start}"
    first, last = (_span(seconds) for seconds in start)
    return f"likely in {first}" + (f" to {last}" if last != first else "")


def _span(seconds: float) -> str:
    """Two digits are enough of what is a guess."""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.2g} {unit}"
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"


def candidate_table(found: Explanation, limit: int) -> Table:
    """The best candidates with the parts of their scores, the place of choice first."""
    table = Table(title=None if found.candidates else "no place can take it now")
    table.add_column("node")
    table.add_column("devices")
    table.add_column("score", justify="right")
    for name in found.candidates[0].parts if found.candidates else ():
        table.add_column(name, justify="right")
    for candidate in found.candidates[:limit]:
        devices = ", ".join(candidate.devices) + (f" (of {candidate.alike} alike)" if candidate.alike > 1 else "")
        parts = [f"{part:.4g}" for part in candidate.parts.values()]
        table.add_row(candidate.node, devices, f"{candidate.score:.4g}", *parts)
    return table
