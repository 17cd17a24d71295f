"""What a node agent does about its executors: from what it sees to what has to be done, nothing in between.

The agent compares what the books say with the processes that live, so a decision that could not be carried out
(Redis was away) is simply found again at the next look. A loss counts against its task only if the task had
begun, for only then can it have been the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from brim.core.model import AttemptView, Reason, State

SETTLE_S = 0.25
"""An executor to be replaced is left alone this long: it may still be telling its worker that its task ended."""

REPLACED, NOT_STARTED = "executor_replaced", "not_started"
DRAINING = Reason("node_draining", "the node is shutting down")

STALLS = 2
"""So many messages that never arrive, one after the other, mean that the worker does not consume any more."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A device's worker as it is now; ``boot`` is empty while its process does not run."""

    boot: str = ""
    ready: bool = False
    executors: frozenset[str] = frozenset()
    """Pool processes that live."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What the agent sees at one moment. ``now_s`` is the server's clock."""

    now_s: float
    workers: Mapping[str, Worker]
    """By device."""
    attempts: Sequence[AttemptView]
    processes: Mapping[str, Mapping[str, bool]]
    """What the books list, per device: executor -> whether it is to be replaced."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """How executors (by proc) and workers (by boot) ended, where that is known: "was killed by SIGKILL"."""
    consuming: frozenset[str] = frozenset()
    """Devices whose worker has told of an end since the last look."""
    draining: bool = False

    def ending(self, name: str) -> str:
        """How a process ended, as the end of a sentence."""
        return self.causes.get(name, "is gone")


@dataclass(frozen=True, slots=True)
class Remembered:
    """What has to be remembered from one look to the next, times in server seconds."""

    idle_since: Mapping[str, float] = field(default_factory=dict)
    """Device -> since when it has had an idle executor."""
    doomed_since: Mapping[str, float] = field(default_factory=dict)
    """Executor -> since when it has been seen to be replaced."""
    stalls: Mapping[str, int] = field(default_factory=dict)
    """Device -> how many messages in a row never arrived."""


@dataclass(frozen=True, slots=True)
class Lose:
    """The attempt is lost; its task is placed again, unless its function was over and its result is out."""

    attempt: AttemptView
    reason: Reason

    @property
    def begun(self) -> bool:
        """Whether an executor had taken it."""
        return bool(self.attempt.proc)

    @property
    def counts(self) -> bool:
        """Whether the loss counts towards the limit of its task."""
        return self.begun and self.reason.code != REPLACED


@dataclass(frozen=True, slots=True)
class Forget:
    """A dead executor no longer counts in its device's book; to be done after its attempts were lost."""

    device: str
    proc: str


@dataclass(frozen=True, slots=True)
class Replace:
    """End an idle executor, so that its pool starts a fresh one without its leftover."""

    device: str
    proc: str


@dataclass(frozen=True, slots=True)
class Restart:
    """End a worker that does not consume its queue; it is started again."""

    device: str
    reason: Reason


Action = Lose | Forget | Replace | Restart


def decide(sight: Sight, memory: Remembered, start_timeout_s: float) -> tuple[list[Action], Remembered]:
    """What to do about what is seen, in this order, and what to remember."""
    idle_since = {device: memory.idle_since.get(device, sight.now_s) for device in _idle(sight)}
    doomed = {proc for book in sight.processes.values() for proc, doomed in book.items() if doomed}
    doomed_since = {proc: memory.doomed_since.get(proc, sight.now_s) for proc in doomed}

    losses = []
    for attempt in sight.attempts:
        reason = _loss(attempt, sight, doomed) or _not_started(attempt, sight, idle_since, start_timeout_s)
        if reason is not None:
            losses.append(Lose(attempt, reason))
    settled = {proc for proc, since_s in doomed_since.items() if sight.now_s - since_s >= SETTLE_S}
    stalls = _stalls(sight, memory, losses)
    actions = [*losses, *_clean(sight, settled, losses), *_restarts(stalls, start_timeout_s)]
    return actions, Remembered(idle_since, doomed_since, stalls)


def _idle(sight: Sight) -> Iterator[str]:
    """Devices with an executor that could begin a task now."""
    bound = {(device, attempt.proc) for attempt in sight.attempts for device in attempt.devices}
    for device, worker in sight.workers.items():
        doomed = sight.processes.get(device, {})
        usable = (proc for proc in worker.executors if (device, proc) not in bound and not doomed.get(proc, False))
        if worker.ready and any(usable):
            yield device


def _loss(attempt: AttemptView, sight: Sight, doomed: set[str]) -> Reason | None:
    """How this attempt is lost already, if it is."""
    device = attempt.devices[0]
    worker = sight.workers.get(device, Worker())
    if attempt.boot and attempt.boot != worker.boot:
        return Reason("worker_died", f"the worker of {device} {sight.ending(attempt.boot)}")
    if attempt.proc and attempt.proc not in worker.executors:
        return Reason("executor_died", f"executor {attempt.proc} {sight.ending(attempt.proc)}")
    if attempt.proc in doomed:
        # Its bind was refused: an attempt is bound to an executor to be replaced in no other way.
        return Reason(REPLACED, f"executor {attempt.proc} is being replaced to get its leftover memory back")
    if attempt.boot or worker.ready:
        return None
    return Reason("worker_down", f"the worker of {device} is not ready")


def _not_started(
    attempt: AttemptView, sight: Sight, idle_since: Mapping[str, float], start_timeout_s: float
) -> Reason | None:
    """Why an attempt that is not bound to an executor is not waited for any longer, if so."""
    device = attempt.devices[0]
    if attempt.proc:
        return None
    if sight.draining and attempt.state is not State.FINISHING:  # the worker itself answers that one
        return DRAINING
    if device not in idle_since or sight.now_s - max(attempt.placed_s, idle_since[device]) < start_timeout_s:
        return None
    progress = "taken but not begun" if attempt.boot else "not taken"
    message = f"{progress} for {start_timeout_s:g} s by the worker of {device}, though it has an idle executor"
    return Reason(NOT_STARTED, message)


def _clean(sight: Sight, settled: set[str], losses: Iterable[Lose]) -> Iterator[Forget | Replace]:
    """Which executors to take out of the books, and which to end."""
    lost = {loss.attempt.attempt for loss in losses}
    in_use = {attempt.proc for attempt in sight.attempts if attempt.attempt not in lost}
    for device, book in sight.processes.items():
        living = sight.workers.get(device, Worker()).executors
        for proc in book:
            if proc not in living:
                yield Forget(device, proc)
            elif proc in settled and proc not in in_use:
                yield Replace(device, proc)


def _stalls(sight: Sight, memory: Remembered, losses: Iterable[Lose]) -> dict[str, int]:
    """Messages in a row that never arrived, per device; one that its worker took begins the count anew."""
    consuming = sight.consuming | {attempt.devices[0] for attempt in sight.attempts if attempt.boot}
    ready = {device for device, worker in sight.workers.items() if worker.ready}
    stalls = {device: count for device, count in memory.stalls.items() if device in ready - consuming}
    for loss in losses:
        device = loss.attempt.devices[0]
        if loss.reason.code == NOT_STARTED and device not in consuming:
            stalls[device] = stalls.get(device, 0) + 1
    return stalls


def _restarts(stalls: Mapping[str, int], start_timeout_s: float) -> Iterator[Restart]:
    for device, count in stalls.items():
        if count >= STALLS:
            message = f"{count} messages in a row have not been taken for {start_timeout_s:g} s"
            yield Restart(device, Reason("worker_stalled", message))
