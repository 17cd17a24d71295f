"""Servers and tasks to simulate, from CSV files (docs/simulate.md) or from the published openb trace.

In the openb trace a GPU of any model holds 1,000 units, and requests are shares of it; those units stand for MiB.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from brim.core.model import Demand, Device, Node
from brim.core.profiles import Mib
from brim.core.simulation import ENDLESS_EXECUTORS, Job, Server

OPENB_GPU_UNITS = 1000
OPENB_LONGEST_S = 12 * 3600.0
"""Run times of the openb trace are cut here: some of its tasks are services that ran for months."""

ADDED = re.compile(r"(?P<nodes>\d+)x(?P<model>.+?)-(?P<gib>\d+)(x(?P<gpus>\d+))?$")


class TraceError(ValueError):
    """What is wrong in a file of servers or tasks, with its place."""


def _names(text: object) -> object:
    return tuple(name for name in text.split("|") if name) if isinstance(text, str) else text


def _pairs(text: object) -> object:
    """``zone=a|disk=ssd`` as pairs."""
    if not isinstance(text, str):
        return text
    pairs = [pair.partition("=") for pair in text.split("|") if pair]
    if any(not sign for _, sign, _ in pairs):
        raise ValueError("labels are written label=value, several joined by |")
    return tuple((label, value) for label, _, value in pairs)


def _bare(text: object) -> object:
    """A number in a file is text."""
    return float(text) if isinstance(text, str) and text.replace(".", "", 1).isdigit() else text


Row = TypeVar("Row", bound=BaseModel)
Amount = Annotated[Mib, BeforeValidator(_bare)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Pairs = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs)]


class _Row(BaseModel):
    """One line of a file; an empty field counts as absent."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_empty(cls, row: Any) -> Any:
        return {name: value for name, value in row.items() if value not in ("", None)}


class ServerRow(_Row):
    """A line of the file of servers."""

    name: str = "node"
    count: int = Field(1, ge=1)
    gpus: int = Field(ge=1, le=63)
    model: str = "GPU"
    vram_mib: Annotated[Amount, Field(gt=0)]
    headroom_mib: Amount = 512
    executors: int = Field(ENDLESS_EXECUTORS, ge=1)
    cpus: float = Field(0.0, ge=0)
    ram_mib: Amount = 0
    labels: Pairs = ()

    def servers(self) -> Iterator[Server]:
        """The servers that the line stands for."""
        for number in range(self.count):
            name = self.name if self.count == 1 else f"{self.name}-{number}"
            devices = tuple(
                Device(
                    uuid=f"{name}-{index}",
                    node=name,
                    index=index,
                    model=self.model,
                    total_mib=self.vram_mib,
                    headroom_mib=self.headroom_mib,
                    external_mib=0,
                    committed_mib=0,
                    executors=self.executors,
                    busy=0,
                )
                for index in range(self.gpus)
            )
            yield Server(Node(name, dict(self.labels), self.cpus, self.ram_mib), devices)


class JobRow(_Row):
    """A line of the file of tasks."""

    name: str = ""
    count: int = Field(1, ge=1)
    vram_mib: Amount = 0
    gpus: int = Field(1, ge=0)
    whole: bool = False
    cpus: float = Field(0.0, ge=0)
    ram_mib: Amount = 0
    gpu_models: Names = ()
    labels: Pairs = ()
    arrival_s: float = Field(0.0, ge=0)
    run_s: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _asks_for_memory(self) -> Self:
        if self.gpus and not self.vram_mib:
            raise ValueError("vram_mib is missing (or gpus = 0)")
        return self

    def jobs(self) -> list[Job]:
        """The tasks that the line stands for."""
        demand = Demand(
            self.vram_mib if self.gpus else 0,
            self.gpus,
            self.cpus,
            self.ram_mib,
            self.gpu_models,
            self.labels,
            self.whole and self.gpus > 0,
        )
        return [Job(demand, self.arrival_s, self.run_s)] * self.count


class OpenbServerRow(BaseModel):
    """A node of the openb trace."""

    sn: str
    cpu_milli: int
    memory_mib: int
    gpu: int = Field(ge=1)
    model: str

    def servers(self) -> Iterator[Server]:
        """The server."""
        row = {"name": self.sn, "gpus": self.gpu, "model": self.model, "vram_mib": OPENB_GPU_UNITS, "headroom_mib": 0}
        host = {"cpus": self.cpu_milli / 1000, "ram_mib": self.memory_mib}
        yield from ServerRow.model_validate(row | host).servers()


class OpenbJobRow(BaseModel):
    """A pod of the openb trace; some of its files lack the times and the models."""

    cpu_milli: int
    memory_mib: int
    num_gpu: int = Field(ge=0)
    gpu_milli: int = Field(ge=0, le=OPENB_GPU_UNITS)
    gpu_spec: Names = ()
    creation_time: float = 0.0
    scheduled_time: float | None = None
    deletion_time: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_empty(cls, row: Any) -> Any:
        return {name: value for name, value in row.items() if value not in ("", None)}

    def jobs(self) -> list[Job]:
        """The task."""
        begun_s = self.creation_time if self.scheduled_time is None else self.scheduled_time
        run_s = 0.0 if self.deletion_time is None else self.deletion_time - begun_s
        units = self.gpu_milli if self.num_gpu else 0
        demand = Demand(units, self.num_gpu, self.cpu_milli / 1000, self.memory_mib, self.gpu_spec)
        return [Job(demand, self.creation_time, min(max(run_s, 0.0), OPENB_LONGEST_S))]


def read_servers(path: Path, *, openb: bool, every: int = 1) -> list[Server]:
    """The servers in the file, every ``every``-th of them. Raises `TraceError`."""
    kind: type[ServerRow | OpenbServerRow] = OpenbServerRow if openb else ServerRow
    rows = [_parsed(kind, path, line, row) for line, row in _rows(path)]
    servers = [server for row in rows for server in row.servers()][::every]
    if not servers:
        raise TraceError(f"{path}: no server in it")
    return servers


def read_jobs(path: Path, *, openb: bool) -> list[Job]:
    """The tasks in the file. Raises `TraceError`."""
    kind: type[JobRow | OpenbJobRow] = OpenbJobRow if openb else JobRow
    rows = [_parsed(kind, path, line, row) for line, row in _rows(path)]
    jobs = [job for row in rows for job in row.jobs()]
    if not jobs:
        raise TraceError(f"{path}: no task in it")
    return jobs


def added_servers(text: str, like: list[Server]) -> list[Server]:
    """Servers asked for as ``NODESxMODEL-GIB[xGPUS]``: 4xA100-80 is four servers of eight A100 with 80 GiB each.

    Each GPU brings as much host CPU and RAM as there is for one on average in ``like``, if that declares any. A GPU of
    the openb trace is 1,000 units whatever its GiB. Raises `TraceError`.
    """
    wish = ADDED.match(text)
    if wish is None:
        raise TraceError(f"--add-nodes {text}: write NODESxMODEL-GIB[xGPUS], as in 4xA100-80 or 2xL40S-48x4")
    gpus = int(wish["gpus"] or 8)
    known = [device for server in like for device in server.devices]
    shares = bool(known) and all(device.total_mib == OPENB_GPU_UNITS for device in known)
    row = ServerRow(
        name=f"added-{wish['model']}",
        count=int(wish["nodes"]),
        gpus=gpus,
        model=wish["model"],
        vram_mib=OPENB_GPU_UNITS if shares else int(wish["gib"]) * 1024,
        headroom_mib=known[0].headroom_mib if known else 512,
        executors=known[0].executors if known else ENDLESS_EXECUTORS,
        cpus=gpus * sum(server.node.cpus for server in like) / max(1, len(known)),
        ram_mib=round(gpus * sum(server.node.ram_mib for server in like) / max(1, len(known))),
    )
    return list(row.servers())


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            for row in reader:
                if None in row:
                    raise TraceError(f"{path}, line {reader.line_num}: more fields than the first line names")
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TraceError(f"{path}: {reason}") from error


def _parsed(kind: type[Row], path: Path, line: int, row: dict[str, Any]) -> Row:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise TraceError(f"{path}, line {line}{f', {field}' if field else ''}: {first['msg']}") from error
