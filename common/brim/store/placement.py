"""Placement's side of the store: leadership, the mirror's changes, commits, losses and answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import redis

from brim.core.model import Reason, State

from .base import Base, FencedError
from .codec import (
    NODE_FIELDS,
    admitted_s,
    dump,
    load_device,
    load_executor,
    load_lane,
    load_node_view,
    load_reason,
    seconds,
)
from .runner import Arg, Call
from .types import Changes, Commit, CommitAnswer, LaneWindow, NodeView, Owed

MOST_SEEN = 20_000
"""Batched tasks whose size is remembered; beyond it they are read anew."""
LANES_AT_ONCE = 16
"""Lanes whose beginning is read in the same step that takes what has changed."""
COMMITS_AT_ONCE = 32
"""Placements that one call of the script commits; the server does nothing else meanwhile."""


class PlacementSide(Base):
    """Every change made here carries the fencing epoch and is refused once another placement is active."""

    def __init__(self, client: redis.Redis, prefix: str = "brim:") -> None:
        super().__init__(client, prefix)
        self._seen: dict[tuple[str, float], tuple[float, float]] = {}
        """Size and admission of batched tasks, by id and order: a new run has another one."""

    def elect(self, holder: str, ttl_s: float) -> tuple[int, float]:
        """Takes or keeps the placement lease: (epoch or 0 while another holds it, seconds it still runs)."""
        epoch, left = self.runner.run("elect", [self.keys.leader], [holder, round(ttl_s * 1000)])
        return int(epoch), int(left) / 1000

    def resign(self, holder: str) -> None:
        """Gives the lease back so that a standby takes over at once."""
        self.runner.run("resign", [self.keys.leader], [holder])

    def take_changes(self, epoch: int, window: int, limit: int = 1000, *, wait_s: float = 0.0) -> Changes:
        """What has changed since the last call, after waiting for it for up to ``wait_s`` (0: not at all).

        An error in between loses changes: then `snapshot` again. Raises `FencedError`.
        """
        keys = self.keys
        names = [keys.leader, keys.changed, keys.wake, keys.availability, keys.lanes, keys.lane("")]
        take = Call("take", names, [epoch, limit, window, LANES_AT_ONCE])
        if wait_s:
            _, answer = self.runner.run_behind(["BLPOP", keys.wake, wait_s], take)
        else:
            answer = self.runner.run_many([take])[0]
        if not answer:
            raise FencedError
        found: dict[str, dict[str, Any]] = {"d": {}, "l": {}, "n": {}, "x": {}}
        for member, what in zip(answer[1::2], answer[2::2], strict=True):
            kind, name = member.decode().split(":", 1)
            found[kind][name] = what
        return self._read(int(answer[0]) / 1000, found["d"], found["l"], list(found["n"]), list(found["x"]), window)

    def snapshot(self, window: int) -> Changes:
        """Everything that placement mirrors."""
        devices = {name.decode(): entry for name, entry in self.client.hgetall(self.keys.availability).items()}
        lanes = {name.decode(): None for name in self.client.hkeys(self.keys.lanes)}
        nodes = [name.decode() for name in self.client.smembers(self.keys.nodes)]
        executors = [name.decode() for name in self.client.smembers(self.keys.executors)]
        return self._read(self.server_ms() / 1000, devices, lanes, nodes, executors, window)

    def lane_windows(self, lanes: Sequence[str], window: int) -> list[LaneWindow]:
        """The first ``window`` tasks of some lanes."""
        return list(self._read(0.0, {}, dict.fromkeys(lanes), [], [], window).lanes)

    def _read(
        self,
        now_s: float,
        devices: Mapping[str, bytes | None],
        lanes: Mapping[str, Sequence[Any] | None],
        nodes: Sequence[str],
        executors: Sequence[str],
        window: int,
    ) -> Changes:
        """What has been found of ``devices``, by UUID, and of some ``lanes``, and what is read of the others."""
        unread = [lane for lane, found in lanes.items() if found is None]
        answers = iter(self._ask(unread, nodes, executors, window) if unread or nodes or executors else ())
        read = {lane: (next(answers), next(answers), next(answers)) for lane in unread}
        windows = []
        for lane in lanes:
            info, waiting, depth = lanes[lane] or read[lane]
            if info is None:
                continue
            task, demand, context_mib, key = load_lane(info)
            ids = [(i.decode(), order, admitted_s(order)) for i, order in _scored(waiting)]
            windows.append(LaneWindow(lane, task, demand, context_mib, ids, depth, key))
        found_nodes = {name: next(answers) for name in nodes}
        found_executors = {name: load_executor(next(answers)) for name in executors}
        return Changes(
            now_s,
            [load_device(entry) for entry in devices.values() if entry is not None],
            [uuid for uuid, entry in devices.items() if entry is None],
            self._with_sizes(windows),
            [load_node_view(name, fields) for name, fields in found_nodes.items() if fields[0] is not None],
            [name for name, fields in found_nodes.items() if fields[0] is None],
            [view for view in found_executors.values() if view is not None],
            [name for name, view in found_executors.items() if view is None],
        )

    def _ask(self, lanes: Sequence[str], nodes: Sequence[str], executors: Sequence[str], window: int) -> list[Any]:
        """What stands in Redis of these, one after another: of each lane three answers."""
        keys, pipeline = self.keys, self.client.pipeline(transaction=False)
        for lane in lanes:
            pipeline.hget(keys.lanes, lane)
            pipeline.zrange(keys.lane(lane), 0, window - 1, withscores=True)
            pipeline.zcard(keys.lane(lane))
        for node in nodes:
            pipeline.hmget(keys.node(node), *NODE_FIELDS)
        for name in executors:
            pipeline.hgetall(keys.executor(name))
        answers: list[Any] = pipeline.execute()
        return answers

    def _with_sizes(self, windows: list[LaneWindow]) -> list[LaneWindow]:
        """Batched lanes with the size of each task and its admission, in another round trip for those not seen yet."""
        batched = [window for window in windows if window.key is not None]
        if not batched:
            return windows
        fresh = [task for w in batched for task in w.waiting if (task[0], task[1]) not in self._seen]
        if fresh:
            if len(self._seen) > MOST_SEEN:
                self._seen.clear()
                fresh = [task for window in batched for task in window.waiting]
            pipeline = self.client.pipeline(transaction=False)
            for task_id, _, _ in fresh:
                pipeline.hmget(self.keys.task(task_id), "size", "admitted_ms")
            for (task_id, order, age_s), (size, admitted) in zip(fresh, pipeline.execute(), strict=True):
                self._seen[task_id, order] = (float(size or 1), seconds(admitted) or age_s)
        return [window if window.key is None else _sized(window, self._seen) for window in windows]

    def tasksets(self, digests: Iterable[str]) -> dict[str, frozenset[str]]:
        """Digest -> the task names that workers with this digest registered."""
        wanted = list(digests)
        pipeline = self.client.pipeline(transaction=False)
        for digest in wanted:
            pipeline.smembers(self.keys.taskset(digest))
        return {
            digest: frozenset(name.decode() for name in names)
            for digest, names in zip(wanted, pipeline.execute(), strict=True)
        }

    def commit(
        self, epoch: int, batch: Sequence[Commit], ahead: int, *, ignore_memory: bool = False
    ) -> list[CommitAnswer]:
        """Commits placements in one round trip; each is checked again and made, or refused, as a whole.

        Placement is not woken by what it has committed itself.
        """
        parts = [batch[first : first + COMMITS_AT_ONCE] for first in range(0, len(batch), COMMITS_AT_ONCE)]
        answers = self.runner.run_many([self._commit(epoch, part, ahead, ignore_memory) for part in parts])
        return [
            _commit_answer(answer)
            for part, found in zip(parts, answers, strict=True)
            for answer in found or [b"fenced"] * len(part)
        ]

    def _commit(self, epoch: int, part: Sequence[Commit], ahead: int, ignore_memory: bool) -> Call:
        keys, looks = self.keys, int(not ignore_memory)
        names: list[str] = [keys.leader, keys.counts, keys.changed, keys.wake, keys.availability]
        args: list[Arg] = [epoch, ahead, looks]
        for c in part:
            milli_cpus = round(c.cpus * 1000)
            of_host = milli_cpus or c.ram_mib
            wish = f"{milli_cpus}|{c.ram_mib}|{int(c.whole)}" if of_host or c.whole else ""
            names += (keys.task(c.task_id), keys.story(c.task_id), keys.lane(c.lane), c.queue)
            names += [keys.book(uuid) for uuid in c.devices]
            if of_host:
                names.append(keys.node(c.node))
            args += (
                c.task_id,
                c.lane,
                c.attempt,
                c.slot,
                c.vram_mib,
                c.node,
                ",".join(c.devices),
                len(c.devices),
                wish,
            )
        return Call("commit", names, args)

    def note_waits(self, epoch: int, reasons: Mapping[str, Reason]) -> None:
        """Notes on records (by id) why they wait."""
        if reasons:
            names = [self.keys.leader, *map(self.keys.task, reasons)]
            self.runner.run("wait_reason", names, [epoch, *map(dump, reasons.values())])

    def doom(self, epoch: int, uuid: str, wanted_mib: int) -> int:
        """Marks idle executor processes of a device for replacement, ``wanted_mib`` of leftover in all."""
        keys = self.keys
        names = [keys.leader, keys.book(uuid), keys.availability, keys.changed, keys.wake]
        return int(self.runner.run("doom", names, [epoch, wanted_mib]))

    def lose_node(self, epoch: int, node: NodeView, lease_timeout_s: float) -> bool:
        """Declares a node lost if it has not renewed for ``lease_timeout_s`` by the server's clock."""
        keys = self.keys
        names = [keys.leader, keys.node(node.node.name), keys.availability, keys.changed, keys.wake]
        names += [keys.book(uuid) for uuid in node.devices]
        answer = int(self.runner.run("lose_node", names, [epoch, round(lease_timeout_s * 1000), node.node.name]))
        if answer < 0:
            raise FencedError
        return answer == 1

    def expired_ids(self, limit: int) -> list[str]:
        """Ids whose ``expires`` has passed."""
        now = self.server_ms()
        return [
            i.decode() for i in self.client.zrange(self.keys.expiring, "-inf", now, byscore=True, offset=0, num=limit)
        ]

    def awaited_ids(self, longer_than_s: float, limit: int) -> list[str]:
        """Ids of retried or replaced tasks whose next message has not come for ``longer_than_s``."""
        before = self.server_ms() - round(longer_than_s * 1000)
        return [
            i.decode() for i in self.client.zrange(self.keys.awaited, "-inf", before, byscore=True, offset=0, num=limit)
        ]

    def owed(self, limit: int) -> list[Owed]:
        """The oldest answers in the outbox, with their envelopes."""
        entries = self.client.lrange(self.keys.outbox, 0, limit - 1)
        parsed = [json.loads(entry) for entry in entries]
        pipeline = self.client.pipeline(transaction=False)
        for fields in parsed:
            pipeline.hmget(self.keys.task(fields["id"]), "head", "tail")
        return [
            Owed(
                entry,
                fields["id"],
                State(fields["state"]),
                load_reason(dump(fields["reason"]).encode()) or Reason("unknown", "no reason was given"),
                head or b"",
                tail or b"",
            )
            for entry, fields, (head, tail) in zip(entries, parsed, pipeline.execute(), strict=True)
        ]

    def answered(self, owed: Owed) -> None:
        """Takes an answer out of the outbox once the result backend has it."""
        keys = self.keys
        self.runner.run("answered", [keys.outbox, keys.task(owed.task_id), keys.story(owed.task_id)], [owed.entry])

    def forget_finished(self, older_than_s: float, limit: int) -> int:
        """Removes records that ended longer ago than ``older_than_s``; returns how many."""
        before = self.server_ms() - round(older_than_s * 1000)
        keys = self.keys
        old = self.client.zrange(keys.finished, "-inf", before, byscore=True, offset=0, num=limit)
        calls = [
            Call("forget", [keys.task(i), keys.story(i), keys.counts, keys.finished, keys.tasks], [i])
            for i in (raw.decode() for raw in old)
        ]
        return sum(int(answer) for answer in self.runner.run_many(calls))


def _scored(flat: Sequence[Any]) -> Iterator[tuple[bytes, float]]:
    """Members of a sorted set with their scores, as a script or redis-py has read them."""
    if flat and not isinstance(flat[0], bytes):
        yield from flat
    else:
        yield from zip(flat[::2], map(float, flat[1::2]), strict=True)


def _sized(window: LaneWindow, seen: Mapping[tuple[str, float], tuple[float, float]]) -> LaneWindow:
    waiting = [(i, order, seen[i, order][1]) for i, order, _ in window.waiting]
    sizes = {i: seen[i, order][0] for i, order, _ in window.waiting}
    return replace(window, waiting=waiting, sizes=sizes)


def _commit_answer(answer: bytes | Sequence[bytes]) -> CommitAnswer:
    if isinstance(answer, bytes):
        return CommitAnswer(answer.decode())
    short, uuid, missing = answer
    return CommitAnswer("refused", short.decode(), uuid.decode(), int(missing))
