"""The typed answers and messages of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from brim.core.batching import Batched, BatchKey, ExecutorState, Phase
from brim.core.model import AttemptView, Demand, Device, Identity, Node, Reason, State


class AdmitAnswer(StrEnum):
    """What admission did with a message."""

    GONE = "gone"
    """Another replica took it."""
    ADMITTED = "admitted"
    SCHEDULED = "scheduled"
    REFUSED = "refused"
    REVOKED = "revoked"
    """Its producer had revoked it before it came; cancelled at once."""
    HELD = "held"
    """An earlier run of this id still lives; the message is kept as its next."""
    REDELIVERY = "redelivery"
    """Known already; dropped."""
    ORPHAN = "orphan"
    """The message of an attempt whose record is gone; dropped."""
    CLOSED = "closed"
    """A later run of a task that brim itself has answered for (cancelled, expired, dead); dropped."""


class ClaimAnswer(StrEnum):
    """What an executor hears when it claims a step of an attempt."""

    GRANTED = "granted"
    STALE = "stale"
    """The attempt is not the live one, or not in the state that this step follows."""
    UNKNOWN = "unknown"
    CANCELLED = "cancelled"
    DOOMED = "doomed"
    """The process is about to be replaced; do not run, the agent places the attempt again."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What an executor hears when it binds an attempt; ``guard``: how the task is held to its reservation."""

    answer: ClaimAnswer
    guard: str


class EndAnswer(StrEnum):
    """What became of an attempt's end."""

    ENDED = "ended"
    PROMOTED = "promoted"
    """A newer run of the same id was waiting; it has gone back to intake."""
    STALE = "stale"
    UNKNOWN = "unknown"
    OCCUPIED = "occupied"
    """Its result was to be stored with its end, but there is one already."""

    @property
    def is_over(self) -> bool:
        """Whether the attempt has ended by this."""
        return self in (EndAnswer.ENDED, EndAnswer.PROMOTED)


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What Celery's result backend, on brim's own server, is to hold of a task; ``expires_s`` 0: for ever."""

    key: str | bytes
    value: str | bytes
    expires_s: int


class LoseAnswer(StrEnum):
    """What became of a task whose attempt was lost."""

    WAITING = "waiting"
    DEAD = "dead"
    CANCELLED = "cancelled"
    PROMOTED = "promoted"
    STALE = "stale"
    UNKNOWN = "unknown"


class OutOfMemoryAnswer(StrEnum):
    """What becomes of an attempt that ran out of memory."""

    WAITING = "waiting"
    """Its task is placed again."""
    FINAL = "final"
    """Its task is not tried again: let it fail."""
    STALE = "stale"
    UNKNOWN = "unknown"


class CloseAnswer(StrEnum):
    """What became of a request to close a task."""

    CLOSED = "closed"
    MARKED = "marked"
    """It runs: its worker has to end it (``revoke(terminate=True)``); the wish is noted."""
    REFUSED = "refused"
    """It is in a state that this request does not close, for example it has ended."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Peeked:
    """A message as it lies in a broker list."""

    list_key: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class Look:
    """What intake acts on: server time, how many tasks wait in overflow, when the next scheduled one is due (None: no
    task is scheduled), and messages of the broker's lists."""

    now_s: float
    waiting: int
    next_eta_s: float | None
    messages: Sequence[Peeked]


@dataclass(frozen=True, slots=True)
class Admission:
    """Everything that admission writes about one message. ``refusal`` set: it is dead-lettered instead."""

    source: Peeked
    identity: Identity
    task: str
    lane: str
    demand: Demand
    context_mib: int
    priority: int
    head: bytes
    tail: bytes
    eta_s: float | None = None
    expires_s: float | None = None
    own_attempt: bool = False
    """The message carries brim's attempt header with this very rank: without a record it is an orphan."""
    refusal: Reason | None = None
    waits_for: Reason | None = None
    explanation: Mapping[str, object] = field(default_factory=dict)
    batched: Batched | None = None
    """What it is batched by, if it is."""


@dataclass(slots=True)
class Commit:
    """One placement to commit; ``slot`` is the part of the message between the record's head and tail.

    ``queue`` is the broker list that the message goes into. ``vram_mib`` is per device, at least so much if ``whole``.
    A value, like a `Device` not ``frozen``: each task has one made.
    """

    task_id: Final[str]
    lane: Final[str]
    attempt: Final[str]
    devices: Final[Sequence[str]]
    node: Final[str]
    queue: Final[str]
    vram_mib: Final[int]
    slot: Final[bytes]
    cpus: Final[float] = 0.0
    ram_mib: Final[int] = 0
    whole: Final[bool] = False


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """``committed``, ``fenced``, ``stale`` (no longer waiting there) or ``refused`` with the short resource.

    ``uuid`` is the device that is short of it, or the node's name where that is short of CPUs (``missing`` counts
    thousandths) or RAM.
    """

    status: str
    short: str = ""
    uuid: str = ""
    missing: int = 0


@dataclass(slots=True)
class LaneWindow:
    """The first tasks of a lane: ``waiting`` holds (task id, order, admitted s); ``depth`` counts all.

    A value like a `Commit`.
    """

    lane: Final[str]
    task: Final[str]
    demand: Final[Demand]
    context_mib: Final[int]
    waiting: Final[Sequence[tuple[str, float, float]]]
    depth: Final[int]
    key: Final[BatchKey | None] = None
    """What its tasks are batched by, if they are; then ``sizes`` says how large each of them is."""
    sizes: Final[Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldItem:
    """An item in the book of a model executor; ``order`` and ``size`` are those of `brim.core.batching.Item`."""

    attempt: str
    task_id: str
    key: BatchKey
    order: float
    size: float
    lane: str
    sealed: bool


@dataclass(frozen=True, slots=True)
class WantedExecutor:
    """A model executor to be wanted. ``profile`` is its model's, as JSON text."""

    name: str
    node: str
    device: str
    index: int
    queue: str
    model: str
    version: str
    vram_mib: int
    profile: str


@dataclass(frozen=True, slots=True)
class ExecutorView(WantedExecutor):
    """A model executor as it stands in Redis. Times are server seconds.

    ``boot`` and ``proc`` are empty while no process has begun; ``ceiling`` is what it has learned (see
    `brim.core.batching.Ceiling`). ``deadline_s`` is when what it computes hits its hard time limit. ``batch`` is how
    many items its latest batch began with; ``ahead``: another one is claimed beside that.
    """

    phase: Phase
    since_s: float
    used_s: float
    boot: str = ""
    proc: str = ""
    ceiling: float | None = None
    reason: Reason | None = None
    deadline_s: float | None = None
    batch: int = 0
    ahead: bool = False
    items: Sequence[HeldItem] = ()

    @property
    def is_working(self) -> bool:
        """Whether a batch is sealed: claimed, computed or being published."""
        return any(item.sealed for item in self.items)

    @property
    def state(self) -> ExecutorState:
        """Idle, waiting or working (requirement B5)."""
        if self.is_working:
            return ExecutorState.WORKING
        return ExecutorState.WAITING if self.items else ExecutorState.IDLE

    def attempt(self, item: HeldItem) -> AttemptView:
        """An item as a live attempt: lost and settled like any other."""
        return AttemptView(
            item.task_id,
            item.attempt,
            (self.device,),
            0,
            self.proc if item.sealed else "",
            State.RUNNING if item.sealed else State.PLACED,
            self.boot if item.sealed else "",
            0.0,
            None,
            item.lane,
            0,
            executor=self.name,
        )


@dataclass(frozen=True, slots=True)
class CommitItem:
    """An item to commit to a model executor; ``source`` is the sibling that holds it, with its attempt there."""

    item: HeldItem
    slot: bytes
    executor: str
    queue: str
    """The broker list of the executor's queue."""
    node: str
    device: str
    source: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node with its lease as it stands in Redis."""

    node: Node
    boot: str
    state: str
    renewed_s: float
    devices: Sequence[str]


@dataclass(frozen=True, slots=True)
class NodeBooks:
    """What stands in the books of a node's devices, read after ``now_ms`` by the server's clock.

    ``processes``: device -> process -> whether it is doomed (to be replaced).
    """

    now_ms: int
    attempts: Sequence[AttemptView]
    processes: Mapping[str, Mapping[str, bool]]
    executors: Sequence[ExecutorView]


@dataclass(frozen=True, slots=True)
class Changes:
    """What placement has to mirror: entries that are new or changed, and names that are gone."""

    now_s: float
    devices: Sequence[Device] = ()
    gone_devices: Sequence[str] = ()
    lanes: Sequence[LaneWindow] = ()
    nodes: Sequence[NodeView] = ()
    gone_nodes: Sequence[str] = ()
    executors: Sequence[ExecutorView] = ()
    gone_executors: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended. ``leftover_mib`` is per device; None where the process's memory is unknown."""

    state: State
    reason: Reason | None = None
    leftover_mib: Sequence[int] | None = None
    context_mib: int = 0
    peak_mib: int | None = None
    """As frameworks counted it; without it the agent's samples have the word."""


@dataclass(frozen=True, slots=True)
class Peak:
    """What the end of an attempt told about its task's need; ``estimate`` is the explanation of its demand.

    ``out_of_memory``: it had been refused memory; its peak counts what it had asked for then.
    """

    task_id: str
    gpu_model: str
    reserved_mib: int
    peak_mib: int
    out_of_memory: bool
    estimate: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeviceRegistration:
    """A device as its agent announces it."""

    uuid: str
    index: int
    model: str
    total_mib: int
    headroom_mib: int


@dataclass(frozen=True, slots=True)
class NodeRegistration:
    """A node as its agent announces it: devices, executors per device, and the tasks its workers know."""

    node: Node
    boot: str
    executors: int
    tasks: Sequence[str]
    signatures: Mapping[str, str]
    """Task name -> signature as JSON text."""
    devices: Sequence[DeviceRegistration]
    state: str = "up"
    """What the devices begin as; ``starting`` until their workers are ready and their memory is known."""


@dataclass(frozen=True, slots=True)
class Record:
    """One task as brim knows it. Times are server seconds, None where it has not come to that."""

    task_id: str
    task: str
    state: State
    identity: Identity
    run: int
    lane: str
    demand: Demand
    context_mib: int
    priority: int
    attempts: int
    losses: int
    attempt: str | None
    node: str | None
    devices: tuple[str, ...]
    reason: Reason | None
    admitted_s: float
    eta_s: float | None = None
    expires_s: float | None = None
    placed_s: float | None = None
    claimed_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None
    finisher_s: float | None = None
    """When its finish was claimed by the clock of the machine that claimed it, which may be another time."""
    ended_s: float | None = None
    peak_mib: int | None = None
    cancelling: bool = False
    batched: Batched | None = None
    executor: str | None = None
    """The model executor that holds it, or that held it last, as an item."""


@dataclass(frozen=True, slots=True)
class Owed:
    """An answer that brim owes a producer; ``head`` and ``tail`` are the message's envelope."""

    entry: bytes
    task_id: str
    state: State
    reason: Reason
    head: bytes
    tail: bytes


class DeviceFigures(BaseModel):
    """What a device's memory looked like when it was sampled, in MiB; a process's None means unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    total_mib: int = Field(ge=0)
    used_mib: int = Field(ge=0)
    free_mib: int = Field(ge=0)
    processes: dict[str, int | None] = Field(default_factory=dict)
    """Executor process ("<pid>.<start ticks>") -> MiB."""


class MemoryReport(BaseModel):
    """A node's memory report: absolute figures, sampled after ``sampled_ms`` of the server's clock."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str
    boot: str
    sampled_ms: int
    devices: dict[str, DeviceFigures]
