"""Why a task goes where it goes, or waits: ``brim explain`` on the state that placement mirrors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from brim.core.batching import BatchKey, Item, ModelKey, Phase, Rules, choices
from brim.core.batching.sizing import Footprint, footprint
from brim.core.model import Reason
from brim.core.placement import Cluster, Explanation, Planner, explain
from brim.core.placement.fit import place_name
from brim.core.profiles import Profile
from brim.settings import Settings
from brim.store import Store
from brim.store.types import ExecutorView, Record
from brim_services.batches import WINDOW, Batches, obstacle
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


@dataclass(frozen=True, slots=True)
class Resident:
    """A model executor of a batched task's model, as a place for the task. ``holds``: the task is one of its items."""

    executor: str
    node: str
    device: str
    phase: str
    state: str
    vram_mib: int
    items: int
    holds: bool
    obstacle: Reason | None


@dataclass(frozen=True, slots=True)
class Site:
    """A device as the place of one more executor of the model."""

    name: str
    device: str
    obstacle: Reason | None


@dataclass(frozen=True, slots=True)
class BatchExplanation:
    """Which model executor would take a batched task now, the one of choice first, and whether one more could start.

    ``before`` counts the items of its lane that come before it, None if it does not wait. ``need`` is what a new
    executor would reserve, and ``no_more`` says why none is started wherever it would fit.
    """

    volume: float
    before: int | None
    need: Footprint
    executors: list[Resident]
    no_more: Reason | None
    sites: list[Site]


def batch_explanation(store: Store, settings: Settings, record: Record) -> BatchExplanation | Reason:
    """What placement would say about a batched task if its turn were now; a reason where the table batches it no more.

    What a running placement knows besides is left out: that a model whose executors failed is let alone for a while.
    That is the reason of the tasks which wait for it.
    """
    assert record.batched is not None
    batched, batches = record.batched, Batches(store, settings, str)
    batches.refresh_table()
    profile = batches.profile_of(record.task)
    if profile is None:
        return Reason("not_batched", f"the table's profile of {record.task} does not batch it (any more)")
    mirror, views = Mirror.read(store, WINDOW), store.executors()
    cluster = mirror.cluster
    key = BatchKey(record.task, ModelKey(batched.model, batched.version), batched.shape)
    item = Item(record.task_id, batched.size, record.admitted_s, record.priority)
    chosen = choices(key, item, [batches.executor_of(_without(view, item.id)) for view in views])
    by_name = {view.name: view for view in views}
    executors = [_resident(by_name[choice.executor], item.id, choice.obstacle, cluster) for choice in chosen]
    batches.look_for_unfit(mirror.batch_windows(), cluster, 0.0)
    want = batches.need(key, batched.size, mirror.batch_windows(), cluster)
    sites = [
        Site(place_name(device), device.uuid, obstacle(want, profile, record.task, site, device, cluster))
        for site in cluster
        for device in site.devices
    ]
    [before] = store.positions([(record.lane, item.id)])
    return BatchExplanation(
        batched.size,
        before,
        Footprint(want.alone_mib, want.least_mib, want.full_mib),
        sorted(executors, key=lambda resident: resident.obstacle is not None),
        _no_more(want.max_executors, executors),
        sorted(sites, key=lambda site: site.obstacle is not None),
    )


def _resident(view: ExecutorView, task_id: str, obstacle: Reason | None, cluster: Cluster) -> Resident:
    device = cluster.device(view.device)
    if view.phase is Phase.DRAINING:
        obstacle = view.reason or obstacle
    elif device is None or device.state != "up":
        obstacle = Reason("state", "its device takes no work")
    return Resident(
        view.name,
        view.node,
        view.device,
        view.phase,
        view.state,
        view.vram_mib,
        len(view.items),
        any(item.task_id == task_id for item in view.items),
        obstacle,
    )


def _without(view: ExecutorView, task_id: str) -> ExecutorView:
    """An executor as if it did not hold the task."""
    return replace(view, items=[item for item in view.items if item.task_id != task_id])


def _no_more(most: int, residents: Sequence[Resident]) -> Reason | None:
    """Why no further executor of a model is started, however much memory is free."""
    alive = [resident for resident in residents if resident.phase != Phase.DRAINING]
    if len(alive) >= most:
        return Reason("max_executors", f"it has {len(alive)}, and batch.max_executors is {most}")
    if any(resident.phase == Phase.STARTING for resident in alive):
        return Reason("executor_starting", "one is starting")
    if alive:
        scale_out_s = Rules().scale_out_s
        return Reason("scale_out", f"one more is started only once an item has waited for {scale_out_s:g} s")
    return None


def batch_lines(profile: Profile, size: float) -> list[str]:
    """What an item of this size is to a batch of its profile, and to the memory of an executor, for people."""
    batch = profile.batch
    assert batch is not None
    most = "no bound on volume" if batch.max_volume is None else f"a padded volume of {batch.max_volume:g}"
    need = footprint(profile, [size])
    return [
        f"that is what a model executor of {ModelKey(profile.model or '', profile.version)} needs to compute it alone; "
        f"for full batches it reserves {need.full_mib} MiB, and the task itself reserves nothing",
        f"its volume is {size:g}; a batch holds {batch.max_items} items and {most}",
    ]


def resident_table(found: BatchExplanation) -> Table:
    """The model's executors, the place of choice first."""
    table = Table(title=None if found.executors else "its model has no executor")
    for column in ("executor", "phase", "state", "MiB", "items", "could take it now"):
        table.add_column(column, justify="right" if column in ("MiB", "items") else "left")
    for each in found.executors:
        answer = "yes" if each.obstacle is None else f"no: {each.obstacle}"
        answer = "holds it" if each.holds else answer
        table.add_row(each.executor, each.phase, each.state, str(each.vram_mib), str(each.items), answer)
    return table


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
