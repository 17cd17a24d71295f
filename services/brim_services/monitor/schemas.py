"""What the HTTP API takes and gives; descriptions and examples go into its OpenAPI document."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from brim.core.attributes import ALL, Cpus, Gpus, Name
from brim.core.model import Reason, State
from brim.core.profiles import MAX_MIB, Estimate, Part
from brim.store.live import LaneHead
from brim.store.types import Record
from brim_services.picture import Gpu, Picture, Server, WaitingLane
from brim_services.waits import NOT_TRIED, behind

from .problems import Problem

MOST_TASKS = 1000
"""In one batch."""


def _json_proper(value: Any) -> Any:
    """Only what JSON can say: no NaN, no infinity, no lone surrogates."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None
    return value


def _within_epoch(value: Any) -> Any:
    """A moment that is long past or far ahead, as one that every part of brim can count with."""
    if isinstance(value, datetime):
        try:
            return max(EARLIEST, min(value.astimezone(UTC), LATEST))
        except OverflowError:
            return EARLIEST if value.year < 2000 else LATEST
    return value


def _whole(value: Any) -> Any:
    """3.0 is the integer 3 in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _vram(value: Any) -> Any:
    amount = _whole(value)
    if amount in (None, ALL) or (type(amount) is int and 0 < amount <= MAX_MIB):
        return amount
    raise ValueError(f"must be a number of MiB from 1 to {MAX_MIB}, or '{ALL}'")


def _written_out(value: Any) -> Any:
    """A date with its time, not a number of seconds that may be meant as another unit."""
    if not (isinstance(value, datetime) or (isinstance(value, str) and "-" in value[1:])):
        raise ValueError("must be a text such as 2040-01-31T12:00:00Z")
    return value


def _scalar(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"must be a number, a text or a flag, not a {type(value).__name__}")
    return value


EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
TaskName = Annotated[str, StringConstraints(pattern=r"^[!-~]+$", max_length=255)]
Moment = Annotated[AwareDatetime, BeforeValidator(_written_out), AfterValidator(_within_epoch)]
Arguments = Annotated[list[JsonValue], AfterValidator(_json_proper)]
Vram = Annotated[
    Any,
    PlainValidator(_vram),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_MIB}, {"const": ALL}, {"type": "null"}]}
    ),
]
Keywords = Annotated[dict[str, JsonValue], AfterValidator(_json_proper)]
Proper = Annotated[str, AfterValidator(_json_proper)]
AttributeValues = Annotated[
    dict[Name, Annotated[Any, PlainValidator(_scalar)]],
    AfterValidator(_json_proper),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "maxLength": 64},
            "additionalProperties": {"type": ["boolean", "number", "string"]},
            "maxProperties": 64,
        }
    ),
]


class Asked(BaseModel):
    """What a producer asks for instead of, or besides, what the task's profile says."""

    model_config = ConfigDict(extra="forbid")

    vram_mib: Vram = Field(
        None, description="the whole demand per GPU, instead of the profile's formula; all: a GPU to itself"
    )
    gpus: Annotated[Gpus, BeforeValidator(_whole)] | None = Field(None, description="GPUs of one node")
    cpus: Cpus | None = Field(None, description="host CPUs that it keeps busy")
    ram_mib: Annotated[int, Field(strict=True, ge=0, le=MAX_MIB), BeforeValidator(_whole)] | None = Field(
        None, description="host memory"
    )
    gpu_model: Annotated[Proper, StringConstraints(min_length=1, max_length=200)] | None = None
    labels: dict[Proper, Proper] = Field({}, max_length=64, description="labels that the node must have")


class Work(BaseModel):
    """A task and its arguments."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "name": "vision.segment",
                    "args": ["s3://images/1.png"],
                    "kwargs": {"width": 4096, "height": 4096},
                }
            ]
        },
    )

    name: TaskName = Field(description="the Celery task's name")
    args: Arguments = []
    kwargs: Keywords = {}
    attributes: AttributeValues = Field(
        {}, max_length=64, description="values for the profile's formula; they win over arguments"
    )
    demand: Asked = Asked()

    def header(self) -> dict[str, Any]:
        """The message's brim header."""
        asked = {"attributes": self.attributes, **self.demand.model_dump()}
        return {name: value for name, value in asked.items() if value not in (None, {})}


class Submission(Work):
    """A task to run."""

    priority: Annotated[int, Field(strict=True, ge=0, le=9), BeforeValidator(_whole)] | None = Field(
        None, description="0 is served first, 9 last; null: the profile's, else 0"
    )
    eta: Moment | None = Field(None, description="not to start before; ISO 8601 with an offset")
    expires: Moment | None = Field(None, description="not to start after; ISO 8601 with an offset")
    idempotency_key: Annotated[Proper, StringConstraints(min_length=1, max_length=255)] | None = Field(
        None,
        description="the same key gives the same task: send it again when an answer got lost",
    )


class Batch(BaseModel):
    """Several tasks; each is accepted or refused by itself."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"tasks": [{"name": "vision.embed", "args": ["a cat"]}]}]}
    )

    tasks: list[Submission] = Field(min_length=1, max_length=MOST_TASKS)


class Accepted(BaseModel):
    """A task that was admitted."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "1c5f…",
                    "state": "waiting",
                    "vram_mib": 7168,
                    "reason": {"code": "memory", "message": "1500 MiB are short on every device"},
                    "position": 3,
                    "repeated": False,
                }
            ]
        }
    )

    id: str
    state: State
    vram_mib: int = Field(description="reserved per GPU; 0 while it cannot be estimated yet")
    reason: Reason | None = Field(None, description="why it waits")
    position: int | None = Field(None, description="while it waits: how many tasks of its lane come before it")
    repeated: bool = Field(False, description="its idempotency key had been used before, for this very task")


class BatchEntry(BaseModel):
    """What became of one task of a batch."""

    accepted: Accepted | None = None
    problem: Problem | None = None


class BatchAnswer(BaseModel):
    """One entry a task, in order: either ``accepted`` or ``problem``."""

    tasks: list[BatchEntry]


class Estimated(BaseModel):
    """How much memory a task would reserve, and why."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "vision.segment",
                    "vram_mib": 7168,
                    "gpus": 1,
                    "whole": False,
                    "profile": "vision.segment",
                    "parts": [{"label": "context", "mib": 400}, {"label": "weights", "mib": 900}],
                    "attributes": {"width": 4096, "height": 4096, "batch": 1},
                }
            ]
        }
    )

    name: str
    vram_mib: int = Field(description="reserved per GPU: the sum of the parts, rounded up to a size class")
    gpus: int = Field(description="GPUs of one node")
    whole: bool = Field(description="it would have its GPUs to itself; vram_mib is then the least that they must give")
    profile: str | None = Field(description="the row of the resource table; null: the demand was given")
    parts: list[Part]
    attributes: dict[str, float | str] = Field(description="what the formula read")

    @classmethod
    def of(cls, name: str, found: Estimate) -> Self:
        """An estimate for the API."""
        return cls(
            name=name,
            vram_mib=found.demand.vram_mib,
            gpus=found.demand.gpus,
            whole=found.demand.whole,
            profile=found.profile,
            parts=list(found.parts),
            attributes=dict(found.attributes),
        )


class Task(BaseModel):
    """A task as brim knows it. Times are seconds since 1970, null where it has not come to that."""

    id: str
    name: str
    state: State
    reason: Reason | None
    vram_mib: int = Field(description="demanded per GPU; of whole GPUs at least so much")
    gpus: int
    whole: bool = Field(description="it has its GPUs to itself")
    priority: int
    lane: str
    run: int = Field(description="1, and one more for every retry")
    attempts: int
    losses: int = Field(description="attempts that were lost, such as with a killed process")
    node: str | None
    devices: list[str]
    admitted_s: float
    eta_s: float | None
    expires_s: float | None
    placed_s: float | None
    started_s: float | None
    finished_s: float | None
    ended_s: float | None
    peak_mib: int | None = Field(description="the most memory that it was measured to use")
    cancelling: bool = Field(description="it runs, and its worker has been told to end it")

    @classmethod
    def of(cls, record: Record) -> Self:
        """A record for the API."""
        same = {
            name: getattr(record, name)
            for name in cls.model_fields
            if name not in ("id", "name", "vram_mib", "gpus", "whole", "devices") and hasattr(record, name)
        }
        return cls(
            id=record.task_id,
            name=record.task,
            vram_mib=record.demand.vram_mib,
            gpus=record.demand.gpus,
            whole=record.demand.whole,
            devices=list(record.devices),
            **same,
        )


class Failure(BaseModel):
    """The exception that a task ended with."""

    type: str
    message: str


class TaskDetail(Task):
    """A task with its story and, once it has ended, what it returned or raised."""

    position: int | None = Field(None, description="while it waits: how many tasks of its lane come before it")
    expected_start: tuple[float, float] | None = Field(
        None, description="while it waits: in how many seconds it is likely to start, from and to; null if nobody knows"
    )
    expected_note: Reason | None = Field(None, description="why nobody knows when it will start")
    story: list[dict[str, Any]] = Field(
        [], description="what happened, oldest first: t (ms since 1970), event, and what belongs to it"
    )
    result: JsonValue = None
    error: Failure | None = None
    result_note: str | None = Field(None, description="why there is no result to show, if there might be one")


class TaskPage(BaseModel):
    """Some tasks, newest first."""

    tasks: list[Task]
    next: str | None = Field(
        description="pass it as `after` for the next page; null at the end. "
        "A page of a rare state may hold fewer tasks than asked for and still have a next one"
    )


class Cluster(BaseModel):
    """Everything that the page shows."""

    at_s: float = Field(description="the moment, in seconds since 1970")
    healthy: bool
    problems: list[str] = Field(description="what is wrong, for a person")
    nodes: list[Server]
    gpus: list[Gpu]
    lanes: list[WaitingLane] = Field(description="overflow (level 1), the deepest lane first")
    counts: dict[State, int] = Field(description="how many tasks are in each state")
    intake_backlog: int = Field(description="messages that wait in the broker for intake")

    @classmethod
    def of(cls, picture: Picture) -> Self:
        """A picture for the API."""
        return cls(
            at_s=picture.at_s,
            healthy=not picture.problems,
            problems=picture.problems,
            nodes=list(picture.nodes.values()),
            gpus=picture.ordered_gpus,
            lanes=list(picture.lanes.values()),
            counts=dict(picture.counts),
            intake_backlog=picture.intake_backlog,
        )


class Past(BaseModel):
    """The last 15 minutes, a value for each step of time, the oldest first."""

    step_s: int
    per_s: list[float] = Field(description="tasks that ended, per second")
    wait_p50_s: list[float | None] = Field(description="half of those had waited no longer; null: none was placed")
    wait_p95_s: list[float | None]


class Change(BaseModel):
    """An event's data. Fields beside `full` and `away` are missing until Redis has been read once."""

    full: bool = Field(description="whether gpus, nodes and lanes are all of them, or those that have changed")
    away: str | None = Field(description="why Redis does not answer; the figures are then the latest known")
    gpus: list[Gpu] = []
    gpus_gone: list[str] = Field([], description="UUIDs of those that are gone")
    nodes: list[Server] = []
    nodes_gone: list[str] = []
    lanes: list[WaitingLane] = []
    lanes_gone: list[str] = []
    at_s: float = Field(0.0, description="the moment, in seconds since 1970")
    counts: dict[State, int] = {}
    intake_backlog: int = 0
    problems: list[str] = []
    history: Past | None = None


class Cancelled(BaseModel):
    """What became of a request to cancel."""

    id: str
    status: str = Field(description="cancelled, or cancelling: it runs and its worker has been told to end it")


class Profiles(BaseModel):
    """The published resource table."""

    profiles: dict[str, dict[str, Any]] = Field(description="task name or glob → its fields")


class Health(BaseModel):
    """Whether this process is there, or ready."""

    status: str


def why_waiting(state: State, reason: Reason | None, head: LaneHead | None) -> Reason | None:
    """Why a task waits: its own reason, else the one of the task that is first in its lane."""
    if state is not State.WAITING or reason is not None:
        return reason
    if head is None or head.reason is None:
        return NOT_TRIED
    return behind(head.task_id, head.reason)
