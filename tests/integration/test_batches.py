"""Intake and placement with batched tasks, on a real server; the test plays the agent and the model executors."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from brim.celery.agent_link import WorkerIdentity
from brim.celery.attempts import Attempts
from brim.celery.envelope import parse
from brim.celery.errors import TaskRejected
from brim.celery.model_executor import ModelExecutor
from brim.core.attributes import TaskSignature
from brim.core.batching import Phase
from brim.core.model import Node, Reason, State
from brim.core.profiles import ResourceTable
from brim.settings import Settings
from brim.store.types import ClaimAnswer, DeviceRegistration, ExecutorView, NodeRegistration, Outcome, Record
from brim_services import cli
from brim_services.answerer import Answerer
from brim_services.intake import Intake
from brim_services.invariants import check_invariants
from brim_services.loop import open_store
from brim_services.placement import PlacementService, make_planner
from support.celery_app import configure
from support.waiting import wait_until

TABLE = """
defaults: {context_mib: 300, margin: 1.0}
profiles:
  embed: {model: enc, weights_mib: 1000, batch: {max_items: 4, per_unit_mib: 10, max_executors: 2, level1_limit: 6}}
  embed.v2: {model: enc, version: "2", weights_mib: 1000, batch: {max_items: 4, keep_warm_s: 0}}
  words: {model: lm, weights_mib: 3000, batch: {max_items: 8, volume: len(text), max_volume: 64, shape_bucket: s}}
  wide: {model: wide, batch: {max_items: 4, volume: len(text), max_volume: 64, per_unit_mib: 200, max_executors: 1}}
  huge: {model: huge, weights_mib: 90GiB, batch: {max_items: 2}}
  plain: {vram: 3000}
"""


class Town:
    """One node with one device of 10,000 MiB, of which 9,500 can be given away."""

    def __init__(self, settings: Settings, app: Celery) -> None:
        self.app, self.settings, stop = app, settings, threading.Event()
        self.store = open_store(settings, stop)
        self.stop = stop
        table = ResourceTable.parse(TABLE, "table")
        self.store.publish_profiles({profile.name: profile.model_dump_json() for profile in table})
        self.intake = Intake(self.store, settings, table, stop)
        self.answerer = Answerer(settings, stop)
        self.placement = PlacementService(self.store, settings, make_planner(settings), self.answerer)
        self._procs = itertools.count(100)
        signature = TaskSignature.from_callable(lambda **_: None).model_dump_json()
        tasks = [profile.name for profile in table]
        node = NodeRegistration(
            Node("n1"),
            "boot",
            2,
            tasks,
            dict.fromkeys(tasks, signature),
            [DeviceRegistration("G0", 0, "SIM", 10_000, 500)],
        )
        assert self.store.register_node(node)

    def send(self, task: str = "embed", count: int = 1, **options: Any) -> list[str]:
        kwargs = options.pop("kwargs", {})
        found = [self.app.send_task(task, kwargs=kwargs, queue="brim.intake", **options).id for _ in range(count)]
        self.step()
        return found

    def step(self) -> None:
        """Let both services do all that they can."""
        self.store.renew("n1", "boot")
        self.intake.learn_signatures()
        while self.intake.admit(self.store.look(self.intake.lists, 1000).messages):
            pass
        for _ in range(3):
            self.placement.batches._settled_s = 0.0
            self.store.client.lpush(self.store.keys.wake, "1")
            self.placement.step()
        self.answerer.drain()

    def wait_for_scale_out(self) -> None:
        """Level 1 has been waiting for so long that one more executor is wanted."""
        placement = self.placement
        now_s = self.store.server_ms() / 1000 + 5
        windows = placement.mirror.batch_windows()
        placement.batches.settle(placement.epoch, windows, [], placement.mirror.cluster, now_s)

    def executor(self, name: str = "n1.0.enc") -> ExecutorView:
        [view] = self.store.executors_named([name])
        return view

    def names(self) -> list[str]:
        return [view.name for view in self.store.executors()]

    def bring_up(self, name: str = "n1.0.enc") -> None:
        """What an agent and the process that it starts do."""
        proc = f"{next(self._procs)}.1"
        assert self.store.executor_begins(name, "G0", f"b-{name}", proc)
        assert self.store.executor_is_up(name, f"b-{name}")
        self.step()

    def seal(self, name: str = "n1.0.enc", most: int = 4) -> list[tuple[str, str]]:
        """The executor claims its oldest items; those that it is granted."""
        view = self.executor(name)
        oldest = sorted((item for item in view.items if not item.sealed), key=lambda item: item.order)[:most]
        pairs = [(item.task_id, item.attempt) for item in oldest]
        answers = self.store.claim_batch(name, view.boot, view.proc, pairs)
        self.step()
        return [pair for pair, answer in zip(pairs, answers, strict=True) if answer is ClaimAnswer.GRANTED]

    def end(self, pairs: list[tuple[str, str]], name: str = "n1.0.enc") -> None:
        """The batch is computed and published."""
        self.store.finish_batch(self.executor(name).proc, pairs)
        self.store.end_batch(name, [(*pair, Outcome(State.SUCCEEDED)) for pair in pairs])
        self.step()

    def die(self, name: str = "n1.0.enc") -> None:
        """What the agent does once the executor's process is gone."""
        view = self.executor(name)
        died = Reason("executor_died", "died")
        for attempt in self.store.item_attempts([view]):
            self.store.lose(attempt, died, counts=bool(attempt.boot), max_attempts=3)
        assert self.store.executor_gone(view, died, [self.settings.broker.global_keyprefix + view.queue])
        self.store.process_gone("G0", view.proc)
        self.step()

    def record(self, task_id: str) -> Record:
        record = self.store.record(task_id)
        assert record is not None
        return record

    def held(self, name: str = "n1.0.enc") -> set[str]:
        return {item.task_id for item in self.executor(name).items}

    def pushed(self, name: str = "n1.0.enc") -> int:
        queue = self.settings.broker.global_keyprefix + self.executor(name).queue
        return self.store.queue_lengths([queue])[queue]


def text(length: int, shape: int) -> dict[str, Any]:
    """Arguments of ``words``."""
    return {"text": "x" * length, "s": shape}


@pytest.fixture
def town(valkey_url: str, namespace: str) -> Iterator[Town]:
    app = configure(Celery("t", set_as_current=False), valkey_url, namespace)
    settings = Settings.model_validate(
        {
            "redis": {"url": valkey_url},
            "broker": {"global_keyprefix": namespace},
            "intake": {"unfit_grace_s": 0.0},
            "results": {"app_options": {"result_backend_transport_options": {"global_keyprefix": namespace}}},
        }
    )
    made = Town(settings, app)
    yield made
    made.stop.set()
    assert check_invariants(made.store, settled=False) == []


def test_a_first_item_wants_an_executor_with_room_for_a_full_batch(town: Town) -> None:
    town.send()
    view = town.executor()
    assert (view.phase, view.model, view.vram_mib) == (Phase.STARTING, "enc", 1344)  # 300 + 1000 + 4 x 10, a size class
    assert view.queue == "gpu.n1.0.enc"
    [device] = town.store.devices()
    assert (device.committed_mib, device.busy) == (1344, 0)


def test_items_go_to_an_executor_once_it_is_up_and_reserve_nothing(town: Town) -> None:
    ids = town.send(count=3)
    assert [town.record(i).state for i in ids] == [State.WAITING] * 3
    assert town.record(ids[0]).reason == Reason("executor_starting", "a model executor of enc is starting or stopping")
    town.bring_up()
    assert [town.record(i).state for i in ids] == [State.PLACED] * 3
    assert town.held() == set(ids)
    assert town.pushed() == 3
    assert town.store.devices()[0].committed_mib == 1344


def test_the_messages_of_a_set_say_how_many_they_are(town: Town) -> None:
    town.send(count=6)
    town.bring_up()
    queue = town.settings.broker.global_keyprefix + "gpu.n1.0.enc"
    headers = [parse(raw).attempt for raw in town.store.client.lrange(queue, 0, -1)]
    groups = [attempt.item for attempt in headers if attempt is not None and attempt.item is not None]
    assert sorted(item.together for item in groups) == [2, 2, 4, 4, 4, 4]
    assert len({item.group for item in groups}) == 2


def test_a_pair_of_sets_is_filled_and_level_1_takes_the_rest_until_a_batch_is_sealed(town: Town) -> None:
    first = town.send(count=1)
    town.bring_up()
    sealed = town.seal()
    assert [i for i, _ in sealed] == first
    more = town.send(count=6)
    assert town.held() == {*first, *more[:4]}  # one set besides the one that is computed
    assert town.record(more[4]).state is State.WAITING
    assert town.record(more[4]).reason is not None
    town.end(sealed)
    assert town.held() == set(more)


def test_a_finished_batch_ends_its_items_each(town: Town) -> None:
    ids = town.send(count=2)
    town.bring_up()
    town.end(town.seal())
    assert [town.record(i).state for i in ids] == [State.SUCCEEDED] * 2
    assert [line["event"] for line in town.store.story(ids[0])] == [
        "admitted",
        "placed",
        "started",
        "finishing",
        "succeeded",
    ]
    assert town.executor().items == []
    assert check_invariants(town.store, settled=True) == []


def test_level_1_is_bounded_and_the_newest_are_refused(town: Town) -> None:
    town.send(count=1)
    town.bring_up()
    town.seal()
    more = town.send(count=12)
    assert [town.record(i).state for i in more].count(State.DEAD) == 2  # 4 are held and 6 may wait
    assert [town.record(i).state for i in more[-2:]] == [State.DEAD] * 2
    with pytest.raises(TaskRejected, match="level1_full"):
        town.app.AsyncResult(more[-1]).get(timeout=5)


def test_models_versions_and_shapes_are_kept_apart(town: Town) -> None:
    town.send("embed")
    town.send("embed.v2")
    short, long = town.send("words", kwargs=text(1, 0)), town.send("words", kwargs=text(30, 3))
    assert town.names() == ["n1.0.enc", "n1.0.enc-2", "n1.0.lm"]
    assert town.record(short[0]).lane == "words|batch|lm|0"
    assert town.record(long[0]).lane == "words|batch|lm|3"
    town.bring_up("n1.0.lm")
    assert {(item.task_id, item.key.shape, item.size) for item in town.executor("n1.0.lm").items} == {
        (short[0], "0", 1.0),
        (long[0], "3", 30.0),
    }


def test_an_item_that_no_device_could_compute_is_dead_lettered(town: Town) -> None:
    [task_id] = town.send("huge")
    town.placement._housekeeping_s = -1e9
    town.step()
    assert town.record(task_id).state is State.DEAD
    assert "needs" in str(town.record(task_id).reason)


def test_items_that_wait_and_are_too_large_for_a_changed_table_are_refused_as_at_intake(town: Town) -> None:
    large = [town.send("words", kwargs=text(60, 0))[0] for _ in range(3)]
    [small] = town.send("words", kwargs=text(20, 0))
    changed = ResourceTable.parse(TABLE.replace("max_volume: 64", "max_volume: 32"), "table")
    town.store.publish_profiles({profile.name: profile.model_dump_json() for profile in changed})
    town.placement._housekeeping_s = -1e9
    town.step()

    reason = "its volume is 60, and no batch of words holds more than batch.max_volume, 32"
    for task_id in large:
        assert (town.record(task_id).state, town.record(task_id).reason) == (State.DEAD, Reason("above_bound", reason))
    with pytest.raises(TaskRejected, match="above_bound"):
        town.app.AsyncResult(large[0]).get(timeout=5)
    assert town.record(small).state is State.WAITING


@pytest.mark.parametrize("order", ["large first", "small first"])
def test_an_item_that_no_device_could_compute_takes_no_other_with_it(town: Town, order: str) -> None:
    kinds = (60, 20) if order == "large first" else (20, 60)
    ids = {size: town.app.send_task("wide", kwargs=text(size, 0), queue="brim.intake").id for size in kinds}
    town.step()
    town.placement._housekeeping_s = -1e9
    town.step()
    assert town.record(ids[60]).state is State.DEAD
    assert "too_large" in str(town.record(ids[60]).reason)
    town.bring_up("n1.0.wide")
    assert town.held("n1.0.wide") == {ids[20]}


def test_a_dead_executor_s_items_wait_again_and_only_sealed_ones_count_it(town: Town) -> None:
    sealed, spare = town.send()[0], ""
    town.bring_up()
    town.seal()
    [spare] = town.send()
    town.die()
    assert (town.record(sealed).state, town.record(sealed).losses) == (State.WAITING, 1)
    assert (town.record(spare).state, town.record(spare).losses) == (State.WAITING, 0)
    assert town.store.devices()[0].committed_mib == 0
    assert town.names() == []  # its model has a pause
    assert "executor_died" in str(town.record(sealed).reason)


def test_an_item_that_is_cancelled_leaves_its_executor_and_its_claim_is_refused(town: Town) -> None:
    ids = town.send(count=2)
    town.bring_up()
    pairs = [(item.task_id, item.attempt) for item in town.executor().items]
    town.store.cancel(ids[0], Reason("cancelled", "by the test"))
    view = town.executor()
    assert town.held() == {ids[1]}
    answers = dict(zip(pairs, town.store.claim_batch(view.name, view.boot, view.proc, pairs), strict=True))
    assert {pair[0]: answer for pair, answer in answers.items()} == {
        ids[0]: ClaimAnswer.CANCELLED,
        ids[1]: ClaimAnswer.GRANTED,
    }


def test_an_idle_sibling_takes_what_a_working_one_has_not_sealed(town: Town) -> None:
    town.send()
    town.bring_up()
    town.seal()
    spare = town.send(count=4)
    waiting = town.send(count=1)
    assert town.record(waiting[0]).state is State.WAITING
    town.wait_for_scale_out()
    assert town.names() == ["n1.0.enc", "n1.0.enc.2"]
    town.bring_up("n1.0.enc.2")
    assert town.held("n1.0.enc.2") >= set(waiting)
    town.end(town.seal("n1.0.enc.2"), "n1.0.enc.2")
    assert town.held("n1.0.enc.2") == set(spare)
    assert town.record(spare[0]).attempts == 2
    assert [line["event"] for line in town.store.story(spare[0])] == ["admitted", "placed", "lost", "placed"]


def test_an_executor_that_nobody_uses_is_drained_and_goes(town: Town) -> None:
    town.send("embed.v2")
    town.bring_up("n1.0.enc-2")
    town.end(town.seal("n1.0.enc-2"), "n1.0.enc-2")
    view = town.executor("n1.0.enc-2")
    assert view.phase is Phase.DRAINING
    assert view.reason is not None
    assert view.reason.code == "idle"
    town.die("n1.0.enc-2")
    assert town.names() == []
    events = [line["event"] for line in town.store.residency()]
    assert events == ["wanted", "up", "draining", "gone"]


def publish(town: Town, before: str, after: str) -> None:
    """A table with one thing changed."""
    table = ResourceTable.parse(TABLE.replace(before, after), "table")
    town.store.publish_profiles({profile.name: profile.model_dump_json() for profile in table})
    town.placement.batches.refresh_table()
    town.step()


def test_an_executor_whose_profile_has_changed_is_replaced(town: Town) -> None:
    town.send()
    town.bring_up()
    sealed = town.seal()
    [spare] = town.send()
    publish(town, "max_items: 4, per_unit_mib: 10", "max_items: 8, per_unit_mib: 10")
    view = town.executor()
    assert view.phase is Phase.DRAINING
    assert view.reason is not None
    assert view.reason.code == "profile_changed"
    assert town.record(spare).state is State.WAITING
    assert town.names() == ["n1.0.enc", "n1.0.enc.2"]
    town.end(sealed)
    town.die()
    town.bring_up("n1.0.enc.2")
    assert town.held("n1.0.enc.2") == {spare}
    town.send(count=10)
    assert len(town.held("n1.0.enc.2")) == 11


def test_of_several_such_executors_one_goes_at_a_time(town: Town) -> None:
    town.send()
    town.bring_up()
    town.seal()
    town.send(count=5)
    town.wait_for_scale_out()
    town.bring_up("n1.0.enc.2")
    publish(town, "max_items: 4, per_unit_mib: 10", "max_items: 3, per_unit_mib: 10")
    phases = [town.executor(name).phase for name in ("n1.0.enc", "n1.0.enc.2")]
    assert sorted(phases) == [Phase.DRAINING, Phase.UP]


def test_what_says_nothing_of_its_memory_and_batches_is_taken_at_once(town: Town) -> None:
    town.send("embed.v2")
    town.bring_up("n1.0.enc-2")
    sealed = town.seal("n1.0.enc-2")
    publish(town, "keep_warm_s: 0", "keep_warm_s: 600")
    town.end(sealed, "n1.0.enc-2")
    assert town.executor("n1.0.enc-2").phase is Phase.UP
    publish(town, "keep_warm_s: 0", "keep_warm_s: 0.001")
    assert town.executor("n1.0.enc-2").phase is Phase.DRAINING


def idle_executor(town: Town) -> ModelExecutor:
    """The process of the executor, which has received nothing and computes nothing."""
    view = town.executor()
    attempts = Attempts(WorkerIdentity("n1", "gpu0", view.queue, ("G0",), view.boot, ""), town.settings)
    return ModelExecutor(town.app, view.name, view.queue, view.boot, attempts, "executor@n1")


def test_an_item_whose_message_was_lost_on_its_way_to_a_working_executor_waits_again(town: Town) -> None:
    town.send()
    town.bring_up()
    town.seal()
    [lost] = town.send()
    executor = idle_executor(town)
    broker_list = town.settings.broker.global_keyprefix + executor.queue
    # While its message is in the queue, it may come;
    executor.look_for_lost(broker_list)
    executor.look_for_lost(broker_list)
    assert town.record(lost).state is State.PLACED
    # once it is not, it may have been received in this moment;
    town.store.client.delete(broker_list)
    executor.look_for_lost(broker_list)
    assert town.record(lost).state is State.PLACED
    # but by the next look it would have come.
    executor.look_for_lost(broker_list)
    assert town.record(lost).state is State.WAITING
    [line] = [line for line in town.store.story(lost) if line["event"] == "lost"]
    assert line["reason"]["code"] == "message_lost"
    town.step()
    assert town.record(lost).state is State.PLACED
    assert town.pushed() == 1


def test_an_end_that_the_server_has_lost_is_told_again(town: Town) -> None:
    town.send()
    town.bring_up()
    [pair] = town.seal()
    executor = idle_executor(town)
    executor._ended.append((*pair, Outcome(State.SUCCEEDED)))
    broker_list = town.settings.broker.global_keyprefix + executor.queue
    # What ends just now may stand in the book that was read;
    executor.look_for_lost(broker_list)
    assert town.record(pair[0]).state is State.RUNNING
    # it does not by the next look.
    executor.look_for_lost(broker_list)
    assert town.record(pair[0]).state is State.SUCCEEDED
    assert town.held() == set()


def test_an_unused_executor_makes_room_for_ordinary_tasks(town: Town) -> None:
    town.send("words", kwargs=text(1, 0))
    town.bring_up("n1.0.lm")
    town.end(town.seal("n1.0.lm"), "n1.0.lm")
    first, second = town.send("plain", count=2)
    assert town.record(first).state is State.PLACED
    assert town.record(second).state is State.WAITING
    assert town.executor("n1.0.lm").phase is Phase.DRAINING
    town.die("n1.0.lm")
    assert town.record(second).state is State.PLACED


def test_ordinary_tasks_do_not_keep_a_model_out_that_has_waited_longer(town: Town) -> None:
    running, _ = town.send("plain", count=2)
    town.send("words", kwargs=text(1, 0))
    later = town.send("plain", count=3)
    assert town.names() == []
    view = next(view for view in town.store.books(["G0"])[0] if view.task_id == running)
    town.store.lose(view, Reason("test", "ended by the test"), counts=True, max_attempts=1)
    town.step()
    assert town.names() == ["n1.0.lm"]
    assert [town.record(i).state for i in later] == [State.WAITING] * 3


def test_a_working_executor_drains_only_after_its_batch_and_gives_the_rest_back(town: Town) -> None:
    town.send()
    town.bring_up()
    sealed = town.seal()
    [spare] = town.send()
    town.store.drain_executor("n1.0.enc", Reason("node_draining", "by the test"))
    town.step()
    assert town.held() == {sealed[0][0]}
    assert town.record(spare).state is State.WAITING
    town.end(sealed)
    assert town.record(sealed[0][0]).state is State.SUCCEEDED


def test_a_retry_of_an_item_waits_in_level_1_again(town: Town) -> None:
    [task_id] = town.send()
    town.bring_up()
    pairs = town.seal()
    town.store.finish_batch(town.executor().proc, pairs)
    town.store.end_batch("n1.0.enc", [(*pairs[0], Outcome(State.HANDED_OVER, Reason("retried", "retried")))])
    town.app.send_task("embed", task_id=task_id, queue="brim.intake", retries=1)
    town.step()
    assert town.record(task_id).state is State.PLACED
    assert town.record(task_id).run == 2
    assert town.held() == {task_id}


def test_what_only_the_profile_can_say_is_refused_in_the_header(town: Town) -> None:
    [task_id] = town.send(headers={"brim": {"vram_mib": 100}})
    assert town.record(task_id).state is State.DEAD
    assert "is batched" in str(town.record(task_id).reason)


def test_an_item_that_has_expired_is_not_sealed(town: Town) -> None:
    late, fine = town.send(expires=0.05)[0], town.send()[0]
    town.bring_up()
    wait_until(lambda: (town.record(late).expires_s or 0) < town.store.server_ms() / 1000, what="it has expired")
    assert [i for i, _ in town.seal()] == [fine]
    town.placement._housekeeping_s = -1e9
    town.step()
    assert town.record(late).state is State.EXPIRED
    assert town.held() == {fine}


@pytest.fixture
def brim(
    town: Town, valkey_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a command on this town; what it printed."""
    monkeypatch.setenv("BRIM_REDIS__URL", valkey_url)
    monkeypatch.setenv("BRIM_BROKER__GLOBAL_KEYPREFIX", town.settings.broker.global_keyprefix)

    def run(*argv: str) -> str:
        cli.app(argv, standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_explain_shows_a_batched_task_s_executors_and_the_bound_that_is_in_the_way(
    town: Town, brim: Callable[..., str]
) -> None:
    ids = town.send(count=5)
    first = json.loads(brim("explain", ids[0], "--json"))
    assert [(each["phase"], each["obstacle"]["code"]) for each in first["executors"]] == [
        ("starting", "executor_starting")
    ]
    town.bring_up()
    town.seal()
    more = town.send(count=5)
    held, waits = ids[0], more[-1]
    told = brim("explain", waits)
    assert f"embed  {waits}  waiting" in told
    assert "batch     model enc, a volume of 1" in told
    assert "before it 1 in its lane" in told
    assert "the task set behind the one that it computes is full: 5 items, and a batch holds 4 [max_items]" in told
    assert "one more  would reserve 1312 MiB at least" in told
    assert "one more is started only once an item has waited for 1 s [scale_out]" in told
    assert "room      gpu0@n1" in told
    told = brim("explain", held)
    assert "is on     n1.0.enc" in told
    assert "holds it" in told
    [executor] = json.loads(brim("explain", held, "--json"))["executors"]
    assert (executor["executor"], executor["state"], executor["holds"]) == ("n1.0.enc", "working", True)
    assert "executor  n1.0.enc" in brim("show", held)
    assert "batch     model enc, a volume of 1" in brim("show", held)


def test_explain_says_which_device_is_too_small_for_a_batched_task_s_executor(
    town: Town, brim: Callable[..., str]
) -> None:
    [task_id] = town.send("huge")
    told = json.loads(brim("explain", task_id, "--json"))
    assert told["executors"] == []
    assert told["no_more"] is None
    assert [(site["name"], site["obstacle"]["code"]) for site in told["sites"]] == [("gpu0@n1", "too_large")]
    assert "its model has no executor" in brim("explain", task_id)
