"""The whole cluster at one moment, as the page, the API and `brim top` show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ConfigDict

from brim.celery.envelope import BrokerLayout
from brim.core.batching import ExecutorState, Phase
from brim.core.model import Device, Reason, State
from brim.settings import Settings
from brim.store import Store
from brim.store.live import AttemptFacts, Book, BookedAttempt, LaneHead
from brim.store.types import ExecutorView
from brim_services.waits import NOT_TRIED

_DOCUMENTED = ConfigDict(use_attribute_docstrings=True)
"""Attribute docstrings are the descriptions in the OpenAPI document."""


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task that holds memory of a GPU."""

    __pydantic_config__ = _DOCUMENTED

    task_id: str
    task: str
    attempt: str
    state: State
    reserved_mib: int
    measured_mib: int | None
    """What its process uses; null while it is not bound to one."""
    since_s: float
    """When it started, or was placed if it has not started; seconds since 1970."""


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """A model executor: it keeps a model on a GPU and computes its tasks in batches."""

    __pydantic_config__ = _DOCUMENTED

    name: str
    model: str
    version: str
    phase: Phase
    """starting, up or draining; only one that is up takes items."""
    state: ExecutorState
    """idle, waiting (its items are being staged) or working (a batch is computed)."""
    reserved_mib: int
    measured_mib: int | None
    """What its process uses; null while none has begun."""
    items: int
    """How many items it holds."""
    batch: int
    """How many the latest batch began with; what else it holds waits for the next, or is being published."""
    since_s: float
    """Since when it is in its phase; seconds since 1970."""

    @property
    def label(self) -> str:
        """What people call it."""
        return f"{self.model}@{self.version}" if self.version else self.model


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device's memory and tasks: available = total − headroom − external − counted."""

    __pydantic_config__ = _DOCUMENTED

    uuid: str
    node: str
    index: int
    model: str
    state: str
    """up, draining, lost, starting (its worker, or all executors of it) or quarantined (it cannot be read, or has
    reported a fault); only up devices take tasks."""
    total_mib: int
    headroom_mib: int
    """Never given away."""
    external_mib: int
    """Used by processes that brim did not start."""
    counted_mib: int
    """Σ over processes max(reserved, measured), and what is reserved for tasks that have no process yet."""
    reserved_mib: int
    """Reserved for the tasks on it."""
    measured_mib: int
    """Used by brim's processes as measured."""
    available_mib: int
    executors: int
    busy: int
    tasks: Sequence[RunningTask]
    models: Sequence[ResidentModel] = ()

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.node}.{self.index}"


@dataclass(frozen=True, slots=True)
class Server:
    """A node; its tasks' leases hold while it renews them."""

    __pydantic_config__ = _DOCUMENTED

    name: str
    state: str
    renewed_s: float
    """When it renewed its leases last; seconds since 1970."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WaitingLane:
    """A lane of overflow (level 1): tasks of equal demand wait in it, in order."""

    __pydantic_config__ = _DOCUMENTED

    lane: str
    task: str
    vram_mib: int
    depth: int
    """How many tasks wait in it."""
    head_id: str
    """The task that is next."""
    head_since_s: float
    """When that task was admitted; seconds since 1970."""
    reason: Reason
    """Why that task waits."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One moment; ``at_s`` is the server's clock."""

    __pydantic_config__ = _DOCUMENTED

    at_s: float
    gpus: Mapping[str, Gpu]
    nodes: Mapping[str, Server]
    lanes: Mapping[str, WaitingLane]
    counts: Mapping[State, int]
    """How many tasks are in each state; states without any are left out."""
    intake_backlog: int
    """Messages that wait in the broker for intake."""
    placement_active: bool
    """Whether a placement holds the lease; without one nothing is placed."""

    @property
    def ordered_gpus(self) -> list[Gpu]:
        """By node and index."""
        return sorted(self.gpus.values(), key=lambda gpu: (gpu.node, gpu.index))

    @property
    def problems(self) -> list[str]:
        """What is wrong with the cluster, for a person; empty means healthy."""
        return list(_problems(self))


def _problems(picture: Picture) -> Iterator[str]:
    if not picture.placement_active:
        yield "no placement is running: nothing is placed"
    if not picture.gpus:
        yield "no GPU has registered: start `brim worker` on a GPU node"
    for state in ("lost", "quarantined", "starting"):
        names = [gpu.name for gpu in picture.ordered_gpus if gpu.state == state]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"{', '.join(names[:3])}{more}: {state}"
    unheard = [node.name for node in picture.nodes.values() if node.state == "up" and picture.at_s - node.renewed_s > 5]
    if unheard:
        yield f"not heard of for more than 5 s: {', '.join(sorted(unheard)[:3])}"
    over = [gpu.name for gpu in picture.ordered_gpus if gpu.available_mib < 0]
    if over:
        yield f"outside processes have grown into reserved memory on {', '.join(over[:3])}"


class Painter:
    """Reads pictures; remembers the facts of attempts that run, which do not change any more."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.store = store
        layout = BrokerLayout.of(settings.broker.model_dump())
        self._lists = layout.lists()
        self._facts: dict[str, AttemptFacts] = {}

    def paint(self) -> Picture:
        """The cluster now, in a few round trips, so figures may differ by a transition."""
        store = self.store
        at_s = store.server_ms() / 1000
        devices = store.devices()
        books = store.device_books([device.uuid for device in devices])
        facts = self._learn(attempt for book in books for attempt in book.attempts)
        leader, executors = store.leader(), store.executors()
        return Picture(
            at_s=at_s,
            gpus={d.uuid: _gpu(d, book, facts, executors) for d, book in zip(devices, books, strict=True)},
            nodes={
                view.node.name: Server(view.node.name, view.state, view.renewed_s, view.node.labels)
                for view in store.nodes()
            },
            lanes={head.lane: _lane(head) for head in store.lane_heads()},
            counts=store.counts(),
            intake_backlog=sum(store.queue_lengths(self._lists).values()),
            placement_active=leader is not None and leader.until_s > at_s,
        )

    def _learn(self, attempts: Iterator[BookedAttempt]) -> Mapping[str, AttemptFacts]:
        """Facts by attempt, read anew for those that were not running when last read."""
        ids = {attempt.attempt: attempt.task_id for attempt in attempts}
        kept = {a: fact for a, fact in self._facts.items() if a in ids and fact.state is State.RUNNING}
        unknown = {attempt: task_id for attempt, task_id in ids.items() if attempt not in kept}
        found = self.store.attempt_facts(list(unknown.values()))
        for attempt, task_id in unknown.items():
            fact = found.get(task_id)
            if fact is not None and fact.attempt == attempt:
                kept[attempt] = fact
        self._facts = kept
        return kept


def _gpu(device: Device, book: Book, facts: Mapping[str, AttemptFacts], executors: Sequence[ExecutorView]) -> Gpu:
    tasks = []
    for booked in book.attempts:
        fact = facts.get(booked.attempt)
        if fact is None:
            continue  # ended between the two reads
        tasks.append(
            RunningTask(
                task_id=booked.task_id,
                task=fact.task,
                attempt=booked.attempt,
                state=fact.state,
                reserved_mib=booked.vram_mib,
                measured_mib=book.held_mib.get(booked.proc, 0) if booked.proc else None,
                since_s=fact.started_s or fact.placed_s or 0.0,
            )
        )
    return Gpu(
        uuid=device.uuid,
        node=device.node,
        index=device.index,
        model=device.model,
        state=device.state,
        total_mib=device.total_mib,
        headroom_mib=device.headroom_mib,
        external_mib=device.external_mib,
        counted_mib=device.committed_mib,
        reserved_mib=sum(booked.vram_mib for booked in book.attempts) + sum(book.residents_mib.values()),
        measured_mib=sum(book.held_mib.values()),
        available_mib=device.available_mib,
        executors=device.executors,
        busy=device.busy,
        tasks=tuple(sorted(tasks, key=lambda task: (task.since_s, task.attempt))),
        models=tuple(_resident(view, book) for view in executors if view.device == device.uuid) if executors else (),
    )


def _resident(view: ExecutorView, book: Book) -> ResidentModel:
    return ResidentModel(
        name=view.name,
        model=view.model,
        version=view.version,
        phase=view.phase,
        state=view.state,
        reserved_mib=view.vram_mib,
        measured_mib=book.held_mib.get(view.proc, 0) if view.proc else None,
        items=len(view.items),
        batch=view.batch,
        since_s=view.since_s,
    )


def _lane(head: LaneHead) -> WaitingLane:
    return WaitingLane(
        lane=head.lane,
        task=head.task,
        vram_mib=head.demand.vram_mib,
        depth=head.depth,
        head_id=head.task_id,
        head_since_s=head.admitted_s,
        reason=head.reason or NOT_TRIED,
    )
