"""How an executor ends an attempt whose result is left to the end (ADR 0012), whatever interrupts it."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, states
from celery.app.task import Context
from celery.app.trace import TraceInfo, trace_ok_t
from celery.backends.redis import RedisBackend
from redis.exceptions import OutOfMemoryError

from brim.celery import endings as endings_module
from brim.celery.agent_link import Listener
from brim.celery.attempts import Attempts
from brim.celery.endings import Endings, tell_end, undisturbed
from brim.celery.envelope import AttemptHeader
from brim.celery.executor import Execution, Executor, _current
from brim.celery.results import LONG, Kept, Results
from brim.core.model import State
from brim.gpu.process import proc_id
from brim.store.types import Bound, ClaimAnswer, EndAnswer, Outcome, StoredResult
from support.celery_app import configure
from support.stage import CONTEXT_MIB, VRAM_MIB, Stage, device_uuid, settings_for
from support.valkey import own_server, url_of

PROC = proc_id() or ""


class Reversing(RedisBackend):
    """A user's own, which does something to what it stores."""

    def get(self, key: Any) -> Any:
        found = super().get(key)
        return found and found[::-1]

    def set(self, key: Any, value: Any, **options: Any) -> Any:
        return super().set(key, value[::-1], **options)


class Office:
    """This process as an executor: a stage, and attempts that it has bound."""

    def __init__(self, url: str, namespace: str, backend: str = "") -> None:
        self.client = redis.Redis.from_url(url)
        self.stage = Stage(self.client, namespace, device_uuid())
        self.app = configure(Celery("office", set_as_current=False), url, namespace)
        self.app.conf.result_backend = backend + url
        self.listener = Listener()
        self.told = set[str]()
        identity = replace(self.stage.identity, agent=self.listener.address)
        self.attempts = Attempts(identity, settings_for(url, namespace), alone=True)

    def execution(self) -> Execution:
        """A task that has been sent, placed and begun."""
        sent = self.app.send_task("work", queue="brim.intake")
        self.stage.admit()
        attempt = self.stage.place(sent.id)
        assert attempt is not None
        header = AttemptHeader(attempt, self.stage.identity.devices, "n1", VRAM_MIB, CONTEXT_MIB, 0, 0)
        execution = Execution(self.attempts, sent.id, header, PROC)
        assert execution.bind().answer is ClaimAnswer.GRANTED
        return execution

    def over(self, execution: Execution, request: Context, value: str = "done") -> Kept:
        """The task's function has returned, and Celery has stored its result as it may."""
        with Results(self.app).kept(execution.task_id, self.attempts.store.client) as kept:
            assert kept is not None
            execution.kept = kept
            execution.over(request, lambda: value)
            self.app.backend.mark_as_done(execution.task_id, value, request)
        return kept

    def run(self, executor: Executor, execution: Execution) -> Any:
        """Have the executor run the task from its bind on: what its trace function returns."""

        @self.app.task(name=f"run.{execution.task_id}", shared=False)
        def task() -> None: ...

        def trace(*_: Any) -> trace_ok_t:
            running = _current.get()
            assert running is not None
            running.over(Context(), lambda: "done")
            self.app.backend.mark_as_done(execution.task_id, "done", Context())
            return trace_ok_t("done", None, 0.0, None)

        header = {**execution.attempt.fields(), "nesting": 0, "retries": 0}
        return executor.traced(task, trace)(execution.task_id, (), {}, {"brim": header})

    def has_ended(self, execution: Execution) -> None:
        """Its result is out, its attempt is over, and the agent has been told."""
        assert self.app.AsyncResult(execution.task_id).get(timeout=5) == "done"
        assert self.stage.record(execution.task_id).state is State.SUCCEEDED
        self.told |= {notice.over for notice in self.listener.receive()}
        assert execution.attempt.attempt in self.told

    @contextmanager
    def server_that_writes_nothing(self) -> Iterator[None]:
        """What it is asked to write waits until then."""
        self.client.client_pause(60_000, all=False)
        try:
            yield
        finally:
            self.client.client_unpause()

    def close(self) -> None:
        self.listener.close()
        self.attempts.store.client.close()
        self.client.close()
        self.app.close()


@pytest.fixture
def office(valkey_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "devices"))
    office = Office(valkey_url, namespace)
    yield office
    assert office.stage.store.audit() == []
    office.close()


def interrupted(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, after which the first time a soft time limit strikes that was meant for the task's function."""
    left = [SoftTimeLimitExceeded()]

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        answer = call(*args, **kwargs)
        if left:
            raise left.pop()
        return answer

    return disturbed


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (Attempts, "complete"),
        (Attempts, "finish"),
        (Execution, "claim"),
        (Attempts, "patiently"),
        (Kept, "store"),
        (Attempts, "end"),
    ],
)
def test_a_soft_time_limit_takes_no_result_away_that_is_stored_by_itself(
    office: Office, monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    execution = office.execution()
    office.app.backend.store_result(execution.task_id, {"done": 1}, "HALFWAY")
    kept = office.over(execution, Context())

    monkeypatch.setattr(owner, step, interrupted(getattr(owner, step)))
    undisturbed(lambda: tell_end(execution, Outcome(State.SUCCEEDED, None, [0]), kept))

    assert office.app.AsyncResult(execution.task_id).get(timeout=5) == "done"
    assert office.stage.record(execution.task_id).state is State.SUCCEEDED


@pytest.mark.parametrize("state", ["", "HALFWAY"])
def test_what_a_backend_does_to_a_result_it_does_once(
    valkey_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "devices"))
    office = Office(valkey_url, namespace, f"{__name__}:Reversing+")
    execution = office.execution()
    if state:
        office.app.backend.store_result(execution.task_id, {"done": 1}, state)
    kept = office.over(execution, Context())

    assert kept.is_success
    tell_end(execution, Outcome(State.SUCCEEDED, None, [0]), kept)

    assert office.app.AsyncResult(execution.task_id).get(timeout=5) == "done"
    office.close()


def test_a_failure_behind_the_result_leaves_the_task_succeeded(office: Office) -> None:
    @office.app.task(name="late", shared=False)
    def task() -> None: ...

    execution = office.execution()
    header = {**execution.attempt.fields(), "nesting": 0, "retries": 0}

    def trace(*_: Any) -> trace_ok_t:
        running, late = _current.get(), SoftTimeLimitExceeded()
        assert running is not None
        running.over(Context(), lambda: "done")
        office.app.backend.mark_as_done(execution.task_id, "done", Context())
        office.app.backend.mark_as_failure(execution.task_id, late, request=Context())
        return trace_ok_t(None, TraceInfo(states.FAILURE, late), 0.0, None)

    Executor(office.app, office.attempts).traced(task, trace)(execution.task_id, (), {}, {"brim": header})

    assert office.app.AsyncResult(execution.task_id).get(timeout=5) == "done"
    assert office.stage.record(execution.task_id).state is State.SUCCEEDED


@pytest.mark.parametrize("length", [10, LONG])
def test_a_long_result_is_stored_by_the_backend_itself(
    office: Office, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    execution, value, stored = office.execution(), "x" * length, list[StoredResult | None]()
    kept = office.over(execution, Context(), value)
    store = Kept.store
    monkeypatch.setattr(Kept, "store", lambda kept: (stored.append(kept.result), store(kept)))

    tell_end(execution, Outcome(State.SUCCEEDED, None, [0]), kept)

    assert office.app.AsyncResult(execution.task_id).get(timeout=5) == value
    assert office.stage.record(execution.task_id).state is State.SUCCEEDED
    assert len(stored) == (length == LONG)


def test_an_answer_that_was_not_waited_for_is_not_taken_for_the_next_one(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = office.attempts.store.client
    left = [SoftTimeLimitExceeded()]

    def read(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise left.pop()

    monkeypatch.setattr(client.connection, "read_response", read)
    said = [office.attempts.patiently(lambda word=word: client.echo(word)) for word in ("one", "two")]

    assert said == [b"one", b"two"]


def test_what_the_function_has_added_to_its_request_follows_behind_the_claim(office: Office) -> None:
    plain, chained = office.execution(), office.execution()

    office.over(plain, Context())
    chained.kept = Kept(office.app.backend, None, chained.task_id)  # type: ignore[arg-type]
    chained.over(Context(chain=[office.app.signature("next")]), lambda: "done")

    assert office.stage.record(plain.task_id).state is State.RUNNING
    assert office.stage.record(chained.task_id).state is State.FINISHING


@pytest.mark.parametrize("own", [False, True])
def test_what_a_task_stores_in_a_backend_of_its_own_is_not_kept(office: Office, own: bool) -> None:
    @office.app.task(name=f"own{own}", shared=False)
    def task() -> None: ...

    if own:
        task.backend = Celery("other", backend="cache+memory://", set_as_current=False).backend
    execution, seen = office.execution(), list[State]()
    header = {**execution.attempt.fields(), "nesting": 0, "retries": 0}

    def trace(*_: Any) -> None:
        running = _current.get()
        assert running is not None
        running.over(Context(), lambda: "done")
        seen.append(office.stage.record(execution.task_id).state)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Executor(office.app, office.attempts).traced(task, trace)(execution.task_id, (), {}, {"brim": header})

    assert seen == [State.FINISHING if own else State.RUNNING]


def test_the_agent_is_not_told_of_an_end_that_somebody_else_is_about_to_make(office: Office) -> None:
    execution = office.execution()
    attempt, outcome = execution.attempt, Outcome(State.SUCCEEDED, None, [0])
    assert office.attempts.finish(execution.task_id, attempt, "") is ClaimAnswer.GRANTED  # it is being revoked

    assert office.attempts.complete(execution.task_id, attempt, PROC, outcome, None) is EndAnswer.STALE

    assert [notice.over for notice in office.listener.receive()] == [""]


def test_messages_stay_where_they_are_while_the_server_has_no_room_for_the_claim(tmp_path: Path) -> None:
    with own_server() as server:
        office = Office(url_of(server), f"t{uuid.uuid4().hex[:10]}:")
        ids = [office.app.send_task("work", queue="brim.intake").id for _ in range(3)]
        office.stage.admit()
        attempts = [office.stage.place(task_id) for task_id in ids]
        store, queue = office.stage.store, office.stage.queue
        office.client.rpop(queue)

        office.client.config_set("maxmemory", 1)
        with pytest.raises(OutOfMemoryError):
            store.claim_and_take([(ids[0], attempts[0] or "")], "b00t", queue, 64)
        office.client.config_set("maxmemory", 0)

        assert office.client.llen(queue) == 2
        answer, taken = store.claim_and_take([(ids[0], attempts[0] or "")], "b00t", queue, 64)
        assert (answer, len(taken), office.client.llen(queue)) == ([ClaimAnswer.GRANTED], 2, 0)
        office.close()


@pytest.mark.parametrize(
    "steps",
    [["send_command"], ["ask_complete"], ["_hand_over"], ["_hand_over", "_take_back"], ["ask_complete", "tell_end"]],
    ids=",".join,
)
def test_a_soft_time_limit_takes_no_end_away_that_is_heard_later(
    office: Office, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    """Wherever it strikes: before or after the end is sent, or handed over."""
    execution, executor = office.execution(), Executor(office.app, office.attempts)
    owners = {
        "send_command": office.attempts.store.client.connection,
        "ask_complete": Attempts,
        "_hand_over": Endings,
        "_take_back": Endings,
        "tell_end": endings_module,
    }
    seen = list[str]()
    bind, hear, hang_up = Execution.bind, endings_module._hear, Attempts.hang_up

    def bound(execution: Execution) -> Bound:
        answer = bind(execution)
        for step in steps:
            monkeypatch.setattr(owners[step], step, interrupted(getattr(owners[step], step)))
        return answer

    def heard(*args: Any) -> None:
        time.sleep(0.1)
        hear(*args)
        seen.append("heard")

    def hung_up(attempts: Attempts) -> None:
        hang_up(attempts)
        seen.append("hung up")

    monkeypatch.setattr(Execution, "bind", bound)
    monkeypatch.setattr(endings_module, "_hear", heard)
    monkeypatch.setattr(Attempts, "hang_up", hung_up)
    office.run(executor, execution)
    monkeypatch.undo()
    following = office.execution()
    office.run(executor, following)
    executor.exiting(exitcode=0)

    assert seen[:2] == (["heard", "hung up"] if "_hand_over" in steps else ["hung up"])
    for each in (execution, following):
        office.has_ended(each)


def test_an_attempt_is_bound_when_the_last_one_has_ended(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, executor = office.execution(), office.execution(), Executor(office.app, office.attempts)
    seen, bind = list[State](), Attempts.bind

    def bound(*args: Any) -> Bound:
        seen.append(office.stage.record(first.task_id).state)
        return bind(*args)

    with office.server_that_writes_nothing():
        monkeypatch.setattr(Execution, "bind", lambda _: Bound(ClaimAnswer.GRANTED, "off"))
        assert office.run(executor, first).retval == "done"
        executor.exiting(exitcode=-15)  # who is interrupted does not wait
        assert office.stage.record(first.task_id).state is State.RUNNING
        monkeypatch.undo()
        monkeypatch.setattr(Attempts, "bind", bound)
        later = threading.Timer(0.2, office.client.client_unpause)
        later.start()
        office.run(executor, second)
        later.join()
    executor.exiting(exitcode=0)

    assert seen == [State.SUCCEEDED]
    office.has_ended(second)


@pytest.mark.parametrize("how", ["dropped", "unread", "forgotten", "occupied"])
def test_an_end_that_is_not_answered_as_it_should_be_is_told_again(
    office: Office, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    execution, executor = office.execution(), Executor(office.app, office.attempts)
    connection = office.attempts.store.client.connection
    number, read = office.attempts.store.client.client_id(), connection.read_response

    def unread() -> None:
        monkeypatch.undo()
        read()
        raise redis.ConnectionError("gone")

    def prepared(*_: Any) -> Bound:
        if how == "forgotten":
            office.client.script_flush()
        elif how == "occupied":
            office.app.backend.store_result(execution.task_id, {"done": 1}, "HALFWAY")
        elif how == "unread":
            monkeypatch.setattr(connection, "read_response", unread)
        return Bound(ClaimAnswer.GRANTED, "off")

    monkeypatch.setattr(Execution, "bind", prepared)
    if how == "dropped":
        with office.server_that_writes_nothing():
            office.run(executor, execution)
            assert office.client.client_kill_filter(_id=str(number)) == 1
    else:
        office.run(executor, execution)
    executor.exiting(exitcode=0)

    office.has_ended(execution)
    assert [line["event"] for line in office.stage.store.story(execution.task_id)].count("succeeded") == 1


def test_an_end_that_is_refused_later_is_logged(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    execution, executor = office.execution(), Executor(office.app, office.attempts)
    begin = Kept.begin
    caplog.set_level("INFO", "brim.worker")

    def begun(kept: Kept) -> None:
        begin(kept)
        assert office.attempts.finish(execution.task_id, execution.attempt, "") is ClaimAnswer.GRANTED

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kept, "begin", begun)
        office.run(executor, execution)
        executor.exiting(exitcode=0)

    assert f"of {execution.task_id} may not publish: stale" in caplog.text
    assert office.stage.record(execution.task_id).state is State.FINISHING
    assert not office.app.AsyncResult(execution.task_id).ready()


def test_a_process_that_cannot_tell_an_end_exits(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent ends its attempts then."""
    execution, executor, exits = office.execution(), Executor(office.app, office.attempts), list[int]()

    def wrong(*_: Any) -> EndAnswer:
        raise ValueError("wrong")

    monkeypatch.setattr(Attempts, "ask_complete", lambda *_: lambda: False)
    monkeypatch.setattr(Attempts, "complete", wrong)
    monkeypatch.setattr(os, "_exit", exits.append)
    office.run(executor, execution)
    executor.exiting(exitcode=0)

    assert exits == [os.EX_SOFTWARE]


def test_after_an_outage_an_executor_asks_on_another_connection(office: Office) -> None:
    """A server that takes no writes any more may have been replaced behind its address."""
    client, connections = office.attempts.store.client, list[int]()

    def ask() -> None:
        connections.append(client.client_id())
        if len(connections) == 1:
            raise redis.ReadOnlyError("You can't write against a read only replica.")

    office.attempts.patiently(ask)

    assert len(set(connections)) == 2
