"""A node agent's side of the store: registration, leases, memory reports and the books of its devices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from brim.core.model import AttemptView, State

from .base import Base
from .codec import dump, guard_of, load_executor, seconds
from .types import MemoryReport, NodeBooks, NodeRegistration

VIEWED = ("attempt", "state", "boot", "devices", "placed_ms", "claimed_ms", "lane", "context_mib", "estimate", "queue")
"""Fields of a record that an `AttemptView` shows."""


class NodeSide(Base):
    """What a node's agent says; a refusal means that another boot has taken over or the node was declared lost."""

    def register_node(self, registration: NodeRegistration) -> bool:
        """Puts the node and its devices into the table.

        False: attempts of an earlier boot are still in the books; lose them first. Before calling, the agent has
        made sure that no process of an earlier boot lives.
        """
        keys, node = self.keys, registration.node
        names = json.dumps(sorted(registration.tasks))
        digest = hashlib.sha256(names.encode()).hexdigest()[:16]
        infos = [
            {
                "uuid": d.uuid,
                "node": node.name,
                "index": d.index,
                "model": d.model,
                "total_mib": d.total_mib,
                "headroom_mib": d.headroom_mib,
                "executors": registration.executors,
                "tasks": digest,
            }
            for d in registration.devices
        ]
        info = {"labels": node.labels, "cpus": node.cpus, "ram_mib": node.ram_mib, "devices": infos}
        answer = b"moved"
        while answer == b"moved":
            gone = sorted(self._devices_of(node.name) - {d.uuid for d in registration.devices})
            answer = self.runner.run(
                "register",
                [
                    keys.node(node.name),
                    keys.nodes,
                    keys.availability,
                    keys.changed,
                    keys.wake,
                    keys.taskset(digest),
                    keys.signatures,
                    *(keys.book(uuid) for uuid in (*(d.uuid for d in registration.devices), *gone)),
                ],
                [
                    node.name,
                    registration.boot,
                    dump(info),
                    names,
                    dump(registration.signatures),
                    registration.state,
                    *gone,
                ],
            )
        return bool(answer == b"registered")

    def _devices_of(self, node: str) -> set[str]:
        """What the node registered last."""
        info = self.client.hget(self.keys.node(node), "info")
        return {device["uuid"] for device in json.loads(info)["devices"]} if info else set()

    def renew(self, node: str, boot: str, *, draining: bool = False) -> bool:
        """Renews the node's leases. False: kill what this agent runs and register again."""
        args = [boot, "draining" if draining else "up"]
        return bool(self.runner.run("renew", [self.keys.node(node)], args))

    def set_device_state(self, node: str, boot: str, uuids: Sequence[str], state: str) -> bool:
        """Marks devices ``up``, ``draining``, ``starting`` or ``quarantined``; only ``up`` ones take work."""
        keys = self.keys
        names = [
            keys.node(node),
            keys.availability,
            keys.changed,
            keys.wake,
            *(keys.book(uuid) for uuid in uuids),
        ]
        return bool(self.runner.run("device_state", names, [boot, state]))

    def report(self, report: MemoryReport) -> bool:
        """Writes a memory report into the books and publishes it; False if another boot has taken over."""
        keys, uuids = self.keys, list(report.devices)
        names = [keys.node(report.node), keys.availability, keys.changed, keys.wake, keys.reports]
        names += [keys.book(uuid) for uuid in uuids]
        return bool(
            self.runner.run("report", names, [report.boot, report.sampled_ms, report.model_dump_json(), *uuids])
        )

    def process_gone(self, uuid: str, proc: str) -> bool:
        """Takes a dead process out of a book; False while an attempt is bound to it (lose that first)."""
        keys = self.keys
        names = [keys.book(uuid), keys.availability, keys.changed, keys.wake]
        return bool(self.runner.run("process_gone", names, [proc]))

    def leave(self, node: str, boot: str) -> bool:
        """Takes a drained node out of the table; False if attempts are left or another boot has taken over."""
        uuids = sorted(self._devices_of(node))
        keys = self.keys
        names = [keys.node(node), keys.nodes, keys.availability, keys.changed, keys.wake]
        names += [keys.book(uuid) for uuid in uuids]
        return bool(self.runner.run("leave", names, [node, boot, *uuids]))

    def books(self, uuids: Sequence[str]) -> tuple[list[AttemptView], dict[str, dict[str, bool]]]:
        """Live attempts on some devices, and per device its processes: proc -> doomed (to be replaced)."""
        pipeline = self.client.pipeline(transaction=False)
        for uuid in uuids:
            pipeline.hgetall(self.keys.book(uuid))
        written = _Written.of(uuids, pipeline.execute())
        for task_id, _, _ in written.bound.values():
            pipeline.hmget(self.keys.task(task_id), *VIEWED)
        return written.views(pipeline.execute()), written.processes

    def look_at(self, uuids: Sequence[str]) -> NodeBooks:
        """All that an agent compares with what it sees of its devices, in two round trips."""
        pipeline = self.client.pipeline(transaction=False)
        pipeline.time()
        for uuid in uuids:
            pipeline.hgetall(self.keys.book(uuid))
        (whole, micros), *books = pipeline.execute()
        written = _Written.of(uuids, books)
        for task_id, _, _ in written.bound.values():
            pipeline.hmget(self.keys.task(task_id), *VIEWED)
        for executor in sorted(written.executors):
            pipeline.hgetall(self.keys.executor(executor))
        answers = pipeline.execute()
        records, executors = answers[: len(written.bound)], answers[len(written.bound) :]
        return NodeBooks(
            int(whole) * 1000 + int(micros) // 1000,
            written.views(records),
            written.processes,
            [view for fields in executors if (view := load_executor(fields)) is not None],
        )


@dataclass(frozen=True, slots=True)
class _Written:
    """What stands in some devices' books; ``bound``: attempt -> task id, process, and MiB that it holds at least."""

    bound: dict[str, tuple[str, str, int]]
    processes: dict[str, dict[str, bool]]
    executors: set[str]

    @classmethod
    def of(cls, uuids: Sequence[str], books: Sequence[Mapping[bytes, bytes]]) -> Self:
        """Of these devices, whose books these are."""
        bound: dict[str, tuple[str, str, int]] = {}
        processes: dict[str, dict[str, bool]] = {}
        executors: set[str] = set()
        for uuid, book in zip(uuids, books, strict=True):
            processes[uuid] = {}
            for raw_field, value in book.items():
                field = raw_field.decode()
                if field.startswith("a:"):
                    vram, _, _, proc, task_id = value.decode().split("|", 4)
                    _, _, least_mib = bound.get(field[2:], ("", "", int(vram)))
                    bound[field[2:]] = (task_id, proc, min(least_mib, int(vram)))
                elif field.startswith("p:"):
                    processes[uuid][field[2:]] = value.split(b"|")[4] == b"1"
                elif field.startswith("x:"):
                    executors.add(field[2:])
        return cls(bound, processes, executors)

    def views(self, records: Sequence[Sequence[bytes | None]]) -> list[AttemptView]:
        """The attempts, with these fields (`VIEWED`) of their tasks' records."""
        views = []
        for (attempt, (task_id, proc, vram)), record in zip(self.bound.items(), records, strict=True):
            owner, state, boot, devices, placed, claimed, lane, context, estimate, queue = record
            if owner is None or owner.decode() != attempt:
                continue  # ended between the two reads
            views.append(
                AttemptView(
                    task_id,
                    attempt,
                    tuple((devices or b"").decode().split(",")),
                    vram,
                    proc,
                    State((state or b"").decode()),
                    (boot or b"").decode(),
                    seconds(placed) or 0.0,
                    seconds(claimed),
                    (lane or b"").decode(),
                    int(context or 0),
                    guard_of(estimate),
                    (queue or b"").decode(),
                )
            )
        return views
