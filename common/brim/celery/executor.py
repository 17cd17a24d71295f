"""What runs inside an executor, a pool process of a device's worker: claims around the user's function.

Celery stores STARTED before the function, and sends callbacks before the result; nothing of that may happen for
an attempt that is not the live one. So the trace function is wrapped (bind first, end last), and the task
itself (finish claim between the function's end and everything that follows from it). Where nothing follows but a
result on brim's own server, claim, result and end are one step (ADR 0012).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from billiard.einfo import ExceptionInfo
from billiard.pool import EX_OK, EX_RECYCLE
from celery import Celery, Task, signals
from celery.app.task import Context
from celery.app.trace import TraceInfo, build_tracer, task_has_custom, trace_ok_t
from celery.canvas import Signature, _chain, chord
from celery.exceptions import Ignore, TaskPredicate
from celery.states import FAILURE, IGNORED, REJECTED, RETRY
from celery.utils.log import get_logger

from brim.core.model import Reason, State
from brim.gpu import frameworks
from brim.gpu.probe import NodeFault, Probe, Sample, open_probe
from brim.gpu.process import proc_id
from brim.store.types import Bound, ClaimAnswer, Outcome, OutOfMemoryAnswer

from .attempts import Attempts, refusal
from .endings import Endings, undisturbed
from .envelope import HEADER, INTAKE_QUEUE, AttemptHeader
from .errors import TaskOutOfMemory
from .results import Kept, Results
from .routing import declare_intake

log = get_logger("brim.worker")

T = TypeVar("T")

REASON_CHARACTERS = 500
"""How much of an exception's text a task's record keeps."""


def prepare(app: Celery, hostname: str, attempts: Attempts) -> None:
    """Wrap every task of this process; it may run attempts from then on."""
    executor = Executor(app, attempts)
    signals.worker_process_shutdown.connect(executor.exiting, weak=False, dispatch_uid="brim.exiting")
    declare_intake(app)
    for name, task in app.tasks.items():
        if not isinstance(task, AttemptTask):
            task.__class__ = type(type(task).__name__, (AttemptTask, type(task)), {"__module__": type(task).__module__})
        task.__trace__ = executor.traced(task, build_tracer(name, task, app.loader, hostname, app=app))


class Execution:
    """One attempt while this process runs it."""

    def __init__(
        self, attempts: Attempts, task_id: str, attempt: AttemptHeader, proc: str, memory: OwnMemory | None = None
    ) -> None:
        self.attempts = attempts
        self.memory = memory
        self.kept: Kept | None = None
        """Keeps the result, if that is all that may follow from the function."""
        self.unclaimed = False
        """Whether the function has returned and the finish claim is left to the end."""
        self.task_id = task_id
        self.attempt = attempt
        self.proc = proc
        self.entered = False
        self.refused = False
        self.wanted_mib = 0
        """What frameworks' pools would have held if they had not been refused it."""
        self.replaced_by: Signature | None = None

    def bind(self) -> Bound:
        """Claim the attempt for this process."""
        return self.attempts.bind(self.task_id, self.attempt, self.proc)

    def finish(self) -> None:
        """Claim what follows the function; raises `Ignore` if this attempt is not the live one any more."""
        self.unclaimed, self.kept = False, None
        self.claim()

    def claim(self) -> None:
        """The same while the result is kept, which is stored behind it."""
        answer = self.attempts.finish(self.task_id, self.attempt, self.proc)
        if answer is not ClaimAnswer.GRANTED:
            self.refused = True
            raise Ignore(refusal(self.attempt, self.task_id, "publish", answer))

    def over(self, request: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` and claim the finish when it has returned or raised.

        ``request``: the task's; the function may have given it something that is to follow.

        An exception of `MemoryError`'s family would make the whole worker exit; it is replaced, after its
        frames, which hold the task's memory, have been let go. One that says that a GPU's memory did not suffice
        has the task placed again, while there is hope.
        """
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            again = self._is_tried_again(error)
            if isinstance(error, MemoryError):
                out_of_memory = plain(error)
            elif not again:
                self.finish()
                raise
        else:
            if self.kept is None or follows(request):
                self.finish()
            else:
                self.unclaimed = True
                self.kept.begin()
            return result
        if again:
            self.refused = True
            raise Ignore(f"task {self.task_id} ran out of GPU memory and is placed again")
        self.finish()
        raise out_of_memory

    def _is_tried_again(self, error: Exception) -> bool:
        """Whether the error says that GPU memory ran out, and the task has been put back to be placed again.

        Its frames still hold what the task had: what it wanted is that, and what the error says it asked for.
        """
        if isinstance(error, TaskPredicate) or not frameworks.is_out_of_memory(error):
            return False
        attempt = self.attempt
        if (asked_mib := frameworks.asked_mib(error)) is not None:
            self.wanted_mib = frameworks.pool().allocated_mib + asked_mib
        known_mib = max(frameworks.peak_mib() or 0, self.wanted_mib)
        needed_mib = known_mib + attempt.context_mib if known_mib else 0
        offered_mib = self.memory.offered_mib(attempt.devices) if self.memory is not None else None
        text = failure(error).message
        answer = self.attempts.out_of_memory(self.task_id, attempt, self.proc, text, needed_mib, offered_mib)
        return answer is OutOfMemoryAnswer.WAITING


_current: ContextVar[Execution | None] = ContextVar("brim_execution", default=None)


@contextmanager
def current_execution(execution: Execution) -> Iterator[None]:
    """Within this, the tasks of this thread run as that attempt."""
    token = _current.set(execution)
    try:
        yield
    finally:
        _current.reset(token)


class AttemptTask(Task):
    """Mixed into every task of an executor; tasks that run outside an attempt are not touched."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function as the worker calls it; not when another task's function calls it."""
        execution = self._execution()
        if execution is None or execution.entered:
            return super().__call__(*args, **kwargs)
        execution.entered = True
        return execution.over(self.request, super().__call__, *args, **kwargs)

    def before_start(self, *args: Any, **kwargs: Any) -> None:
        """The user's own hook; what it raises is the task's failure."""
        execution = self._execution()
        try:
            super().before_start(*args, **kwargs)
        except Exception:
            if execution is not None:
                execution.finish()
            raise

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Publishes from inside the function: the finish claim comes first."""
        self._claim()
        return super().retry(*args, **kwargs)

    def on_replace(self, sig: Signature) -> Any:
        """Publishes the replacement from inside the function: the finish claim comes first."""
        execution = self._claim()
        if execution is not None:
            execution.replaced_by = sig
        return super().on_replace(sig)

    def add_to_chord(self, sig: Signature, lazy: bool = False) -> Any:
        """Lengthens the chord from inside the function: the finish claim comes first."""
        self._claim()
        return super().add_to_chord(sig, lazy)

    def _claim(self) -> Execution | None:
        execution = self._execution()
        if execution is not None:
            execution.finish()
        return execution

    def _execution(self) -> Execution | None:
        execution = _current.get()
        return execution if execution is not None and self.request.id == execution.task_id else None


class Executor:
    """This process, as its attempts see it."""

    def __init__(self, app: Celery, attempts: Attempts) -> None:
        self._app = app
        self._attempts = attempts
        self._results = Results(app)
        self._endings = Endings()
        self._proc = proc_id() or ""
        self._memory = OwnMemory(os.environ.get("BRIM_DEVICES"))

    def traced(self, task: Task, trace: Any) -> Any:
        """Celery's trace function of a task with the bind in front and the end behind."""
        hooked = any(task_has_custom(task, hook) for hook in ("on_success", "after_return"))

        def traced(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
            attempt = AttemptHeader.read((request or {}).get(HEADER) or {})
            if attempt is None:
                return trace(uuid, args, kwargs, request)
            self._endings.wait()
            execution = Execution(self._attempts, uuid, attempt, self._proc, self._memory)
            bound = execution.bind()
            if bound.answer is not ClaimAnswer.GRANTED:
                return _ignored(refusal(attempt, uuid, "run", bound.answer))
            frameworks.begin()
            frameworks.limit(None if bound.guard == "off" else max(1, attempt.vram_mib - attempt.context_mib))
            out_of_memory = None
            with current_execution(execution), self._results.kept(uuid, self._attempts.store.client) as kept:
                execution.kept = None if hooked or task.backend is not self._app.backend else kept
                try:
                    traced_outcome = trace(uuid, args, kwargs, request)
                except MemoryError as error:
                    out_of_memory = plain(error)
            if out_of_memory is not None:
                raise out_of_memory
            try:
                self._end(execution, kept, traced_outcome.info)
            except Ignore as refused:
                return _ignored(str(refused))
            return traced_outcome

        return traced

    def _end(self, execution: Execution, kept: Kept | None, info: TraceInfo | None) -> None:
        """End the attempt by what the trace function made of it, unless somebody else does or may not at all.

        Raises `Ignore` if its finish claim was left to now, and that this is refused is heard here: see `Endings`.
        """
        if execution.refused:
            return
        task_id, attempt = execution.task_id, execution.attempt
        if info is not None and info.state == REJECTED:
            if info.retval.requeue:
                execution.attempts.requeue(task_id, attempt, Reason("requeued", "the task asked to be requeued"))
            # Otherwise Celery answers in the main process, and the attempt is ended there.
            return
        if info is not None and kept is not None and execution.unclaimed and kept.is_success:
            info = None  # what has gone wrong behind the function's result takes nothing of it back
        outcome = undisturbed(lambda: self._outcome(execution, info))
        self._endings.tell(execution, outcome, kept)

    def exiting(self, exitcode: int | None = None, **_: Any) -> None:
        """Before this process exits because it is to, not because it was interrupted: its last end has been told."""
        if exitcode in (EX_OK, EX_RECYCLE):
            self._endings.wait()

    def _outcome(self, execution: Execution, info: TraceInfo | None) -> Outcome:
        attempt = execution.attempt
        state, reason = outcome_of(self._app, execution, info)
        leftover_mib = self._memory.leftover_mib(attempt.devices)
        counted_mib = max(frameworks.peak_mib() or 0, execution.wanted_mib)
        peak_mib = counted_mib + self._beside_pools_mib(attempt, leftover_mib) if counted_mib else None
        return Outcome(state, reason, leftover_mib, attempt.context_mib, peak_mib)

    @staticmethod
    def _beside_pools_mib(attempt: AttemptHeader, leftover_mib: Sequence[int] | None) -> int:
        """What the process holds of its device beside frameworks' pools: its context, and what no framework counts."""
        if leftover_mib is None:
            return attempt.context_mib
        return max(0, max(leftover_mib) - frameworks.pool().held_mib)


def follows(request: Mapping[str, Any] | Context) -> bool:
    """Whether more than its result may follow from a task's return: other tasks, or receivers of Celery's signals."""
    others = any(request.get(name) for name in ("callbacks", "errbacks", "chain", "chord"))
    return others or bool(signals.task_success.receivers or signals.task_postrun.receivers)


def outcome_of(app: Celery, execution: Execution, info: TraceInfo | None) -> tuple[State, Reason | None]:
    """How an attempt ended, by what Celery's trace function made of it; not for one that was rejected."""
    if info is None:
        return State.SUCCEEDED, None
    if execution.replaced_by is not None:
        return _handed_over(app, execution.replaced_by, "replaced")
    if info.state == RETRY:
        return _handed_over(app, info.retval.sig, "retried")
    if info.state == IGNORED:
        return State.SUCCEEDED, Reason("ignored", f"the task raised Ignore: {info.retval}")
    assert info.state == FAILURE
    return State.FAILED, failure(info.retval)


def _handed_over(app: Celery, sig: Signature, how: str) -> tuple[State, Reason]:
    """Whether the message that carries the task's id on comes back to intake, or leaves brim."""
    carrier = _carrier(sig)
    if goes_to_intake(app, carrier):
        return State.HANDED_OVER, Reason(how, f"{how} by {carrier.task}" if how == "replaced" else how)
    return State.SUCCEEDED, Reason(how, f"{how} by {carrier.task}, which does not go through brim")


class OwnMemory:
    """What this process itself holds on devices, where it can know."""

    def __init__(self, spec: str | None) -> None:
        self._probe: Probe | None = None
        with suppress(NodeFault):
            self._probe = open_probe(spec)
            self._probe.devices()

    def leftover_mib(self, devices: Sequence[str]) -> list[int] | None:
        """MiB on each device; None where the driver does not tell (brim then waits for a report)."""
        found = [(own, sample) for own, sample in self._sampled(devices) if own is not None]
        return [own for own, _ in found] if len(found) == len(devices) else None

    def offered_mib(self, devices: Sequence[str]) -> int | None:
        """What it holds and what is free, on the device where that is least; None where the driver does not tell."""
        found = [own + sample.free_mib for own, sample in self._sampled(devices) if own is not None]
        return min(found) if len(found) == len(devices) else None

    def _sampled(self, devices: Sequence[str]) -> list[tuple[int | None, Sample]]:
        """Own MiB, None if unknown, and the sample, of each device that can be read."""
        if self._probe is None:
            return []
        try:
            samples = self._probe.sample()
        except Exception as error:  # whatever is wrong with measuring, the attempt ends
            log.warning("the executor's own memory is unknown: %s", error)
            return []
        read = [sample for uuid in devices if isinstance(sample := samples.get(uuid), Sample)]
        return [(sample.of(os.getpid()), sample) for sample in read]


def plain(error: MemoryError) -> TaskOutOfMemory:
    """The exception that stands for one of `MemoryError`'s family: its traceback as text, not its frames."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    replacement = TaskOutOfMemory(f"{name}: {error}" if str(error) else name)
    replacement.add_note("Raised here:\n" + "".join(traceback.format_tb(error.__traceback__)))
    return replacement


def failure(error: BaseException) -> Reason:
    """Why a task failed, for its record."""
    text = f"{type(error).__name__}: {error}"
    code = "out_of_memory" if isinstance(error, TaskOutOfMemory) or frameworks.is_out_of_memory(error) else "failed"
    return Reason(code, text if len(text) <= REASON_CHARACTERS else text[: REASON_CHARACTERS - 1] + "…")


def goes_to_intake(app: Celery, sig: Signature) -> bool:
    """Whether publishing the signature puts it into the intake queue."""
    route = app.amqp.router.route(dict(sig.options), sig.task, sig.args, sig.kwargs, app.tasks.get(sig.task))
    queue = route.get("queue")
    return bool(getattr(queue, "name", queue) == INTAKE_QUEUE)


def _carrier(sig: Any) -> Signature:
    """The task of a workflow that ends under the workflow's own id."""
    while isinstance(sig, _chain | chord):
        sig = sig.tasks[-1] if isinstance(sig, _chain) else sig.body
    found: Signature = sig
    return found


def _ignored(why: str) -> trace_ok_t:
    """What Celery's trace function returns for a task that raised `Ignore`."""
    try:
        raise Ignore(why)
    except Ignore as error:
        return trace_ok_t(ExceptionInfo(internal=True), TraceInfo(IGNORED, error), 0.0, None)
