"""The life of attempts: claims, ends and losses, each one script, exactly once whoever asks how often."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from brim.core.model import AttemptView, Demand, Reason, State

from .base import Base, FencedError
from .codec import dump, guard_of
from .runner import Arg, Call
from .types import Bound, ClaimAnswer, CloseAnswer, EndAnswer, LoseAnswer, Outcome, OutOfMemoryAnswer, StoredResult

_PLACED_ON_THE_WAY = (State.PLACED, State.CLAIMED)


class AttemptSide(Base):
    """What executors and their agents tell about attempts."""

    def claim(self, task_id: str, attempt: str, boot: str) -> ClaimAnswer:
        """The start claim: a device's worker (this ``boot`` of it) has the attempt's message."""
        return self.claim_all([(task_id, attempt)], boot)[0]

    def claim_all(self, pairs: Sequence[tuple[str, str]], boot: str) -> list[ClaimAnswer]:
        """The same of several (task id, attempt), in one round trip."""
        answers = self.runner.run_many([self._claim(task_id, attempt, boot) for task_id, attempt in pairs])
        return [ClaimAnswer(answer.decode()) for answer in answers]

    def claim_and_take(
        self, pairs: Sequence[tuple[str, str]], boot: str, queue_key: str, most: int
    ) -> tuple[list[ClaimAnswer], Sequence[bytes]]:
        """The same of one or more, and in the last one's step at most so many messages out of the worker's queue."""
        *calls, last = [self._claim(task_id, attempt, boot) for task_id, attempt in pairs]
        taking = Call(last.script, [*last.keys, queue_key], [*last.args, most])
        *answers, (answer, *raw) = self.runner.run_many([*calls, taking])
        return [ClaimAnswer(each.decode()) for each in (*answers, answer)], raw

    def _claim(self, task_id: str, attempt: str, boot: str) -> Call:
        keys = self.keys
        return Call("claim", [keys.task(task_id), keys.story(task_id), keys.counts], [attempt, boot])

    def bind(self, task_id: str, attempt: str, devices: Sequence[str], proc: str, *, boot: str = "") -> Bound:
        """Binds an attempt to the executor process ``proc`` ("<pid>.<start ticks>") that will run it.

        With its worker's ``boot`` this is the start claim, too, where that is still on its way.
        """
        keys = self.keys
        names = [
            keys.task(task_id),
            keys.story(task_id),
            keys.counts,
            keys.availability,
            keys.changed,
            keys.wake,
        ]
        names += [keys.book(uuid) for uuid in devices]
        answer, estimate = self.runner.run("bind", names, [attempt, proc, boot])
        return Bound(ClaimAnswer(answer.decode()), guard_of(estimate))

    def finish(self, task_id: str, attempt: str, proc: str, *, left_to_main: bool = False) -> ClaimAnswer:
        """The finish claim: the user's function is over, its callbacks and result are not out yet.

        ``proc`` is empty when the worker's main process claims, for instance for a task that was revoked there.
        It gets what an executor has claimed only if that is done and has left the answer to it (``left_to_main``).
        """
        call = self._finish(task_id, attempt, proc, left_to_main=left_to_main)
        return ClaimAnswer(self.runner.run_many([call])[0].decode())

    def _finish(self, task_id: str, attempt: str, proc: str, *, left_to_main: bool = False) -> Call:
        keys = self.keys
        names = [keys.task(task_id), keys.story(task_id), keys.counts]
        args: list[Arg] = [attempt, proc, int(left_to_main), round(time.time() * 1000)]
        return Call("finish", names, args)

    def end(
        self, task_id: str, attempt: str, devices: Sequence[str], outcome: Outcome, *, executor: str = ""
    ) -> EndAnswer:
        """Ends an attempt: its reservation becomes leftover, its record is closed, placement wakes.

        An item of a model ``executor`` has no reservation; it leaves that one's book.
        """
        call = self._end(task_id, attempt, self.books_of(devices, executor), outcome)
        return EndAnswer(self.runner.run_many([call])[0].decode())

    def complete(
        self,
        task_id: str,
        attempt: str,
        devices: Sequence[str],
        outcome: Outcome,
        proc: str,
        result: StoredResult | None,
    ) -> EndAnswer:
        """Finish claim, result and end in one: for a task from which nothing else follows (ADR 0012).

        OCCUPIED where the result backend has something for the task already: nothing was done then.
        """
        call = self._end(task_id, attempt, self.books_of(devices), outcome, proc, result)
        return EndAnswer(self.runner.run_many([call])[0].decode())

    def ask_complete(
        self,
        task_id: str,
        attempt: str,
        devices: Sequence[str],
        outcome: Outcome,
        proc: str,
        result: StoredResult | None,
    ) -> Callable[[], EndAnswer]:
        """Sends what `complete` asks; what is returned waits for the answer: see `Runner.ask`."""
        read = self.runner.ask(self._end(task_id, attempt, self.books_of(devices), outcome, proc, result))
        return lambda: EndAnswer(read().decode())

    def _end(
        self,
        task_id: str,
        attempt: str,
        books: Sequence[str],
        outcome: Outcome,
        claimer: str = "",
        result: StoredResult | None = None,
    ) -> Call:
        keys = self.keys
        names: list[Arg] = [
            keys.task(task_id),
            keys.story(task_id),
            keys.counts,
            keys.changed,
            keys.wake,
            keys.availability,
            keys.finished,
            keys.expiring,
            keys.outbox,
            keys.awaited,
            keys.peaks,
            *books,
        ]
        leftover = "" if outcome.leftover_mib is None else ",".join(str(mib) for mib in outcome.leftover_mib)
        args: list[Arg] = [
            task_id,
            attempt,
            outcome.state,
            dump(outcome.reason) if outcome.reason else "",
            leftover,
            outcome.context_mib,
            "" if outcome.peak_mib is None else outcome.peak_mib,
            claimer,
            round(time.time() * 1000),
        ]
        if result is not None:
            names.append(result.key)
            args += [result.value, result.expires_s]
        return Call("end", names, args)

    def out_of_memory(
        self,
        task_id: str,
        attempt: str,
        devices: Sequence[str],
        proc: str,
        lane: str,
        demand: Demand,
        context_mib: int,
        reason: Reason,
        max_attempts: int,
        peak_mib: int | None,
    ) -> OutOfMemoryAnswer:
        """A running attempt ran out of GPU memory: its task waits again, in the ``lane`` of what it demands now.

        FINAL if it has been lost too often (this loss counts towards ``max_attempts``) or has no further try.
        ``peak_mib``: what it held and had asked for, for calibration a lower bound of its need; None if unknown.
        """
        keys = self.keys
        names = [
            keys.task(task_id),
            keys.story(task_id),
            keys.counts,
            keys.changed,
            keys.wake,
            keys.availability,
            keys.lane(lane),
            keys.lanes,
            keys.expiring,
            keys.peaks,
            *(keys.book(uuid) for uuid in devices),
        ]
        peak = "" if peak_mib is None else peak_mib
        args: list[Arg] = [task_id, attempt, proc, lane, dump(demand), context_mib, dump(reason), max_attempts, peak]
        return OutOfMemoryAnswer(self.runner.run("oom", names, args).decode())

    def lose(
        self,
        view: AttemptView,
        reason: Reason,
        *,
        counts: bool,
        max_attempts: int,
        epoch: int | None = None,
    ) -> LoseAnswer:
        """A live attempt was lost: its task waits again in its old place.

        STALE, and nothing is done, if it has gone on since it was seen: look again, it may have left its result.
        ``counts``: the loss counts towards ``max_attempts``, after which the task is dead-lettered.
        ``epoch``: of the placement that says so, if it is one; raises `FencedError` once it is not the active one.
        """
        keys, lane = self.keys, view.lane
        while True:
            names = [
                keys.task(view.task_id),
                keys.story(view.task_id),
                keys.counts,
                keys.changed,
                keys.wake,
                keys.availability,
                keys.finished,
                keys.expiring,
                keys.outbox,
                keys.lane(lane),
                keys.lanes,
                keys.awaited,
                keys.leader,
                keys.peaks,
                *self.books_of(view.devices, view.executor),
            ]
            args: list[Arg] = [
                view.task_id,
                view.attempt,
                lane,
                dump(reason),
                int(counts),
                max_attempts,
                view.context_mib,
                view.state,
                "" if epoch is None else epoch,
            ]
            answer = self.runner.run("lose", names, args).decode()
            if answer == "fenced":
                raise FencedError
            if answer != "moved":
                return LoseAnswer(answer)
            lane = (self.client.hget(keys.task(view.task_id), "lane") or b"").decode()

    def close(
        self, task_id: str, state: State, reason: Reason, allowed: Sequence[State], *, epoch: int | None = None
    ) -> CloseAnswer:
        """Closes a task that does not run, if it is in one of the ``allowed`` states; the producer is answered.

        A running one that may be closed is marked; its worker has to end it. One that may not be expired now is
        not tried again until it waits anew. ``epoch``: of the placement that says so, if it is one; raises
        `FencedError` once it is not the active one.
        """
        keys = self.keys
        while True:
            fields = self.client.hmget(keys.task(task_id), "lane", "attempt", "devices", "context_mib", "executor")
            lane, attempt, devices, context, executor = ((value or b"").decode() for value in fields)
            names = [
                keys.task(task_id),
                keys.story(task_id),
                keys.counts,
                keys.changed,
                keys.wake,
                keys.availability,
                keys.finished,
                keys.expiring,
                keys.outbox,
                keys.scheduled,
                keys.awaited,
                keys.leader,
                keys.lane(lane),
                *self.books_of([uuid for uuid in devices.split(",") if uuid], executor),
            ]
            args: list[Arg] = [
                task_id,
                state,
                dump(reason),
                ",".join(allowed),
                lane,
                attempt,
                context or 0,
                "" if epoch is None else epoch,
            ]
            answer = self.runner.run("close", names, args).decode()
            if answer == "fenced":
                raise FencedError
            if answer != "moved":
                return CloseAnswer(answer)

    def cancel(self, task_id: str, reason: Reason, *, running: bool = True) -> CloseAnswer:
        """Cancels a task wherever it is; MARKED means that its worker has to end it.

        A ``running`` one is not touched if that is false.
        """
        allowed = [State.SCHEDULED, State.WAITING, State.HANDED_OVER, *_PLACED_ON_THE_WAY]
        if running:
            allowed.append(State.RUNNING)
        return self.close(task_id, State.CANCELLED, reason, allowed)

    def revive(self, task_id: str, lane: str, why: Reason) -> bool:
        """Starts a new run of a dead-lettered task in ``lane`` (the unestimated one of its task).

        False if it is not dead, its message could not be kept, or its producer has not been answered yet.
        """
        keys = self.keys
        names = [
            keys.task(task_id),
            keys.story(task_id),
            keys.counts,
            keys.finished,
            keys.lane(lane),
            keys.lanes,
            keys.changed,
            keys.wake,
        ]
        return bool(self.runner.run("revive", names, [task_id, lane, dump(why)]))

    def purge(self, task_id: str) -> bool:
        """Removes the record of a task that has ended; False if it has not, or its producer is not answered yet."""
        keys = self.keys
        names = [keys.task(task_id), keys.story(task_id), keys.counts, keys.finished, keys.tasks]
        return bool(self.runner.run("forget", names, [task_id]))
