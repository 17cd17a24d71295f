"""The fit rule stands twice, in Python and in the script that commits; they must agree on every case (house rule 2)."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.core.model import Demand, Identity, Node
from brim.core.placement import node_shortage, shortage
from brim.core.placement.fit import claim_mib, milli, missing_mib
from brim.store import Store
from brim.store.types import Admission, Commit, DeviceRegistration, NodeRegistration, Peeked

GPU, OTHER, NODE = "GPU-a", "GPU-b", "n1"


@dataclass(frozen=True)
class Case:
    """A device's book, and a demand that comes to it."""

    total: int
    headroom: int
    external: int
    executors: int
    state: str
    attempts: Sequence[tuple[int, str]]
    """MiB and process (nothing while it is not bound)."""
    processes: Mapping[str, tuple[int, int]]
    """Measured MiB (-1 unknown) and floor."""
    vram: int
    ahead: int
    whole: bool
    host: tuple[float, int]
    """CPUs and MiB of RAM that the node has registered; 0: none declared."""
    held: tuple[float, int]
    """What an attempt on another of its devices holds of them."""
    asked: tuple[float, int]


mib = st.integers(0, 4000)
processes = st.sampled_from(["", "1.1", "2.2"])
cases = st.builds(
    Case,
    total=st.integers(1, 12_000),
    headroom=st.sampled_from([0, 500]),
    external=st.sampled_from([0, 0, 300, 5000]),
    executors=st.integers(1, 4),
    state=st.sampled_from(["up", "up", "up", "up", "draining", "lost", "quarantined"]),
    attempts=st.lists(st.tuples(mib, processes), max_size=5),
    processes=st.dictionaries(processes.filter(bool), st.tuples(st.one_of(st.just(-1), mib), mib)),
    vram=st.integers(1, 8000),
    ahead=st.integers(0, 2),
    whole=st.booleans(),
    host=st.tuples(st.sampled_from([0, 2, 4.5]), st.sampled_from([0, 1000, 2000])),
    held=st.tuples(st.sampled_from([0, 0.5, 1.001]), st.sampled_from([0, 400, 1000])),
    asked=st.tuples(st.sampled_from([0, 0.5, 1.5, 3]), st.sampled_from([0, 600, 1500])),
)


class Server:
    """A store in which books can be written as one likes."""

    def __init__(self, url: str, namespace: str) -> None:
        self.client: Any = redis.Redis.from_url(url)
        self.store = Store(self.client, f"{namespace}brim:")
        self.list = f"{namespace}brim.intake"
        self.numbers = itertools.count()
        self.epoch, _ = self.store.elect("test", 3600)

    def set_up(self, case: Case) -> None:
        """The case as agents, executors and reports would have left it."""
        self.client.delete(self.store.keys.book(GPU), self.store.keys.book(OTHER))
        devices = [
            DeviceRegistration(uuid_, i, "SIM", case.total, case.headroom) for i, uuid_ in enumerate((GPU, OTHER))
        ]
        node = Node(NODE, cpus=case.host[0], ram_mib=case.host[1])
        registration = NodeRegistration(node, "boot", case.executors, ["t"], {}, devices, case.state)
        assert self.store.register_node(registration)
        book: dict[str, str | int] = {"external": case.external}
        for number, (vram, proc) in enumerate(case.attempts):
            book[f"a:{number}"] = f"{vram}|0|0|{proc}|other-{number}"
        for proc, (measured, floor) in case.processes.items():
            book[f"p:{proc}"] = f"{measured}|{floor}|0|0|0"
        self.client.hset(self.store.keys.book(GPU), mapping=book)
        beside = f"1|{milli(case.held[0])}|{case.held[1]}||beside"
        self.client.hset(self.store.keys.book(OTHER), "a:beside", beside)
        # Some script that refreshes the table, so that Python sees the device as placement does.
        assert self.store.set_device_state(NODE, "boot", [GPU, OTHER], case.state)

    def commit(self, case: Case, *, memory: bool) -> tuple[str, int]:
        """The script's answer for a fresh task: the short resource or "", and how much is missing."""
        task_id, lane = f"task-{next(self.numbers)}", f"t|{case.vram}"
        raw = task_id.encode()
        self.client.lpush(self.list, raw)
        demand = Demand(case.vram)
        admission = Admission(Peeked(self.list, raw), Identity(task_id, 0, 0), "t", lane, demand, 0, 5, b"", b"")
        self.store.admit([admission])
        attempt, queue = f"{self.epoch}-{task_id}", f"{self.list}.gpu"
        commit = Commit(task_id, lane, attempt, [GPU], NODE, queue, case.vram, b"", *case.asked, case.whole)
        [answer] = self.store.commit(self.epoch, [commit], case.ahead, ignore_memory=not memory)
        assert answer.status in ("committed", "refused")
        return answer.short, answer.missing


@pytest.fixture(scope="module")
def server(valkey_url: str) -> Iterator[Server]:
    made = Server(valkey_url, f"t{uuid.uuid4().hex[:10]}:")
    yield made
    made.client.close()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases, memory=st.sampled_from([True, True, True, False]))
def test_the_script_commits_exactly_what_fits_by_the_rule(server: Server, case: Case, memory: bool) -> None:
    server.set_up(case)
    device, other = server.store.devices()
    demand = Demand(case.vram, 1, *case.asked, whole=case.whole)
    node = Node(NODE, {}, *case.host, device.cpus_used + other.cpus_used, device.ram_used_mib + other.ram_used_mib)

    short, missing = server.commit(case, memory=memory)

    reason = shortage(device, demand, case.ahead, memory=memory) or node_shortage(node, demand)
    assert short == (reason.code if reason else "")
    if short == "memory":
        assert missing == missing_mib(device, demand)
        assert reason is not None
        assert f"short by {missing} MiB" in reason.message
    if not short:
        now = next(found for found in server.store.devices() if found.uuid == GPU)
        assert now.committed_mib == device.committed_mib + claim_mib(device, demand)
