"""The scripts of model executors through every transition, in any order, by several clients, against a model.

As in `test_scripts_model`, calls are stale, repeated and out of order as often as not: epochs, attempts, boots and
views of long ago are used again. After each step everything in Redis must be as the model says.

``BRIM_MODEL_EXAMPLES=2000`` tries so many sequences instead of a few.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from brim.core.batching import Batched, BatchKey, ModelKey
from brim.core.model import LIVE, TERMINAL, AttemptView, Demand, Identity, Node, Reason, State
from brim.store import FencedError, Store
from brim.store.types import (
    Admission,
    CommitItem,
    DeviceFigures,
    DeviceRegistration,
    ExecutorView,
    HeldItem,
    MemoryReport,
    NodeRegistration,
    Outcome,
    Peeked,
    WantedExecutor,
)
from brim_services.invariants import check_invariants
from faults.executors_model import HEADROOM_MIB, TOTAL_MIB, Fenced, Model

T = TypeVar("T")

LONG = int(os.environ.get("BRIM_MODEL_EXAMPLES", "0"))
WHY = Reason("test", "because the test says so")
MODEL = ModelKey("enc", "")
KEY = BatchKey("embed", MODEL)
LANE = "embed|lane"
DEVICES = ("A0", "A1")
EXECUTORS = {"x0": "A0", "x1": "A0", "x2": "A1"}
TASKS = ("a", "b", "c", "d")
PROCS = {"x0": ("10.1", "10.2"), "x1": ("11.1",), "x2": ("12.1",)}
BOOTS = ("w1", "w2")
CLIENTS = 3
CANCELLABLE = (State.WAITING, State.PLACED, State.RUNNING)

clients = st.integers(0, CLIENTS - 1)
names = st.sampled_from(sorted(EXECUTORS))
tasks = st.sampled_from(TASKS)
boots = st.sampled_from([BOOTS[0], *BOOTS])
marks = st.sampled_from([False, False, True, None])


class ExecutorScripts(RuleBasedStateMachine):
    """The machine: each rule makes one call, or a few, through one of the clients, and through the model."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.namespace = f"x{uuid.uuid4().hex[:10]}:"
        self.connections = [redis.Redis.from_url(url, single_connection_client=True) for _ in range(CLIENTS)]
        self.stores = [Store(connection, f"{self.namespace}brim:") for connection in self.connections]
        self.model = Model(DEVICES)
        self.numbers = itertools.count(1)
        self.epochs = [0]
        self.commits: list[CommitItem] = []
        self.views: list[AttemptView] = []
        self.mirror: dict[str, ExecutorView] = {}

    @property
    def store(self) -> Store:
        return self.stores[0]

    @initialize()
    def start(self) -> None:
        self.fail_over(0, "p")
        found = [DeviceRegistration(uuid_, i, "SIM", TOTAL_MIB, HEADROOM_MIB) for i, uuid_ in enumerate(DEVICES)]
        self.store.register_node(NodeRegistration(Node("n1"), "boot", 1, ["embed"], {}, found))
        assert self.store.set_device_state("n1", "boot", DEVICES, "up")

    # -- natural lives ---------------------------------------------------------------------------------------

    @rule(client=clients, data=st.data(), name=names, steps=st.integers(1, 4))
    def an_executor_lives(self, client: int, data: st.DataObject, name: str, steps: int) -> None:
        """Wanted, begun, up; then it claims what it holds; once it drains, it goes."""
        for _ in range(steps):
            executor = self.model.executors.get(name)
            if executor is None:
                self.want(client, self.model.epoch, name, data.draw(st.sampled_from([2000, 2000, 4000]), "MiB"))
            elif executor.state == "draining":
                self.goes(client, name)
            elif not executor.boot:
                self.begin(client, name, BOOTS[0], PROCS[name][0])
            elif executor.state == "starting":
                self.up(client, name, executor.boot)
            else:
                held = [(t, a) for t, a in self.held_by(name) if not executor.items[a]]
                self.claim(client, name, executor.boot, executor.proc, held, data.draw(marks, "ahead"))

    @rule(client=clients, data=st.data(), task_id=tasks, steps=st.integers(1, 5))
    def an_item_lives(self, client: int, data: st.DataObject, task_id: str, steps: int) -> None:
        """Admitted, committed, claimed, finished, ended, purged."""
        for _ in range(steps):
            self.views = [*self.views[-20:], *self.views_of(task_id)]
            item = self.model.items.get(task_id)
            if item is None:
                self.admit(client, task_id)
            elif item.state is State.WAITING:
                up = [name for name, executor in self.model.executors.items() if executor.state == "up"]
                name = data.draw(st.sampled_from([*up * 3, *sorted(EXECUTORS)]), "executor")
                self.commit(client, self.model.epoch, self.commitment(task_id, name))
            elif item.state in TERMINAL:
                self.after_the_end(client, task_id)
            else:
                assert item.attempt is not None
                pair, executor = (task_id, item.attempt), self.model.executors[item.executor]
                if item.state is State.PLACED:
                    self.claim(client, item.executor, executor.boot, executor.proc, [pair], data.draw(marks, "ahead"))
                elif item.state is State.RUNNING:
                    self.finish(client, pair, item.proc)
                else:
                    outcome = data.draw(st.sampled_from([State.SUCCEEDED, State.FAILED]), "outcome")
                    self.end(client, item.executor, pair, outcome)

    # -- level 1 and placement -------------------------------------------------------------------------------

    def admit(self, client: int, task_id: str) -> None:
        raw = b"%d" % next(self.numbers)
        broker = f"{self.namespace}intake"
        self.store.client.lpush(broker, raw)
        admission = Admission(
            source=Peeked(broker, raw),
            identity=Identity(task_id, 0, 0),
            task="embed",
            lane=LANE,
            demand=Demand(0),
            context_mib=300,
            priority=5,
            head=b"<",
            tail=b">",
            batched=Batched(MODEL.model, MODEL.version, "", 1.0),
        )
        assert self.stores[client].admit([admission]) == ["admitted"]
        self.model.admit(task_id)

    @rule(client=clients, data=st.data(), task_id=tasks, name=names, again=st.booleans())
    def commit_whatever(self, client: int, data: st.DataObject, task_id: str, name: str, again: bool) -> None:
        """By any placement that ever was active; from level 1, from a sibling that may hold it, or again."""
        if task_id not in self.model.items:
            return
        item = self.model.items[task_id]
        sources = [None, *((item.executor, item.attempt) for _ in range(3) if item.attempt and item.executor != name)]
        made = self.commitment(task_id, name, data.draw(st.sampled_from(sources), "source"))
        known = [commit for commit in self.commits[-5:] if commit.item.task_id in self.model.items]
        chosen = data.draw(st.sampled_from(known), "which") if again and known else made
        self.commit(client, self.some_epoch(data) or self.model.epoch, chosen)

    def commitment(self, task_id: str, name: str, source: tuple[str, str] | None = None) -> CommitItem:
        number = next(self.numbers)
        item = HeldItem(f"{self.model.epoch}-x-{number}", task_id, KEY, float(number), 1.0, LANE, sealed=False)
        return CommitItem(item, b"slot", name, self.queue(name), "n1", EXECUTORS[name], source)

    def queue(self, name: str) -> str:
        return f"{self.namespace}gpu.{name}"

    def commit(self, client: int, epoch: int, commit: CommitItem) -> None:
        item = commit.item
        repeated = self.model.items[item.task_id].attempt == item.attempt
        expected = self.model.commit(epoch, item.task_id, item.attempt, commit.executor, commit.source)
        if expected == "fenced":
            with pytest.raises(FencedError):
                self.stores[client].commit_items(epoch, [commit])
            return
        assert self.stores[client].commit_items(epoch, [commit]) == [expected]
        if expected == "committed" and not repeated:
            self.commits.append(commit)
            self.mirror_commit(commit)

    def mirror_commit(self, commit: CommitItem) -> None:
        """Placement knows what it has committed itself."""
        taker = self.mirror[commit.executor]
        self.mirror[taker.name] = replace(taker, items=[*taker.items, commit.item])
        if commit.source is not None:
            sibling = self.mirror[commit.source[0]]
            kept = [item for item in sibling.items if item.attempt != commit.source[1]]
            self.mirror[sibling.name] = replace(sibling, items=kept)

    @rule(client=clients, holder=st.sampled_from(["p", "q"]))
    def fail_over(self, client: int, holder: str) -> None:
        self.store.resign("p")
        self.store.resign("q")
        self.model.epoch, _ = self.stores[client].elect(holder, 3600)
        self.epochs.append(self.model.epoch)

    def some_epoch(self, data: st.DataObject) -> int | None:
        """None: somebody else than a placement says so; the active placement's; or one of long ago."""
        return data.draw(st.sampled_from([None, None, self.model.epoch, self.model.epoch, self.epochs[-2], 0]), "epoch")

    @rule(client=clients, data=st.data(), name=names, vram_mib=st.sampled_from([1000, 5000, 9000]))
    def want_whatever(self, client: int, data: st.DataObject, name: str, vram_mib: int) -> None:
        self.want(client, self.some_epoch(data) or self.model.epoch, name, vram_mib)

    def want(self, client: int, epoch: int, name: str, vram_mib: int) -> None:
        device = EXECUTORS[name]
        wanted = WantedExecutor(name, "n1", device, 0, f"gpu.{name}", "enc", "", vram_mib, "{}")
        expected = self.model.want(epoch, name, device, vram_mib)
        if expected == "fenced":
            with pytest.raises(FencedError):
                self.stores[client].want_executor(epoch, wanted)
            return
        answer = self.stores[client].want_executor(epoch, wanted)
        assert f"{answer.status} {answer.short}".strip() == expected
        assert self.model.committed(device) + HEADROOM_MIB <= TOTAL_MIB or expected != "wanted"

    @rule(client=clients, data=st.data(), name=names)
    def drain(self, client: int, data: st.DataObject, name: str) -> None:
        epoch = self.some_epoch(data)
        expected = _unless_fenced(lambda: self.model.drain(name, epoch))
        assert _unless_fenced(lambda: self.stores[client].drain_executor(name, WHY, epoch)) == expected

    # -- the executor's own calls, in and out of turn --------------------------------------------------------

    @rule(client=clients, name=names, boot=boots, data=st.data(), up=st.booleans())
    def a_process_says_who_it_is(self, client: int, name: str, boot: str, data: st.DataObject, up: bool) -> None:
        if up:
            self.up(client, name, boot)
        else:
            self.begin(client, name, boot, data.draw(st.sampled_from(PROCS[name]), "proc"))

    def begin(self, client: int, name: str, boot: str, proc: str) -> None:
        found = self.stores[client].executor_begins(name, EXECUTORS[name], boot, proc)
        assert found == self.model.begin(name, boot, proc)

    def up(self, client: int, name: str, boot: str) -> None:
        assert self.stores[client].executor_is_up(name, boot) == self.model.up(name, boot)

    @rule(client=clients, name=names, ceiling=st.sampled_from([None, 4.0, 16.5]), what=st.integers(0, 2))
    def it_notes_something(self, client: int, name: str, ceiling: float | None, what: int) -> None:
        store = self.stores[client]
        if what == 0:
            store.note_ceiling(name, ceiling)
            self.model.note(name, ceiling)
        elif what == 1:
            store.note_start(name)
            self.model.note_start(name)
        else:
            store.note_deadline(name, ceiling)

    @rule(client=clients, data=st.data(), name=names, boot=boots, ahead=marks)
    def it_claims_whatever(self, client: int, data: st.DataObject, name: str, boot: str, ahead: bool | None) -> None:
        """What it holds, what a sibling holds, what is over, and what was never there; in one script."""
        old = [(commit.item.task_id, commit.item.attempt) for commit in self.commits[-6:]]
        known = st.sampled_from([*self.held_by(name) * 3, *old, ("nobody", "0-x-0")])
        pairs = data.draw(st.lists(known, min_size=1, max_size=4, unique=True), "items")
        self.claim(client, name, boot, data.draw(st.sampled_from(PROCS[name]), "proc"), pairs, ahead)

    def claim(
        self, client: int, name: str, boot: str, proc: str, pairs: Sequence[tuple[str, str]], ahead: bool | None
    ) -> None:
        if pairs:
            found = self.stores[client].claim_batch(name, boot, proc, pairs, ahead)
            assert found == self.model.claim(name, boot, proc, pairs, ahead)

    @rule(client=clients, data=st.data(), proc=st.sampled_from(["", "10.1", "11.1"]), ends=st.booleans())
    def it_finishes_or_ends_whatever(self, client: int, data: st.DataObject, proc: str, ends: bool) -> None:
        if self.commits:
            commit = data.draw(st.sampled_from(self.commits[-6:]), "attempt")
            pair = (commit.item.task_id, commit.item.attempt)
            if ends:
                self.end(client, commit.executor, pair, State.SUCCEEDED)
            else:
                self.finish(client, pair, proc)

    def finish(self, client: int, pair: tuple[str, str], proc: str) -> None:
        assert self.stores[client].finish_batch(proc, [pair]) == [self.model.finish(*pair, proc)]

    def end(self, client: int, name: str, pair: tuple[str, str], state: State) -> None:
        outcome = Outcome(state, WHY if state is State.FAILED else None)
        assert self.stores[client].end_batch(name, [(*pair, outcome)]) == [self.model.end(name, *pair, state)]

    # -- agents, users ---------------------------------------------------------------------------------------

    def held_by(self, name: str) -> list[tuple[str, str]]:
        found = [(task_id, item) for task_id, item in self.model.items.items() if item.executor == name]
        return [(task_id, item.attempt) for task_id, item in found if item.attempt and item.state in LIVE]

    def views_of(self, task_id: str) -> list[AttemptView]:
        """An item as its agent or placement would see it now."""
        item = self.model.items.get(task_id)
        if item is None or item.attempt is None or item.state not in LIVE:
            return []
        device, lives = EXECUTORS[item.executor], (item.proc, item.state, item.boot, 0.0, None, LANE, 0)
        return [AttemptView(task_id, item.attempt, (device,), 0, *lives, executor=item.executor)]

    @rule(client=clients, data=st.data(), task_id=tasks, counts=st.booleans(), most=st.integers(1, 3))
    def lose(self, client: int, data: st.DataObject, task_id: str, counts: bool, most: int) -> None:
        """With a view of now or of a moment ago; by an agent or by a placement."""
        now = self.views_of(task_id)
        if not now and not self.views:
            return
        view, epoch = data.draw(st.sampled_from([*now * 3, *self.views[-4:]]), "view"), self.some_epoch(data)
        expected = _unless_fenced(
            lambda: self.model.lose(view.task_id, view.attempt, view.state, counts=counts, most=most, epoch=epoch)
        )
        store = self.stores[client]
        found = _unless_fenced(lambda: str(store.lose(view, WHY, counts=counts, max_attempts=most, epoch=epoch)))
        assert found == expected

    @rule(client=clients, task_id=tasks)
    def cancel(self, client: int, task_id: str) -> None:
        expected = self.model.close(task_id, State.CANCELLED, CANCELLABLE)
        assert str(self.stores[client].close(task_id, State.CANCELLED, WHY, CANCELLABLE)) == expected

    @rule(task_id=tasks)
    def its_time_is_over(self, task_id: str) -> None:
        """Its ``expires`` passes: it may be claimed no more."""
        if task_id in self.model.items:
            self.store.client.hset(self.store.keys.task(task_id), "expires_ms", 1)
            self.model.items[task_id].lapsed = True

    @rule(client=clients, task_id=tasks)
    def after_the_end(self, client: int, task_id: str) -> None:
        for owed in self.store.owed(10):
            self.stores[client].answered(owed)
            self.model.items[owed.task_id].owed = False
        assert self.stores[client].purge(task_id) == self.model.purge(task_id)

    @rule(client=clients, name=names)
    def goes(self, client: int, name: str) -> None:
        """Its process is gone: not while it holds items."""
        view = next((view for view in self.store.executors() if view.name == name), None)
        if view is None:
            assert name not in self.model.executors
            return
        assert self.stores[client].executor_gone(view, WHY, [self.queue(name)]) == self.model.gone(name)

    @rule(client=clients, name=names, data=st.data())
    def a_process_is_gone(self, client: int, name: str, data: st.DataObject) -> None:
        proc, device = data.draw(st.sampled_from(PROCS[name]), "proc"), EXECUTORS[name]
        assert self.stores[client].process_gone(device, proc) == self.model.process_gone(device, proc)

    @rule(device=st.sampled_from(DEVICES), mib=st.sampled_from([0, 500, 3000]))
    def memory_is_reported(self, device: str, mib: int) -> None:
        """The processes that the book knows hold so much each, and nobody else holds anything."""
        known = dict.fromkeys(self.model.books[device].processes, mib)
        used = sum(known.values())
        figures = DeviceFigures(total_mib=TOTAL_MIB, used_mib=used, free_mib=TOTAL_MIB - used, processes=known)
        report = MemoryReport(node="n1", boot="boot", sampled_ms=self.store.server_ms(), devices={device: figures})
        assert self.store.report(report)
        self.model.books[device].processes.update(known)

    @rule(device=st.sampled_from(DEVICES), state=st.sampled_from(["up", "up", "draining"]))
    def a_device_changes(self, device: str, state: str) -> None:
        assert self.store.set_device_state("n1", "boot", [device], state)
        self.model.books[device].state = state

    # -- what must hold after each step ----------------------------------------------------------------------

    @invariant()
    def redis_is_as_the_model_says(self) -> None:
        store, model = self.store, self.model
        if not model.epoch:
            return
        assert store.audit() == []
        views = {view.name: view for view in store.executors()}
        assert views.keys() == model.executors.keys()
        for name, executor in model.executors.items():
            view = views[name]
            assert (view.phase, view.boot, view.proc) == (executor.state, executor.boot, executor.proc)
            assert (view.ceiling, view.batch, view.ahead) == (executor.ceiling, executor.batch, executor.ahead > 0)
            assert {item.attempt: item.sealed for item in view.items} == executor.items
            assert store.client.llen(self.queue(name)) == model.pushed.get(name, 0)
        records = {record.task_id: record for record in store.records(sorted(model.items))}
        assert records.keys() == model.items.keys()
        for task_id, item in model.items.items():
            record = records[task_id]
            assert (record.state, record.losses, record.cancelling) == (item.state, item.losses, item.cancelling)
            if item.state in LIVE:
                assert record.attempt == item.attempt
        waiting = {task_id for task_id, item in model.items.items() if item.state is State.WAITING}
        assert {i.decode() for i in store.client.zrange(store.keys.lane(LANE), 0, -1)} == waiting
        for device in store.devices():
            assert (device.committed_mib, device.external_mib) == (model.committed(device.uuid), 0)
            assert device.state == model.books[device.uuid].state
        self.placement_has_heard(views)

    def placement_has_heard(self, views: Mapping[str, ExecutorView]) -> None:
        """What placement mirrors of executors by what it is told of is what there is."""
        changes = self.store.take_changes(self.model.epoch, 100)
        self.mirror |= {view.name: view for view in changes.executors}
        for name in changes.gone_executors:
            self.mirror.pop(name, None)
        told, there = ({name: _mirrored(view) for name, view in found.items()} for found in (self.mirror, views))
        assert told == there

    def teardown(self) -> None:
        """Everything comes to its end; then the invariants must hold, and nothing may be left."""
        try:
            for view in self.store.executors():
                for attempt in self.store.item_attempts([view]):
                    self.store.lose(attempt, WHY, counts=True, max_attempts=1)
                assert self.store.executor_gone(view, WHY, [self.queue(view.name)])
            for task_id in TASKS:
                self.store.cancel(task_id, WHY)
            for owed in self.store.owed(100):
                self.store.answered(owed)
            assert check_invariants(self.store, settled=True) == []
        finally:
            for connection in self.connections:
                connection.close()


def _mirrored(view: ExecutorView) -> tuple[object, ...]:
    """What placement goes by."""
    return view.phase, view.ceiling, view.batch, view.ahead, {item.attempt: item.sealed for item in view.items}


def _unless_fenced(call: Callable[[], T]) -> T | str:
    try:
        return call()
    except (Fenced, FencedError):
        return "fenced"


@pytest.mark.timeout(0 if LONG else 600)
def test_the_scripts_of_executors_do_what_the_model_says(valkey_url: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: ExecutorScripts(valkey_url),
        settings=settings(
            max_examples=LONG or 25,
            stateful_step_count=50,
            deadline=None,
            phases=set(Phase) if LONG else set(Phase) - {Phase.shrink, Phase.explain},
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
