"""The values that every part of brim speaks in: demands, devices, reasons and task states.

Amounts of memory are whole MiB and times are seconds since the epoch by the Redis server's clock,
unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

Attributes = Mapping[str, float | int | str | bool]


class State(StrEnum):
    """Where a task is on its way; `TERMINAL` names the states that it never leaves by itself."""

    SCHEDULED = "scheduled"
    """Admitted, its eta lies ahead."""
    WAITING = "waiting"
    """In overflow (level 1): admitted, nothing can take it now."""
    PLACED = "placed"
    """Memory and an executor are reserved; its message is on the way to the device's queue."""
    CLAIMED = "claimed"
    """The device's worker holds the message (start claim granted)."""
    RUNNING = "running"
    """Bound to an executor process."""
    FINISHING = "finishing"
    """The user's function is over (finish claim granted); callbacks and result are under way."""
    HANDED_OVER = "handed_over"
    """Retried or replaced; the next identity of the same task id is awaited at intake."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD = "dead"
    """Dead-lettered by brim: not understood, never fitting, or lost too often."""


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED, State.DEAD})
LIVE = frozenset({State.PLACED, State.CLAIMED, State.RUNNING, State.FINISHING})
"""States in which an attempt holds a reservation."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something was refused, waits or failed: a stable code and a sentence for a person."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one task asks for (requirement A2); the same for every task of one overflow lane.

    ``vram_mib`` is per GPU; ``gpus`` GPUs of one node. ``cpus`` and ``ram_mib`` are host resources of the whole
    task, 0 when not declared. Empty ``gpu_models`` and ``labels`` constrain nothing. ``whole`` wishes for whole
    GPUs: they must be empty, have at least ``vram_mib``, and are held entirely.
    """

    vram_mib: int
    gpus: int = 1
    cpus: float = 0.0
    ram_mib: int = 0
    gpu_models: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    whole: bool = False

    def __str__(self) -> str:
        """What it asks of GPUs, for people: "4096 MiB on each of 2 GPUs"."""
        if self.whole:
            return "a whole GPU" if self.gpus == 1 else f"{self.gpus} whole GPUs"
        return f"{self.vram_mib} MiB" + f" on each of {self.gpus} GPUs" * (self.gpus > 1)


@dataclass(slots=True, unsafe_hash=True)
class Device:
    """One entry of the availability table (requirement A3), as placement sees it.

    ``committed_mib`` is Σ over processes max(reserved, measured) plus what is reserved for attempts
    that are not bound to a process yet. ``busy`` counts attempts that hold an executor.
    ``cpus_used`` and ``ram_used_mib`` are what attempts whose first device it is hold of their host.
    ``reclaimable_mib`` is the leftover of idle executors, which comes back if they are replaced.
    ``tasks`` is the digest of the task names that the device's worker has registered.

    A value: its fields never change, which the types see to. Like a `Node` it is not ``frozen``, for placement makes
    one for every decision, and a frozen one takes three times as long to make.
    """

    uuid: Final[str]
    node: Final[str]
    index: Final[int]
    model: Final[str]
    total_mib: Final[int]
    headroom_mib: Final[int]
    external_mib: Final[int]
    committed_mib: Final[int]
    executors: Final[int]
    busy: Final[int]
    reclaimable_mib: Final[int] = 0
    tasks: Final[str] = ""
    cpus_used: Final[float] = 0.0
    ram_used_mib: Final[int] = 0
    state: Final[str] = "up"
    """``up``, ``draining``, ``lost``, ``starting`` or ``quarantined``; only ``up`` devices take work."""

    @property
    def available_mib(self) -> int:
        """What may still be given away; negative when external use has grown into it."""
        return self.total_mib - self.headroom_mib - self.external_mib - self.committed_mib

    def holding(self, mib: int) -> Device:
        """The device after one more attempt was reserved on it."""
        return Device(
            self.uuid,
            self.node,
            self.index,
            self.model,
            self.total_mib,
            self.headroom_mib,
            self.external_mib,
            self.committed_mib + mib,
            self.executors,
            self.busy + 1,
            self.reclaimable_mib,
            self.tasks,
            self.cpus_used,
            self.ram_used_mib,
            self.state,
        )

    @property
    def queue(self) -> str:
        """The Celery queue of this device's worker."""
        return gpu_queue(self.node, (self.index,))


def gpu_queue(node: str, indices: Iterable[int]) -> str:
    """The Celery queue of the workers that see exactly these devices of a node: ``gpu.n1.0``, ``gpu.n1.0-3``."""
    return f"gpu.{node}.{'-'.join(map(str, sorted(indices)))}"


@dataclass(slots=True, unsafe_hash=True)
class Node:
    """A worker server: its labels and the host resources that tasks may declare.

    ``cpus`` and ``ram_mib`` are 0 where the server has not declared them; then nothing is accounted.
    ``cpus_used`` and ``ram_used_mib`` are what live attempts hold of them.
    """

    name: Final[str]
    labels: Final[Mapping[str, str]] = field(default_factory=dict)
    cpus: Final[float] = 0.0
    ram_mib: Final[int] = 0
    cpus_used: Final[float] = 0.0
    ram_used_mib: Final[int] = 0


@dataclass(frozen=True, slots=True)
class AttemptView:
    """A live attempt as it stands in the books of a node's devices; times are server seconds.

    ``vram_mib`` is what it holds of each device, of whole devices that differ what it holds of the least.
    """

    task_id: str
    attempt: str
    devices: tuple[str, ...]
    vram_mib: int
    proc: str
    """The executor process it is bound to; empty while it is not bound."""
    state: State
    boot: str
    """The worker boot that claimed it; empty while it is not claimed."""
    placed_s: float
    claimed_s: float | None
    lane: str
    context_mib: int
    guard: str = "off"
    """Whether it is held to its reservation, as its profile says."""
    queue: str = ""
    """The broker list that its message was put into."""
    executor: str = ""
    """The model executor that holds it as an item; empty for a task that holds memory of its own."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which run of a task id a message is (DESIGN, "Identity of a message"); ordered by ``rank``."""

    task_id: str
    nesting: int
    retries: int

    @property
    def rank(self) -> tuple[int, int]:
        """(replaced_task_nesting, retries): a higher rank of the same id is a new run."""
        return (self.nesting, self.retries)


def canonical(value: Any) -> Any:
    """A JSON-ready copy of a dataclass value with tuples as lists, for stable digests and storage."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: canonical(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    return value
