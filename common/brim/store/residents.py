"""Model executors: wanted by placement, run by agents, and the items that they hold (DESIGN, "Two-level batching")."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from brim.core.model import AttemptView, Reason, State

from .attempts import AttemptSide
from .base import FencedError
from .codec import dump, dump_item, load_executor
from .runner import Arg, Call
from .types import ClaimAnswer, CommitAnswer, CommitItem, EndAnswer, ExecutorView, Outcome, WantedExecutor

TAKEN = Reason("taken_by_sibling", "an idle executor of the model starts it sooner")


class ResidentSide(AttemptSide):
    """What placement, agents and model executors say about these. Each call but the reads is one script for each."""

    def executors(self) -> list[ExecutorView]:
        """Every model executor, by name."""
        return self.executors_named(sorted(name.decode() for name in self.client.smembers(self.keys.executors)))

    def executors_named(self, names: Iterable[str]) -> list[ExecutorView]:
        """Some model executors; those that are gone are left out."""
        pipeline = self.client.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(self.keys.executor(name))
        found = (load_executor(fields) for fields in pipeline.execute())
        return [view for view in found if view is not None]

    def executors_on(self, uuids: Sequence[str]) -> list[ExecutorView]:
        """The model executors of some devices, by those devices' books."""
        pipeline = self.client.pipeline(transaction=False)
        for uuid in uuids:
            pipeline.hkeys(self.keys.book(uuid))
        names = {field[2:].decode() for fields in pipeline.execute() for field in fields if field.startswith(b"x:")}
        return self.executors_named(sorted(names)) if names else []

    def item_attempts(self, views: Iterable[ExecutorView]) -> list[AttemptView]:
        """The items of some model executors as live attempts, in the states that their records say."""
        attempts = [view.attempt(item) for view in views for item in view.items]
        pipeline = self.client.pipeline(transaction=False)
        for attempt in attempts:
            pipeline.hmget(self.keys.task(attempt.task_id), "attempt", "state")
        return [
            replace(attempt, state=State(state.decode()))
            for attempt, (owner, state) in zip(attempts, pipeline.execute(), strict=True)
            if owner is not None and owner.decode() == attempt.attempt
        ]

    def residency(self) -> list[dict[str, Any]]:
        """What happened to model executors lately, oldest first."""
        return [json.loads(line) for line in self.client.lrange(self.keys.residency, 0, -1)]

    # -- placement -------------------------------------------------------------------------------------------

    def want_executor(self, epoch: int, wanted: WantedExecutor) -> CommitAnswer:
        """Reserves a model executor's memory and has its node's agent start it. Raises `FencedError`."""
        keys = self.keys
        names = [keys.leader, keys.executors, keys.executor(wanted.name), keys.book(wanted.device), keys.availability]
        names += [keys.changed, keys.wake, keys.residency]
        answer = self.runner.run("executor_want", names, [epoch, wanted.name, dump(wanted), wanted.vram_mib])
        status, *short = (part.decode() for part in answer)
        if status == "fenced":
            raise FencedError
        return CommitAnswer(status, short[0], wanted.device, int(short[1])) if short else CommitAnswer(status)

    def drain_executor(self, name: str, reason: Reason, epoch: int | None = None) -> bool:
        """A model executor takes nothing more; False if it drains already, or is gone. Raises `FencedError`."""
        keys = self.keys
        names = [keys.executor(name), keys.changed, keys.wake, keys.residency, keys.leader]
        answer = self.runner.run("executor_drain", names, [name, dump(reason), "" if epoch is None else epoch])
        if answer < 0:
            raise FencedError
        return bool(answer)

    def commit_items(self, epoch: int, batch: Sequence[CommitItem]) -> list[str]:
        """Commits items in one round trip: ``committed``, ``stale`` or ``refused`` each. Raises `FencedError`."""
        answers = [answer.decode() for answer in self.runner.run_many([self._commit_item(epoch, c) for c in batch])]
        if "fenced" in answers:
            raise FencedError
        return answers

    def _commit_item(self, epoch: int, commit: CommitItem) -> Call:
        keys, item = self.keys, commit.item
        sibling, before = commit.source or ("", "")
        names = [
            keys.leader,
            keys.task(item.task_id),
            keys.story(item.task_id),
            keys.counts,
            keys.lane(item.lane),
            keys.changed,
            keys.wake,
            keys.executor(commit.executor),
            commit.queue,
            keys.executor(sibling or commit.executor),
        ]
        args: list[Arg] = [
            epoch,
            item.task_id,
            item.lane,
            item.attempt,
            commit.slot,
            dump_item(item),
            commit.node,
            commit.device,
            commit.executor,
            before,
            sibling,
            dump(TAKEN),
        ]
        return Call("commit_item", names, args)

    # -- the executor itself -----------------------------------------------------------------------------------

    def executor_begins(self, name: str, device: str, boot: str, proc: str) -> bool:
        """The executor's process is ``proc``, and holds its reservation; False if it is not wanted any more."""
        keys = self.keys
        names = [keys.executor(name), keys.book(device), keys.availability, keys.changed, keys.wake]
        return bool(self.runner.run("executor_begin", names, [name, boot, proc]))

    def executor_is_up(self, name: str, boot: str) -> bool:
        """Its model is loaded; False if it drains already."""
        keys = self.keys
        names = [keys.executor(name), keys.changed, keys.wake, keys.residency]
        return bool(self.runner.run("executor_up", names, [name, boot]))

    def note_ceiling(self, name: str, ceiling: float | None) -> None:
        """How large its batches may get from now on, in padded volume; None bounds nothing."""
        self._note(name, "ceiling", "" if ceiling is None else repr(ceiling))

    def note_deadline(self, name: str, in_s: float | None) -> None:
        """In how many seconds what it computes hits its hard time limit; None once that is over."""
        self._note(name, "deadline_ms", "" if in_s is None else str(self.server_ms() + round(1000 * in_s)))

    def _note(self, name: str, field: str, value: str) -> None:
        keys = self.keys
        self.runner.run("executor_note", [keys.executor(name), keys.changed, keys.wake], [name, field, value])

    def note_start(self, name: str) -> None:
        """A batch that was claimed ahead is computed now: the executor can be given items again."""
        self._note(name, "ahead", "")

    def claim_batch(
        self, name: str, boot: str, proc: str, items: Sequence[tuple[str, str]], ahead: bool | None = False
    ) -> list[ClaimAnswer]:
        """Start claims of a sealed batch, (task id, attempt) each, in one script.

        ``ahead``: another batch is being computed; None: these are no batch, but somebody is to answer for them.
        """
        keys = self.keys
        names = [keys.executor(name), keys.counts, keys.changed, keys.wake]
        for task_id, _ in items:
            names += [keys.task(task_id), keys.story(task_id)]
        mark = "" if ahead is None else str(int(ahead))
        args = [boot, proc, name, mark, *(attempt for _, attempt in items)]
        answers = self.runner.run("claim_batch", names, args)
        return [ClaimAnswer(answer.decode()) for answer in answers]

    def finish_batch(self, proc: str, items: Sequence[tuple[str, str]]) -> list[ClaimAnswer]:
        """Finish claims of items that were computed, in one round trip."""
        calls = [self._finish(task_id, attempt, proc) for task_id, attempt in items]
        return [ClaimAnswer(answer.decode()) for answer in self.runner.run_many(calls)]

    def end_batch(self, name: str, items: Sequence[tuple[str, str, Outcome]]) -> list[EndAnswer]:
        """Ends of items whose results are out, in one round trip."""
        book = [self.keys.executor(name)]
        calls = [self._end(task_id, attempt, book, outcome) for task_id, attempt, outcome in items]
        return [EndAnswer(answer.decode()) for answer in self.runner.run_many(calls)]

    # -- its agent ---------------------------------------------------------------------------------------------

    def executor_gone(self, view: ExecutorView, reason: Reason, broker_keys: Sequence[str]) -> bool:
        """Its process is gone: ends its reservation and removes its queue; False while it holds items (lose those)."""
        keys = self.keys
        names = [keys.executor(view.name), keys.executors, keys.book(view.device), keys.availability]
        names += [keys.changed, keys.wake, keys.residency, *broker_keys]
        return bool(self.runner.run("executor_gone", names, [view.name, dump(reason)]))
