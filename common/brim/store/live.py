"""What a monitor reads again and again: books, lane heads, ends and positions, each in one round trip or two."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brim.core.model import Demand, Reason, State

from .base import Base
from .codec import admitted_s, load_demand, load_reason, seconds
from .types import Record
from .views import UserSide


@dataclass(frozen=True, slots=True)
class BookedAttempt:
    """An attempt in a device's book; ``proc`` is empty while it is not bound to a process."""

    attempt: str
    task_id: str
    vram_mib: int
    proc: str


@dataclass(frozen=True, slots=True)
class Book:
    """A device's book. ``held_mib``: process -> what it was measured to use, or its floor while unknown.

    ``residents_mib``: model executor -> what is reserved for it.
    """

    attempts: Sequence[BookedAttempt]
    held_mib: Mapping[str, int]
    residents_mib: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """What a record says of its live attempt."""

    task: str
    attempt: str | None
    state: State
    placed_s: float | None
    started_s: float | None


@dataclass(frozen=True, slots=True)
class LaneHead:
    """An overflow lane that is not empty: how many wait in it, its first task, since when, and why it waits."""

    lane: str
    task: str
    demand: Demand
    depth: int
    task_id: str
    admitted_s: float
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Leader:
    """The active placement, or the latest one; ``until_s`` is when its lease runs out."""

    holder: str
    epoch: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Ending:
    """A task that has ended: what throughput, waits and the quality of estimates are counted from."""

    task_id: str
    task: str
    state: State
    ended_s: float
    waited_s: float | None
    """From admission to its last placement; None for a task that was never placed."""
    reserved_mib: int
    peak_mib: int | None
    lane: str
    demand: Demand
    ran_s: float | None
    """From its last start to its end; None where its function has not come to an end, or with a batch."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some tasks, newest admission first; ``next`` continues after them, None at the end."""

    records: Sequence[Record]
    next: str | None


class LiveSide(UserSide, Base):
    """Cheap enough to be asked twice a second with thousands of devices."""

    def device_books(self, uuids: Sequence[str]) -> list[Book]:
        """The books of some devices, in order."""
        pipeline = self.client.pipeline(transaction=False)
        for uuid in uuids:
            pipeline.hgetall(self.keys.book(uuid))
        return [_book(fields) for fields in pipeline.execute()]

    def attempt_facts(self, ids: Sequence[str]) -> dict[str, AttemptFacts]:
        """Facts by task id; unknown ones are left out."""
        pipeline = self.client.pipeline(transaction=False)
        for task_id in ids:
            pipeline.hmget(self.keys.task(task_id), "task", "attempt", "state", "placed_ms", "started_ms")
        found = {}
        for task_id, (task, attempt, state, placed, started) in zip(ids, pipeline.execute(), strict=True):
            if task is not None:
                found[task_id] = AttemptFacts(
                    task.decode(),
                    attempt.decode() if attempt else None,
                    State(state.decode()),
                    seconds(placed),
                    seconds(started),
                )
        return found

    def lane_heads(self) -> list[LaneHead]:
        """Every overflow lane in which tasks wait, the deepest first."""
        commons = self.client.hgetall(self.keys.lanes)
        lanes = [name.decode() for name in commons]
        pipeline = self.client.pipeline(transaction=False)
        for lane in lanes:
            pipeline.zrange(self.keys.lane(lane), 0, 0, withscores=True)
            pipeline.zcard(self.keys.lane(lane))
        answers = iter(pipeline.execute())
        heads = [(lane, next(answers), int(next(answers))) for lane in lanes]
        heads = [(lane, first, depth) for lane, first, depth in heads if first]
        pipeline = self.client.pipeline(transaction=False)
        for _, first, _ in heads:
            pipeline.hget(self.keys.task(first[0][0].decode()), "reason")
        found = []
        for (lane, [(task_id, order)], depth), reason in zip(heads, pipeline.execute(), strict=True):
            common = json.loads(commons[lane.encode()])
            found.append(
                LaneHead(
                    lane,
                    common["task"],
                    load_demand(common["demand"]),
                    depth,
                    task_id.decode(),
                    admitted_s(order),
                    load_reason(reason),
                )
            )
        return sorted(found, key=lambda head: (-head.depth, head.lane))

    def ends_between(self, after_ms: int, until_ms: int, limit: int) -> list[Ending]:
        """Tasks that ended in the half-open span, the latest ``limit`` of them, oldest first."""
        ids = [
            raw.decode()
            for raw in self.client.zrange(
                self.keys.finished, until_ms, f"({after_ms}", desc=True, byscore=True, offset=0, num=limit
            )
        ]
        pipeline = self.client.pipeline(transaction=False)
        for task_id in ids:
            pipeline.hmget(
                self.keys.task(task_id),
                *("task", "state", "ended_ms", "admitted_ms", "placed_ms", "demand", "peak_mib"),
                *("lane", "started_ms", "finished_ms", "batch"),
            )
        endings = []
        for task_id, fields in zip(ids, pipeline.execute(), strict=True):
            task, state, ended, admitted, placed, demand, peak, lane, started, finished, batch = fields
            if not ended or state is None:
                continue  # forgotten or tried again between the two reads
            waited_s = (int(placed) - int(admitted)) / 1000 if placed and admitted else None
            asked = load_demand(demand)
            ran_s = (int(ended) - int(started)) / 1000 if started and finished and not batch else None
            endings.append(
                Ending(
                    task_id,
                    task.decode(),
                    State(state.decode()),
                    int(ended) / 1000,
                    waited_s,
                    asked.vram_mib,
                    int(peak) if peak else None,
                    (lane or b"").decode(),
                    asked,
                    ran_s,
                )
            )
        return endings[::-1]

    def positions(self, waiting: Sequence[tuple[str, str]]) -> list[int | None]:
        """For (lane, task id): how many tasks of the lane stand before it; None if it does not wait there."""
        pipeline = self.client.pipeline(transaction=False)
        for lane, task_id in waiting:
            pipeline.zrank(self.keys.lane(lane), task_id)
        return [None if rank is None else int(rank) for rank in pipeline.execute()]

    def before(self, lane: str, task_id: str, lanes: Sequence[str]) -> list[int]:
        """How many tasks of each of ``lanes`` come before one that waits in ``lane``; none if it does not wait."""
        score = self.client.zscore(self.keys.lane(lane), task_id)
        if score is None:
            return [0] * len(lanes)
        pipeline = self.client.pipeline(transaction=False)
        for other in lanes:
            pipeline.zcount(self.keys.lane(other), "-inf", f"({score:.0f}")
        return [int(number) for number in pipeline.execute()]

    def leader(self) -> Leader | None:
        """Who is, or was, the active placement; None before the first."""
        holder, epoch, until = self.client.hmget(self.keys.leader, "holder", "epoch", "until_ms")
        if epoch is None:
            return None
        return Leader((holder or b"").decode(), int(epoch), int(until or 0) / 1000)

    def published_profiles(self) -> dict[str, str]:
        """The published resource table: task name or glob -> profile as JSON text."""
        return {name.decode(): text.decode() for name, text in self.client.hgetall(self.keys.profiles).items()}

    def page(self, state: State | None, after: str | None, limit: int, look_at: int = 5000) -> Page:
        """Up to ``limit`` tasks, of one state if given, continuing after an earlier page's ``next``.

        At most ``look_at`` tasks are looked at, so a page of a rare state may be short and still have a ``next``.
        Raises `ValueError` for an ``after`` that no page gave.
        """
        bound = "+inf" if after is None else f"({int(after)}"
        found: list[Record] = []
        seen = 0
        while seen < look_at:
            members = self.client.zrange(
                self.keys.tasks, bound, "-inf", desc=True, byscore=True, offset=0, num=500, withscores=True
            )
            if not members:
                return Page(found, None)
            ids = [raw.decode() for raw, _ in members]
            states = self._states(ids)
            chosen = [i for i, has in zip(ids, states, strict=True) if has and state in (None, has)]
            room = limit - len(found)
            found += self.records(chosen[:room])
            if len(chosen) >= room:
                last = chosen[room - 1]
                return Page(found, next(f"{score:.0f}" for raw, score in members if raw.decode() == last))
            bound = f"({members[-1][1]:.0f}"
            seen += len(members)
        return Page(found, bound[1:])

    def _states(self, ids: Sequence[str]) -> list[State | None]:
        pipeline = self.client.pipeline(transaction=False)
        for task_id in ids:
            pipeline.hget(self.keys.task(task_id), "state")
        return [State(raw.decode()) if raw else None for raw in pipeline.execute()]

    def claim_submission(self, task_id: str, digest: str, keep_s: float) -> str:
        """Notes that this id was submitted with a request of this digest; returns the digest that stands first.

        What was noted is forgotten after ``keep_s``.
        """
        earlier = self.client.set(
            self.keys.submission(task_id), digest, nx=True, get=True, px=max(1, round(keep_s * 1000))
        )
        return digest if earlier is None else str(earlier.decode())

    def push(self, list_key: str, messages: Sequence[bytes]) -> None:
        """Puts messages at the waiting end of a broker list, as a producer does."""
        if messages:
            self.client.lpush(list_key, *messages)


def _book(fields: Mapping[bytes, bytes]) -> Book:
    attempts, held, residents = [], {}, {}
    for field, value in fields.items():
        kind = field[:2]
        if kind == b"a:":
            vram, _, _, proc, task_id = value.decode().split("|", 4)
            attempts.append(BookedAttempt(field[2:].decode(), task_id, int(vram), proc))
        elif kind == b"p:":
            measured, floor = value.split(b"|", 2)[:2]
            held[field[2:].decode()] = max(int(measured), 0) or int(floor)
        elif kind == b"x:":
            residents[field[2:].decode()] = int(value.split(b"|", 1)[0])
    return Book(attempts, held, residents)
