"""Intake's side of the store: from the broker's lists into records and overflow lanes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from brim.core.model import Identity, Reason, State

from .base import Base
from .bells import Bells
from .codec import dump, dump_demand, milliseconds
from .runner import Arg, Call
from .types import Admission, AdmitAnswer, Look, Peeked

REVOKED = Reason("revoked", "revoked by its producer")
_REVOKED = dump(REVOKED)
REVOKES_KEPT, REVOKES_KEPT_S = 50_000, 10_800
"""How many revoked ids are remembered, and for how long; as many as Celery's workers do."""
ADMITTED_AT_ONCE = 16
"""Messages that one call of the script admits; the server does nothing else meanwhile."""


class IntakeSide(Base):
    """Peeking at messages and admitting them; any number of replicas may do so at once."""

    def look(self, lists: Sequence[str], limit: int) -> Look:
        """What there is to do, in one round trip: up to ``limit`` (at least 1) messages from the consuming ends of
        ``lists`` (most urgent list first), and what decides whether they may come in."""
        pipeline = self.client.pipeline(transaction=False)
        pipeline.time()
        pipeline.hget(self.keys.counts, State.WAITING)
        pipeline.zrange(self.keys.scheduled, 0, 0, withscores=True)
        for key in lists:
            pipeline.lrange(key, -limit, -1)
        (whole, micros), waiting, scheduled, *tails = pipeline.execute()
        found = [Peeked(key, raw) for key, tail in zip(lists, tails, strict=True) for raw in reversed(tail)]
        return Look(
            int(whole) + int(micros) / 1e6,
            int(waiting or 0),
            float(scheduled[0][1]) / 1000 if scheduled else None,
            found[:limit],
        )

    def bells(self, lists: Sequence[str]) -> Bells:
        """What tells of messages in these broker lists while they are empty."""
        return Bells(self.client, lists)

    def admit(self, batch: Sequence[Admission]) -> list[AdmitAnswer]:
        """Admits or refuses messages in one round trip; each as a whole."""
        parts = [batch[first : first + ADMITTED_AT_ONCE] for first in range(0, len(batch), ADMITTED_AT_ONCE)]
        found = self.runner.run_many([self._admit(part) for part in parts])
        answers = [answer.decode() for part in found for answer in part]
        for position in (i for i, answer in enumerate(answers) if answer == "moved"):
            answers[position] = self._admit_over(batch[position])
        return [AdmitAnswer(answer) for answer in answers]

    def _admit_over(self, admission: Admission) -> str:
        """Admits a run whose id waits as an earlier run in some lane, which it has to be taken out of."""
        answer = "moved"
        while answer == "moved":
            [lane] = self._lanes_of([admission.identity.task_id])
            [[raw]] = self.runner.run_many([self._admit([admission], lane)])
            answer = raw.decode()
        return answer

    def _admit(self, part: Sequence[Admission], waits_in: str = "") -> Call:
        keys = self.keys
        names = [keys.counts, keys.tasks, keys.lanes, keys.changed, keys.wake, keys.scheduled, keys.expiring, keys.seq]
        names += [keys.finished, keys.outbox, keys.awaited, keys.revoked]
        args: list[Arg] = [_REVOKED]
        for a in part:
            task_id = a.identity.task_id
            names += (
                a.source.list_key,
                keys.task(task_id),
                keys.story(task_id),
                keys.lane(a.lane),
                keys.lane(waits_in),
            )
            args += (
                a.source.raw,
                task_id,
                a.task,
                a.identity.nesting,
                a.identity.retries,
                a.lane,
                a.priority,
                milliseconds(a.eta_s),
                milliseconds(a.expires_s),
                a.head,
                a.tail,
                dump_demand(a.demand),
                a.context_mib,
                int(a.own_attempt),
                dump(a.refusal) if a.refusal else "",
                dump(a.waits_for) if a.waits_for else "",
                dump(a.explanation),
                waits_in,
                *_batched(a),
            )
        return Call("admit", names, args)

    def remember_revoked(self, ids: Sequence[str]) -> None:
        """Remembers ids whose tasks, should they still come, are not to run."""
        if not ids:
            return
        now = self.server_ms()
        pipeline = self.client.pipeline(transaction=False)
        pipeline.zadd(self.keys.revoked, dict.fromkeys(ids, now))
        pipeline.zremrangebyscore(self.keys.revoked, "-inf", now - REVOKES_KEPT_S * 1000)
        pipeline.zremrangebyrank(self.keys.revoked, 0, -REVOKES_KEPT - 1)
        pipeline.execute()

    def release_due(self, limit: int) -> int:
        """Moves scheduled tasks whose eta has come into overflow; returns how many."""
        now = self.server_ms()
        due = [
            i.decode() for i in self.client.zrange(self.keys.scheduled, "-inf", now, byscore=True, offset=0, num=limit)
        ]
        lanes = self._lanes_of(due)
        keys = self.keys
        calls = [
            Call(
                "due",
                [
                    keys.scheduled,
                    keys.task(i),
                    keys.story(i),
                    keys.counts,
                    keys.lane(lane),
                    keys.lanes,
                    keys.changed,
                    keys.wake,
                ],
                [i, lane],
            )
            for i, lane in zip(due, lanes, strict=True)
        ]
        return sum(int(answer) for answer in self.runner.run_many(calls))

    def _lanes_of(self, ids: Iterable[str]) -> list[str]:
        pipeline = self.client.pipeline(transaction=False)
        for task_id in ids:
            pipeline.hget(self.keys.task(task_id), "lane")
        return [(lane or b"").decode() for lane in pipeline.execute()]

    def lane_ids(self, lane: str, limit: int) -> list[str]:
        """The first ids that wait in a lane."""
        return [i.decode() for i in self.client.zrange(self.keys.lane(lane), 0, limit - 1)]

    def envelopes(self, ids: Sequence[str]) -> list[tuple[Identity, bytes, bytes] | None]:
        """Identity, head and tail of records; None where the envelope is gone."""
        pipeline = self.client.pipeline(transaction=False)
        for task_id in ids:
            pipeline.hmget(self.keys.task(task_id), "nesting", "retries", "head", "tail")
        return [
            (Identity(task_id, int(nesting), int(retries)), head, tail) if head is not None else None
            for task_id, (nesting, retries, head, tail) in zip(ids, pipeline.execute(), strict=True)
        ]

    def relane(self, task_id: str, old: str, new: Admission) -> bool:
        """Gives a waiting task another lane, demand and priority; False if it does not wait in ``old`` any more."""
        keys = self.keys
        names = [
            keys.task(task_id),
            keys.story(task_id),
            keys.lane(old),
            keys.lane(new.lane),
            keys.lanes,
            keys.changed,
            keys.wake,
        ]
        explanation = dump(new.explanation)
        args: list[Arg] = [task_id, old, new.lane, dump(new.demand), new.context_mib, explanation, new.priority]
        args += _batched(new)
        return bool(self.runner.run("relane", names, args))

    def publish_profiles(self, table: Mapping[str, str]) -> None:
        """Publishes the resource table: task name or glob -> profile as JSON text."""
        pipeline = self.client.pipeline(transaction=True)
        pipeline.delete(self.keys.profiles)
        if table:
            pipeline.hset(self.keys.profiles, mapping=dict(table))
        pipeline.execute()

    def signatures(self) -> dict[str, str]:
        """Task name -> published signature as JSON text."""
        return {name.decode(): text.decode() for name, text in self.client.hgetall(self.keys.signatures).items()}


def _batched(admission: Admission) -> list[Arg]:
    """What a task is batched by, and its size; empty texts where it is not batched."""
    found = admission.batched
    if found is None:
        return ["", ""]
    return [dump({"model": found.model, "version": found.version, "shape": found.shape}), repr(float(found.size))]
