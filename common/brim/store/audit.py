"""Recomputes every device's books from the leases and names each difference (invariants 1 to 4)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from brim.core.model import LIVE, TERMINAL, State

from .base import Base
from .codec import load_device


class AuditSide(Base):
    """Reads in one transaction per kind, so it is meant for a quiet moment or to be asked twice."""

    def audit(self) -> list[str]:
        """Differences between records, books, lanes, counts and the availability table; empty is right."""
        return list(self._differences())

    def _differences(self) -> Iterator[str]:
        keys, client = self.keys, self.client
        ids = [i.decode() for i in client.zrange(keys.tasks, 0, -1)]
        uuids = [uuid.decode() for uuid in client.hkeys(keys.availability)]
        lanes = [lane.decode() for lane in client.hkeys(keys.lanes)]
        pipeline = client.pipeline(transaction=True)
        for task_id in ids:
            pipeline.hmget(keys.task(task_id), "state", "attempt", "devices", "lane", "order")
        for uuid in uuids:
            pipeline.hgetall(keys.book(uuid))
        pipeline.hgetall(keys.availability)
        pipeline.hgetall(keys.counts)
        for lane in lanes:
            pipeline.zrange(keys.lane(lane), 0, -1)
        answers = pipeline.execute()
        records = dict(zip(ids, answers[: len(ids)], strict=True))
        books = dict(zip(uuids, answers[len(ids) : len(ids) + len(uuids)], strict=True))
        availability, counts = answers[len(ids) + len(uuids) : len(ids) + len(uuids) + 2]
        waiting = {
            (lane, i.decode())
            for lane, members in zip(lanes, answers[len(ids) + len(uuids) + 2 :], strict=True)
            for i in members
        }

        seen: Counter[str] = Counter()
        leased: set[tuple[str, str]] = set()
        for task_id, (state, attempt, devices, lane, _order) in records.items():
            if state is None:
                yield f"task {task_id}: listed, but it has no record"
                continue
            name = State(state.decode())
            seen[name] += 1
            if name in LIVE:
                for uuid in devices.decode().split(","):
                    leased.add((uuid, attempt.decode()))
                    if f"a:{attempt.decode()}".encode() not in books.get(uuid, {}):
                        yield f"task {task_id}: {name} as attempt {attempt.decode()}, not in the book of {uuid}"
            elif name == State.WAITING and (lane.decode(), task_id) not in waiting:
                yield f"task {task_id}: waiting, but not in its lane {lane.decode()!r}"
            elif name in TERMINAL and (lane.decode(), task_id) in waiting:
                yield f"task {task_id}: {name}, but still in lane {lane.decode()!r}"
        for state in State:
            if seen[state] != int(counts.get(state.encode(), b"0")):
                yield f"counts: {state} says {counts.get(state.encode(), b'0').decode()}, there are {seen[state]}"
        for uuid, book in books.items():
            yield from _book_differences(uuid, book, availability.get(uuid.encode()), leased)


def _book_differences(
    uuid: str, book: Mapping[bytes, bytes], entry: bytes | None, leased: set[tuple[str, str]]
) -> Iterator[str]:
    if b"info" not in book or entry is None:
        yield f"device {uuid}: in the availability table without a book"
        return
    info, reserved, committed, busy = json.loads(book[b"info"]), Counter[str](), 0, 0
    for field, value in book.items():
        if field.startswith(b"a:"):
            vram, proc, task_id = value.decode().split("|", 2)
            busy += 1
            if (uuid, field[2:].decode()) not in leased:
                yield f"device {uuid}: holds attempt {field[2:].decode()} of {task_id}, which has no such lease"
            if proc:
                reserved[proc] += int(vram)
            else:
                committed += int(vram)
    processes = {field[2:].decode(): value for field, value in book.items() if field.startswith(b"p:")}
    for proc in processes.keys() | reserved.keys():
        measured, floor = (int(part) for part in processes.get(proc, b"-1|0").split(b"|")[:2])
        committed += max(reserved[proc], measured if measured >= 0 else floor)
    device = load_device(entry)
    expected = {
        "committed_mib": committed,
        "busy": busy,
        "external_mib": int(book.get(b"external", b"0")),
        "total_mib": info["total_mib"],
        "state": book[b"state"].decode(),
    }
    for name, value in expected.items():
        if getattr(device, name) != value:
            yield f"device {uuid}: {name} is {getattr(device, name)} in the table, {value} by its book"
