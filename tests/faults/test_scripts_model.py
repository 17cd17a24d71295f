"""Every script through every transition, in any order, by several clients, against a model in plain Python.

Calls are stale, repeated and out of order as often as not: attempts, epochs, boots, reports and views of long ago
are used again. After each step everything in Redis must be as the model says.

``BRIM_MODEL_EXAMPLES=2000`` tries so many sequences instead of a few, and makes one that fails as short as it can
be, which takes minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from brim.core.model import LIVE, AttemptView, Demand, Device, Identity, Node, Reason, State
from brim.store import FencedError, Store
from brim.store.types import (
    Admission,
    Commit,
    DeviceFigures,
    DeviceRegistration,
    MemoryReport,
    NodeRegistration,
    NodeView,
    Outcome,
    Peeked,
    StoredResult,
)
from brim_services.invariants import check_invariants
from brim_services.mirror import Mirror
from faults.scripts_model import (
    CONTEXT_MIB,
    EXECUTORS,
    HEADROOM_MIB,
    HOST_CPUS,
    HOST_RAM_MIB,
    TOTAL_MIB,
    WHOLE_MIB,
    Fenced,
    Message,
    Model,
    Sample,
    Task,
    lane_of,
)

T = TypeVar("T")

LONG = int(os.environ.get("BRIM_MODEL_EXAMPLES", "0"))
WHY = Reason("test", "because the test says so")
ANOTHER = Reason("executor_died", "executor was killed")
UNESTIMATED = "?t"
TASKS = ("a", "b", "c")
NODES = {"n1": ("A0", "A1"), "n2": ("B0",)}
HOMES = {uuid_: node for node, uuids in NODES.items() for uuid_ in uuids}
HOSTS = ((0.5, 10), (0.0, 10), (0.25, 0))
"""CPUs and RAM that attempts ask of their host, in turn."""
CHOICES = (("A0",), ("A1",), ("B0",), ("A0", "A1"))
PROCS = ("10.1", "11.1")
CLIENTS = 3
CANCELLABLE = (
    State.SCHEDULED,
    State.WAITING,
    State.HANDED_OVER,
    State.PLACED,
    State.CLAIMED,
    State.RUNNING,
)
EXPIRABLE = (State.SCHEDULED, State.WAITING, State.PLACED, State.CLAIMED)

choices = st.sampled_from(CHOICES)
closings = st.sampled_from(
    [
        (State.CANCELLED, CANCELLABLE),
        (State.CANCELLED, CANCELLABLE),
        (State.EXPIRED, EXPIRABLE),
        (State.DEAD, (State.WAITING,)),
    ]
)
clients = st.integers(0, CLIENTS - 1)
tasks = st.sampled_from(TASKS)
amounts = st.sampled_from([1000, 2000, WHOLE_MIB, 4000, 9000])
wishes = st.sampled_from(["plain", "plain", "later", "expires", "expires", "refused", "revoked", "orphan"])
procs = st.sampled_from(PROCS)
boots = st.sampled_from(["w1", "w2"])
outcomes = st.sampled_from(
    [
        State.SUCCEEDED,
        State.SUCCEEDED,
        State.FAILED,
        State.HANDED_OVER,
        State.HANDED_OVER,
        State.CANCELLED,
        State.EXPIRED,
    ]
)
leftovers = st.sampled_from([None, (0, 0), (400, 400), (2500, 0), (300, 2500)])
"""By device."""
processes = st.fixed_dictionaries({}, optional=dict.fromkeys(PROCS, st.sampled_from([None, None, 0, 700, 3500])))
moves = st.sampled_from(
    [
        *["next_step"] * 10,
        *["call_out_of_turn"] * 2,
        *["lose"] * 2,
        *["close"] * 2,
        "retry_arrives",
        *["memory_is_reported"] * 3,
        "process_is_replaced",
    ]
)


class Scripts(RuleBasedStateMachine):
    """The machine: each rule makes one call, or a few, through one of the clients, and through the model."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.namespace = f"m{uuid.uuid4().hex[:10]}:"
        self.list, self.queue = f"{self.namespace}brim.intake", f"{self.namespace}gpu"
        self.connections = [redis.Redis.from_url(url, single_connection_client=True) for _ in range(CLIENTS)]
        self.stores = [Store(connection, f"{self.namespace}brim:") for connection in self.connections]
        self.model = Model()
        self.mirror = Mirror()
        self.numbers = itertools.count(1)
        self.epochs = [0]
        self.attempts: list[Commit] = []
        self.views: list[AttemptView] = []
        self.boots: dict[str, list[str]] = {name: ["never"] for name in NODES}
        self.samples: list[Sample] = []

    @property
    def store(self) -> Store:
        return self.stores[0]

    def begin(self, client: int) -> Store:
        """The next step, made through this client."""
        self.model.step += 1
        return self.stores[client]

    @initialize()
    def start(self) -> None:
        self.elect(0, "p")
        for name, devices in NODES.items():
            self.register(0, name, devices)

    # -- what happens to one task ------------------------------------------------------------------------------

    @rule(client=clients, data=st.data(), task_id=tasks, moves=st.lists(moves, min_size=1, max_size=12))
    def live_through(self, client: int, data: st.DataObject, task_id: str, moves: Sequence[str]) -> None:
        """Natural steps of a task, disturbed by what concerns the same task."""
        for move in moves:
            self.views = [*self.views[-20:], *self.views_of(task_id)]
            getattr(self, move)(client, data, task_id)

    @rule(client=clients, data=st.data(), task_id=tasks, moves=st.lists(moves, min_size=1, max_size=12))
    def live_through_more(self, client: int, data: st.DataObject, task_id: str, moves: Sequence[str]) -> None:
        """The same again, so that it is chosen more often."""
        self.live_through(client, data, task_id, moves)

    def views_of(self, task_id: str) -> list[AttemptView]:
        """A task's live attempt, as an agent or placement would see it now."""
        task = self.model.tasks.get(task_id)
        if task is None or task.attempt is None or task.state not in LIVE:
            return []
        where, amount = (task.devices, task.vram_mib), CONTEXT_MIB
        return [
            AttemptView(task_id, task.attempt, *where, task.proc, task.state, task.boot, 0.0, None, task.lane, amount)
        ]

    def next_step(self, client: int, data: st.DataObject, task_id: str) -> None:
        model = self.model
        task = model.tasks.get(task_id)
        if task is None:
            self.admit(client, self.publish(task_id, 0, data.draw(amounts), data.draw(wishes)))
        elif task.state is State.SCHEDULED:
            self.time_passes_for_etas(client)
        elif task.state is State.HANDED_OVER:
            waiting = next((m for m in model.queue if m.task_id == task_id), None)
            self.admit(client, waiting or self.publish(task_id, task.retries + 1, data.draw(amounts), "plain"))
        elif task.state is State.WAITING and task.lane == UNESTIMATED:
            self.relane(client, task_id, UNESTIMATED, data.draw(amounts))
        elif task.state is State.WAITING:
            fitting = [choice for choice in CHOICES if all(self.fits(uuid_, task.vram_mib) for uuid_ in choice)]
            if not fitting:
                self.mend(client, data.draw(st.sampled_from(sorted(NODES)), "node"))
            devices = data.draw(st.sampled_from([*fitting * 3, *CHOICES]), "devices")
            made = self.placement(task_id, task.lane, task.vram_mib, devices)
            self.commit(client, model.epoch, made, data.draw(st.integers(0, 1), "ahead"))
        elif task.state in LIVE:
            self.advance(client, data, next(a for a in self.attempts if a.attempt == task.attempt), task)
        elif task.owed:
            self.after_the_end(client, task_id, "answer")
        else:
            self.after_the_end(client, task_id, data.draw(st.sampled_from(["purge", "purge", "revive"])))

    def mend(self, client: int, name: str) -> None:
        """A node that takes nothing does so again, if nothing is left on it."""
        store, node = self.begin(client), self.model.nodes.get(name)
        if node is None or node.lost or len(node.devices) < len(NODES[name]):
            self.register(client, name, NODES[name])
        else:
            assert store.set_device_state(name, node.boot, node.devices, "up")
            assert self.model.set_device_state(name, node.boot, node.devices, "up")

    def advance(self, client: int, data: st.DataObject, a: Commit, task: Task) -> None:
        """Claim, bind, finish, end; sometimes a newer run of the id comes before the end."""
        if task.state is State.PLACED:
            self.claim(client, a, "w1")
        elif task.state is State.CLAIMED:
            self.bind(client, a, data.draw(procs), data.draw(st.one_of(st.just(""), boots)))
        elif task.state is State.RUNNING:
            call = data.draw(st.sampled_from(["finish", "finish", "complete", "complete", "out of memory"]), "call")
            if call == "finish":
                self.finish(client, a, task.proc, False)
            elif call == "complete":
                self.complete(client, a, task.proc, data)
            else:
                self.out_of_memory(client, a, task.proc, data.draw(amounts), 3)
        elif task.next is None and data.draw(st.booleans(), "retried"):
            self.admit(client, self.publish(a.task_id, task.retries + 1, a.vram_mib, "plain"))
        else:
            self.end(client, a, data.draw(outcomes), data.draw(leftovers))

    def fits(self, uuid_: str, vram_mib: int) -> bool:
        book = self.model.books.get(uuid_)
        if book is None or book.state != "up" or len(book.attempts) >= EXECUTORS:
            return False
        return self.model.missing(uuid_, vram_mib) <= 0

    # -- intake ----------------------------------------------------------------------------------------------

    @rule(client=clients, task_id=tasks, retries=st.integers(0, 4), vram_mib=amounts, wish=wishes, twice=st.booleans())
    def publish_and_admit(self, client: int, task_id: str, retries: int, vram_mib: int, wish: str, twice: bool) -> None:
        """Any run of any task, in whatever state it is; or what was promoted, by two replicas."""
        promoted = self.model.queue[0] if twice and self.model.queue else None
        message = promoted or self.publish(task_id, retries, vram_mib, wish)
        self.admit(client, message)
        if twice:
            self.admit((client + 1) % CLIENTS, message)

    def retry_arrives(self, client: int, data: st.DataObject, task_id: str) -> None:
        """A message of this run or one near it."""
        task = self.model.tasks.get(task_id)
        retries = max(0, (task.retries if task else 0) + data.draw(st.sampled_from([0, 1, 1, 2]), "retries"))
        self.admit(client, self.publish(task_id, retries, data.draw(amounts), data.draw(wishes)))

    def publish(self, task_id: str, retries: int, vram_mib: int, wish: str) -> Message:
        message = Message(b"%d" % next(self.numbers), task_id, retries, vram_mib, wish)
        self.store.client.lpush(self.list, message.raw)
        self.model.queue.append(message)
        return message

    def admit(self, client: int, message: Message) -> None:
        store = self.begin(client)
        in_an_hour_s = store.server_ms() / 1000 + 3600
        admission = Admission(
            source=Peeked(self.list, message.raw),
            identity=Identity(message.task_id, 0, message.retries),
            task="t",
            lane=message.lane,
            demand=demand_of(message.vram_mib),
            context_mib=CONTEXT_MIB,
            priority=5,
            head=b"<",
            tail=b">",
            eta_s=in_an_hour_s if message.wish == "later" else None,
            expires_s=in_an_hour_s if message.wish == "expires" else None,
            own_attempt=message.wish == "orphan",
            refusal=WHY if message.wish == "refused" else None,
        )
        if message.wish == "revoked":
            store.remember_revoked([message.task_id])
        assert store.admit([admission])[0] == self.model.admit(message)
        store.client.delete(store.keys.revoked)

    @rule(client=clients, task_id=tasks, old=st.sampled_from([UNESTIMATED, lane_of(2000)]), vram_mib=amounts)
    def relane(self, client: int, task_id: str, old: str, vram_mib: int) -> None:
        store, lane = self.begin(client), lane_of(vram_mib)
        new = Admission(Peeked("", b""), Identity(task_id, 0, 0), "t", lane, demand_of(vram_mib), 300, 5, b"", b"")
        assert store.relane(task_id, old, new) == self.model.relane(task_id, old, vram_mib)

    def time_passes_for_etas(self, client: int) -> None:
        store = self.begin(client)
        scheduled = [task_id for task_id, task in self.model.tasks.items() if task.state is State.SCHEDULED]
        for task_id in scheduled:
            store.client.zadd(store.keys.scheduled, {task_id: 1}, xx=True)
        assert store.release_due(10) == sum(self.model.due(task_id) for task_id in scheduled)

    # -- placement -------------------------------------------------------------------------------------------

    @rule(client=clients, data=st.data(), task_id=tasks, devices=choices, ahead=st.integers(0, 1))
    def place_whatever_fits(
        self, client: int, data: st.DataObject, task_id: str, devices: Sequence[str], ahead: int
    ) -> None:
        """By any placement that ever was active, in any lane, on any device; or again, after a timeout."""
        epoch = data.draw(st.sampled_from([*[self.model.epoch] * 3, *self.epochs[-2:]]), "epoch")
        known = self.model.tasks.get(task_id)
        lane = data.draw(st.sampled_from([known.lane if known else UNESTIMATED, lane_of(2000)]), "lane")
        vram_mib = int(lane.removeprefix("t|")) if lane != UNESTIMATED else 0
        made = self.placement(task_id, lane, vram_mib, devices)
        self.commit(client, epoch, data.draw(st.sampled_from([made, *self.attempts[-2:]])), ahead)

    def placement(self, task_id: str, lane: str, vram_mib: int, devices: Sequence[str]) -> Commit:
        number, node = next(self.numbers), HOMES[devices[0]]
        attempt, host = f"{self.model.epoch}-x-{number}", HOSTS[number % len(HOSTS)]
        whole = vram_mib == WHOLE_MIB
        return Commit(task_id, lane, attempt, devices, node, self.queue, vram_mib, b"slot", *host, whole)

    def commit(self, client: int, epoch: int, commit: Commit, ahead: int) -> None:
        store = self.begin(client)
        known = [uuid_ for uuid_ in commit.devices if uuid_ in self.model.books]
        before = {uuid_: self.model.missing(uuid_, commit.vram_mib) for uuid_ in known}
        answer = store.commit(epoch, [commit], ahead)[0]
        expected = self.model.commit(
            epoch,
            commit.task_id,
            commit.lane,
            commit.attempt,
            commit.devices,
            commit.vram_mib,
            ahead,
            commit.cpus,
            commit.ram_mib,
        )
        assert f"{answer.status} {answer.short}".strip() == expected
        if answer.short == "memory":
            assert answer.missing == before[answer.uuid]
        if expected in ("committed", "stale"):
            self.mirror.drop(commit.lane, commit.task_id)
        if expected == "committed" and commit not in self.attempts:
            self.attempts.append(commit)
            for uuid_ in commit.devices:  # invariant 1
                book = self.model.books[uuid_]
                assert book.committed + book.external + HEADROOM_MIB <= TOTAL_MIB
                assert len(book.attempts) <= EXECUTORS + ahead
                assert book.whole is None or len(book.attempts) == 1

    @rule(client=clients, holder=st.sampled_from(["p", "q"]), resigns=st.booleans())
    def fail_over(self, client: int, holder: str, resigns: bool) -> None:
        if resigns:
            self.store.resign(self.model.holder)
            self.model.resign(self.model.holder)
        self.elect(client, holder)

    def elect(self, client: int, holder: str) -> None:
        epoch, _ = self.begin(client).elect(holder, 3600)
        assert epoch == self.model.elect(holder)
        if epoch and epoch not in self.epochs:
            self.epochs.append(epoch)

    # -- attempts --------------------------------------------------------------------------------------------

    def call_out_of_turn(self, client: int, data: st.DataObject, task_id: str) -> None:
        """Any claim or end of any attempt of this task, or of one of long ago."""
        mine = [a for a in self.attempts if a.task_id == task_id][-3:]
        if not self.attempts:
            return
        a = data.draw(st.sampled_from([*mine * 2, *mine[-1:] * 4, *self.attempts[-3:]]), "attempt")
        calls = ["claim", "bind", "finish", "finish", "end", "complete", "out of memory"]
        call = data.draw(st.sampled_from(calls), "call")
        if call == "claim":
            self.claim(client, a, data.draw(boots))
        elif call == "bind":
            self.bind(client, a, data.draw(procs), data.draw(st.one_of(st.just(""), boots)))
        elif call == "finish":
            known = self.model.tasks.get(a.task_id)
            proc = data.draw(st.sampled_from(["", "", known.proc if known else "", "10.1"]), "proc")
            self.finish(client, a, proc, data.draw(st.booleans(), "left to main"))
        elif call == "out of memory":
            known = self.model.tasks.get(a.task_id)
            proc = data.draw(st.sampled_from([*[known.proc if known else ""] * 3, "10.1"]), "proc")
            self.out_of_memory(client, a, proc, data.draw(amounts), data.draw(st.integers(1, 3), "most"))
        elif call == "complete":
            known = self.model.tasks.get(a.task_id)
            proc = data.draw(st.sampled_from([*[known.proc if known else ""] * 3, "10.1"]), "proc") or "10.1"
            self.complete(client, a, proc, data)
        else:
            self.end(client, a, data.draw(outcomes), data.draw(leftovers))

    def claim(self, client: int, a: Commit, boot: str) -> None:
        found = self.begin(client).claim(a.task_id, a.attempt, boot)
        assert found == self.model.claim(a.task_id, a.attempt, boot)

    def bind(self, client: int, a: Commit, proc: str, boot: str) -> None:
        found = self.begin(client).bind(a.task_id, a.attempt, a.devices, proc, boot=boot).answer
        assert found == self.model.bind(a.task_id, a.attempt, proc, boot)

    def finish(self, client: int, a: Commit, proc: str, left_to_main: bool) -> None:
        found = self.begin(client).finish(a.task_id, a.attempt, proc, left_to_main=left_to_main)
        assert found == self.model.finish(a.task_id, a.attempt, proc, left_to_main)

    def out_of_memory(self, client: int, a: Commit, proc: str, vram_mib: int, most: int) -> None:
        demand, context_mib = demand_of(vram_mib), CONTEXT_MIB
        found = self.begin(client).out_of_memory(
            a.task_id, a.attempt, a.devices, proc, lane_of(vram_mib), demand, context_mib, WHY, most, None
        )
        assert found == self.model.out_of_memory(a.task_id, a.attempt, proc, vram_mib, most)

    def end(self, client: int, a: Commit, state: State, leftover: Sequence[int] | None) -> None:
        store = self.begin(client)
        outcome = Outcome(state, None if state is State.SUCCEEDED else WHY, _some(leftover, a), CONTEXT_MIB, 123)
        expected = self.model.end(a.task_id, a.attempt, state, leftover)
        assert store.end(a.task_id, a.attempt, a.devices, outcome) == expected

    def complete(self, client: int, a: Commit, proc: str, data: st.DataObject) -> None:
        """With a result or none; sometimes there is one already."""
        store, state, leftover = self.begin(client), data.draw(outcomes), data.draw(leftovers)
        key, there = f"{store.keys.prefix}result-{a.attempt}", data.draw(st.sampled_from([None, None, b"already"]))
        store.client.delete(key)
        if there:
            store.client.set(key, there)
        result = data.draw(st.sampled_from([None, StoredResult(key, b"42", 0), StoredResult(key, b"42", 60)]))
        outcome = Outcome(state, None if state is State.SUCCEEDED else WHY, _some(leftover, a), CONTEXT_MIB, 123)
        before = self.model.tasks.get(a.task_id)
        was_live = before is not None and before.state in LIVE
        expected = self.model.complete(a.task_id, a.attempt, proc, state, leftover, bool(result and there))
        assert store.complete(a.task_id, a.attempt, a.devices, outcome, proc, result) == expected
        stored = result is not None and was_live and expected in ("ended", "promoted")
        assert store.client.get(key) == (b"42" if stored else there)

    def lose(self, client: int, data: st.DataObject, task_id: str) -> None:
        """With a view of now or of a moment ago; by an agent or by a placement."""
        if not self.views:
            return
        now = self.views_of(task_id)
        store, view = self.begin(client), data.draw(st.sampled_from([*now * 3, *self.views[-5:]]), "view")
        counts, most = data.draw(st.booleans(), "counts"), data.draw(st.integers(1, 3), "most")
        epoch = self.some_epoch(data)
        expected = _unless_fenced(
            lambda: self.model.lose(view.task_id, view.attempt, view.state, counts=counts, most=most, epoch=epoch)
        )
        found = _unless_fenced(lambda: str(store.lose(view, ANOTHER, counts=counts, max_attempts=most, epoch=epoch)))
        assert found == expected

    def some_epoch(self, data: st.DataObject) -> int | None:
        """None: somebody else than a placement says so; the active placement's; or one of long ago."""
        return data.draw(st.sampled_from([None, None, None, self.model.epoch, self.epochs[-1], 0]), "epoch")

    # -- ends that brim gives --------------------------------------------------------------------------------

    def close(self, client: int, data: st.DataObject, task_id: str) -> None:
        """Cancelled by a user, expired or buried by a placement of now or long ago."""
        store, (state, allowed) = self.begin(client), data.draw(closings)
        epoch = self.some_epoch(data)
        expected = _unless_fenced(lambda: self.model.close(task_id, state, allowed, epoch))
        assert _unless_fenced(lambda: str(store.close(task_id, state, WHY, allowed, epoch=epoch))) == expected

    @rule(client=clients, task_id=tasks, call=st.sampled_from(["answer", "answer", "revive", "revive", "purge"]))
    def after_the_end(self, client: int, task_id: str, call: str) -> None:
        store = self.begin(client)
        if call == "revive":
            assert store.revive(task_id, UNESTIMATED, WHY) == self.model.revive(task_id, UNESTIMATED)
        elif call == "purge":
            assert store.purge(task_id) == self.model.purge(task_id)
        else:
            for owed in store.owed(1):
                store.answered(owed)
                self.model.answered(owed.task_id)
                self.stores[(client + 1) % CLIENTS].answered(owed)

    # -- nodes -----------------------------------------------------------------------------------------------

    def some_boot(self, data: st.DataObject, name: str) -> str:
        current = self.model.nodes[name].boot if name in self.model.nodes else "none"
        return data.draw(st.sampled_from([*[current] * 4, *self.boots[name][-2:]]), "boot")

    @rule(
        client=clients,
        data=st.data(),
        name=st.sampled_from(sorted(NODES)),
        call=st.sampled_from(["register", "renew", "leave", "up", "up", "draining", "quarantined"]),
    )
    def the_agent_says(self, client: int, data: st.DataObject, name: str, call: str) -> None:
        if call == "register":
            self.register(client, name, data.draw(st.sampled_from([NODES[name], NODES[name][:1]])))
            return
        store, boot = self.begin(client), self.some_boot(data, name)
        if call == "renew":
            assert store.renew(name, boot) == self.model.renew(name, boot)
        elif call == "leave":
            assert store.leave(name, boot) == self.model.leave(name, boot)
        else:
            uuids = self.model.nodes[name].devices if name in self.model.nodes else ()
            expected = self.model.set_device_state(name, boot, uuids, call)
            assert store.set_device_state(name, boot, uuids, call) == expected

    def register(self, client: int, name: str, devices: Sequence[str]) -> None:
        store, boot = self.begin(client), f"boot{next(self.numbers)}"
        found = [DeviceRegistration(uuid_, i, "SIM", TOTAL_MIB, HEADROOM_MIB) for i, uuid_ in enumerate(devices)]
        registration = NodeRegistration(
            Node(name, cpus=HOST_CPUS, ram_mib=HOST_RAM_MIB), boot, EXECUTORS, ["t"], {}, found
        )
        assert store.register_node(registration) == self.model.register(name, boot, devices)
        self.boots[name].append(boot)

    @rule(client=clients, data=st.data(), name=st.sampled_from(sorted(NODES)), silent=st.booleans())
    def lose_node(self, client: int, data: st.DataObject, name: str, silent: bool) -> None:
        store, epoch = self.begin(client), data.draw(st.sampled_from([*[self.model.epoch] * 3, *self.epochs[-2:]]))
        if silent and name in self.model.nodes:
            store.client.hset(store.keys.node(name), "renewed_ms", 1)
            self.model.nodes[name].silent = True
        view = NodeView(Node(name), "", "", 0.0, NODES[name])
        expected = _unless_fenced(lambda: self.model.lose_node(epoch, name))
        assert _unless_fenced(lambda: store.lose_node(epoch, view, 3000)) == expected

    def memory_is_reported(self, client: int, data: st.DataObject, task_id: str) -> None:
        """An agent samples memory, and sends the report at once, after the task's end, or much later."""
        when = data.draw(st.sampled_from(["now", "now", "after an end", "after an end", "later", "an old one"]), "when")
        if when == "an old one" and self.samples:
            self.send(client, data.draw(st.sampled_from(self.samples[-5:]), "sample"))
            return
        before = self.store.server_ms()
        while (now_ms := self.store.server_ms()) == before:
            pass  # so that it is later than every end so far, and not than the next one
        self.begin(client)
        task = self.model.tasks.get(task_id)
        name = HOMES[task.devices[0]] if task and task.devices else data.draw(st.sampled_from(sorted(NODES)))
        used = st.sampled_from([0, 300, 900, 4000, 9900])
        found = {uuid_: (data.draw(used, "used"), data.draw(processes)) for uuid_ in NODES[name]}
        self.samples.append(Sample(self.model.step, now_ms, name, self.some_boot(data, name), found))
        if when == "after an end" and task and task.state in LIVE:
            mine = next(a for a in self.attempts if a.attempt == task.attempt)
            self.end(client, mine, data.draw(outcomes), data.draw(leftovers))
        if when != "later":
            self.send(client, self.samples[-1])

    def send(self, client: int, sample: Sample) -> None:
        devices = {
            uuid_: DeviceFigures(
                total_mib=TOTAL_MIB, used_mib=used, free_mib=TOTAL_MIB - used, processes=dict(processes)
            )
            for uuid_, (used, processes) in sample.figures.items()
        }
        report = MemoryReport(node=sample.node, boot=sample.boot, sampled_ms=sample.sampled_ms, devices=devices)
        assert self.stores[client].report(report) == self.model.report(sample)

    def process_is_replaced(self, client: int, data: st.DataObject, task_id: str) -> None:
        """Placement marks processes, or the agent sees one gone."""
        store, task = self.begin(client), self.model.tasks.get(task_id)
        uuid_ = task.devices[0] if task and task.devices else data.draw(st.sampled_from(sorted(HOMES)))
        if data.draw(st.booleans(), "gone"):
            proc = data.draw(procs)
            assert store.process_gone(uuid_, proc) == self.model.process_gone(uuid_, proc)
        else:
            mib = data.draw(st.sampled_from([1, 500, 5000]), "mib")
            epoch = data.draw(st.sampled_from([*[self.model.epoch] * 3, *self.epochs[-2:]]))
            expected = _unless_fenced(lambda: self.model.doom(epoch, uuid_, mib))
            assert store.doom(epoch, uuid_, mib) == (-1 if expected == "fenced" else expected)

    # -- what must hold after each step ----------------------------------------------------------------------

    @invariant()
    def redis_is_as_the_model_says(self) -> None:
        store, model = self.store, self.model
        assert store.audit() == []
        pipeline = store.client.pipeline(transaction=False)
        pipeline.zrange(store.keys.tasks, 0, -1).zrange(store.keys.expiring, 0, -1).lrange(store.keys.outbox, 0, -1)
        pipeline.lrange(self.list, 0, -1).llen(self.queue)
        ids, expiring, outbox, queue, pushed = pipeline.execute()
        assert {i.decode() for i in ids} == model.tasks.keys()
        assert {i.decode() for i in expiring} == model.expiring
        assert [json.loads(entry)["id"] for entry in outbox] == model.outbox
        assert queue == [message.raw for message in reversed(model.queue)]
        assert pushed == model.pushed
        for record in store.records(sorted(model.tasks)):
            task = model.tasks[record.task_id]
            assert (record.state, record.identity.retries, record.run) == (task.state, task.retries, task.run)
            assert (record.lane, record.losses, record.cancelling) == (task.lane, task.losses, task.cancelling)
            if task.state in LIVE:
                assert (record.attempt, record.devices) == (task.attempt, task.devices)
        devices = store.devices()
        assert {device.uuid for device in devices} == model.books.keys()
        for device in devices:
            book = model.books[device.uuid]
            expected = {
                "node": book.node,
                "state": book.state,
                "external_mib": book.external,
                "committed_mib": book.committed,
                "reclaimable_mib": book.reclaimable,
                "busy": len(book.attempts),
                "cpus_used": sum(held.cpus for held in book.attempts.values()),
                "ram_used_mib": sum(held.ram_mib for held in book.attempts.values()),
            }
            assert {name: getattr(device, name) for name in expected} == expected
        self.placement_has_heard_of_every_change(devices)

    def placement_has_heard_of_every_change(self, devices: Sequence[Device]) -> None:
        if not self.model.epoch:
            return
        mirror = self.mirror
        mirror.apply(self.store.take_changes(self.model.epoch, 100))
        assert mirror.exhausted() == []
        lanes: dict[str, set[str]] = {}
        for task_id, task in self.model.tasks.items():
            if task.state is State.WAITING:
                lanes.setdefault(task.lane, set()).add(task_id)
        assert {lane: {i for i, _, _ in window.waiting} for lane, window in mirror.lanes.items()} == lanes
        assert {device for site in mirror.cluster for device in site.devices} == set(devices)
        nodes = {name: (node.boot, node.devices) for name, node in self.model.nodes.items()}
        assert {name: (view.boot, tuple(view.devices)) for name, view in mirror.nodes.items()} == nodes

    def teardown(self) -> None:
        """Everything comes to its end; then the invariants must hold, and nothing may be left."""
        try:
            while self.model.queue:
                self.admit(0, self.model.queue[0])
            for view in self.store.books(sorted(self.model.books))[0] if self.model.books else []:
                self.model.lose(view.task_id, view.attempt, view.state, counts=True, most=0)
                self.store.lose(view, ANOTHER, counts=True, max_attempts=0)
            while self.model.queue:
                self.admit(0, self.model.queue[0])
            for task_id in TASKS:
                self.store.cancel(task_id, WHY)
            for owed in self.store.owed(100):
                self.store.answered(owed)
            assert check_invariants(self.store, settled=True) == []
        finally:
            for connection in self.connections:
                connection.close()


def demand_of(vram_mib: int) -> Demand:
    """The demand of this size."""
    return Demand(vram_mib, whole=vram_mib == WHOLE_MIB)


def _some(leftover: Sequence[int] | None, a: Commit) -> Sequence[int] | None:
    """As many of these as the attempt has devices."""
    return None if leftover is None else leftover[: len(a.devices)]


def _unless_fenced(call: Callable[[], T]) -> T | str:
    try:
        return call()
    except (Fenced, FencedError):
        return "fenced"


@pytest.mark.timeout(0 if LONG else 600)
def test_the_scripts_do_what_the_model_says(valkey_url: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Scripts(valkey_url),
        settings=settings(
            max_examples=LONG or 40,
            stateful_step_count=60,
            deadline=None,
            phases=set(Phase) if LONG else set(Phase) - {Phase.shrink, Phase.explain},
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
