"""A model executor: the worker process that keeps one model on one GPU and runs its tasks in batches.

What is staged, claimed and computed when is decided by `brim.core.batching.ExecutorMachine`. Four threads beside
Celery's own carry that out:

* the *stager* takes what the consumer hands over, and prepares it with the user's ``stage``;
* the *computer* claims what is sealed and calls the user's function: it does nothing else, so that one batch follows
  the other;
* the *foreseer* tells the machine when a batch is about to end, and claims the next one beside it if that is full;
* the *publisher* does all that is told to the outside: results, ends, events, what is given back.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.app.trace import TraceInfo, build_tracer
from celery.states import REJECTED
from celery.utils.log import get_logger
from celery.worker import state as worker_state

from brim.core.batching import (
    Arrived,
    Claim,
    Claimed,
    Complete,
    Discard,
    Drain,
    Ending,
    ExecutorMachine,
    ExecutorState,
    Fail,
    Failed,
    Finished,
    Instruction,
    Limits,
    OutOfMemory,
    Raised,
    Report,
    Requeue,
    Stage,
    Staged,
    StageFailed,
    Start,
    Stop,
    Withdrawal,
    Withdrawn,
)
from brim.core.batching import Event as MachineEvent
from brim.core.batching import Item as Held
from brim.core.batching.items import BatchKey, ModelKey
from brim.core.batching.sizing import limits_of
from brim.core.model import Reason, State
from brim.core.patterns import best_match
from brim.core.profiles import Profile
from brim.gpu import frameworks
from brim.gpu.process import proc_id
from brim.store.connection import is_outage
from brim.store.types import ClaimAnswer, ExecutorView, Outcome

from .attempts import Attempts, refusal
from .batch_task import BatchTask, Computed, Item, answering
from .envelope import AttemptHeader
from .errors import TaskRejected
from .executor import AttemptTask, Execution, current_execution, failure, outcome_of, plain
from .results import Results
from .routing import declare_intake

log = get_logger("brim.worker")

TOGETHER_S = 0.05
"""How long items are waited for that placement has committed together with one that has come."""
SWITCH_S = 0.0002
"""Python's switch interval in this process: how long another thread may keep the computer from going on."""
AHEAD_S = 0.02
"""How long before a batch is expected to end the next one is claimed if it is full."""
LOOK_S = 5.0
"""Between two looks for items whose message was lost on its way here."""
REMEMBERED = 4096
"""So many of the latest ends are remembered, should a server that dies, or its replica, have lost some of them."""
STAGED_S = 0.005
"""How long an item that is staged may wait for others of its set that are being staged."""


@dataclass(slots=True)
class Entry:
    """An item that this executor holds, with the message that it came in."""

    request: Any
    attempt: AttemptHeader
    key: BatchKey
    held: Held
    item: Item
    embed: Mapping[str, Any]
    claimed: bool = False
    ahead: bool = False
    """Claimed beside another batch, and not begun yet."""
    accepted: bool = False
    computed_s: float = 0.0
    """How long the batch took that it was computed in, the last one."""

    @property
    def task_id(self) -> str:
        """The task that it is."""
        return str(self.request.id)

    @property
    def pair(self) -> tuple[str, str]:
        """As the store wants it."""
        return (self.task_id, self.attempt.attempt)

    @property
    def limit_s(self) -> float | None:
        """Its hard time limit."""
        limit = self.request.time_limits[0] or self.request.task.time_limit
        return float(limit) if limit else None

    @property
    def is_withdrawn(self) -> bool:
        """Whether it was revoked, by what this worker has heard."""
        return self.task_id in worker_state.revoked


class ItemExecution(Execution):
    """An item whose batch is computed, while Celery's own tracing publishes what has become of it."""

    def finish(self) -> None:
        """Claimed already, with the others of its batch."""

    def over(self, request: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Nothing is computed any more: no memory is held, and nothing to be placed again."""
        return function(*args, **kwargs)


def _not_batched(name: str) -> ExceptionInfo:
    """What is wrong with a task that its profile would have batched."""
    try:
        raise TaskRejected("not_batched", f"{name} has a profile with batch, but not the base brim.BatchTask")
    except TaskRejected:
        return ExceptionInfo(internal=True)


class ModelExecutor:
    """This process, from `begin` on; `arrive` is given every request for it."""

    def __init__(self, app: Celery, name: str, queue: str, boot: str, attempts: Attempts, hostname: str) -> None:
        self.app = app
        self.name = name
        self.queue = queue
        self.boot = boot
        self.attempts = attempts
        self.store = attempts.store
        self._results = Results(app)
        self.proc = proc_id() or ""
        self._hostname = hostname
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._arrivals: SimpleQueue[Entry | None] = SimpleQueue()
        self._computing: SimpleQueue[Claim | Start | None] = SimpleQueue()
        self._publishing: SimpleQueue[Sequence[Instruction]] = SimpleQueue()
        self._ahead: SimpleQueue[Claim | float] = SimpleQueue()
        """What to claim beside the batch that is computed, or when (monotonic s) that one will be about to end."""
        self._took_s: dict[tuple[str, int], float] = {}
        """How long the latest batch of a task with so many items took."""
        self._ceiling = float("inf")
        self._limited = False
        self._kept: list[Instruction] = []
        """What is published once the next batch has begun."""
        self._unknown: frozenset[str] = frozenset()
        """Attempts in its book that it did not know of at the latest look."""
        self._ended: deque[tuple[str, str, Outcome]] = deque(maxlen=REMEMBERED)
        """The latest ends: task id, attempt, outcome."""
        self._latest_group = ("", 0)
        """The group that came last, and how many of it have come."""
        self._limits: Limits
        self._machine: ExecutorMachine
        self._model: ModelKey
        self.stopped = threading.Event()

    # -- the beginning ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take the reservation over, load the model, and take items from now on. Raises what loading raises."""
        view = self._wanted()
        profile = Profile.model_validate_json(view.profile)
        self._model = ModelKey(view.model, view.version)
        sys.setswitchinterval(SWITCH_S)
        declare_intake(self.app)
        try:
            tasks = self._tasks(profile)
            for task in tasks:
                self._prepare(task)
                task.ensure_loaded()
        except Exception as error:
            reason = Reason("load_failed", f"{profile.model} could not be loaded: {failure(error).message}")
            self.store.drain_executor(self.name, reason)
            raise
        stages = any(task.stage is not None for task in tasks)
        self._limits = limits_of(profile, view.vram_mib)
        self._machine = ExecutorMachine(self._limits, stages=stages)
        for role in (self._stage_all, self._compute_all, self._foresee_all, self._publish_all):
            threading.Thread(target=self._or_die, args=(role,), name=role.__name__.strip("_"), daemon=True).start()
        self.attempts.patiently(partial(self.store.executor_is_up, self.name, self.boot))

    def _wanted(self) -> ExecutorView:
        found = self.store.executors_named([self.name])
        if not found or not self.store.executor_begins(self.name, found[0].device, self.boot, self.proc):
            raise RuntimeError(f"model executor {self.name} is not wanted any more")
        return found[0]

    def _tasks(self, profile: Profile) -> list[BatchTask]:
        names = self.store.profile_names()
        found = [task for name, task in self.app.tasks.items() if best_match(name, names) == profile.name]
        batched = [task for task in found if isinstance(task, BatchTask)]
        if not batched:
            raise RuntimeError(f"no task of profile {profile.name} has the base brim.BatchTask")
        return batched

    def _prepare(self, task: BatchTask) -> None:
        kind: type[Any] = type(task)
        task.__class__ = type(kind.__name__, (AttemptTask, kind), {"__module__": kind.__module__})
        task.__trace__ = build_tracer(task.name, task, self.app.loader, self._hostname, app=self.app)

    def _or_die(self, role: Callable[[], None]) -> None:
        """A thread that fails ends the process: its agent puts the items back, and nothing hangs."""
        try:
            role()
        except BaseException:
            log.exception("model executor %s cannot go on", self.name)
            os._exit(70)

    # -- stager ----------------------------------------------------------------------------------------------

    def arrive(self, request: Any) -> None:
        """The consumer has received an item; called in its thread, in place of handing it to the pool."""
        attempt = request.attempt
        assert attempt.item is not None
        task, header = self.app.tasks[request.name], attempt.item
        if not isinstance(task, BatchTask):
            request.on_failure(_not_batched(request.name))
            return
        key = BatchKey(request.name, self._model, header.shape)
        held = Held(attempt.attempt, header.size, header.order)
        try:
            args, kwargs, embed = request._payload
            item = task.item(request.id, args, kwargs, request.request_dict)
        except Exception as error:
            # It is answered like one whose staging failed, without ever having been held.
            item, embed = Item(request.id, [], {}), {}
            entry = Entry(request, attempt, key, held, item, embed)
            self._entries[held.id] = entry
            self._publishing.put([Fail(held, error)])
            return
        self._entries[held.id] = entry = Entry(request, attempt, key, held, item, embed or {})
        self._arrivals.put(entry)

    def look_for_lost(self, broker_list: str) -> None:
        """Set right what its book says and it does not know of; called in the consumer's thread.

        Items whose message was lost on its way here wait in level 1 again: the queue is empty, and they have not come
        since the look before. Items that are over are ended again: the server has lost what it was told of that.
        """
        try:
            self._look_for_lost(broker_list)
        except Exception as error:
            if not is_outage(error):
                raise

    def _look_for_lost(self, broker_list: str) -> None:
        left = self.store.queue_lengths([broker_list])[broker_list]
        views = self.store.executors_named([self.name])
        unknown = {
            item.attempt: view.attempt(item)
            for view in views
            for item in view.items
            if item.attempt not in self._entries and (item.sealed or not left)
        }
        again = self._unknown & unknown.keys()
        ended = {end[1]: end for end in self._ended.copy()} if again else {}
        for attempt in again:
            item = unknown.pop(attempt)
            if attempt in ended:
                log.warning("the server has lost the end of %s, attempt %s: it is told again", item.task_id, attempt)
                self.store.end_batch(self.name, [ended[attempt]])
            elif not item.boot:
                log.warning("the message of %s, attempt %s, has not come: it waits again", item.task_id, attempt)
                self.attempts.put_back(item, Reason("message_lost", "its message to its model executor was lost"))
        self._unknown = frozenset(unknown)

    def drain(self) -> None:
        """Finish what is computed and give back the rest; `stopped` is set then."""
        self._feed(Drain())

    def _stage_all(self) -> None:
        waiting: list[Entry] = []
        while True:
            first = waiting.pop(0) if waiting else self._arrivals.get()
            if first is None:
                return
            group, waiting = self._together(first, waiting)
            self._withdraw_gone(len(group))
            for instruction in self._feed(Arrived(first.key, tuple(entry.held for entry in group))):
                self._stage(instruction)

    def _together(self, first: Entry, waiting: list[Entry]) -> tuple[list[Entry], list[Entry]]:
        """The items that were committed together with this one; those of other groups that came between them.

        They are on the way, so this waits for messages, never for a batch to fill.
        """
        header = first.attempt.item
        assert header is not None
        group, others = [first], list[Entry]()
        until_s = time.monotonic() + TOGETHER_S
        label, before = self._latest_group
        missing = header.together - (before if label == header.group else 0)
        while len(group) < missing:
            if waiting:
                entry: Entry | None = waiting.pop(0)
            else:
                try:
                    entry = self._arrivals.get(timeout=max(0.0, until_s - time.monotonic()))
                except Empty:
                    break
            if entry is None:
                break
            item = entry.attempt.item
            assert item is not None
            (group if item.group == header.group and entry.key == first.key else others).append(entry)
        self._latest_group = (header.group, header.together - missing + len(group))
        return group, others + waiting

    def _withdraw_gone(self, coming: int) -> None:
        """Where room gets short, let go of items that are not this executor's any more: cancelled, or a sibling's."""
        unsealed = [item.id for items in self._machine.holds.values() for item in items]
        if not unsealed or len(unsealed) + coming <= self._limits.max_items:
            return
        found = self.attempts.patiently(lambda: self.store.executors_named([self.name]))
        ours = {item.attempt for view in found for item in view.items}
        for attempt in unsealed:
            if attempt not in ours:
                self._feed(Withdrawn(attempt, Withdrawal.REFUSED))

    def _stage(self, stage: Stage) -> None:
        """Prepare items, and tell of them together where that is quick: an idle executor begins at once."""
        task = self.app.tasks[stage.key.task]
        staged, until_s = list[str](), time.monotonic() + STAGED_S
        for held in stage.items:
            entry = self._entries.get(held.id)
            if entry is None:
                continue
            try:
                if task.stage is not None:
                    entry.item.staged = task.stage(entry.item)
            except Exception as error:
                self._feed(StageFailed(held.id, error))
            else:
                staged.append(held.id)
            if staged and time.monotonic() > until_s:
                self._feed(Staged(tuple(staged)))
                staged, until_s = [], time.monotonic() + STAGED_S
        if staged:
            self._feed(Staged(tuple(staged)))

    def claim_one(self, task_id: str, attempt: AttemptHeader) -> None:
        """Claim an item by itself, so that the consumer may answer for it."""
        pair = (task_id, attempt.attempt)
        self.attempts.patiently(lambda: self.store.claim_batch(self.name, self.boot, self.proc, [pair], ahead=None))

    # -- foreseer --------------------------------------------------------------------------------------------

    def _foresee_all(self) -> None:
        due_s: float | None = None
        while True:
            try:
                told = self._ahead.get(timeout=None if due_s is None else max(0.0, due_s - time.monotonic()))
            except Empty:
                due_s = None
                self._feed(Ending())
                continue
            if isinstance(told, Claim):
                self._feed(Claimed(self._claim([self._entries[held.id] for held in told.items], ahead=True)))
            else:
                due_s = told

    # -- computer --------------------------------------------------------------------------------------------

    def _compute_all(self) -> None:
        while (instruction := self._computing.get()) is not None:
            entries = [self._entries[held.id] for held in instruction.items]
            if isinstance(instruction, Claim):
                self._feed(Claimed(self._claim(entries)))
            else:
                self._feed(self._compute(instruction.key.task, entries))

    def _claim(self, entries: Sequence[Entry], *, ahead: bool | None = False) -> frozenset[str]:
        """Claim a sealed batch; the items that are not computed."""
        pairs = [entry.pair for entry in entries]
        answers = self.attempts.patiently(lambda: self.store.claim_batch(self.name, self.boot, self.proc, pairs, ahead))
        refused = set()
        for entry, answer in zip(entries, answers, strict=True):
            entry.claimed = answer is ClaimAnswer.GRANTED
            entry.ahead = entry.claimed and bool(ahead)
            if not entry.claimed or entry.is_withdrawn:
                refused.add(entry.held.id)
        return frozenset(refused)

    def _compute(self, name: str, entries: Sequence[Entry]) -> MachineEvent:
        """Call the user's function; its frames, and what they hold of the GPU, are let go before anything else."""
        task = self.app.tasks[name]
        limits = [limit for entry in entries if (limit := entry.limit_s) is not None]
        timer = threading.Timer(min(limits), self._over_time, (entries, min(limits))) if limits else None
        if timer is not None:
            timer.start()
        began_s, kind = time.monotonic(), (name, len(entries))
        if kind in self._took_s:
            self._ahead.put(began_s + max(0.0, self._took_s[kind] - AHEAD_S))
        try:
            return Finished(list(task.compute([entry.item for entry in entries])))
        except Exception as error:
            out_of_memory = frameworks.is_out_of_memory(error) or isinstance(error, MemoryError)
            told: Exception = plain(error) if isinstance(error, MemoryError) else error
            traceback.clear_frames(error.__traceback__)
            return OutOfMemory(told) if out_of_memory else Raised(told)
        finally:
            self._took_s[kind] = took_s = time.monotonic() - began_s
            if timer is not None:
                timer.cancel()
            for entry in entries:
                entry.computed_s = took_s

    def _over_time(self, entries: Sequence[Entry], limit_s: float) -> None:
        """A batch computes for too long: the items whose limit it is fail, the others go back, and the process ends."""
        log.error("a batch of %s has hit the hard time limit of %g s", entries[0].key.task, limit_s)
        reason = Reason("time_limit", f"an item of its batch hit its hard time limit of {limit_s:g} s")
        for entry in entries:
            if entry.limit_s is not None and entry.limit_s <= limit_s:
                entry.request.on_timeout(soft=False, timeout=limit_s)
            else:
                self.attempts.give_back(entry.task_id, entry.attempt, reason, State.RUNNING)
        os._exit(75)

    # -- publisher -------------------------------------------------------------------------------------------

    def _feed(self, event: MachineEvent) -> list[Stage]:
        """Have the machine decide, and pass on what it says; what is to be staged is returned."""
        with self._lock:
            instructions = self._machine.handle(event)
            stages, told, started = list[Stage](), list[Instruction](), list[Instruction]()
            for instruction in instructions:
                if isinstance(instruction, Stage):
                    stages.append(instruction)
                elif isinstance(instruction, Claim) and instruction.ahead:
                    self._ahead.put(instruction)
                elif isinstance(instruction, Claim | Start):
                    self._computing.put(instruction)
                    started += [instruction] if isinstance(instruction, Start) else []
                else:
                    told.append(instruction)
            self._kept += [*told, *started]
            # While a claim is under way the computer needs this process's time.
            if self._kept and not self._machine.is_claiming:
                self._publishing.put(self._kept)
                self._kept = []
        return stages

    def _publish_all(self) -> None:
        while True:
            self._publish(self._publishing.get())

    def _publish(self, instructions: Iterable[Instruction]) -> None:
        answers: list[tuple[Entry, Computed | Failed]] = []
        begun: list[Entry] = []
        for instruction in instructions:
            match instruction:
                case Complete(held, result):
                    answers.append((self._entries[held.id], Computed(result)))
                case Fail(held, error):
                    told = TaskRejected(error.code, error.message) if isinstance(error, Reason) else error
                    answers.append((self._entries[held.id], Failed(told)))
                case Requeue(held, reason):
                    self._give_back(self._entries[held.id], reason)
                case Discard(held, _):
                    self._discard(self._entries[held.id])
                case Start(_, items):
                    begun = [self._entries[held.id] for held in items if held.id in self._entries]
                    self._note_start(begun)
                case Report(state, ceiling):
                    self._note(ceiling)
                    if state is not ExecutorState.WORKING:
                        self._note_deadline(None)
                case Stop():
                    self.stopped.set()
        # Whoever waits for a result comes before whoever watches.
        if answers:
            self._answer(answers)
        self._announce(begun)

    def _answer(self, answers: Sequence[tuple[Entry, Computed | Failed]]) -> None:
        """Finish claims, results and ends of items that were computed together."""
        entries = [entry for entry, _ in answers]
        first = entries[0]
        log.info("%s: a batch of %d took %.1f ms", first.key.task, len(entries), 1000 * first.computed_s)
        if unclaimed := [entry for entry in entries if not entry.claimed]:
            self._claim(unclaimed, ahead=None)
        pairs = [entry.pair for entry in entries]
        granted = self.attempts.patiently(lambda: self.store.finish_batch(self.proc, pairs))
        live: list[tuple[Entry, Computed | Failed]] = []
        for (entry, answer), said in zip(answers, granted, strict=True):
            if said is ClaimAnswer.GRANTED:
                live.append((entry, answer))
            else:
                refusal(entry.attempt, entry.task_id, "publish", said)
                self._drop(entry)
        ends: list[tuple[str, str, Outcome]] = []
        traced: list[tuple[Entry, Any]] = []
        with self._results.together([entry.task_id for entry, _ in live], self.attempts.patiently):
            for entry, answer in live:
                outcome, returned = self._trace(entry, answer)
                traced.append((entry, returned))
                if outcome is not None:
                    ends.append((*entry.pair, outcome))
        self.attempts.patiently(lambda: self.store.end_batch(self.name, ends))
        self._ended.extend(ends)
        for entry, returned in traced:
            self._forget(entry)
            entry.request.on_success(returned)

    def _trace(self, entry: Entry, answer: Computed | Failed) -> tuple[Outcome | None, Any]:
        """Have Celery publish an item's answer as it does for every task: the outcome, and what its pool would return.

        No outcome: the task asked to be delivered again, and waits.
        """
        task = self.app.tasks[entry.key.task]
        request = entry.request.request_dict
        args, kwargs = entry.item.args, entry.item.kwargs
        request.update({"args": args, "kwargs": kwargs, "hostname": self._hostname, "is_eager": False}, **entry.embed)
        execution = ItemExecution(self.attempts, entry.task_id, entry.attempt, self.proc, None)
        # What is called once a result is stored may look for it: then it has to be there.
        follows = request.get("chord") or request.get("errbacks")
        with answering(answer), current_execution(execution), self._results.apart(bool(follows)):
            result, info, _, shown = task.__trace__(entry.task_id, args, kwargs, request)
        returned = (1, result, entry.computed_s) if info else (0, shown, entry.computed_s)
        return self._outcome(entry, execution, info), returned

    def _outcome(self, entry: Entry, execution: Execution, info: TraceInfo | None) -> Outcome | None:
        if info is not None and info.state == REJECTED:
            if info.retval.requeue:
                asked = Reason("requeued", "the task asked to be requeued")
                self.attempts.requeue(entry.task_id, entry.attempt, asked)
                return None
            return Outcome(State.FAILED, failure(info.retval))
        state, reason = outcome_of(self.app, execution, info)
        return Outcome(state, reason)

    def _note_start(self, entries: Sequence[Entry]) -> None:
        """Tell placement that there is room again, and the agent when these have to be done."""
        if any(entry.ahead for entry in entries):
            self.attempts.patiently(lambda: self.store.note_start(self.name))
        self._note_deadline(min((limit for entry in entries if (limit := entry.limit_s) is not None), default=None))
        for entry in entries:
            entry.ahead = False

    def _announce(self, entries: Iterable[Entry]) -> None:
        """Tell the world, and Flower, that these have started."""
        for entry in entries:
            if not entry.accepted:
                entry.accepted = True
                entry.request.on_accepted(os.getpid(), time.monotonic())

    def _give_back(self, entry: Entry, reason: Reason) -> None:
        """An item that cannot be held here waits in level 1 again."""
        self.attempts.give_back(entry.task_id, entry.attempt, reason)
        self._drop(entry)

    def _discard(self, entry: Entry) -> None:
        """An item is not computed here: Celery answers for it where it expired or was revoked, else nobody does."""
        if not (entry.claimed and entry.request.revoked()):
            self._drop(entry)
        else:
            self._forget(entry)

    def _drop(self, entry: Entry) -> None:
        self._forget(entry)
        entry.request.drop()

    def _forget(self, entry: Entry) -> None:
        self._entries.pop(entry.held.id, None)

    def _note_deadline(self, limit_s: float | None) -> None:
        if limit_s is not None or self._limited:
            self._limited = limit_s is not None
            self.attempts.patiently(lambda: self.store.note_deadline(self.name, limit_s))

    def _note(self, ceiling: float) -> None:
        if ceiling != self._ceiling:
            self._ceiling = ceiling
            known = None if ceiling == float("inf") else ceiling
            self.attempts.patiently(lambda: self.store.note_ceiling(self.name, known))
