"""Recomputes every device's books from the leases and names each difference (invariants 1 to 4)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from brim.core.model import LIVE, TERMINAL, State

from .base import Base
from .codec import NODE_FIELDS, load_device, load_executor, load_node_view
from .types import ExecutorView, NodeView

RECORD = ("state", "attempt", "devices", "executor", "lane", "next", "owed", "head")


@dataclass(frozen=True, slots=True)
class _Task:
    """What of a record has to agree with other keys."""

    state: State
    attempt: str
    devices: tuple[str, ...]
    executor: str
    lane: str
    holds_next: bool
    owed: bool
    has_envelope: bool


@dataclass(frozen=True, slots=True)
class _Everything:
    """All that is compared, read in one transaction but for the names of tasks, devices, lanes and nodes."""

    tasks: Mapping[str, _Task | None]
    books: Mapping[str, Mapping[bytes, bytes]]
    nodes: Mapping[str, NodeView | None]
    availability: Mapping[str, bytes]
    executors: Mapping[str, ExecutorView | None] = field(default_factory=dict)
    lanes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    counts: Mapping[State, int] = field(default_factory=dict)
    indexes: Mapping[State, frozenset[str]] = field(default_factory=dict)
    finished: frozenset[str] = frozenset()
    expiring: frozenset[str] = frozenset()
    owed: Counter[str] = field(default_factory=Counter)


class AuditSide(Base):
    """Meant for a quiet moment, or to be asked twice: names are read before what belongs to them."""

    def audit(self) -> list[str]:
        """Differences between records, books, lanes, counts and the availability table; empty is right."""
        found = self._read_everything()
        return [
            *_task_differences(found),
            *_index_differences(found),
            *_device_differences(found),
            *_executor_differences(found),
        ]

    def audit_devices(self) -> list[str]:
        """The part of it that costs little, however many tasks there are: books against leases and the table."""
        keys = self.keys
        executors = _texts(self.client.smembers(keys.executors))
        uuids, names = _texts(self.client.hkeys(keys.availability)), _texts(self.client.smembers(keys.nodes))
        pipeline = self.client.pipeline(transaction=False)
        for uuid in uuids:
            pipeline.hgetall(keys.book(uuid))
        held = [value for book in pipeline.execute() for name, value in book.items() if name.startswith(b"a:")]
        ids = sorted({value.decode().split("|", 4)[4] for value in held})
        pipeline = self.client.pipeline(transaction=True)
        for task_id in ids:
            pipeline.hmget(keys.task(task_id), *RECORD)
        for uuid in uuids:
            pipeline.hgetall(keys.book(uuid))
        for name in names:
            pipeline.hmget(keys.node(name), *NODE_FIELDS)
        pipeline.hgetall(keys.availability)
        for executor in executors:
            pipeline.hgetall(keys.executor(executor))
        answers = iter(pipeline.execute())
        found = _Everything(
            tasks={task_id: _task(next(answers)) for task_id in ids},
            books={uuid: next(answers) for uuid in uuids},
            nodes={name: _node(name, next(answers)) for name in names},
            availability={uuid.decode(): entry for uuid, entry in next(answers).items()},
            executors={executor: load_executor(next(answers)) for executor in executors},
        )
        return list(_device_differences(found))

    def _read_everything(self) -> _Everything:
        keys, client = self.keys, self.client
        pipeline = client.pipeline(transaction=True)
        pipeline.zrange(keys.tasks, 0, -1).hkeys(keys.availability).hkeys(keys.lanes).smembers(keys.nodes)
        pipeline.smembers(keys.executors)
        ids, uuids, lanes, names, executors = (_texts(found) for found in pipeline.execute())
        for task_id in ids:
            pipeline.hmget(keys.task(task_id), *RECORD)
        for uuid in uuids:
            pipeline.hgetall(keys.book(uuid))
        for lane in lanes:
            pipeline.zrange(keys.lane(lane), 0, -1)
        for name in names:
            pipeline.hmget(keys.node(name), *NODE_FIELDS)
        pipeline.hgetall(keys.availability)
        for executor in executors:
            pipeline.hgetall(keys.executor(executor))
        pipeline.hgetall(keys.counts)
        for index in (keys.scheduled, keys.awaited, keys.finished, keys.expiring):
            pipeline.zrange(index, 0, -1)
        pipeline.lrange(keys.outbox, 0, -1)
        answers = iter(pipeline.execute())
        tasks = {task_id: _task(next(answers)) for task_id in ids}
        books = {uuid: next(answers) for uuid in uuids}
        members = {lane: frozenset(_texts(next(answers))) for lane in lanes}
        return _Everything(
            tasks,
            books,
            {name: _node(name, next(answers)) for name in names},
            {uuid.decode(): entry for uuid, entry in next(answers).items()},
            {executor: load_executor(next(answers)) for executor in executors},
            members,
            {State(state.decode()): int(n) for state, n in next(answers).items()},
            {state: frozenset(_texts(next(answers))) for state in (State.SCHEDULED, State.HANDED_OVER)},
            frozenset(_texts(next(answers))),
            frozenset(_texts(next(answers))),
            Counter(str(json.loads(entry)["id"]) for entry in next(answers)),
        )


def _task_differences(found: _Everything) -> Iterator[str]:
    """Each record against the books, and against itself."""
    for task_id, task in found.tasks.items():
        if task is None:
            yield f"task {task_id}: listed, but it has no record"
            continue
        if task.state in LIVE:
            for uuid in task.devices:
                if not task.executor and f"a:{task.attempt}".encode() not in found.books.get(uuid, {}):
                    yield f"task {task_id}: {task.state} as attempt {task.attempt}, not in the book of {uuid}"
            if task.executor and task.attempt not in _held(found.executors.get(task.executor)):
                yield f"task {task_id}: {task.state} as attempt {task.attempt}, not held by {task.executor}"
        elif task.holds_next:
            yield f"task {task_id}: {task.state}, but the message of a newer run is held"
        if task.state not in TERMINAL and not task.has_envelope:
            yield f"task {task_id}: {task.state} without its envelope"
        if found.owed[task_id] != int(task.owed):
            yield f"task {task_id}: {found.owed[task_id]} answers in the outbox, its record says {int(task.owed)}"


def _index_differences(found: _Everything) -> Iterator[str]:
    """Counts, lanes and sorted sets against the records."""
    states = {task_id: task.state for task_id, task in found.tasks.items() if task is not None}
    seen = Counter(states.values())
    for state in State:
        if seen[state] != found.counts.get(state, 0):
            yield f"counts: {state} says {found.counts.get(state, 0)}, there are {seen[state]}"
    belongs = {i: task.lane for i, task in found.tasks.items() if task is not None and task.state == State.WAITING}
    for task_id, lane in belongs.items():
        if task_id not in found.lanes.get(lane, frozenset()):
            yield f"task {task_id}: waiting, but not in its lane {lane!r}"
    for lane, members in found.lanes.items():
        for task_id in members:
            if belongs.get(task_id) != lane:
                yield f"task {task_id}: {states.get(task_id, 'unknown')}, but in lane {lane!r}"
    indexes = [(str(state), members, {state}) for state, members in found.indexes.items()]
    for name, members, of_states in [*indexes, ("finished", found.finished, TERMINAL)]:
        for task_id in members ^ {task_id for task_id, state in states.items() if state in of_states}:
            listed = "listed" if task_id in members else "not listed"
            yield f"task {task_id}: {states.get(task_id, 'unknown')}, but {listed} as {name}"
    for task_id in found.expiring:
        if states.get(task_id) in {None, *TERMINAL, State.HANDED_OVER}:
            yield f"task {task_id}: {states.get(task_id, 'unknown')}, but listed to expire"


def _device_differences(found: _Everything) -> Iterator[str]:
    leased = {
        (uuid, task.attempt)
        for task in found.tasks.values()
        if task and task.state in LIVE and not task.executor
        for uuid in task.devices
    }
    listed = {uuid: view for view in found.nodes.values() if view is not None for uuid in view.devices}
    for name, view in found.nodes.items():
        if view is None:
            yield f"node {name}: listed, but it has not registered"
    for uuid in listed.keys() - found.books.keys():
        yield f"device {uuid}: registered by node {listed[uuid].node.name}, not in the availability table"
    for uuid, book in found.books.items():
        entry = found.availability.get(uuid)
        if b"info" not in book or entry is None:
            yield f"device {uuid}: in the availability table without a book"
            continue
        node = json.loads(book[b"info"])["node"]
        view = listed.get(uuid)
        if view is None or view.node.name != node:
            yield f"device {uuid}: in the availability table, but node {node} does not list it"
        elif (view.state == "lost") != (book[b"state"] == b"lost"):
            yield f"device {uuid}: {book[b'state'].decode()}, but its node {node} is {view.state}"
        yield from _book_differences(uuid, book, entry, leased)


def _book_differences(
    uuid: str, book: Mapping[bytes, bytes], entry: bytes, leased: set[tuple[str, str]]
) -> Iterator[str]:
    """One book against the leases, and its entry in the availability table against the book."""
    info, reserved, committed, busy = json.loads(book[b"info"]), Counter[str](), 0, 0
    milli, ram_mib = 0, 0
    for name, value in book.items():
        if name.startswith(b"a:"):
            vram, milli_cpus, ram, proc, task_id = value.decode().split("|", 4)
            busy, milli, ram_mib = busy + 1, milli + int(milli_cpus), ram_mib + int(ram)
            if (uuid, name[2:].decode()) not in leased:
                yield f"device {uuid}: holds attempt {name[2:].decode()} of {task_id}, which has no such lease"
            if proc:
                reserved[proc] += int(vram)
            else:
                committed += int(vram)
        elif name.startswith(b"x:"):
            vram, proc = value.decode().split("|")
            if proc:
                reserved[proc] += int(vram)
            else:
                committed += int(vram)
    processes = {name[2:].decode(): value.decode() for name, value in book.items() if name.startswith(b"p:")}
    reclaimable = 0
    for proc in processes.keys() | reserved.keys():
        measured, floor, _, _, doomed, noted = processes.get(proc, "-1|0|0|0|0|0").split("|")
        if reserved[proc] != int(noted):
            yield f"device {uuid}: {noted} MiB are noted as reserved for process {proc}, {reserved[proc]} are"
        held = int(measured) if int(measured) >= 0 else int(floor)
        committed += max(reserved[proc], held)
        if not reserved[proc] and doomed == "0":
            reclaimable += held
    external = int(book.get(b"external", b"0"))
    if book.get(b"entry") != entry:
        yield f"device {uuid}: its entry in the table is not the one in its book"
    if b"whole" in book:
        committed = max(committed, info["total_mib"] - info["headroom_mib"] - external)
        if b"a:" + book[b"whole"] not in book:
            yield f"device {uuid}: is kept for attempt {book[b'whole'].decode()}, which it does not hold"
    device = load_device(entry)
    expected = {
        **info,
        "committed_mib": committed,
        "reclaimable_mib": reclaimable,
        "busy": busy,
        "cpus_used": milli / 1000,
        "ram_used_mib": ram_mib,
        "external_mib": external,
        "state": book[b"state"].decode(),
    }
    for name, value in expected.items():
        if getattr(device, name) != value:
            yield f"device {uuid}: {name} is {getattr(device, name)} in the table, {value} by its book"


def _task(fields: list[bytes | None]) -> _Task | None:
    state, attempt, devices, executor, lane, next_message, owed, head = fields
    if state is None:
        return None
    return _Task(
        State(state.decode()),
        (attempt or b"").decode(),
        tuple(uuid for uuid in (devices or b"").decode().split(",") if uuid),
        (executor or b"").decode(),
        (lane or b"").decode(),
        next_message is not None,
        owed is not None,
        head is not None,
    )


def _node(name: str, fields: Any) -> NodeView | None:
    return load_node_view(name, fields) if fields[0] is not None else None


def _texts(values: Any) -> list[str]:
    return [value.decode() for value in values]


def _held(view: ExecutorView | None) -> frozenset[str]:
    """The attempts in a model executor's book."""
    return frozenset(item.attempt for item in view.items) if view is not None else frozenset()


def _executor_differences(found: _Everything) -> Iterator[str]:
    """Each model executor's book against the records, and its reservation against its device's book."""
    reserved = {
        (name[2:].decode(), uuid): int(value.split(b"|")[0])
        for uuid, book in found.books.items()
        for name, value in book.items()
        if name.startswith(b"x:")
    }
    for name, view in found.executors.items():
        if view is None:
            yield f"model executor {name}: listed, but it has no book"
            continue
        mib = reserved.pop((name, view.device), None)
        if mib != view.vram_mib:
            yield f"model executor {name}: holds {view.vram_mib} MiB, {mib} by the book of {view.device}"
        for item in view.items:
            task = found.tasks.get(item.task_id)
            if task is None or task.attempt != item.attempt or task.state not in LIVE:
                yield f"model executor {name}: holds attempt {item.attempt} of {item.task_id}, which has no such lease"
    for name, uuid in reserved:
        yield f"device {uuid}: holds a reservation of model executor {name}, which is not listed"
