"""Several clients call the scripts at once, with what each of them has read a moment ago; then the invariants hold.

``BRIM_MODEL_SECONDS`` (default 3) is how long they do.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import redis

from brim.core.model import TERMINAL, Demand, Identity, Node, Reason, State
from brim.store import FencedError, Store
from brim.store.types import (
    Admission,
    AdmitAnswer,
    Commit,
    DeviceFigures,
    DeviceRegistration,
    MemoryReport,
    NodeRegistration,
    Outcome,
    Peeked,
    Record,
)
from brim_services.invariants import check_invariants

SECONDS = float(os.environ.get("BRIM_MODEL_SECONDS", "3"))
WHY = Reason("test", "because the test says so")
NODE, GPUS, TOTAL_MIB, EXECUTORS = "n1", ("G0", "G1"), 10_000, 2
TASKS = 12
NEW_S = 0.02
EXPIRABLE = (State.SCHEDULED, State.WAITING, State.PLACED, State.CLAIMED)


class Client:
    """One thread with a connection of its own; what it does next is drawn by its seed."""

    def __init__(self, url: str, namespace: str, seed: int) -> None:
        self.connection = redis.Redis.from_url(url)
        self.store = Store(self.connection, f"{namespace}brim:")
        self.list, self.queue = f"{namespace}brim.intake", f"{namespace}gpu"
        self.random = random.Random(seed)
        self.name = f"client{seed}"
        self.epoch = 0
        self.done: Counter[str] = Counter()

    def run(self, until_s: float) -> None:
        calls: Sequence[tuple[Callable[[], object], int]] = (
            (self.publish, 4),
            (self.admit, 6),
            (self.place, 8),
            (self.work, 30),
            (self.lose, 2),
            (self.close, 1),
            (self.answer, 2),
            (self.report, 3),
            (self.fail_over, 1),
        )
        while time.monotonic() < until_s:
            [call] = self.random.choices([call for call, _ in calls], [weight for _, weight in calls])
            try:
                answer = call()
            except FencedError:
                answer = "fenced"
            self.done[f"{call.__name__} {answer}"] += 1

    def publish(self) -> None:
        self.send(f"{self.random.randrange(TASKS)}-{self.random.randrange(10**6)}", 0)

    def send(self, task_id: str, retries: int) -> None:
        vram_mib = self.random.choice([1000, 3000, 6000])
        self.connection.lpush(self.list, f"{task_id} {retries} {vram_mib} {self.random.random()}")

    def admit(self) -> AdmitAnswer | None:
        messages = self.store.look([self.list], 3).messages
        if not messages:
            return None
        return self.store.admit([self.assess(message) for message in messages])[0]

    def assess(self, message: Peeked) -> Admission:
        task_id, retries, vram, _ = message.raw.decode().split()
        return Admission(
            source=message,
            identity=Identity(task_id, 0, int(retries)),
            task="t",
            lane=f"t|{vram}",
            demand=Demand(int(vram)),
            context_mib=300,
            priority=5,
            head=b"<",
            tail=b">",
            expires_s=time.time() + NEW_S if self.random.random() < 0.1 else None,
            refusal=WHY if self.random.random() < 0.05 else None,
        )

    def place(self) -> str | None:
        waiting = [(lane, i) for lane in self.store.snapshot(5).lanes for i, _, _ in lane.waiting]
        if not waiting:
            return None
        window, task_id = self.random.choice(waiting)
        attempt, gpu = f"{self.name}-{time.monotonic_ns()}", self.random.choice(GPUS)
        vram_mib = window.demand.vram_mib
        commit = Commit(task_id, window.lane, attempt, [gpu], NODE, self.queue, vram_mib, b"slot", 1.0, 100)
        active = int(self.connection.hget(self.store.keys.leader, "epoch") or 0)  # type: ignore[arg-type]
        epoch = self.random.choice([active, active, self.epoch])
        return self.store.commit(epoch, [commit], self.random.randrange(2))[0].status

    def some(self) -> Record | None:
        records = self.store.records(self.store.task_ids(0, 30))
        alive = [record for record in records if record.state not in TERMINAL]
        return self.random.choice(alive) if alive else None

    def work(self) -> str | None:
        """The next step of some attempt, as it stood when it was read."""
        record = self.some()
        if record is None or record.attempt is None:
            return None
        i, attempt, proc = record.task_id, record.attempt, f"1{self.random.randrange(3)}.1"
        if record.state is State.PLACED:
            return self.store.claim(i, attempt, "w1")
        if record.state is State.CLAIMED:
            return self.store.bind(i, attempt, record.devices, proc).answer
        if record.state is State.RUNNING:
            bound = next((v.proc for v in self.store.books(record.devices)[0] if v.attempt == attempt), proc)
            return self.store.finish(i, attempt, self.random.choice([bound, bound, ""]))
        state = self.random.choice([State.SUCCEEDED, State.SUCCEEDED, State.FAILED, State.HANDED_OVER])
        if state is State.HANDED_OVER:
            self.send(i, record.identity.retries + 1)
        reason = None if state is State.SUCCEEDED else WHY
        outcome = Outcome(state, reason, self.random.choice([None, [200]]), 300)
        return self.store.end(i, attempt, record.devices, outcome)

    def lose(self) -> str | None:
        views, _ = self.store.books(GPUS)
        if not views:
            return None
        time.sleep(self.random.random() * NEW_S)
        epoch = self.random.choice([None, self.epoch])
        view = self.random.choice(views)
        return self.store.lose(view, WHY, counts=self.random.random() < 0.5, max_attempts=3, epoch=epoch)

    def close(self) -> str | None:
        for task_id in self.store.expired_ids(5):
            self.store.close(task_id, State.EXPIRED, WHY, EXPIRABLE, epoch=self.random.choice([None, self.epoch]))
        record = self.some() if self.random.random() < 0.5 else None
        return record and self.store.cancel(record.task_id, WHY)

    def answer(self) -> int:
        owed = self.store.owed(3)
        for answer in owed:
            self.store.answered(answer)
        for record in self.store.list_tasks(State.DEAD, 1):
            self.store.revive(record.task_id, "t|1000", WHY)
        return self.store.forget_finished(1.0, 5)

    def report(self) -> bool:
        sampled_ms = self.store.server_ms()
        processes = {f"1{n}.1": self.random.choice([None, 0, 500, 2000]) for n in range(3)}
        used = sum(mib or 0 for mib in processes.values()) + self.random.choice([0, 700])
        figures = DeviceFigures(total_mib=TOTAL_MIB, used_mib=used, free_mib=TOTAL_MIB - used, processes=processes)
        time.sleep(self.random.random() * NEW_S)
        devices = dict.fromkeys(GPUS, figures)
        return self.store.report(MemoryReport(node=NODE, boot="boot", sampled_ms=sampled_ms, devices=devices))

    def fail_over(self) -> int:
        if self.epoch:
            self.store.resign(self.name)
        epoch, _ = self.store.elect(self.name, 60)
        self.epoch = epoch or self.epoch
        return min(epoch, 1)

    def settle(self) -> None:
        """What is left comes to its end, one way or another."""
        while self.admit():
            pass
        while views := self.store.books(GPUS)[0]:
            for view in views:
                self.store.lose(view, WHY, counts=True, max_attempts=0)
        while self.admit():
            pass
        for task_id in self.store.task_ids():
            self.store.cancel(task_id, WHY)
        while owed := self.store.owed(100):
            for answer in owed:
                self.store.answered(answer)


@pytest.mark.parametrize("seed", [1, 2])
def test_clients_at_once_leave_everything_in_order(valkey_url: str, namespace: str, seed: int) -> None:
    clients = [Client(valkey_url, namespace, 100 * seed + number) for number in range(4)]
    devices = [DeviceRegistration(gpu, i, "SIM", TOTAL_MIB, 500) for i, gpu in enumerate(GPUS)]
    clients[0].store.register_node(NodeRegistration(Node(NODE), "boot", EXECUTORS, ["t"], {}, devices))
    clients[0].fail_over()
    until_s = time.monotonic() + SECONDS / 2
    threads = [threading.Thread(target=client.run, args=(until_s,)) for client in clients]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    clients[0].settle()
    done = sum((client.done for client in clients), Counter[str]())
    assert check_invariants(clients[0].store, settled=True) == [], done
    assert done["place committed"], done
    assert done["work ended"] + done["work promoted"], done
    for client in clients:
        client.connection.close()
