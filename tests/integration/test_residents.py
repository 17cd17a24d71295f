"""What an agent does about the model executors of its node, on a real server; the test plays all else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import redis

from brim.celery.envelope import parse, split
from brim.core.batching import Batched, BatchKey, ModelKey, Phase
from brim.core.model import AttemptView, Demand, Identity, Node, Reason, State
from brim.core.oversight import Remembered, Retire, Sight, Start, decide
from brim.core.posts import Worker
from brim.settings import Settings
from brim.store import Store
from brim.store.types import (
    Admission,
    CommitItem,
    DeviceRegistration,
    ExecutorView,
    HeldItem,
    NodeRegistration,
    Peeked,
    WantedExecutor,
)
from brim_services.agent.residents import Residents, post_name, posts

NAME, QUEUE, KEY = "n1.0.enc", "gpu.n1.0.enc", BatchKey("embed", ModelKey("enc"))
RAW = b'{"body": "W10=", "headers": {"id": "%s", "task": "embed"}, "properties": {}}'


@dataclass
class Node1:
    """A node with one device, a model executor that is wanted there, and what its agent has settled and killed."""

    store: Store
    settings: Settings
    epoch: int
    settled: list[tuple[str, str, bool]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.residents = Residents(self.store, self.settings, self.settle, self.killed.append)

    def settle(self, attempt: AttemptView, reason: Reason, counts: bool) -> None:
        self.settled.append((attempt.task_id, reason.code, counts))
        self.store.lose(attempt, reason, counts=counts, max_attempts=3)

    def want(self) -> ExecutorView:
        wanted = WantedExecutor(NAME, "n1", "G0", 0, QUEUE, "enc", "", 1000, "{}")
        assert self.store.want_executor(self.epoch, wanted).status == "wanted"
        return self.view()

    def begin(self, boot: str = "b1", proc: str = "10.1") -> Worker:
        """Its process has begun and is up; how the agent sees its worker."""
        assert self.store.executor_begins(NAME, "G0", boot, proc)
        assert self.store.executor_is_up(NAME, boot)
        return Worker(posts([self.view()])[0], boot, ready=True, executors=frozenset({proc}))

    def give(self, task_id: str, *, seal: bool) -> None:
        """An item, sealed or not."""
        raw = RAW % task_id.encode()
        self.store.client.lpush(f"{self.settings.broker.global_keyprefix}brim.intake", raw)
        prepared, batched = split(parse(raw)), Batched("enc", "", "", 1.0)
        source = Peeked(f"{self.settings.broker.global_keyprefix}brim.intake", raw)
        lane = batched.lane("embed")
        self.store.admit(
            [
                Admission(
                    source,
                    Identity(task_id, 0, 0),
                    "embed",
                    lane,
                    Demand(1),
                    0,
                    0,
                    prepared.head,
                    prepared.tail,
                    batched=batched,
                )
            ]
        )
        item = HeldItem(f"a-{task_id}", task_id, KEY, 1.0, 1.0, lane, sealed=False)
        queue = self.settings.broker.global_keyprefix + QUEUE
        assert self.store.commit_items(self.epoch, [CommitItem(item, b"", NAME, queue, "n1", "G0")]) == ["committed"]
        if seal:
            self.store.claim_batch(NAME, self.view().boot, self.view().proc, [(task_id, item.attempt)])

    def view(self) -> ExecutorView:
        [view] = self.store.executors_named([NAME])
        return view

    def look(self, *workers: Worker, draining: bool = False) -> list[ExecutorView]:
        return self.residents.look(
            self.store.executors_on(["G0"]),
            self.store.server_ms() / 1000,
            {worker.post.name: worker for worker in workers},
            draining=draining,
        )

    def state(self, task_id: str) -> State:
        record = self.store.record(task_id)
        assert record is not None
        return record.state


@pytest.fixture
def node(valkey_url: str, namespace: str) -> Iterator[Node1]:
    client = redis.Redis.from_url(valkey_url)
    settings = Settings.model_validate({"redis": {"url": valkey_url}, "broker": {"global_keyprefix": namespace}})
    store = Store(client, settings.key_prefix)
    device = DeviceRegistration("G0", 0, "SIM", 10_000, 500)
    assert store.register_node(NodeRegistration(Node("n1"), "boot", 1, ["embed"], {}, [device]))
    made = Node1(store, settings, store.elect("test", 3600)[0])
    yield made
    assert store.audit() == []
    client.close()


def actions(views: list[ExecutorView], *workers: Worker) -> list[object]:
    """What follows for the agent from what is wanted and what runs."""
    by_name = {worker.post.name: worker for worker in workers}
    found, _ = decide(Sight(0.0, by_name, [], {}, wanted=posts(views)), Remembered(), 10.0)
    return list(found)


def test_a_wanted_executor_is_started_as_a_worker_of_its_own(node: Node1) -> None:
    node.want()
    views = node.look()
    [start] = actions(views)
    assert isinstance(start, Start)
    assert (start.post.name, start.post.queue, start.post.devices, start.post.pool) == (
        "gpu0.enc",
        QUEUE,
        ("G0",),
        "threads",
    )
    assert dict(start.post.variables) == {"BRIM_MODEL_EXECUTOR": NAME}
    assert post_name(node.view()) == "gpu0.enc"


def test_one_that_runs_stays_and_one_that_drains_and_holds_nothing_is_retired(node: Node1) -> None:
    node.want()
    worker = node.begin()
    assert actions(node.look(worker), worker) == []
    node.give("t1", seal=True)
    node.store.drain_executor(NAME, Reason("idle", "by the test"))
    assert actions(node.look(worker), worker) == []
    pair = ("t1", "a-t1")
    node.store.finish_batch("10.1", [pair])
    attempt = node.store.item_attempts([node.view()])[0]
    node.settle(attempt, Reason("test", "given back"), False)
    assert actions(node.look(worker), worker) == [Retire("gpu0.enc")]


def test_a_dead_one_s_items_are_put_back_and_its_reservation_and_queue_go(node: Node1) -> None:
    node.want()
    worker = node.begin()
    node.give("sealed", seal=True)
    node.give("spare", seal=False)
    dead = Worker(worker.post, trouble="was killed by SIGKILL")
    assert node.look(dead) == []
    assert sorted(node.settled) == [("sealed", "executor_died", True), ("spare", "executor_died", False)]
    assert [node.state(task_id) for task_id in ("sealed", "spare")] == [State.WAITING] * 2
    assert node.store.executors() == []
    assert node.store.devices()[0].committed_mib == 0
    assert not node.store.client.exists(node.settings.broker.global_keyprefix + QUEUE)
    gone = node.store.residency()[-1]
    assert (gone["event"], gone["reason"]["message"]) == (
        "gone",
        f"the process of model executor {NAME} was killed by SIGKILL",
    )
    assert actions([], dead) == [Retire("gpu0.enc")]


def test_one_whose_process_never_began_is_given_up(node: Node1) -> None:
    view = node.want()
    post = posts([view])[0]
    assert len(node.look(Worker(post, "b1"))) == 1  # it is starting
    assert len(node.look(Worker(post))) == 1  # so it is between two starts
    assert node.look(Worker(post, trouble="exited with code 1")) == []
    assert node.store.executors() == []


def test_one_that_could_not_load_its_model_goes_with_that_reason(node: Node1) -> None:
    node.want()
    assert node.store.executor_begins(NAME, "G0", "b1", "10.1")
    node.store.drain_executor(NAME, Reason("load_failed", "no such file"))
    assert node.look() == []
    assert node.store.residency()[-1]["reason"] == {"code": "load_failed", "message": "no such file"}


def test_while_the_node_drains_all_of_them_do(node: Node1) -> None:
    node.want()
    worker = node.begin()
    node.give("t1", seal=True)
    node.look(worker, draining=True)
    assert node.view().phase is Phase.DRAINING
    assert len(node.look(worker, draining=True)) == 1
    node.residents.bury(node.view(), Reason("node_draining", "cut short"), counts=False)
    assert node.settled == [("t1", "node_draining", False)]


def test_one_that_computes_beyond_its_time_limit_is_killed(node: Node1) -> None:
    node.want()
    worker = node.begin()
    node.store.note_deadline(NAME, -4.0)
    node.look(worker)
    assert node.killed == []  # it may still end itself
    node.store.note_deadline(NAME, -6.0)
    node.look(worker)
    assert node.killed == ["10.1"]
    node.store.note_deadline(NAME, None)
    node.look(worker)
    assert node.killed == ["10.1"]
