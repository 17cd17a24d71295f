"""What people and producers may look at: records, stories, the availability table, depths and published tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from brim.core.model import Device, Identity, State

from .base import Base
from .codec import NODE_FIELDS, load_batched, load_demand, load_device, load_node_view, load_reason, seconds, text
from .types import NodeView, Record


class UserSide(Base):
    """Read-only views; nothing here changes anything."""

    def record(self, task_id: str) -> Record | None:
        """One task, or None if brim does not know it (any more)."""
        return _record(task_id, self.client.hgetall(self.keys.task(task_id)))

    def records(self, ids: Sequence[str]) -> list[Record]:
        """Several tasks; unknown ids are left out."""
        pipeline = self.client.pipeline(transaction=False)
        for task_id in ids:
            pipeline.hgetall(self.keys.task(task_id))
        found = (_record(task_id, fields) for task_id, fields in zip(ids, pipeline.execute(), strict=True))
        return [record for record in found if record is not None]

    def story(self, task_id: str) -> list[dict[str, Any]]:
        """What happened to a task, oldest first: ``t`` (server ms), ``event`` and what belongs to it."""
        return [json.loads(line) for line in self.client.lrange(self.keys.story(task_id), 0, -1)]

    def stories(self, ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """The stories of several tasks, by id."""
        pipeline = self.client.pipeline(transaction=False)
        for task_id in ids:
            pipeline.lrange(self.keys.story(task_id), 0, -1)
        return {i: [json.loads(line) for line in lines] for i, lines in zip(ids, pipeline.execute(), strict=True)}

    def task_ids(self, offset: int = 0, limit: int = -1) -> list[str]:
        """Ids of all tasks that brim knows, newest first."""
        last = -1 if limit < 0 else offset + limit - 1
        return [i.decode() for i in self.client.zrange(self.keys.tasks, offset, last, desc=True)]

    def list_tasks(self, state: State | None = None, limit: int = 50) -> list[Record]:
        """The newest tasks, of one state if given."""
        found: list[Record] = []
        offset, page = 0, 500
        while len(found) < limit:
            ids = self.task_ids(offset, page)
            if not ids:
                break
            found += [record for record in self.records(ids) if state is None or record.state == state]
            offset += page
        return found[:limit]

    def ids_in(self, state: State) -> list[str]:
        """Ids of all tasks in this state, newest first."""
        ids = self.task_ids()
        pipeline = self.client.pipeline(transaction=False)
        for task_id in ids:
            pipeline.hget(self.keys.task(task_id), "state")
        found = zip(ids, pipeline.execute(), strict=True)
        return [task_id for task_id, value in found if value is not None and value.decode() == state]

    def counts(self) -> dict[State, int]:
        """How many tasks are in each state; states without any are left out."""
        counts = {State(state.decode()): int(n) for state, n in self.client.hgetall(self.keys.counts).items()}
        return {state: counts[state] for state in State if counts.get(state)}

    def devices(self) -> list[Device]:
        """The availability table, by node and index."""
        entries = [load_device(entry) for entry in self.client.hvals(self.keys.availability)]
        return sorted(entries, key=lambda device: (device.node, device.index))

    def nodes(self) -> list[NodeView]:
        """Every node that has registered and not left, with its lease, by name."""
        names = sorted(name.decode() for name in self.client.smembers(self.keys.nodes))
        pipeline = self.client.pipeline(transaction=False)
        for name in names:
            pipeline.hmget(self.keys.node(name), *NODE_FIELDS)
        found = zip(names, pipeline.execute(), strict=True)
        return [load_node_view(name, fields) for name, fields in found if fields[0] is not None]

    def measured_mib(self, uuids: Sequence[str]) -> dict[str, dict[str, int]]:
        """Per device: ``reserved`` (by live attempts), ``measured`` (by brim's processes) and ``external`` MiB."""
        pipeline = self.client.pipeline(transaction=False)
        for uuid in uuids:
            pipeline.hgetall(self.keys.book(uuid))
        return {uuid: _sums(book) for uuid, book in zip(uuids, pipeline.execute(), strict=True)}

    def lane_depths(self) -> dict[str, int]:
        """Overflow: lane -> how many tasks wait in it; empty lanes are left out."""
        lanes = [lane.decode() for lane in self.client.hkeys(self.keys.lanes)]
        pipeline = self.client.pipeline(transaction=False)
        for lane in lanes:
            pipeline.zcard(self.keys.lane(lane))
        return {lane: depth for lane, depth in zip(lanes, pipeline.execute(), strict=True) if depth}

    def queue_lengths(self, queues: Sequence[str]) -> dict[str, int]:
        """Broker list -> number of messages in it."""
        pipeline = self.client.pipeline(transaction=False)
        for queue in queues:
            pipeline.llen(queue)
        return dict(zip(queues, pipeline.execute(), strict=True))

    def profile_names(self) -> list[str]:
        """Names and globs of the published resource table."""
        return [name.decode() for name in self.client.hkeys(self.keys.profiles)]


def _sums(book: Mapping[bytes, bytes]) -> dict[str, int]:
    reserved = measured = 0
    for field, value in book.items():
        if field.startswith((b"a:", b"x:")):
            reserved += int(value.split(b"|", 1)[0])
        elif field.startswith(b"p:"):
            measured += max(0, int(value.split(b"|", 1)[0]))
    return {"reserved": reserved, "measured": measured, "external": int(book.get(b"external", b"0"))}


def _record(task_id: str, raw: Mapping[bytes, bytes]) -> Record | None:
    if b"state" not in raw:
        return None
    fields = {key.decode(): value for key, value in raw.items() if key not in (b"head", b"tail", b"next")}
    return Record(
        task_id=task_id,
        task=fields["task"].decode(),
        state=State(fields["state"].decode()),
        identity=Identity(task_id, int(fields["nesting"]), int(fields["retries"])),
        run=int(fields["run"]),
        lane=fields["lane"].decode(),
        demand=load_demand(fields["demand"]),
        context_mib=int(fields["context_mib"]),
        priority=int(fields["priority"]),
        attempts=int(fields.get("attempts", 0)),
        losses=int(fields.get("losses", 0)),
        attempt=text(fields.get("attempt")),
        node=text(fields.get("node")),
        devices=tuple(uuid for uuid in fields.get("devices", b"").decode().split(",") if uuid),
        reason=load_reason(fields.get("reason")),
        admitted_s=seconds(fields["admitted_ms"]) or 0.0,
        eta_s=seconds(fields.get("eta_ms")),
        expires_s=seconds(fields.get("expires_ms")),
        placed_s=seconds(fields.get("placed_ms")),
        claimed_s=seconds(fields.get("claimed_ms")),
        started_s=seconds(fields.get("started_ms")),
        finished_s=seconds(fields.get("finished_ms")),
        finisher_s=seconds(fields.get("finisher_ms")),
        ended_s=seconds(fields.get("ended_ms")),
        peak_mib=int(fields["peak_mib"]) if "peak_mib" in fields else None,
        cancelling="cancel" in fields,
        batched=load_batched(fields.get("batch"), fields.get("size")),
        executor=text(fields.get("executor")) or None,
    )
