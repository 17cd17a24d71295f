"""A node agent's side of the store: registration, leases, memory reports and the books of its devices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from brim.core.model import AttemptView, State

from .base import Base
from .codec import dump, guard_of, seconds
from .types import MemoryReport, NodeRegistration

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
        bound: dict[str, tuple[str, str, int]] = {}
        processes: dict[str, dict[str, bool]] = {}
        for uuid, book in zip(uuids, pipeline.execute(), strict=True):
            processes[uuid] = {}
            for raw_field, value in book.items():
                field = raw_field.decode()
                if field.startswith("a:"):
                    vram, _, _, proc, task_id = value.decode().split("|", 4)
                    _, _, least_mib = bound.get(field[2:], ("", "", int(vram)))
                    bound[field[2:]] = (task_id, proc, min(least_mib, int(vram)))
                elif field.startswith("p:"):
                    processes[uuid][field[2:]] = value.split(b"|")[4] == b"1"
        return self._views(bound), processes

    def _views(self, bound: dict[str, tuple[str, str, int]]) -> list[AttemptView]:
        pipeline = self.client.pipeline(transaction=False)
        for task_id, _, _ in bound.values():
            pipeline.hmget(self.keys.task(task_id), *VIEWED)
        views = []
        for (attempt, (task_id, proc, vram)), record in zip(bound.items(), pipeline.execute(), strict=True):
            owner, state, boot, devices, placed, claimed, lane, context, estimate, queue = record
            if owner is None or owner.decode() != attempt:
                continue  # ended between the two reads
            views.append(
                AttemptView(
                    task_id,
                    attempt,
                    tuple(devices.decode().split(",")),
                    vram,
                    proc,
                    State(state.decode()),
                    (boot or b"").decode(),
                    seconds(placed) or 0.0,
                    seconds(claimed),
                    lane.decode(),
                    int(context or 0),
                    guard_of(estimate),
                    (queue or b"").decode(),
                )
            )
        return views
