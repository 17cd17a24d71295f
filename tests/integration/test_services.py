"""Intake and placement on a real server: given published tasks, when the services step, then tasks are placed."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from brim.celery.answers import Answers
from brim.celery.envelope import parse
from brim.celery.errors import TaskRejected
from brim.core.attributes import TaskSignature
from brim.core.model import AttemptView, Node, Reason, State
from brim.core.profiles import ResourceTable
from brim.settings import Settings
from brim.store import FencedError, Store
from brim.store.types import DeviceRegistration, NodeRegistration, Outcome, Peeked
from brim_services.admission import NO_SIGNATURE
from brim_services.answerer import Answerer
from brim_services.intake import HURRY_S, Intake
from brim_services.invariants import check_invariants
from brim_services.learning import Learning, stand_ins
from brim_services.loop import open_store
from brim_services.placement import PlacementService, make_planner
from brim_services.profiles import standings
from support.celery_app import configure
from support.waiting import wait_until

TABLE = """
profiles:
  t.host: {vram: 100, cpus: 1.5, margin: 1.0}
  t.run: {vram: "1000 * n", context_mib: 300, margin: 1.0}
"""


class Pipeline:
    """Intake and placement as one process, stepped by the test; a test's worker is played by store calls."""

    def __init__(self, settings: Settings, app: Celery) -> None:
        self.settings, self.app, self.stop = settings, app, threading.Event()
        self.store = open_store(settings, self.stop)
        table = ResourceTable.parse(TABLE, "table")
        self.intake = Intake(self.store, settings, table, self.stop)
        self.answerer = Answerer(settings, self.stop)
        self.placement = PlacementService(self.store, settings, make_planner(settings), self.answerer)

    def register(self, total_mib: int = 10_000, devices: int = 1, executors: int = 2) -> None:
        signature = TaskSignature.from_callable(lambda n=1: n).model_dump_json()
        found = [DeviceRegistration(f"GPU-{i}", i, "SIM", total_mib, 500) for i in range(devices)]
        node = NodeRegistration(Node("n1"), "boot", executors, ["t.run"], {"t.run": signature}, found)
        assert self.store.register_node(node)

    def send(self, n: object = 1, **options: object) -> str:
        name = options.pop("name", "t.run")
        result = self.app.send_task(name, kwargs={"n": n}, queue="brim.intake", **options)
        return str(result.id)

    def configure(self, section: str, **values: object) -> None:
        """Placement gets other settings."""
        changed = getattr(self.settings, section).model_copy(update=values)
        self.placement.settings = self.settings.model_copy(update={section: changed})

    def begin(self, task_id: str, proc: str = "10.1") -> AttemptView:
        """A test's worker begins a placed task; how its attempt stands then."""
        record = self.store.record(task_id)
        assert record is not None
        assert record.attempt is not None
        self.store.claim(task_id, record.attempt, "w1")
        self.store.bind(task_id, record.attempt, record.devices, proc)
        return next(view for view in self.store.books(record.devices)[0] if view.task_id == task_id)

    def settle(self) -> None:
        """Steps both services and the answerer until nothing is left to do for them."""
        self.intake._learnt_s = 0.0
        self.intake.learn_signatures()
        while self.admit():
            pass
        self.placement.step()
        self.placement.step()
        self.answerer.drain()

    def admit(self) -> int:
        """Intake admits what lies in the broker; how many."""
        return len(self.intake.admit(self.store.look(self.intake.lists, 1000).messages))

    def state(self, task_id: str) -> State:
        record = self.store.record(task_id)
        assert record is not None
        return record.state

    def run(self, task_id: str, state: State = State.SUCCEEDED) -> None:
        record = self.store.record(task_id)
        assert record is not None
        assert record.attempt is not None
        proc = f"{uuid.uuid4().int % 10_000}.1"
        self.store.claim(task_id, record.attempt, "w1")
        self.store.bind(task_id, record.attempt, record.devices, proc)
        self.store.finish(task_id, record.attempt, proc)
        self.store.end(task_id, record.attempt, record.devices, Outcome(state, leftover_mib=[0]))


@pytest.fixture
def pipeline(valkey_url: str, namespace: str) -> Iterator[Pipeline]:
    app = configure(Celery("t", set_as_current=False), valkey_url, namespace)
    settings = Settings.model_validate(
        {
            "redis": {"url": valkey_url},
            "broker": {"global_keyprefix": namespace},
            "intake": {"unfit_grace_s": 0.0},
            "placement": {"leader_ttl_s": 1.0, "visibility_timeout_s": 0.05},
            "results": {"app_options": {"result_backend_transport_options": {"global_keyprefix": namespace}}},
        }
    )
    made = Pipeline(settings, app)
    yield made
    made.stop.set()
    assert check_invariants(made.store, settled=False) == []


def test_what_a_task_holds_of_its_host_comes_back_when_it_ends(pipeline: Pipeline) -> None:
    signature = TaskSignature.from_callable(lambda: None).model_dump_json()
    device = DeviceRegistration("GPU-0", 0, "SIM", 10_000, 500)
    node = NodeRegistration(Node("n1", cpus=2), "boot", 4, ["t.host"], {"t.host": signature}, [device])
    assert pipeline.store.register_node(node)
    ids = [str(pipeline.app.send_task("t.host", queue="brim.intake").id) for _ in range(3)]
    for task_id in ids:
        pipeline.settle()
        assert [i for i in ids if pipeline.state(i) is State.PLACED] == [task_id]
        pipeline.run(task_id)


def test_tasks_are_estimated_placed_and_pushed_to_the_devices_queue(pipeline: Pipeline) -> None:
    pipeline.register()
    task_id = pipeline.send(3)
    pipeline.settle()
    record = pipeline.store.record(task_id)
    assert record is not None
    assert (record.state, record.demand.vram_mib, record.devices) == (State.PLACED, 3328, ("GPU-0",))
    raw = pipeline.store.client.rpop(f"{pipeline.settings.broker.global_keyprefix}gpu.n1.0")
    message = parse(raw)
    assert message.attempt is not None
    assert (message.identity.task_id, message.attempt.attempt) == (task_id, record.attempt)
    assert json.loads(raw)["properties"]["delivery_info"]["routing_key"] == "brim.intake"


def test_what_does_not_fit_waits_with_its_reason_and_is_fed_when_an_attempt_ends(pipeline: Pipeline) -> None:
    pipeline.register()
    first, second = pipeline.send(6), pipeline.send(6)
    pipeline.settle()
    assert (pipeline.state(first), pipeline.state(second)) == (State.PLACED, State.WAITING)
    record = pipeline.store.record(second)
    assert record is not None
    assert record.reason is not None
    assert record.reason.code == "memory"
    pipeline.run(first)
    pipeline.settle()
    assert pipeline.state(second) is State.PLACED


def test_demands_weigh_by_how_long_their_tasks_have_run(pipeline: Pipeline) -> None:
    pipeline.register(executors=4)
    short, long = pipeline.send(1), pipeline.send(2)
    pipeline.settle()
    mix, keys = pipeline.placement.planner.mix, pipeline.store.keys
    assert [share for _, share in mix.shares()] == pytest.approx([0.5, 0.5], abs=0.01)
    for task_id, seconds in ((short, 10), (long, 30)):
        pipeline.begin(task_id, proc := f"{seconds}.1")
        pipeline.store.client.hset(keys.task(task_id), "started_ms", pipeline.store.server_ms() - seconds * 1000)
        record = pipeline.store.record(task_id)
        assert record is not None
        pipeline.store.finish(task_id, record.attempt, proc)
        pipeline.store.end(task_id, record.attempt, record.devices, Outcome(State.SUCCEEDED, leftover_mib=[0]))

    def learned() -> bool:
        pipeline.placement._keep_house()
        return len({round(share, 1) for share in dict(mix.shares()).values()}) == 2

    wait_until(learned, what="the ends are old enough to be read")
    by_time = {demand.vram_mib: share for demand, share in mix.shares()}
    assert by_time[max(by_time)] == pytest.approx(0.75, abs=0.01)


def test_many_tasks_of_one_lane_all_run_in_order(pipeline: Pipeline) -> None:
    pipeline.register(total_mib=100_000, executors=8)
    ids = [pipeline.send(1) for _ in range(150)]
    order: list[str] = []
    while len(order) < len(ids):
        pipeline.settle()
        placed = [i for i in ids if pipeline.state(i) is State.PLACED]
        order += placed
        for task_id in placed:
            pipeline.run(task_id)
    assert order == ids


def test_without_a_worker_tasks_wait_and_go_on_when_one_comes(pipeline: Pipeline) -> None:
    task_id = pipeline.send(2)
    pipeline.settle()
    record = pipeline.store.record(task_id)
    assert record is not None
    assert (record.state, record.reason and record.reason.code) == (State.WAITING, "no_worker")
    pipeline.register()
    pipeline.settle()
    assert pipeline.state(task_id) is State.PLACED


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"name": "t.unknown"}, "no_profile"),
        ({"n": "many"}, "bad_attribute"),
        ({"n": 100}, "too_large"),
        ({"headers": {"brim": {"vram_mb": 1}}}, "bad_header"),
    ],
)
def test_what_cannot_run_is_answered_with_the_reason(pipeline: Pipeline, message: dict[str, object], code: str) -> None:
    pipeline.register()
    task_id = pipeline.send(**message)
    pipeline.settle()
    pipeline.placement._keep_house()
    pipeline.settle()
    assert pipeline.state(task_id) is State.DEAD
    with pytest.raises(TaskRejected) as caught:
        pipeline.app.AsyncResult(task_id).get(timeout=5)
    assert caught.value.code == code


def test_an_expired_task_is_answered(pipeline: Pipeline) -> None:
    task_id = pipeline.send(1, expires=0.05)
    pipeline.settle()

    def expired() -> bool:
        pipeline.placement._keep_house()
        return pipeline.state(task_id) is State.EXPIRED

    wait_until(expired, what="expiry")
    pipeline.answerer.drain()
    with pytest.raises(TaskRevokedError):
        pipeline.app.AsyncResult(task_id).get(timeout=5)


def test_a_second_placement_stands_by_and_takes_over(pipeline: Pipeline) -> None:
    pipeline.register()
    pipeline.settle()
    second = PlacementService(pipeline.store, pipeline.settings, make_planner(pipeline.settings), pipeline.answerer)
    assert not second._lead()
    pipeline.placement.resign()
    assert second._lead()
    task_id = pipeline.send(1)
    pipeline.intake.learn_signatures()
    pipeline.admit()
    pipeline.placement._stale = False
    pipeline.placement.step()
    assert pipeline.placement.epoch == 0
    second.step()
    assert pipeline.state(task_id) is State.PLACED


def test_noise_in_the_broker_list_is_a_dead_letter_and_the_rest_goes_on(pipeline: Pipeline) -> None:
    pipeline.register()
    pipeline.store.client.lpush(pipeline.intake.lists[0], b"\xff not a message")
    task_id = pipeline.send(1)
    pipeline.settle()
    assert pipeline.state(task_id) is State.PLACED
    assert pipeline.store.counts()[State.DEAD] == 1


def test_a_dead_letter_is_tried_again_once_its_cause_is_gone(pipeline: Pipeline) -> None:
    pipeline.register()
    task_id = pipeline.send(1, name="t.later")
    pipeline.settle()
    assert pipeline.state(task_id) is State.DEAD
    pipeline.intake.table = ResourceTable.parse(TABLE + "  t.later: {vram: 500}", "table")
    assert pipeline.store.revive(task_id, "?t.later", NO_SIGNATURE)
    pipeline.settle()
    assert pipeline.state(task_id) is State.WAITING
    node = NodeRegistration(
        Node("n2"),
        "boot",
        1,
        ["t.later"],
        {"t.later": TaskSignature.from_callable(lambda n: n).model_dump_json()},
        [DeviceRegistration("GPU-9", 0, "SIM", 9000, 0)],
    )
    pipeline.store.register_node(node)
    pipeline.settle()
    record = pipeline.store.record(task_id)
    assert record is not None
    assert (record.state, record.run) == (State.PLACED, 2)


def test_a_task_that_placement_finds_gone_leaves_its_place_to_the_next_at_once(pipeline: Pipeline) -> None:
    pipeline.register(executors=1)
    pipeline.configure("placement", ahead=0)
    pipeline.placement.planner = make_planner(pipeline.placement.settings)
    pipeline.placement.step()
    first, second = pipeline.send(1), pipeline.send(1)
    pipeline.intake.learn_signatures()
    pipeline.admit()
    pipeline.placement._resync()
    pipeline.store.cancel(first, Reason("test", "because"))
    pipeline.placement._place()
    assert pipeline.state(second) is State.PLACED


def test_a_task_behind_a_busy_executor_goes_to_another_that_becomes_idle(pipeline: Pipeline) -> None:
    pipeline.register(devices=2, executors=1)
    first, second, third = (pipeline.send(1) for _ in range(3))
    pipeline.settle()
    placed = {task_id: pipeline.store.records([task_id])[0].devices for task_id in (first, second, third)}
    [beside] = [task_id for task_id in (first, second) if placed[task_id] != placed[third]]

    pipeline.run(beside)
    pipeline.settle()
    pipeline.settle()

    assert pipeline.store.records([third])[0].devices == placed[beside]
    assert [event["event"] for event in pipeline.store.story(third)][-2:] == ["lost", "placed"]


def test_a_task_behind_a_busy_executor_is_found_by_the_placement_that_takes_over(pipeline: Pipeline) -> None:
    pipeline.register(devices=2, executors=1)
    first, second = pipeline.send(1), pipeline.send(1)
    pipeline.settle()
    third = pipeline.send(1)
    pipeline.settle()
    placed = {task_id: pipeline.store.records([task_id])[0].devices for task_id in (first, second, third)}
    [beside] = [task_id for task_id in (first, second) if placed[task_id] != placed[third]]

    pipeline.placement.resign()
    pipeline.placement = PlacementService(
        pipeline.store, pipeline.settings, make_planner(pipeline.settings), pipeline.answerer
    )
    pipeline.settle()
    pipeline.run(beside)
    pipeline.settle()
    pipeline.settle()

    assert pipeline.store.records([third])[0].devices == placed[beside]
    assert [event["event"] for event in pipeline.store.story(third)][-2:] == ["lost", "placed"]


def test_the_grace_of_a_task_begins_anew_when_the_device_that_it_fits_goes_away(pipeline: Pipeline) -> None:
    pipeline.configure("intake", unfit_grace_s=0.4)
    pipeline.register()
    large = NodeRegistration(
        Node("large"), "boot", 1, ["t.run"], {}, [DeviceRegistration("GPU-L", 0, "SIM", 50_000, 0)]
    )
    pipeline.store.register_node(large)
    holder = pipeline.send(20)
    pipeline.settle()
    ahead = pipeline.send(15)  # placed behind it
    pipeline.settle()
    waits = pipeline.send(20)
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() - began_s > 0.5, what="longer than the grace")
    pipeline.settle()
    for task_id in (holder, ahead):
        pipeline.store.cancel(task_id, Reason("test", "because"))
    assert pipeline.store.leave("large", "boot")

    pipeline.settle()
    pipeline.placement._keep_house()
    assert pipeline.state(waits) is State.WAITING

    def buried() -> bool:
        pipeline.placement._keep_house()
        return pipeline.state(waits) is State.DEAD

    wait_until(buried, what="the grace is over")


def test_a_retry_that_never_comes_is_a_dead_letter(pipeline: Pipeline) -> None:
    pipeline.register()
    task_id, other = pipeline.send(1), pipeline.send(1)
    pipeline.settle()
    pipeline.run(task_id, State.HANDED_OVER)
    pipeline.send(1)  # in the broker's list: so might be the retry

    def looked_for() -> list[str]:
        pipeline.placement._keep_house()
        return pipeline.store.awaited_ids(0.05, 10)

    wait_until(looked_for, what="the time is over")
    assert pipeline.state(task_id) is State.HANDED_OVER
    pipeline.settle()
    pipeline.placement._keep_house()
    record = pipeline.store.record(task_id)
    assert record is not None
    assert (record.state, record.reason and record.reason.code) == (State.DEAD, "next_lost")
    assert pipeline.state(other) is State.PLACED


@pytest.mark.parametrize(
    ("dated_s", "state"),
    [
        pytest.param(0.2, State.SUCCEEDED, id="its result is out"),
        pytest.param(-60.0, State.WAITING, id="the result is an earlier run's"),
        pytest.param(None, State.WAITING, id="its result is not out"),
    ],
)
@pytest.mark.parametrize("ahead_s", [0, 30, -30])
def test_an_attempt_lost_after_its_function_was_over_ends_by_its_result(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, dated_s: float | None, state: State, ahead_s: int
) -> None:
    """Whatever the clock says of the machine that it ran on: its result is dated by the same."""
    pipeline.register()
    task_id = pipeline.send(1)
    pipeline.settle()
    view = pipeline.begin(task_id)
    there_s = time.time() + ahead_s
    with monkeypatch.context() as there:
        there.setattr("brim.store.attempts.time", SimpleNamespace(time=lambda: there_s))
        pipeline.store.finish(task_id, view.attempt, "10.1")
    if dated_s is not None:
        backend = pipeline.app.backend
        done = datetime.fromtimestamp(there_s + dated_s, UTC).isoformat()
        meta = {"status": "SUCCESS", "result": 42, "task_id": task_id, "date_done": done}
        backend.set(backend.get_key_for_task(task_id), json.dumps(meta))
    pipeline.configure("placement", lease_timeout_s=0.01)
    pipeline.placement._hearing_since_s = 0.0

    def lost() -> bool:
        pipeline.placement._lose_nodes()
        pipeline.settle()
        return pipeline.store.devices()[0].state == "lost"

    wait_until(lost, what="the node is lost")
    pipeline.placement._lose_nodes()
    pipeline.answerer.drain()
    assert pipeline.state(task_id) is state


def test_a_placement_that_was_paused_takes_nothing_from_a_node_that_is_back(pipeline: Pipeline) -> None:
    pipeline.register()
    pipeline.settle()
    paused = pipeline.placement
    paused.mirror.cluster.update(dataclasses.replace(pipeline.store.devices()[0], state="lost"))
    paused.resign()
    pipeline.placement = PlacementService(
        pipeline.store, pipeline.settings, make_planner(pipeline.settings), pipeline.answerer
    )
    task_id = pipeline.send(1)
    pipeline.settle()
    pipeline.begin(task_id)

    with pytest.raises(FencedError):
        paused._place_elsewhere(["GPU-0"], Reason("node_lost", "as it was before the pause"))
    assert pipeline.state(task_id) is State.RUNNING


def test_an_answer_that_cannot_be_written_holds_up_no_other(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.register()
    first, second = pipeline.send(name="t.unknown"), pipeline.send(name="t.unknown")
    pipeline.admit()
    write = Answers.write

    def failing(answers: Answers, task_id: str, *rest: object) -> None:
        if task_id == first:
            raise ValueError("its errback cannot be published")
        write(answers, task_id, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Answers, "write", failing)
    with pytest.raises(ValueError, match="errback"):
        pipeline.answerer.drain()
    with pytest.raises(TaskRejected):
        pipeline.app.AsyncResult(second).get(timeout=5)
    assert [owed.task_id for owed in pipeline.store.owed(10)] == [first]


def test_a_task_that_waited_for_its_signature_gets_its_priority_with_its_estimate(pipeline: Pipeline) -> None:
    late = pipeline.send(1, headers={"brim": {"priority": 9}})
    early = pipeline.send(1, headers={"brim": {"priority": 2}})
    pipeline.admit()
    pipeline.register()
    pipeline.intake.learn_signatures()
    [window] = pipeline.store.snapshot(10).lanes[-1:]
    assert [task_id for task_id, _, _ in window.waiting] == [early, late]


def test_messages_that_come_alone_are_admitted_one_after_the_other_until_one_has_an_eta(pipeline: Pipeline) -> None:
    pipeline.register()
    etas = [None, None, datetime.now(UTC) + timedelta(hours=1), None]
    sent: list[str] = []

    class Bells:
        """Heard of a message that comes while nobody looks."""

        def wait(self, timeout_s: float) -> list[Peeked]:
            time.sleep(HURRY_S)
            assert timeout_s > 0
            sent.append(pipeline.send(eta=etas[len(sent)]))
            return list(pipeline.store.look(pipeline.intake.lists, 10).messages)

    pipeline.intake.bells = Bells()  # type: ignore[assignment]
    pipeline.intake.step()
    assert [pipeline.state(task_id) for task_id in sent] == [State.WAITING, State.WAITING, State.SCHEDULED]


def test_what_tasks_truly_need_is_learned_and_reserved(pipeline: Pipeline) -> None:
    text = "profiles:\n  t.run: {vram: 1000 * n, context_mib: 300, calibration: on}"
    pipeline.intake.table = ResourceTable.parse(text, "table")
    pipeline.register()
    pipeline.intake.step()
    learning = Learning(pipeline.settings, pipeline.stop, lambda: pipeline.placement.epoch)
    first = pipeline.send(2)
    pipeline.settle()
    begun = pipeline.begin(first)
    pipeline.store.end(first, begun.attempt, begun.devices, Outcome(State.SUCCEEDED, leftover_mib=[0], peak_mib=1100))
    [line] = pipeline.store.client.lrange(pipeline.store.keys.peaks, 0, -1)
    others = [json.dumps(json.loads(line) | {"task_id": f"t{number}"}) for number in range(25)]
    pipeline.store.client.rpush(pipeline.store.keys.peaks, *others)

    learning.step()
    pipeline.intake.learned.refresh(pipeline.intake.table.profiles)
    second = pipeline.send(2)
    pipeline.settle()

    assert pipeline.store.peaks(1) == []
    [before, after] = [record.demand.vram_mib for record in pipeline.store.records([first, second])]
    assert before == 2944
    assert 1100 <= after < 1400


def test_a_placement_that_stands_by_keeps_nothing_of_what_it_learned(pipeline: Pipeline) -> None:
    pipeline.register()
    task_id = pipeline.send(2)
    pipeline.settle()
    begun = pipeline.begin(task_id)
    pipeline.store.end(task_id, begun.attempt, begun.devices, Outcome(State.SUCCEEDED, leftover_mib=[0], peak_mib=900))

    Learning(pipeline.settings, pipeline.stop, lambda: pipeline.placement.epoch - 1).step()

    assert len(pipeline.store.peaks(10)) == 1
    assert pipeline.store.calibrations() == {}


def test_services_count_and_time_what_they_do(pipeline: Pipeline) -> None:
    pipeline.register()
    pipeline.send(3)
    pipeline.send(name="t.unknown")
    pipeline.settle()

    def value(service: Intake | PlacementService, name: str, **labels: str) -> float | None:
        return service.metrics.registry.get_sample_value(name, labels)

    assert value(pipeline.intake, "brim_intake_messages_total", answer="admitted") == 1
    assert value(pipeline.intake, "brim_intake_messages_total", answer="refused") == 1
    assert value(pipeline.placement, "brim_wait_seconds_count", task="t.run") == 1
    assert value(pipeline.placement, "brim_placement_commits_total", answer="committed") == 1
    assert (value(pipeline.placement, "brim_placement_decision_seconds_count") or 0) > 0
    assert value(pipeline.placement, "brim_placement_active") == 1


def test_peaks_of_a_task_without_a_profile_are_learned(pipeline: Pipeline) -> None:
    intake = pipeline.settings.intake.model_copy(update={"unknown": "exclusive"})
    pipeline.intake.settings = pipeline.settings.model_copy(update={"intake": intake})
    pipeline.intake.table = ResourceTable()
    pipeline.register()
    pipeline.intake.step()
    task_id = pipeline.send(2)
    pipeline.settle()
    begun = pipeline.begin(task_id)
    assert begun.vram_mib > 8500
    pipeline.store.end(task_id, begun.attempt, begun.devices, Outcome(State.SUCCEEDED, leftover_mib=[0], peak_mib=900))

    Learning(pipeline.settings, pipeline.stop, lambda: pipeline.placement.epoch).step()

    [standing] = standings(ResourceTable(), pipeline.store.calibrations(), stand_ins(pipeline.store))
    assert (standing.profile.name, standing.in_table, standing.lessons[0].samples) == ("t.run", False, 1)


@pytest.mark.parametrize("service", [Intake, PlacementService])
def test_after_an_outage_a_service_asks_on_another_connection(pipeline: Pipeline, service: type[Any]) -> None:
    """A server that takes no writes any more may have been replaced behind its address."""
    store, settings = Store.of(pipeline.settings, single=True), pipeline.settings
    others: dict[type[Any], tuple[Any, ...]] = {
        Intake: (pipeline.intake.table, pipeline.stop),
        PlacementService: (make_planner(settings), pipeline.answerer),
    }
    before = store.client.client_id()

    service(store, settings, *others[service]).lost_touch()

    assert store.client.client_id() != before
    store.client.close()
