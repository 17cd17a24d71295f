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
from brim.core.placement import shortage
from brim.store import Store
from brim.store.types import Admission, Commit, DeviceRegistration, NodeRegistration, Peeked

GPU, NODE = "GPU-a", "n1"


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
        self.client.delete(self.store.keys.book(GPU))
        device = DeviceRegistration(GPU, 0, "SIM", case.total, case.headroom)
        registration = NodeRegistration(Node(NODE), "boot", case.executors, ["t"], {}, [device], case.state)
        assert self.store.register_node(registration)
        book: dict[str, str | int] = {"external": case.external}
        for number, (vram, proc) in enumerate(case.attempts):
            book[f"a:{number}"] = f"{vram}|0|0|{proc}|other-{number}"
        for proc, (measured, floor) in case.processes.items():
            book[f"p:{proc}"] = f"{measured}|{floor}|0|0|0"
        self.client.hset(self.store.keys.book(GPU), mapping=book)
        # Some script that refreshes the table, so that Python sees the device as placement does.
        assert self.store.set_device_state(NODE, "boot", [GPU], case.state)

    def commit(self, case: Case, *, memory: bool) -> tuple[str, int]:
        """The script's answer for a fresh task: the short resource or "", and how much is missing."""
        task_id, lane = f"task-{next(self.numbers)}", f"t|{case.vram}"
        raw = task_id.encode()
        self.client.lpush(self.list, raw)
        demand = Demand(case.vram)
        admission = Admission(Peeked(self.list, raw), Identity(task_id, 0, 0), "t", lane, demand, 0, 5, b"", b"")
        self.store.admit([admission])
        commit = Commit(task_id, lane, f"{self.epoch}-{task_id}", [GPU], NODE, f"{self.list}.gpu", case.vram, b"")
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
    [device] = server.store.devices()

    short, missing = server.commit(case, memory=memory)

    reason = shortage(device, Demand(case.vram), case.ahead, memory=memory)
    assert short == (reason.code if reason else "")
    if short == "memory":
        assert missing == case.vram - device.available_mib
        assert reason is not None
        assert f"short by {missing} MiB" in reason.message
