"""How values are written into Redis and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from brim.core.batching import Batched, BatchKey, ModelKey, Phase
from brim.core.model import Demand, Device, Node, Reason, canonical

from .types import ExecutorView, HeldItem, NodeView

EPOCH_S = 1_735_689_600
"""Start of 2025, from which admission ticks (10 µs) are counted; see scripts/admit.lua."""
PRIORITY_STEP = 2**47


def dump(value: Any) -> str:
    """Compact JSON of a value or dataclass."""
    return _COMPACT.encode(value)


def _plain(value: Any) -> Any:
    """What JSON can say of a value that it does not know."""
    if isinstance(value, Mapping) or hasattr(value, "__dataclass_fields__"):
        return canonical(value)
    raise TypeError(f"no JSON for a {type(value).__name__}")


_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain)


@lru_cache(maxsize=1024)
def dump_demand(demand: Demand) -> str:
    """As `dump`: few demands are many tasks'."""
    return dump(demand)


def text(value: bytes | None) -> str | None:
    """A field as text; None when it is not there."""
    return None if value is None else value.decode()


def seconds(value: bytes | None) -> float | None:
    """A field in ms as seconds; None when it is not there or empty."""
    return int(value) / 1000 if value else None


def milliseconds(value: float | None) -> str:
    """Seconds as a field in ms; empty for None."""
    return "" if value is None else str(round(value * 1000))


def guard_of(estimate: bytes | None) -> str:
    """How a task is held to its reservation, by its record's estimate."""
    return str(json.loads(estimate).get("guard", "off")) if estimate else "off"


def admitted_s(order: float) -> float:
    """When a task with this overflow order was admitted."""
    return (order % PRIORITY_STEP) / 100_000 + EPOCH_S


def load_reason(value: bytes | None) -> Reason | None:
    """A reason from JSON."""
    return Reason(**json.loads(value)) if value else None


def load_demand(value: bytes | str | dict[str, Any]) -> Demand:
    """A demand from JSON."""
    return _demand_of(value) if isinstance(value, dict) else _load_demand(value)


@lru_cache(maxsize=1024)
def _load_demand(value: bytes | str) -> Demand:
    return _demand_of(json.loads(value))


def _demand_of(fields: dict[str, Any]) -> Demand:
    labels = tuple((key, label) for key, label in fields.pop("labels", ()))
    return Demand(**fields | {"gpu_models": tuple(fields.get("gpu_models", ())), "labels": labels})


def load_device(value: bytes) -> Device:
    """An entry of the availability table."""
    return Device(**json.loads(value))


def load_batched(batch: bytes | None, size: bytes | None) -> Batched | None:
    """What a task is batched by, from its record's fields; None for other tasks."""
    if not batch:
        return None
    found = json.loads(batch)
    return Batched(found["model"], found["version"], found["shape"], float(size or 1))


@lru_cache(maxsize=1024)
def load_lane(value: bytes) -> tuple[str, Demand, int, BatchKey | None]:
    """What a lane's tasks have in common: their name, their demand, the MiB of their CUDA context, and what they are
    batched by, if they are."""
    common = json.loads(value)
    batch, task = common.get("batch"), common["task"]
    key = BatchKey(task, ModelKey(batch["model"], batch["version"]), batch["shape"]) if batch else None
    return task, load_demand(common["demand"]), common["context_mib"], key


def load_executor(fields: Mapping[bytes, bytes]) -> ExecutorView | None:
    """A model executor from its hash; None where there is none."""
    if b"about" not in fields:
        return None
    about = json.loads(fields[b"about"])
    model = ModelKey(about["model"], about["version"])
    return ExecutorView(
        **about,
        phase=Phase(fields[b"state"].decode()),
        since_s=seconds(fields[b"since_ms"]) or 0.0,
        used_s=seconds(fields[b"used_ms"]) or 0.0,
        boot=fields.get(b"boot", b"").decode(),
        proc=fields.get(b"proc", b"").decode(),
        ceiling=float(fields[b"ceiling"]) if b"ceiling" in fields else None,
        reason=load_reason(fields.get(b"reason")),
        deadline_s=seconds(fields.get(b"deadline_ms")),
        batch=int(fields.get(b"batch", 0)),
        ahead=b"ahead" in fields,
        items=[_held(name[2:].decode(), model, value) for name, value in fields.items() if name.startswith(b"i:")],
    )


def dump_item(item: HeldItem) -> str:
    """An item as it stands in its executor's book, without the mark of the sealed ones."""
    return json.dumps([item.task_id, item.key.task, item.key.shape, item.order, item.size, item.lane])


def _held(attempt: str, model: ModelKey, value: bytes) -> HeldItem:
    task_id, task, shape, order, size, lane = json.loads(value[1:])
    return HeldItem(attempt, task_id, BatchKey(task, model, shape), order, size, lane, value[:1] == b"1")


NODE_FIELDS = ("boot", "state", "renewed_ms", "info")
"""What `load_node_view` needs of a node's hash."""


def load_node_view(name: str, fields: Sequence[bytes]) -> NodeView:
    """A node with its lease, from `NODE_FIELDS`."""
    boot, state, renewed, text = fields
    info = json.loads(text)
    node = Node(name, dict(info.get("labels") or {}), float(info.get("cpus", 0)), int(info.get("ram_mib", 0)))
    devices = [device["uuid"] for device in info["devices"]]
    return NodeView(node, boot.decode(), state.decode(), int(renewed) / 1000, devices)
