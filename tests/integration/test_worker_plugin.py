"""A device's worker as an agent starts it (prefork, spawn): every way a task can end, in its record and its result."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord, group
from celery.exceptions import NotRegistered, TaskRevokedError, TimeLimitExceeded
from celery.result import AsyncResult

import brim
from brim.celery.envelope import INTAKE_QUEUE
from brim.core.model import Reason, State
from brim.gpu.process import is_alive, proc_id
from brim.store.types import LoseAnswer, Record
from support.celery_app import WorkerProcess, configure, worker
from support.stage import VRAM_MIB, Stage, device_uuid, settings_for, worker_environment
from support.valkey import own_server, url_of
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

TERMINAL = (State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED, State.DEAD)


@dataclass
class Plant:
    """A producer, a stage, and the device's worker."""

    app: Celery
    stage: Stage
    worker: WorkerProcess

    def send(self, name: str, *args: Any, **options: Any) -> AsyncResult:
        """Publish as a producer does."""
        return self.app.send_task(name, args, **options)

    def run(self, name: str, *args: Any, **options: Any) -> tuple[AsyncResult, Record]:
        """Publish, and step until the record is terminal."""
        result = self.send(name, *args, **options)
        return result, self.stage.until(result.id, *TERMINAL)

    def events(self, task_id: str) -> list[str]:
        """The names of what happened to a task."""
        return [line["event"] for line in self.stage.store.story(task_id)]


@pytest.fixture(scope="module")
def plant(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plant]:
    """One worker with two executors for all tests; each test looks at its own tasks only."""
    folder = tmp_path_factory.mktemp("plant")
    with pytest.MonkeyPatch.context() as patch, redis.Redis.from_url(valkey_url) as client:
        patch.setenv("BRIM_SIM_DIR", str(folder / "devices"))
        patch.setenv("BRIM_TEST_MARKERS", str(folder))
        namespace = f"t{uuid.uuid4().hex[:10]}:"
        with started(client, valkey_url, namespace, folder) as plant:
            yield plant
        assert plant.stage.store.audit() == []
        assert plant.stage.unacked() == 0


@contextmanager
def started(
    client: redis.Redis, url: str, namespace: str, folder: Path, settings: dict[str, str] | None = None, key: str = ""
) -> Iterator[Plant]:
    stage = Stage(client, namespace, device_uuid(), key=key.encode())
    app = configure(Celery("producer", set_as_current=False), url, namespace)
    brim.install(app, tasks=["*"])
    with worker(
        "support.apps.gpu",
        [stage.identity.queue],
        url=url,
        namespace=namespace,
        log_path=folder / "gpu0.log",
        options=["--concurrency=2"],
        env={
            **worker_environment(stage, settings_for(url, namespace)),
            "BRIM_SECURITY__HEADER_KEY": key,
            **(settings or {}),
        },
    ) as running:
        yield Plant(app, stage, running)
    app.close()


def test_a_task_runs_and_its_executor_keeps_only_what_it_left_behind(plant: Plant) -> None:
    result = plant.send("keep", 500)
    plant.stage.admit()
    plant.stage.place(result.id)

    pid = result.get(timeout=20)
    wait_until(lambda: plant.stage.record(result.id).state in TERMINAL, what="the attempt ended")
    record = plant.stage.record(result.id)
    assert (record.state, record.reason) == (State.SUCCEEDED, None)
    assert record.peak_mib == 500 + 300
    assert plant.events(result.id) == ["admitted", "placed", "claimed", "started", "finishing", "succeeded"]
    book = plant.stage.client.hgetall(plant.stage.store.keys.book(plant.stage.identity.devices[0]))
    [process] = [value for name, value in book.items() if name.startswith(f"p:{pid}.".encode())]
    measured_mib = int(process.split(b"|")[0])
    assert measured_mib == 500 + 300


@pytest.mark.parametrize(
    ("task", "args", "value"),
    [
        ("add", (2, 3), 5),
        ("hooked", ("x",), ["called", "x"]),
        ("inline", (), 10),
        ("retry", (), 2),
        ("retry", (0.3,), 2),
        ("replace", ("add",), 42),
        ("replace_chain", (), 13),
        ("reject", (True,), "second time"),
        ("progress", (), "all the way"),
    ],
)
def test_what_succeeds_in_plain_celery_succeeds(plant: Plant, task: str, args: tuple[Any, ...], value: Any) -> None:
    result, record = plant.run(task, *args)

    assert record.state is State.SUCCEEDED
    assert result.get(timeout=5) == value


@pytest.mark.parametrize(
    ("task", "args", "error", "reason"),
    [
        ("fail", (), ValueError, "ValueError: on purpose"),
        ("hooked", ("refuse",), ValueError, "ValueError: before_start refuses"),
        ("auto", (), ValueError, "ValueError: again and again"),
        ("unserialisable", (), Exception, "EncodeError: Object of type object is not JSON serializable"),
        (
            "out_of_memory",
            (),
            brim.TaskOutOfMemory,
            "TaskOutOfMemory: support.apps.gpu.ArrayMemoryError: Out of memory allocating 1,024 bytes",
        ),
        ("reject", (False,), Exception, "Reject: "),
        ("nobody", (), NotRegistered, "NotRegistered: "),
    ],
)
def test_what_fails_in_plain_celery_fails_with_its_reason(
    plant: Plant, task: str, args: tuple[Any, ...], error: type[Exception], reason: str
) -> None:
    result, record = plant.run(task, *args)

    assert record.state is State.FAILED
    assert record.reason is not None
    assert record.reason.message.startswith(reason)
    with pytest.raises(error):
        result.get(timeout=5)


def test_the_workers_survive_a_task_that_ran_out_of_memory_and_its_trace_is_kept(plant: Plant) -> None:
    result, record = plant.run("out_of_memory")

    assert record.reason is not None
    assert record.reason.code == "out_of_memory"
    assert plant.worker.process.poll() is None
    with pytest.raises(brim.TaskOutOfMemory):
        result.get(timeout=5)
    assert "in out_of_memory" in str(result.traceback)
    assert plant.run("add", 1, 1)[1].state is State.SUCCEEDED


def test_a_task_that_raises_ignore_leaves_no_result(plant: Plant) -> None:
    result, record = plant.run("ignore")

    assert (record.state, record.reason and record.reason.code) == (State.SUCCEEDED, "ignored")
    assert result.state == "PENDING"


def test_a_retry_is_a_new_run_of_the_same_record(plant: Plant) -> None:
    result, record = plant.run("retry", headers={"brim": {"vram_mib": VRAM_MIB}, "tenant": "blue"})

    assert (record.run, record.identity.retries) == (3, 2)
    assert plant.events(result.id).count("handed_over") == 2


def test_a_replacement_outside_brim_closes_the_record(plant: Plant) -> None:
    _, record = plant.run("replace", "add", "elsewhere")

    assert record.state is State.SUCCEEDED
    assert record.reason == Reason("replaced", "replaced by add, which does not go through brim")


class TestTimeLimits:
    def test_a_soft_limit_is_the_tasks_own_business(self, plant: Plant) -> None:
        result, record = plant.run("soft", soft_time_limit=1)

        assert record.state is State.SUCCEEDED
        assert result.get(timeout=5) == "stopped in time"

    def test_a_hard_limit_ends_the_attempt_before_its_executor_dies(self, plant: Plant) -> None:
        result, record = plant.run("sleep", 30, time_limit=1)

        assert record.state is State.FAILED
        assert record.reason is not None
        assert record.reason.message == "hit its hard time limit of 1 s"
        with pytest.raises(TimeLimitExceeded):
            result.get(timeout=5)
        assert plant.run("add", 1, 1)[1].state is State.SUCCEEDED


class TestRevoked:
    def test_while_it_runs(self, plant: Plant) -> None:
        result = plant.send("sleep", 30)
        plant.stage.until(result.id, State.RUNNING)

        result.revoke(terminate=True)

        record = plant.stage.until(result.id, *TERMINAL)
        assert record.state is State.CANCELLED
        with pytest.raises(TaskRevokedError):
            result.get(timeout=5)
        assert plant.run("add", 1, 1)[1].state is State.SUCCEEDED

    def test_too_late_when_its_function_is_over(self, plant: Plant) -> None:
        result = plant.send("slow_hook")
        plant.stage.until(result.id, State.FINISHING)

        result.revoke(terminate=True)

        assert plant.stage.until(result.id, *TERMINAL).state is State.SUCCEEDED
        assert result.get(timeout=5) == "done"
        assert plant.events(result.id).count("started") == 1

    def test_before_it_comes_to_the_worker(self, plant: Plant) -> None:
        result = AsyncResult(str(uuid.uuid4()), app=plant.app)
        plant.app.control.revoke(result.id, reply=True)

        _, record = plant.run("add", 1, 1, task_id=result.id)

        assert record.state is State.CANCELLED
        with pytest.raises(TaskRevokedError):
            result.get(timeout=5)

    def test_by_expiring_on_the_way(self, plant: Plant) -> None:
        result = plant.send("add", 1, 1, expires=0.2)
        plant.stage.admit()
        time.sleep(0.3)

        record = plant.stage.until(result.id, *TERMINAL)

        assert record.state is State.EXPIRED
        with pytest.raises(TaskRevokedError):
            result.get(timeout=5)


class TestNotTheLiveAttempt:
    def test_a_stale_message_does_not_run(self, plant: Plant) -> None:
        result = plant.send("add", 1, 1)
        [raw] = plant.stage.client.lrange(plant.stage.layout.list_for(0), 0, -1)
        plant.stage.admit()
        attempt = plant.stage.place(result.id)
        assert attempt is not None
        plant.stage.until(result.id, *TERMINAL)

        plant.stage.push(raw, attempt)

        refused = f"attempt {attempt} of {result.id} may not run: stale"
        wait_until(lambda: refused in plant.worker.log, what="the second message was refused")
        assert plant.events(result.id) == ["admitted", "placed", "claimed", "started", "finishing", "succeeded"]
        assert plant.worker.log.count(f"add[{result.id}] succeeded") == 1

    def test_an_attempt_lost_while_it_computes_publishes_nothing(self, plant: Plant) -> None:
        result = plant.send("sleep", 1.5)
        plant.stage.until(result.id, State.RUNNING)
        view = plant.stage.view(result.id)
        assert plant.stage.lose(view) is LoseAnswer.WAITING

        refused = f"attempt {view.attempt} of {result.id} may not publish: stale"
        wait_until(lambda: refused in plant.worker.log, what="the old attempt was refused")
        assert not result.ready()
        record = plant.stage.until(result.id, *TERMINAL)

        assert record.state is State.SUCCEEDED
        assert plant.events(result.id).count("finishing") == 1
        assert result.get(timeout=5) == "slept"

    def test_a_retry_of_a_lost_attempt_is_not_published(self, plant: Plant) -> None:
        result = plant.send("retry_late", 1.0)
        plant.stage.until(result.id, State.RUNNING)
        view = plant.stage.view(result.id)
        assert plant.stage.lose(view, max_attempts=1) is LoseAnswer.DEAD

        refused = f"attempt {view.attempt} of {result.id} may not publish: stale"
        wait_until(lambda: refused in plant.worker.log, what="the old attempt was refused")
        assert plant.stage.admit() == []
        assert plant.stage.record(result.id).state is State.DEAD
        assert result.state == "PENDING"

    def test_a_message_that_placement_did_not_send_goes_to_intake(self, plant: Plant) -> None:
        result, record = plant.run("add", 2, 2, queue=plant.stage.identity.queue)

        assert record.state is State.SUCCEEDED
        assert result.get(timeout=5) == 4


def test_a_body_that_the_worker_refuses_is_answered(plant: Plant) -> None:
    result, record = plant.run("add", 1, 1, serializer="pickle", queue=INTAKE_QUEUE)

    assert record.state is State.FAILED
    assert record.reason is not None
    assert "ContentDisallowed" in record.reason.message
    with pytest.raises(Exception, match="pickle"):
        result.get(timeout=5)


def test_an_unknown_task_is_answered_with_its_whole_request(plant: Plant) -> None:
    errback: Any = plant.app.signature("total", ([7],), immutable=True, task_id=str(uuid.uuid4()))

    result, record = plant.run("nobody", link_error=[errback])

    assert record.state is State.FAILED
    with pytest.raises(NotRegistered):
        result.get(timeout=5)
    plant.stage.until(errback.options["task_id"], State.SUCCEEDED)


@pytest.mark.parametrize(("name", "options"), [("nobody", {}), ("add", {"serializer": "pickle"})])
def test_what_lies_behind_a_message_that_no_task_can_take_is_run(
    plant: Plant, name: str, options: dict[str, Any]
) -> None:
    bad = plant.send(name, 0, 0, queue=INTAKE_QUEUE, **options)
    good = [plant.send("add", number, number) for number in range(3)]
    plant.stage.report()
    plant.stage.admit()
    os.kill(plant.worker.process.pid, signal.SIGSTOP)
    try:
        placed = [plant.stage.place(result.id) for result in (bad, *good)]
    finally:
        os.kill(plant.worker.process.pid, signal.SIGCONT)

    assert None not in placed
    assert [result.get(timeout=10) for result in good] == [0, 2, 4]
    assert plant.stage.until(bad.id, *TERMINAL).state is State.FAILED


def test_an_executor_that_dies_leaves_its_attempt_to_the_agent(plant: Plant) -> None:
    result = plant.send("exit", 3)
    plant.stage.until(result.id, State.RUNNING)
    wait_until(lambda: "exitcode 3" in plant.worker.log, what="Celery has seen it")

    assert plant.stage.admit() == []
    assert plant.stage.record(result.id).state is State.RUNNING
    assert plant.stage.lose(plant.stage.view(result.id), max_attempts=1) is LoseAnswer.DEAD
    assert result.state == "PENDING"
    assert [owed.task_id for owed in plant.stage.store.owed(10)][-1] == result.id


def test_workflows_give_through_brim_what_they_give_without(plant: Plant) -> None:
    add, total, fail = (plant.app.signature(name) for name in ("add", "total", "fail"))
    linked = add.clone((100,), task_id=str(uuid.uuid4()))
    on_error: Any = plant.app.signature("total", ([7],), immutable=True, task_id=str(uuid.uuid4()))
    add.clone((1, 2), link=[linked]).apply_async()
    fail.clone(link_error=[on_error]).apply_async()
    results = {
        "link": (plant.app.AsyncResult(linked.options["task_id"]), 103),
        "link_error": (plant.app.AsyncResult(on_error.options["task_id"]), 7),
        "chain": (chain(add.clone((1, 2)), add.clone((10,)), add.clone((100,))).apply_async(), 113),
        "group": (group(add.clone((i, i)) for i in range(4)).apply_async(), [0, 2, 4, 6]),
        "chord": (chord((add.clone((i, i)) for i in range(4)), total.clone()).apply_async(), 12),
    }

    def ended() -> bool:
        plant.stage.step()
        return all(result.ready() for result, _ in results.values())

    wait_until(ended, what="every workflow ended")

    assert {name: result.get(timeout=5) for name, (result, _) in results.items()} == {
        name: value for name, (_, value) in results.items()
    }


def test_an_errback_that_cannot_be_called_does_not_keep_the_memory(plant: Plant) -> None:
    wrong = plant.app.signature("total", ([7],))  # it gets the failed task's id as well

    result, record = plant.run("fail", link_error=[wrong])

    assert record.state is State.FAILED
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):  # as in plain Celery
        result.get(timeout=5)


def test_the_worker_shows_its_device_to_flower(plant: Plant) -> None:
    [stats] = plant.app.control.inspect(timeout=5.0, limit=1).stats().values()

    gpu = stats["gpu"]
    assert (gpu["uuid"], gpu["total_mib"], gpu["executors"]) == (plant.stage.identity.devices[0], 8192, 2)
    assert gpu["available_mib"] == 8192 - 192 - gpu["committed_mib"]


@pytest.mark.large
def test_an_outage_of_redis_delays_claims_and_loses_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "devices"))
    with own_server() as server, redis.Redis.from_url(url_of(server)) as client:
        impatient = {"BRIM_REDIS__SOCKET_TIMEOUT_S": "0.3"}
        with started(client, url_of(server), "", tmp_path, impatient) as plant:
            result = plant.send("sleep", 1.0)
            plant.stage.until(result.id, State.RUNNING)

            os.kill(server._process.pid, signal.SIGSTOP)
            time.sleep(2.5)
            os.kill(server._process.pid, signal.SIGCONT)

            assert plant.stage.until(result.id, *TERMINAL).state is State.SUCCEEDED
            assert result.get(timeout=5) == "slept"
            assert "Redis is away, trying again" in plant.worker.log
            assert plant.events(result.id).count("started") == 1


@pytest.mark.large
def test_a_long_task_is_not_redelivered_while_its_worker_lives(
    valkey_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "devices"))
    options = {"visibility_timeout": 2, "unacked_restore_interval": 0.5, "unacked_restore_throttle": 1}
    short = {"BRIM_TEST_TRANSPORT": json.dumps(options)}
    with (
        redis.Redis.from_url(valkey_url) as client,
        started(client, valkey_url, namespace, tmp_path, short) as plant,
    ):
        result = plant.send("sleep", 5.0)
        plant.stage.until(result.id, State.RUNNING)
        admitted: list[Any] = []

        def ended() -> bool:
            admitted.extend(plant.stage.admit())
            return plant.stage.record(result.id).state in TERMINAL

        wait_until(ended, what="the task ended")

        assert admitted == []
        assert plant.stage.record(result.id).state is State.SUCCEEDED


def test_tasks_that_have_not_begun_outlive_a_lost_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "devices"))
    with (
        own_server() as server,
        redis.Redis.from_url(url_of(server)) as client,
        started(client, url_of(server), "", tmp_path) as plant,
    ):
        results = [plant.send("sleep", 2.0) for _ in range(5)]
        plant.stage.admit()
        for result in results:
            plant.stage.place(result.id)
        wait_until(
            lambda: {plant.stage.record(result.id).state for result in results} == {State.CLAIMED, State.RUNNING},
            what="some run, and the worker holds the others",
        )
        for connection in client.client_list():
            if connection["cmd"] == "brpop":
                client.client_kill_filter(_id=connection["id"])

        for result in results:
            assert plant.stage.until(result.id, *TERMINAL).state is State.SUCCEEDED
            assert result.get(timeout=10) == "slept"
        assert "onnection to broker lost" in plant.worker.log


def test_a_process_that_is_to_exit_tells_the_end_of_its_task_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task is over for the worker, and the server takes no end for longer than a process needs to exit."""
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "devices"))
    with own_server() as server, redis.Redis.from_url(url_of(server)) as client:
        recycled = {"BRIM_EXECUTOR__RECYCLE": "after_task"}
        with (
            started(client, url_of(server), "", tmp_path, recycled) as plant,
            client.pubsub(ignore_subscribe_messages=True) as events,
        ):
            events.psubscribe("*celeryev/*")
            result = plant.send("sleep", 0.5)
            plant.stage.until(result.id, State.RUNNING)
            pid = int(plant.stage.view(result.id).proc.partition(".")[0])

            client.config_set("maxmemory", 1)

            def succeeded() -> bool:
                message = events.get_message(timeout=0.1)
                return message is not None and b"task-succeeded" in b64decode(json.loads(message["data"])["body"])

            wait_until(succeeded, what="the worker's main process has been told")
            since_s = time.monotonic()
            wait_until(lambda: time.monotonic() - since_s > 2.0, what="it would have exited")
            assert is_alive(proc_id(pid) or "")
            assert plant.stage.record(result.id).state is State.RUNNING
            client.config_set("maxmemory", 0)

            assert plant.stage.until(result.id, *TERMINAL).state is State.SUCCEEDED
            assert result.get(timeout=5) == "slept"
            wait_until(lambda: proc_id(pid) is None, what="the process has exited")
            assert plant.events(result.id).count("started") == 1
        assert plant.stage.store.audit() == []


def test_a_worker_that_brim_cannot_work_in_stops(valkey_url: str, namespace: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        stage = Stage(client, namespace, device_uuid())
    environment = {
        **worker_environment(stage, settings_for(valkey_url, namespace)),
        "BRIM_PLACEMENT__AHEAD": "-1",
    }

    with (
        pytest.raises(AssertionError, match="brim cannot work in this process: environment: BRIM_PLACEMENT__AHEAD: "),
        worker(
            "support.apps.gpu",
            [stage.identity.queue],
            url=valkey_url,
            namespace=namespace,
            log_path=tmp_path / "gpu0.log",
            env=environment,
        ),
    ):
        pass


def test_with_a_key_only_what_intake_and_placement_have_signed_is_run(
    valkey_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "devices"))
    monkeypatch.setenv("BRIM_TEST_MARKERS", str(tmp_path))
    with (
        redis.Redis.from_url(valkey_url) as client,
        started(client, valkey_url, namespace, tmp_path, key="k" * 32) as plant,
    ):
        # given tasks of every way through the worker: signed ones are run, retries and errors included
        assert plant.run("add", 2, 3)[0].get(timeout=5) == 5
        assert plant.run("retry")[0].get(timeout=5) == 2
        with pytest.raises(ValueError, match="on purpose"):
            plant.run("fail")[0].get(timeout=5)

        # when somebody who knows a live attempt pushes a message of its own under it, into the GPU's queue
        result = plant.send("sleep", 1.5)
        plant.stage.until(result.id, State.RUNNING)
        attempt = plant.stage.view(result.id).attempt
        plant.send("add", 100, 100, task_id=result.id)
        raw = client.rpop(plant.stage.layout.list_for(0))
        assert isinstance(raw, bytes)
        plant.stage.push(raw, attempt)

        # then that is not even claimed, and the attempt goes on
        refused = f"task add[{result.id}] is refused: intake and placement have not signed it as attempt {attempt}"
        wait_until(lambda: refused in plant.worker.log, what="the forged message was refused")
        assert plant.stage.until(result.id, *TERMINAL).state is State.SUCCEEDED
        assert result.get(timeout=5) == "slept"
        assert plant.worker.log.count(f"add[{result.id}] received") == 0
        assert plant.events(result.id).count("claimed") == 1
        assert plant.stage.store.audit() == []
