"""What runs in the main process of a device's worker: the start claim, and outcomes that arise there.

Celery gives some answers before or without an executor: a task has expired, was revoked, hit its hard time limit,
is unknown, cannot be decoded. Each of them is an answer about an attempt, so the attempt must be the live one:
the finish claim comes first, then Celery's own answer, then the end; all of it before an executor is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from billiard.common import TERM_SIGNAME
from billiard.einfo import ExceptionWithTraceback
from celery import Celery, Task, bootsteps, platforms
from celery.exceptions import Ignore, NotRegistered, Reject, Retry, Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.imports import instantiate, symbol_by_name
from celery.utils.log import get_logger
from celery.worker import state as worker_state
from celery.worker.request import Request
from kombu.utils.objects import cached_property

from brim.core.model import Reason, State
from brim.store.types import ClaimAnswer, Outcome

from .arrivals import Arrivals, attempt_of, may_be_taken, take_rest
from .attempts import MAIN_PROCESS, Attempts, refusal
from .envelope import HEADER, AttemptHeader, context, forward, received
from .executor import failure
from .model_executor import LOOK_S, ModelExecutor
from .pool import begin_waiting

log = get_logger("brim.worker")

EVENTS_S = 0.1
"""How long a worker gathers events: sending one costs as much as sending all."""

NOT_OURS = (Ignore, Retry, WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)
"""What executors or agents deal with: nothing is published about the task in the main process."""


def prepare(tasks: Iterable[Any], attempts: Attempts, arrivals: Arrivals) -> None:
    """Have every task's messages claimed and, where they are acknowledged at all, only when their attempt is over."""
    for task in tasks:
        if task.rate_limit:
            log.warning(
                "%s: rate_limit %s is not applied: a task held back would hold its GPU", task.name, task.rate_limit
            )
        task.acks_late = True
        task.acks_on_timeout = True
        task.reject_on_worker_lost = True
        task.retry_on_worker_lost = False
        base = symbol_by_name(task.Request)
        task.Request = type("Request", (AttemptRequest, base), {"attempts": attempts, "arrivals": arrivals})
        task.Strategy = partial(strategy, arrivals, task.Strategy)


def strategy(arrivals: Arrivals, inner: Any, task: Task, app: Celery, consumer: Any, **options: Any) -> Any:
    """The task's own strategy, with the start claim behind it; a message that brim has not made is let go.

    When a task has come or, where nothing is acknowledged, is over, an idle executor begins with what the pool has.
    """
    handle = instantiate(inner, task, app, consumer, **options)

    def begin_next(*_: Any) -> None:
        begin_waiting(consumer)

    def on_message(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **more: Any) -> Any:
        if consumer.task_consumer.no_ack:
            ack, reject = begin_next, _nothing
        attempt = attempt_of(message.headers)
        try:
            if attempt is None:
                # Its memory is unknown here: whoever sent it past placement, intake knows what to do with it.
                log.warning("task %s[%s] came past placement: sent on to intake", task.name, message.headers["id"])
                forward(message)
            elif arrivals.accept(message, attempt):
                handled = handle(message, body, ack, reject, callbacks, **more)
                begin_next()
                return handled
            return ack(log, consumer.connection_errors)
        finally:
            arrivals.settle()

    return on_message


class AttemptRequest(Request):
    """Mixed into every task's request class in a device's worker."""

    attempts: Attempts
    arrivals: Arrivals
    _granted = False
    _ended = False

    @cached_property
    def attempt(self) -> AttemptHeader:
        """The attempt that this request is; there is one, or the strategy would have sent it away."""
        attempt = AttemptHeader.read(self._request_dict[HEADER])
        assert attempt is not None
        return attempt

    def maybe_expire(self) -> bool:
        """Whether its ``expires`` has passed, by the server's clock: nodes' clocks may differ."""
        over: bool = self.attempts.server_s() > self.expires.timestamp()
        if over:
            worker_state.revoked.add(self.id)
        return over

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        if not self._may_answer():
            self._already_revoked = True
            self.drop()
            return
        try:
            super()._announce_revoked(reason, terminated, signum, expired)
        finally:
            if expired:
                self._end(State.EXPIRED, Reason("expired", "expired in its device's queue"))
            else:
                self._end(State.CANCELLED, Reason("revoked", f"revoked while in its device's worker ({reason})"))

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Revoked with ``terminate=True``: answered and ended before the executor is killed.

        An executor that has the finish claim is left alone: its task is over, and killing it could only repeat it.
        """
        if not self.time_start:
            super().terminate(pool, signal)  # once it is accepted
            return
        if not self._may_answer():
            return
        number = platforms.signals.signum(signal or TERM_SIGNAME)
        self._announce_revoked("terminated", True, number, False)
        pool.terminate_job(self.worker_pid, number)
        result = self._apply_result() if self._apply_result is not None else None
        if result is not None:
            result.terminate(number)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """The pool calls this before it kills the executor of a task that hit its hard limit.

        It has called `on_failure` with a `TimeLimitExceeded` before; Celery answers in both.
        """
        inherited = partial(super().on_timeout, soft, timeout)
        if soft:
            inherited()
        else:
            self._answer(inherited, _over_time(timeout))

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        """A failure that the executor has not published itself is published here, if that is allowed."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        inherited = partial(super().on_failure, exc_info, send_failed_event, return_ok)
        answered = error.requeue if isinstance(error, Reject) else return_ok or isinstance(error, NOT_OURS)
        if answered:
            inherited()
        else:
            # The executor has left the answer to this process, or it is about to be killed for being too slow.
            over_time = isinstance(error, TimeLimitExceeded)
            reason = _over_time(*error.args) if over_time else failure(error)
            self._answer(inherited, reason, left_to_main=not over_time)

    def _answer(self, answer: Callable[[], None], reason: Reason, *, left_to_main: bool = False) -> None:
        if not self._may_answer(left_to_main=left_to_main):
            self.drop()
            return
        try:
            answer()
        finally:  # an errback that cannot be called must not keep the memory
            self._end(State.FAILED, reason)

    def _may_answer(self, *, left_to_main: bool = False) -> bool:
        """The finish claim; a granted one is kept, because Celery announces some outcomes twice."""
        if not self._granted:
            self._claim()
            answer = self.attempts.finish(self.id, self.attempt, MAIN_PROCESS, left_to_main=left_to_main)
            self._granted = answer is ClaimAnswer.GRANTED
            if not self._granted:
                refusal(self.attempt, self.id, "answer", answer)
        return self._granted

    def _claim(self) -> None:
        """The start claim, if it has not been made yet."""
        self.arrivals.claim()

    def _end(self, state: State, reason: Reason) -> None:
        if not self._ended:
            self._ended = True
            self.attempts.end(self.id, self.attempt, Outcome(state, reason, context_mib=self.attempt.context_mib))

    def drop(self) -> None:
        """Let go of a message whose attempt is somebody else's by now."""
        worker_state.task_ready(self)
        self.acknowledge()


class ItemRequest(AttemptRequest):
    """Mixed into every batched task's request class in a model executor."""

    executor: ModelExecutor

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Revoked with ``terminate=True``: answered at once; what its batch then says of it is refused.

        The batch goes on: ending the process would throw away what it computes for others.
        """
        if self._may_answer():
            number = platforms.signals.signum(signal or TERM_SIGNAME)
            self._announce_revoked("terminated", True, number, False)

    def _claim(self) -> None:
        """Of an item that is not sealed yet, as its batch would claim it."""
        self.executor.claim_one(self.id, self.attempt)


def hand_over(tasks: Iterable[Any], attempts: Attempts, executor: ModelExecutor) -> None:
    """Have every task's messages handed to the model executor instead of the pool."""
    for task in tasks:
        task.acks_late = task.acks_on_timeout = True
        base = symbol_by_name(task.Request)
        task.Request = type("Request", (ItemRequest, base), {"attempts": attempts, "executor": executor})
        task.Strategy = partial(item_strategy, executor, task.Strategy)


class _Handing:
    """The consumer, but that what it is asked to run goes elsewhere."""

    def __init__(self, consumer: Any, handle: Callable[[Any], None]) -> None:
        self._consumer = consumer
        self.on_task_request = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def item_strategy(executor: ModelExecutor, inner: Any, task: Task, app: Celery, consumer: Any, **options: Any) -> Any:
    """The task's own strategy; it is claimed with its batch. Other executors' items are let go silently.

    Nothing is acknowledged: see `BrimStep`.
    """
    handle = instantiate(inner, task, app, _Handing(consumer, executor.arrive), **options)
    key, draining = executor.attempts.key, list[bool]()

    def on_message(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **more: Any) -> Any:
        attempt = attempt_of(message.headers)
        if attempt is None:
            log.warning("task %s[%s] came past placement: sent on to intake", task.name, message.headers["id"])
            forward(message)
        elif attempt.executor == executor.name and may_be_taken(message, attempt, key):
            handle(message, body, _nothing, _nothing, callbacks, **more)
        if not draining:
            draining.append(True)
            try:
                take_rest(executor.store.client, message.channel, executor.queue)
            finally:
                draining.clear()

    return on_message


def _nothing(*_: Any) -> None:
    """In place of an acknowledgement."""


class BrimStep(bootsteps.StartStopStep):
    """In the consumer: prepares the tasks, sees to it that no message is redelivered, tells Flower.

    The worker of one device takes its messages without acknowledgement, which is most of what a message costs: what is
    lost with this process, its agent puts back, and with a connection nothing is lost (ADR 0011). Several workers may
    serve one set of devices, and each must leave the others theirs, so there Celery's transport keeps count of what is
    not acknowledged. It gives that to somebody else after its visibility timeout; renewing its entry means that this
    never strikes a worker that lives.
    """

    name: Any = "brim"
    requires: Any = ("celery.worker.consumer.tasks:Tasks",)
    attempts: Attempts
    queue: str
    devices: tuple[str, ...]

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timers: list[Any] = []
        self._arrivals = Arrivals(self.attempts, self.queue, alone=self._is_alone)
        if self._is_alone:
            # Celery forgets the tasks that have not begun with a connection: their messages would come again.
            consumer.on_close = _nothing
        self._prepare(consumer.app.tasks.values())
        for hook in ("on_unknown_task", "on_invalid_task"):
            setattr(consumer, hook, self._answering(consumer, getattr(consumer, hook), message_at=1))
        consumer.on_decode_error = self._answering(consumer, consumer.on_decode_error, message_at=0)

    @property
    def _is_alone(self) -> bool:
        """Whether no other worker serves its devices, or takes messages from its queue."""
        return len(self.devices) == 1

    def _prepare(self, tasks: Iterable[Any]) -> None:
        prepare(tasks, self.attempts, self._arrivals)

    def start(self, consumer: Any) -> None:
        """Before messages are consumed on this connection."""
        if self._is_alone:
            consumer.task_consumer.no_ack = True
        else:
            every_s = consumer.task_consumer.channel.visibility_timeout / 4
            self._timers.append(consumer.timer.call_repeatedly(every_s, renew, (consumer,)))
        if consumer.event_dispatcher is not None:
            consumer.event_dispatcher.on_send_buffered = None
            self._timers.append(consumer.timer.call_repeatedly(EVENTS_S, flush, (consumer.event_dispatcher,)))

    def stop(self, consumer: Any) -> None:
        """The connection is going."""
        while self._timers:
            self._timers.pop().cancel()
        if consumer.event_dispatcher is not None:
            with suppress(*consumer.connection_errors):
                flush(consumer.event_dispatcher)

    def info(self, consumer: Any) -> dict[str, Any]:
        """Its devices in the availability table, for ``inspect stats`` and Flower's page of the worker.

        The worker of one device shows that as ``gpu``, one of several a list of them as ``gpus``.
        """
        entries = [
            {
                "uuid": device.uuid,
                "model": device.model,
                "state": device.state,
                "total_mib": device.total_mib,
                "available_mib": device.available_mib,
                "committed_mib": device.committed_mib,
                "external_mib": device.external_mib,
                "executors": device.executors,
                "busy": device.busy,
            }
            for device in self.attempts.store.devices()
            if device.uuid in self.devices
        ]
        if len(self.devices) > 1:
            return {"gpus": entries}
        return {"gpu": entries[0]} if entries else {}

    def _answering(self, consumer: Any, hook: Callable[..., None], message_at: int) -> Callable[..., None]:
        """A hook of Celery's for messages that no task can take, which tells the producer why (Celery does not)."""

        def answering(*args: Any) -> None:
            message, error = args[message_at], args[-1]
            attempt = attempt_of(message.headers)
            try:
                if attempt is None or self._answer(consumer, message, attempt, error):
                    hook(*args)
                else:
                    message.ack_log_error(log, consumer.connection_errors)
            finally:
                self._arrivals.settle()

        return answering

    def _answer(self, consumer: Any, message: Any, attempt: AttemptHeader, error: Exception) -> bool:
        """Fail a task that could not even be begun; not if its attempt is not the live one."""
        task_id, task = message.headers["id"], message.headers["task"]
        if not self._arrivals.accept(message, attempt):
            return False
        self._arrivals.claim()
        if self.attempts.finish(task_id, attempt, MAIN_PROCESS) is not ClaimAnswer.GRANTED:
            return False
        cause = NotRegistered(task) if isinstance(error, KeyError) else error
        request = context(received(message))
        try:
            consumer.app.backend.mark_as_failure(
                task_id, cause, request=request, store_result=not request.ignore_result
            )
        finally:
            outcome = Outcome(State.FAILED, failure(cause), context_mib=attempt.context_mib)
            self.attempts.end(task_id, attempt, outcome)
        return True


class ExecutorStep(BrimStep):
    """The same in a model executor."""

    executor: ModelExecutor

    def start(self, consumer: Any) -> None:
        """Looks for items whose messages were lost on the way, too."""
        super().start(consumer)
        queue = f"{consumer.task_consumer.channel.global_keyprefix}{self.executor.queue}"
        self._timers.append(consumer.timer.call_repeatedly(LOOK_S, self.executor.look_for_lost, (queue,)))

    def _prepare(self, tasks: Iterable[Any]) -> None:
        hand_over(list(tasks), self.attempts, self.executor)


def flush(dispatcher: Any) -> None:
    """Send the events that have gathered."""
    if any(dispatcher._group_buffer.values()):
        dispatcher.flush()


def renew(consumer: Any) -> None:
    """Say that every message which this worker has reserved is in good hands."""
    channel = consumer.task_consumer.channel
    tags = [request.message.delivery_tag for request in worker_state.reserved_requests if not request.acknowledged]
    if tags:
        with channel.conn_or_acquire() as client:
            client.zadd(channel.unacked_index_key, dict.fromkeys(tags, time.time()), xx=True)


def _over_time(limit_s: float) -> Reason:
    return Reason("time_limit", f"hit its hard time limit of {limit_s:g} s")
