"""What a device's worker tells the store about its attempts, patiently: an outage of Redis loses no attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from celery.utils.log import get_logger

from brim.core.model import AttemptView, Reason, State
from brim.core.profiles import lane_of
from brim.core.retry import demand_after_out_of_memory
from brim.settings import Settings
from brim.store import Store
from brim.store.connection import is_outage
from brim.store.types import Bound, ClaimAnswer, EndAnswer, Outcome, OutOfMemoryAnswer, StoredResult

from .agent_link import WorkerIdentity, WorkerSide
from .envelope import AttemptHeader

log = get_logger("brim.worker")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0

MAIN_PROCESS = ""
"""Said instead of an executor's name by the worker's main process, which speaks for all of its executors."""

T = TypeVar("T")


def refusal(attempt: AttemptHeader, task_id: str, what: str, answer: ClaimAnswer | EndAnswer) -> str:
    """Say, here and in the log, that an attempt is not the live one (any more)."""
    said = f"attempt {attempt.attempt} of {task_id} may not {what}: {answer}"
    log.info("%s", said)
    return said


class Attempts:
    """One process's side of the claims. Each call is asked again while Redis is away, for ``patience_s`` at most.

    An executor's patience has no end: what it computed is worth waiting for, and its node keeps the lease. The
    main process must not stop listening for long. ``alone``: one call is made at a time, on one connection.
    """

    def __init__(
        self, identity: WorkerIdentity, settings: Settings, patience_s: float = float("inf"), *, alone: bool = False
    ) -> None:
        self._identity = identity
        self._patience_s = patience_s
        self._agent = WorkerSide(identity)
        self._max_attempts = settings.placement.max_attempts
        self.key = settings.security.key
        self._settings = settings
        self._alone = alone

    @cached_property
    def store(self) -> Store:
        """Connects when it is first asked for, if it is on one connection: do so patiently."""
        return Store.of(self._settings, single=self._alone)

    def server_s(self) -> float:
        """The server's clock, the only one that all nodes have in common."""
        return self.patiently(lambda: self.store.server_ms() / 1000)

    def claim_all(self, pairs: Sequence[tuple[str, str]]) -> list[ClaimAnswer]:
        """The start claims of several (task id, attempt): this worker has their messages."""
        return self.patiently(lambda: self.store.claim_all(pairs, self._identity.boot))

    def claim_and_take(
        self, pairs: Sequence[tuple[str, str]], queue_key: str, most: int
    ) -> tuple[list[ClaimAnswer], Sequence[bytes]]:
        """The same, and at most so many further messages of the worker's queue, which are taken out of it."""
        return self.patiently(lambda: self.store.claim_and_take(pairs, self._identity.boot, queue_key, most))

    def bind(self, task_id: str, attempt: AttemptHeader, proc: str) -> Bound:
        """An executor is about to run the task, which its worker may be about to claim."""
        boot = self._identity.boot
        return self.patiently(lambda: self.store.bind(task_id, attempt.attempt, attempt.devices, proc, boot=boot))

    def finish(self, task_id: str, attempt: AttemptHeader, proc: str, *, left_to_main: bool = False) -> ClaimAnswer:
        """The finish claim: only who is granted it may publish anything about the task."""
        return self.patiently(lambda: self.store.finish(task_id, attempt.attempt, proc, left_to_main=left_to_main))

    def end(self, task_id: str, attempt: AttemptHeader, outcome: Outcome) -> None:
        """The end, after the result: the reservation becomes leftover, and the agent looks at once."""
        self.patiently(
            lambda: self.store.end(task_id, attempt.attempt, attempt.devices, outcome, executor=attempt.executor)
        )
        self._agent.changed(attempt.attempt)

    def complete(
        self, task_id: str, attempt: AttemptHeader, proc: str, outcome: Outcome, result: StoredResult | None
    ) -> EndAnswer:
        """Finish claim, result and end in one; see `AttemptSide.complete`."""
        answer = self.patiently(
            lambda: self.store.complete(task_id, attempt.attempt, attempt.devices, outcome, proc, result)
        )
        self._agent.changed(attempt.attempt if answer.is_over else "")
        return answer

    @property
    def asks_ahead(self) -> bool:
        """Whether `ask_complete` can be called: there is one connection."""
        return "store" in vars(self) and self.store.client.connection is not None

    def ask_complete(
        self, task_id: str, attempt: AttemptHeader, proc: str, outcome: Outcome, result: StoredResult | None
    ) -> Callable[[], bool]:
        """Send what `complete` asks. What is returned waits for the answer: whether that says that the attempt is over.

        Without patience: an outage while it is sent is raised, one while it is awaited is told as "no". Call `complete`
        then.
        """
        read = self.store.ask_complete(task_id, attempt.attempt, attempt.devices, outcome, proc, result)

        def is_over() -> bool:
            try:
                answer = read()
            except Exception:
                self.hang_up()
                return False
            if not answer.is_over:
                return False
            self._agent.changed(attempt.attempt)
            return True

        return is_over

    def requeue(self, task_id: str, attempt: AttemptHeader, reason: Reason) -> None:
        """The task asked to be delivered again (``Reject(requeue=True)``): it waits in its old place."""
        view = self._view(task_id, attempt, MAIN_PROCESS, State.FINISHING)
        self.patiently(lambda: self.store.lose(view, reason, counts=False, max_attempts=self._max_attempts))
        self._agent.changed(attempt.attempt)

    def give_back(self, task_id: str, attempt: AttemptHeader, reason: Reason, state: State = State.PLACED) -> None:
        """An item that its model executor does not hold any longer waits in its old place, and nothing counts it."""
        self.put_back(self._view(task_id, attempt, MAIN_PROCESS, state), reason)

    def put_back(self, view: AttemptView, reason: Reason) -> None:
        """The same of an item as its executor's book has it."""
        self.patiently(lambda: self.store.lose(view, reason, counts=False, max_attempts=self._max_attempts))
        self._agent.changed(view.attempt)

    def out_of_memory(
        self, task_id: str, attempt: AttemptHeader, proc: str, text: str, peak_mib: int, offered_mib: int | None
    ) -> OutOfMemoryAnswer:
        """The attempt ran out of GPU memory, which the framework told in this ``text``; see `place_again_with_more`."""
        view = self._view(task_id, attempt, proc, State.RUNNING)
        reason = Reason("oom", f"ran out of GPU memory with {attempt.vram_mib} MiB reserved: {text}")
        answer = self.patiently(
            lambda: place_again_with_more(self.store, view, reason, peak_mib, offered_mib, self._max_attempts)
        )
        self._agent.changed(attempt.attempt if answer is OutOfMemoryAnswer.WAITING else "")
        return answer

    def _view(self, task_id: str, attempt: AttemptHeader, proc: str, state: State) -> AttemptView:
        return AttemptView(
            task_id,
            attempt.attempt,
            attempt.devices,
            attempt.vram_mib,
            proc=proc,
            state=state,
            boot=self._identity.boot,
            placed_s=0.0,
            claimed_s=None,
            lane="",
            context_mib=attempt.context_mib,
            executor=attempt.executor,
        )

    def patiently(self, call: Callable[[], T]) -> T:
        """The answer of a call to the store, which is asked again through an outage. Raises that outage in the end."""
        deadline = time.monotonic() + self._patience_s
        pause_s = 0.0
        while True:
            try:
                if pause_s:  # even a sleep of nothing gives the processor away
                    time.sleep(pause_s)
                return call()
            except SoftTimeLimitExceeded:
                # It was meant for the task's function, which does not run now; the script may be asked twice.
                self.hang_up()
                pause_s = 0.0
            except Exception as error:
                if not is_outage(error) or time.monotonic() > deadline:
                    raise
                if not pause_s:
                    log.warning("Redis is away, trying again: %s", error)
                self.hang_up()  # who answers that it takes no writes may have been replaced
                pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)

    def hang_up(self) -> None:
        """Leave an answer unread that may still come on the one connection: the next question is asked on another."""
        if self._alone and "store" in vars(self):
            self.store.drop_connection()


def place_again_with_more(
    store: Store, view: AttemptView, reason: Reason, peak_mib: int, offered_mib: int | None, max_attempts: int
) -> OutOfMemoryAnswer:
    """Have the task of a running attempt placed again that ran out of its memory, with what it is known to need.

    ``reason``: what happened; the task's story says besides what becomes of its demand. For the other figures see
    `demand_after_out_of_memory`. FINAL where no further try makes sense: the attempt has not ended then.
    """
    record = store.record(view.task_id)
    if record is None:
        return OutOfMemoryAnswer.UNKNOWN
    largest_mib = max((d.total_mib - d.headroom_mib for d in store.devices()), default=0)
    vram_mib = demand_after_out_of_memory(view.vram_mib, peak_mib, offered_mib, largest_mib)
    if vram_mib is None:
        return OutOfMemoryAnswer.FINAL
    then = f"its demand is raised to {vram_mib} MiB"
    if vram_mib == view.vram_mib:
        then = "others had taken from what was reserved for it"
    demand = replace(record.demand, vram_mib=vram_mib)
    return store.out_of_memory(
        view.task_id,
        view.attempt,
        view.devices,
        view.proc,
        lane_of(record.task, demand),
        demand,
        view.context_mib,
        Reason(reason.code, f"{then}: {reason.message}"),
        max_attempts,
        peak_mib or None,
    )
