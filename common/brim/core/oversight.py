"""What a node agent does about its executors: from what it sees to what has to be done, nothing in between.

The agent compares what the books say with the processes that live, so a decision that could not be carried out
(Redis was away) is simply found again at the next look. A loss counts against its task only if the task had
begun, for only then can it have been the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from brim.core.model import AttemptView, Reason, State
from brim.core.posts import Post, Worker, for_sets

SETTLE_S = 0.25
"""An executor to be replaced is left alone this long: it may still be telling its worker that its task ended."""

REPLACED, NOT_STARTED, CANNOT_START = "executor_replaced", "not_started", "worker_cannot_start"
END_LOST = "end_lost"
DRAINING = Reason("node_draining", "the node is shutting down")

STALLS = 2
"""So many messages that never arrive, one after the other, mean that the worker does not consume any more."""

STARTS = 3
"""So many ends in a row soon after its start mean that a worker on demand cannot serve who calls for it."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What the agent sees at one moment. ``now_s`` is the server's clock."""

    now_s: float
    workers: Mapping[str, Worker]
    """By name."""
    attempts: Sequence[AttemptView]
    processes: Mapping[str, Mapping[str, bool]]
    """What the books list, per device: executor -> whether it is to be replaced."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """How executors (by proc) and workers (by boot) ended, where that is known: "was killed by SIGKILL"."""
    consuming: frozenset[str] = frozenset()
    """Queues whose workers have told of an end since the last look."""
    over: frozenset[str] = frozenset()
    """Attempts that the store had ended when their executors told of it: where it lists one now, it has forgotten."""
    draining: bool = False
    wanted: Sequence[Post] = ()
    """Posts on demand that are desired whatever the attempts are; those of sets of devices follow from the attempts."""

    def ending(self, name: str) -> str:
        """How a process ended, as the end of a sentence."""
        return self.causes.get(name, "is gone")


@dataclass(frozen=True, slots=True)
class Remembered:
    """What has to be remembered from one look to the next, times in server seconds."""

    idle_since: Mapping[str, float] = field(default_factory=dict)
    """Queue -> since when a worker of it has had an idle executor."""
    doomed_since: Mapping[str, float] = field(default_factory=dict)
    """Executor -> since when it has been seen to be replaced."""
    stalls: Mapping[str, int] = field(default_factory=dict)
    """Queue -> how many messages in a row never arrived."""
    uncalled_since: Mapping[str, float] = field(default_factory=dict)
    """Worker on demand -> since when nothing has called for it."""
    passed_since: Mapping[str, float] = field(default_factory=dict)
    """Attempt that no worker has taken -> since when one that was placed after it has been."""


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
        """Whether the loss counts towards the limit of its task: nor may it call for a hopeless worker for ever."""
        return self.reason.code == CANNOT_START or (self.begun and self.reason.code not in (REPLACED, END_LOST))

    @property
    def over(self) -> bool:
        """Whether its function is known to be over, whatever the store says."""
        return self.reason.code == END_LOST


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

    worker: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker on demand."""

    post: Post


@dataclass(frozen=True, slots=True)
class Retire:
    """Have a worker on demand end, which runs nothing; said again until it has."""

    worker: str


Action = Lose | Forget | Replace | Restart | Start | Retire


def decide(
    sight: Sight, memory: Remembered, start_timeout_s: float, set_idle_s: float = 0.0
) -> tuple[list[Action], Remembered]:
    """What to do about what is seen, in this order, and what to remember.

    ``set_idle_s``: how long the worker of a set of devices stays when no attempt calls for it any more.
    """
    idle_since = {queue: memory.idle_since.get(queue, sight.now_s) for queue in _idle(sight)}
    doomed = {proc for book in sight.processes.values() for proc, doomed in book.items() if doomed}
    doomed_since = {proc: memory.doomed_since.get(proc, sight.now_s) for proc in doomed}
    calls = [*sight.wanted, *for_sets(sight.attempts, sight.workers, set_idle_s)]
    passed_since = _passed(sight, memory)

    losses = []
    for attempt in sight.attempts:
        reason = _loss(attempt, sight, doomed, calls)
        reason = reason or _not_started(attempt, sight, idle_since, passed_since, start_timeout_s)
        if reason is not None:
            losses.append(Lose(attempt, reason))
    settled = {proc for proc, since_s in doomed_since.items() if sight.now_s - since_s >= SETTLE_S}
    stalls = _stalls(sight, memory, losses)
    uncalled_since = _uncalled(sight, memory, calls)
    kept = _kept(sight, losses)
    actions = [
        *losses,
        *_clean(sight, settled, kept),
        *_restarts(sight, stalls, start_timeout_s),
        *_retire(sight, uncalled_since, settled, kept),
        *(Start(post) for post in calls if post.name not in sight.workers and not sight.draining),
    ]
    return actions, Remembered(idle_since, doomed_since, stalls, uncalled_since, passed_since)


def _serving(sight: Sight, queue: str) -> Iterator[Worker]:
    """The workers that take messages from a queue, or will once they are ready."""
    return (worker for worker in sight.workers.values() if worker.post.queue == queue and not worker.ending)


def _idle(sight: Sight) -> Iterator[str]:
    """Queues whose workers have an executor that could begin a task now."""
    bound = {attempt.proc for attempt in sight.attempts}
    doomed = {proc for book in sight.processes.values() for proc, doomed in book.items() if doomed}
    for worker in sight.workers.values():
        if worker.ready and not worker.ending and worker.executors - bound - doomed:
            yield worker.post.queue


def _loss(attempt: AttemptView, sight: Sight, doomed: set[str], calls: Iterable[Post]) -> Reason | None:
    """How this attempt is lost already, if it is."""
    if attempt.attempt in sight.over:
        return Reason(END_LOST, "it was over, and the server has lost what it had been told of that")
    if attempt.boot:
        worker = next((worker for worker in sight.workers.values() if worker.boot == attempt.boot), None)
        if worker is None:
            return Reason("worker_died", f"the worker of {attempt.queue} {sight.ending(attempt.boot)}")
        if attempt.proc and attempt.proc not in worker.executors:
            return Reason("executor_died", f"executor {attempt.proc} {sight.ending(attempt.proc)}")
        if attempt.proc in doomed:
            # Its bind was refused: an attempt is bound to an executor to be replaced in no other way.
            return Reason(REPLACED, f"executor {attempt.proc} is being replaced to get its leftover memory back")
        return None
    serving = list(_serving(sight, attempt.queue))
    if any(worker.ready for worker in serving):
        return None
    if any(post.queue == attempt.queue for post in calls):
        failed = max(serving, key=lambda worker: worker.failures, default=None)
        if failed is None or failed.failures < STARTS:
            return None
        message = (
            f"its worker {failed.post.name} ended {failed.failures} times soon after its start: it {failed.trouble}"
        )
        return Reason(CANNOT_START, message)
    return Reason("worker_down", f"the worker of {attempt.queue} is not ready")


def _passed(sight: Sight, memory: Remembered) -> dict[str, float]:
    """Attempts that no worker has taken, though one that was placed after them has been, and since when that is known.

    Queues are first in, first out, and a device's one worker claims messages in the order in which it takes them: what
    is passed over has lost its message. A claimed one has not: a pool process that is starting may have it in its pipe.
    """
    boots = {worker.boot for worker in sight.workers.values() if worker.boot and worker.post.standing}
    latest_s: dict[str, float] = {}
    for attempt in sight.attempts:
        if attempt.boot in boots:
            latest_s[attempt.queue] = max(latest_s.get(attempt.queue, 0.0), attempt.placed_s)
    return {
        attempt.attempt: memory.passed_since.get(attempt.attempt, sight.now_s)
        for attempt in sight.attempts
        if not attempt.boot
        and (attempt.attempt in memory.passed_since or attempt.placed_s < latest_s.get(attempt.queue, 0.0))
    }


def _not_started(
    attempt: AttemptView,
    sight: Sight,
    idle_since: Mapping[str, float],
    passed_since: Mapping[str, float],
    start_timeout_s: float,
) -> Reason | None:
    """Why an attempt that is not bound to an executor is not waited for any longer, if so."""
    queue = attempt.queue
    if attempt.proc:
        return None
    if sight.draining and attempt.state is not State.FINISHING:  # the worker itself answers that one
        return DRAINING
    passed_s = sight.now_s - passed_since.get(attempt.attempt, sight.now_s)
    if passed_s >= start_timeout_s:
        message = f"not taken by the worker of {queue}, which took one placed after it {passed_s:.0f} s ago"
        return Reason(NOT_STARTED, message)
    if queue not in idle_since or sight.now_s - max(attempt.placed_s, idle_since[queue]) < start_timeout_s:
        return None
    progress = "taken but not begun" if attempt.boot else "not taken"
    message = f"{progress} for {start_timeout_s:g} s by the worker of {queue}, though it has an idle executor"
    return Reason(NOT_STARTED, message)


def _kept(sight: Sight, losses: Iterable[Lose]) -> list[AttemptView]:
    """The attempts that go on."""
    lost = {loss.attempt.attempt for loss in losses}
    return [attempt for attempt in sight.attempts if attempt.attempt not in lost]


def _clean(sight: Sight, settled: set[str], kept: Iterable[AttemptView]) -> Iterator[Forget | Replace]:
    """Which executors to take out of the books, and which to end; a worker on demand ends as a whole."""
    in_use = {attempt.proc for attempt in kept}
    standing = {proc for worker in sight.workers.values() if worker.post.standing for proc in worker.executors}
    for device, book in sight.processes.items():
        workers = [worker for worker in sight.workers.values() if device in worker.post.devices]
        living = frozenset[str]().union(*(worker.executors for worker in workers))
        for proc in book:
            if proc not in living:
                yield Forget(device, proc)
            elif proc in settled and proc in standing and proc not in in_use:
                yield Replace(device, proc)


def _stalls(sight: Sight, memory: Remembered, losses: Iterable[Lose]) -> dict[str, int]:
    """Messages in a row that never arrived, per queue; one that a worker took begins the count anew."""
    consuming = sight.consuming | {attempt.queue for attempt in sight.attempts if attempt.boot}
    ready = {worker.post.queue for worker in sight.workers.values() if worker.ready}
    stalls = {queue: count for queue, count in memory.stalls.items() if queue in ready - consuming}
    for loss in losses:
        queue = loss.attempt.queue
        if loss.reason.code == NOT_STARTED and queue not in consuming:
            stalls[queue] = stalls.get(queue, 0) + 1
    return stalls


def _restarts(sight: Sight, stalls: Mapping[str, int], start_timeout_s: float) -> Iterator[Restart]:
    for queue, count in stalls.items():
        if count >= STALLS:
            message = f"{count} messages in a row have not been taken for {start_timeout_s:g} s"
            taken = {attempt.boot for attempt in sight.attempts}
            for worker in _serving(sight, queue):
                if not worker.post.standing and worker.boot in taken:
                    continue  # its one executor is busy: it is not this one that does not listen
                yield Restart(worker.post.name, Reason("worker_stalled", message))


def _uncalled(sight: Sight, memory: Remembered, calls: Iterable[Post]) -> dict[str, float]:
    """Since when nothing has called for workers on demand."""
    called = {post.name for post in calls}
    idle = (name for name, worker in sight.workers.items() if not worker.post.standing and name not in called)
    return {name: memory.uncalled_since.get(name, sight.now_s) for name in idle}


def _retire(
    sight: Sight, uncalled_since: Mapping[str, float], settled: set[str], kept: Iterable[AttemptView]
) -> Iterator[Retire]:
    """Workers on demand that run nothing and are not called for, or whose leftover is wanted back."""
    in_use = {attempt.boot for attempt in kept if attempt.boot}
    for name, worker in sight.workers.items():
        if worker.post.standing or worker.boot in in_use:
            continue
        since_s = uncalled_since.get(name)
        over = since_s is not None and (not worker.boot or sight.now_s - since_s >= worker.post.linger_s)
        if worker.ending or over or worker.executors & settled:
            yield Retire(name)
