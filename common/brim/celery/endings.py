"""The ends of an executor's attempts: told one at a time, their answers awaited beside what the process does next.

It is also the place for what a soft time limit may do to that, which is meant for the task's function alone (ADR 0012).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from celery.exceptions import Ignore
from celery.utils.log import get_logger

from brim.store.types import EndAnswer, Outcome

from .attempts import refusal
from .results import Kept

if TYPE_CHECKING:
    from .executor import Execution

log = get_logger("brim.worker")

T = TypeVar("T")


class _Job:
    """Something that the thread is to do, and whether it is done."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._done = False
        self._doing = Lock()
        self._doing.acquire()

    def do(self) -> None:
        try:
            self._call()
        finally:
            self._done = True
            self._doing.release()

    def wait(self) -> None:
        """Until it is done; may be interrupted, and be called again."""
        while not self._done:
            self._doing.acquire()


class Endings:
    """Tells the ends of this process's attempts, one at a time, and awaits answers beside what it does next.

    An end with which claim and result go is sent, and a thread awaits the answer while the worker's main process is
    already told that this one is free: hardly ever is it another than that the attempt has ended. Where it is, or none
    comes, the thread tells the whole end again. Nothing else may be asked before `wait` has returned (ADR 0012).

    A soft time limit may interrupt the main thread anywhere in Python code. So it shares nothing with the other thread
    that is locked and released there, as executors and conditions of the standard library are.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._pending = _Job(_nothing)
        self._jobs.put(self._pending)
        Thread(target=self._work, name="brim-end", daemon=True).start()

    def wait(self) -> None:
        """Until what has been handed to the thread is done."""
        undisturbed(self._pending.wait)

    def tell(self, execution: Execution, outcome: Outcome, kept: Kept | None) -> None:
        """The end of an attempt: see `tell_end`; a refusal that is heard later is logged only."""
        if kept is not None and execution.unclaimed and not kept.apart and execution.attempts.asks_ahead:
            try:
                is_over = execution.attempts.ask_complete(
                    execution.task_id, execution.attempt, execution.proc, outcome, kept.result
                )
                self._hand_over(partial(_hear, is_over, execution, outcome, kept))
                return
            except Exception:  # a soft time limit, wherever it has struck, or an outage
                pass
            undisturbed(lambda: self._take_back(execution))
        tell_at_last(execution, outcome, kept)

    def _hand_over(self, call: Callable[[], None]) -> None:
        job = self._pending = _Job(call)
        self._jobs.put(job)

    def _take_back(self, execution: Execution) -> None:
        """What may have been sent, and handed to the thread or not: it is done with, and its answer comes no more."""
        self._hand_over(_nothing)
        self._pending.wait()
        execution.attempts.hang_up()

    def _work(self) -> None:
        while True:
            self._jobs.get().do()


def _nothing() -> None:
    """When this is done, so is what the thread was given before."""


def _hear(is_over: Callable[[], bool], execution: Execution, outcome: Outcome, kept: Kept) -> None:
    if not is_over():
        with suppress(Ignore):
            tell_at_last(execution, outcome, kept)


def tell_at_last(execution: Execution, outcome: Outcome, kept: Kept | None) -> None:
    """`tell_end`, however often it is interrupted; this process exits if it cannot."""
    try:
        undisturbed(lambda: tell_end(execution, outcome, kept))
    except Ignore:
        raise
    except Exception:  # its agent settles the attempt of a process that is gone
        log.exception("the end of an attempt cannot be told")
        os._exit(os.EX_SOFTWARE)


def undisturbed(call: Callable[[], T]) -> T:
    """The answer of a call that may be made twice, through a soft time limit: it was meant for the task's function."""
    while True:
        try:  # not `suppress`: a limit that strikes while that is left would get out
            return call()
        except SoftTimeLimitExceeded:
            pass


def tell_end(execution: Execution, outcome: Outcome, kept: Kept | None) -> None:
    """The end of an attempt, with its result and the finish claim if these have been left to it.

    Raises `Ignore` if that claim is refused. What has interrupted it may have it done again from the beginning.
    """
    task_id, attempt = execution.task_id, execution.attempt
    if kept is not None and execution.unclaimed:
        if not kept.apart:
            answer = execution.attempts.complete(task_id, attempt, execution.proc, outcome, kept.result)
            if answer.is_over:
                return
            if answer is not EndAnswer.OCCUPIED:
                execution.refused = True
                raise Ignore(refusal(attempt, task_id, "publish", answer))
            kept.set_apart()
        execution.claim()
        execution.attempts.patiently(kept.store)
        execution.unclaimed = False
    execution.attempts.end(task_id, attempt, outcome)
