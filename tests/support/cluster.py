"""A cluster that exists in Redis alone: registered devices, tasks on them, and memory reports, as agents give them.

``python -m support.cluster REDIS_URL NODES GPUS`` reports once a second until it is stopped.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
import uuid
from collections.abc import Sequence

import redis
from celery import Celery

from brim.celery.envelope import BrokerLayout, attempt_fields, compose, parse, slot, split
from brim.core.model import Demand, Identity, Node, Reason, State
from brim.core.profiles import ResourceTable
from brim.store import Store
from brim.store.types import (
    Admission,
    Commit,
    DeviceFigures,
    DeviceRegistration,
    MemoryReport,
    NodeRegistration,
    Outcome,
    Peeked,
)

TABLE = """
profiles:
  vision.segment: {vram: "1000 * n", context_mib: 300, margin: 1.0, max_mib: 60GiB}
  vision.caption: {vram: 9000, context_mib: 300, margin: 1.0}
"""
SIGNATURE = json.dumps(
    {"parameters": [{"name": "n", "kind": "positional_or_keyword", "has_default": True, "default": 1}]}
)
TOTAL_MIB, HEADROOM_MIB = 24_576, 512


class FakeCluster:
    """Nodes with devices in the store; everything an agent and its workers would say is said by method calls."""

    def __init__(self, client: redis.Redis, namespace: str = "", nodes: int = 1, gpus: int = 2) -> None:
        self.client = client
        self.namespace = namespace
        self.layout = BrokerLayout(namespace)
        self.store = Store(client, f"{namespace}brim:")
        self.nodes = {f"node{n:03}": [f"GPU-{n:03}-{i}" for i in range(gpus)] for n in range(nodes)}
        self.boot = uuid.uuid4().hex
        self.app = Celery("t", set_as_current=False)
        self._numbers = itertools.count(1)
        self._processes: dict[str, dict[str, int]] = {u: {} for us in self.nodes.values() for u in us}
        self.epoch, _ = self.store.elect("fake", 3600)
        table = ResourceTable.parse(TABLE, "table")
        self.store.publish_profiles({profile.name: profile.model_dump_json() for profile in table})
        tasks = [profile.name for profile in table]
        for name, uuids in self.nodes.items():
            found = [DeviceRegistration(u, i, "SIM-24", TOTAL_MIB, HEADROOM_MIB) for i, u in enumerate(uuids)]
            node = NodeRegistration(Node(name), self.boot, 4, tasks, dict.fromkeys(tasks, SIGNATURE), found)
            assert self.store.register_node(node)
            self.store.renew(name, self.boot)

    def admit(self, task: str = "vision.segment", vram_mib: int = 1304, *, refusal: Reason | None = None) -> str:
        """A task in overflow (or dead at once)."""
        task_id = str(uuid.uuid4())
        raw = compose(self.app, task, task_id, [], {"n": 1}, {})
        prepared = split(parse(raw))
        list_key = self.layout.list_for(0)
        self.client.lpush(list_key, raw)
        admission = Admission(
            Peeked(list_key, raw),
            Identity(task_id, 0, 0),
            task,
            lane=f"{task}|{vram_mib}MiB",
            demand=Demand(vram_mib),
            context_mib=300,
            priority=0,
            head=prepared.head,
            tail=prepared.tail,
            refusal=refusal,
            explanation={"vram_mib": vram_mib},
        )
        self.store.admit([admission])
        return task_id

    def run(self, device: str, task: str = "vision.segment", vram_mib: int = 1304) -> str:
        """A task that runs on a device, bound to a process that uses four fifths of what is reserved."""
        task_id = self.admit(task, vram_mib)
        node = next(name for name, uuids in self.nodes.items() if device in uuids)
        number = next(self._numbers)
        attempt = f"{self.epoch}-{number}"
        fields = attempt_fields(attempt, [device], node, vram_mib, 300)
        queue = f"{self.namespace}gpu.{node}.{self.nodes[node].index(device)}"
        lane = f"{task}|{vram_mib}MiB"
        commit = Commit(task_id, lane, attempt, [device], node, queue, vram_mib, slot(attempt, fields))
        [answer] = self.store.commit(self.epoch, [commit], 0)
        assert answer.status == "committed", answer
        self.client.rpop(queue)
        self.store.claim(task_id, attempt, "w")
        self.store.bind(task_id, attempt, [device], f"{number}.1")
        self._processes[device][f"{number}.1"] = vram_mib * 4 // 5
        return task_id

    def end(self, task_id: str, state: State = State.SUCCEEDED) -> None:
        """Ends a running task; its process keeps nothing."""
        record = self.store.record(task_id)
        assert record is not None
        assert record.attempt is not None
        proc = f"{record.attempt.split('-')[1]}.1"
        self.store.finish(task_id, record.attempt, proc)
        peak = record.demand.vram_mib * 4 // 5
        self.store.end(task_id, record.attempt, record.devices, Outcome(state, leftover_mib=[0], peak_mib=peak))
        for device in record.devices:
            self._processes[device].pop(proc, None)
            self.store.process_gone(device, proc)

    def report(self, external_mib: int = 0, jitter: random.Random | None = None) -> None:
        """Every node renews and reports what its devices hold."""
        sampled_ms = self.store.server_ms()
        for name, uuids in self.nodes.items():
            devices = {}
            for device in uuids:
                processes = {
                    proc: mib + (jitter.randint(-64, 0) if jitter else 0)
                    for proc, mib in self._processes[device].items()
                }
                used = sum(processes.values()) + external_mib
                devices[device] = DeviceFigures(
                    total_mib=TOTAL_MIB, used_mib=used, free_mib=TOTAL_MIB - used, processes=processes
                )
            self.store.renew(name, self.boot)
            assert self.store.report(MemoryReport(node=name, boot=self.boot, sampled_ms=sampled_ms, devices=devices))


def main(argv: Sequence[str]) -> None:
    """Fill the devices with tasks, queue some, and report every second."""
    url, nodes, gpus = argv[0], int(argv[1]), int(argv[2])
    cluster = FakeCluster(redis.Redis.from_url(url), nodes=nodes, gpus=gpus)
    draw = random.Random(1)
    for uuids in cluster.nodes.values():
        for device in uuids:
            for _ in range(draw.randint(1, 4)):
                cluster.run(device, vram_mib=draw.choice([1304, 3200, 5120]))
    waiting = [cluster.admit("vision.caption", 9344) for _ in range(40)]
    short = Reason("memory", "no device has 9344 MiB: 1536 MiB are short on node000.0")
    cluster.store.note_waits(cluster.epoch, {waiting[0]: short})
    refusal = Reason("no_profile", "the table has no profile for this task, and its header gives no vram_mib")
    cluster.admit("vision.unknown", 1304, refusal=refusal)
    print("ready", flush=True)
    while True:
        began_s = time.monotonic()
        cluster.store.elect("fake", 3600)
        cluster.report(jitter=draw)
        time.sleep(max(0.0, 1.0 - (time.monotonic() - began_s)))


if __name__ == "__main__":
    main(sys.argv[1:])
