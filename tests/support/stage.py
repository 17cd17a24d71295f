"""A stand-in for intake, placement and the agent's books, so that workers can be tested by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import redis

from brim.celery.agent_link import WorkerIdentity
from brim.celery.envelope import BrokerLayout, attempt_fields, parse, slot, split
from brim.core.model import Demand, Node, State
from brim.gpu.simulated import parse_spec
from brim.settings import Settings
from brim.store import Store
from brim.store.types import Admission, AdmitAnswer, Commit, DeviceRegistration, NodeRegistration, Peeked, Record
from support.waiting import wait_until

SPEC = "sim:1x8GiB"
VRAM_MIB, CONTEXT_MIB = 1000, 300


class Stage:
    """One node with one simulated device; every message of the intake queue is admitted and placed there at once."""

    def __init__(self, client: redis.Redis, namespace: str, uuid: str, executors: int = 2) -> None:
        self.client = client
        self.identity = WorkerIdentity("n1", uuid, 0, "b00t", "no-agent")
        self.layout = BrokerLayout(namespace)
        self.store = Store(client, f"{namespace}brim:")
        self.epoch, _ = self.store.elect("stage", 3600)
        self._numbers = itertools.count(1)
        device = DeviceRegistration(uuid, 0, "SIM", 8192, 192)
        assert self.store.register_node(NodeRegistration(Node("n1"), "agent", executors, ["*"], {}, [device]))

    @property
    def queue(self) -> str:
        """The device's list."""
        return self.layout.list_for(0, self.identity.queue)

    def admit(self) -> list[tuple[str, AdmitAnswer]]:
        """Take everything from the intake queue into records."""
        peeked = self.store.peek(self.layout.lists(), 1000)
        admissions = [self._admission(source) for source in peeked]
        return [
            (admission.identity.task_id, answer)
            for admission, answer in zip(admissions, self.store.admit(admissions), strict=True)
        ]

    def place(self, task_id: str) -> str:
        """Commit one waiting task to the device; its attempt."""
        attempt = f"{self.epoch}-{next(self._numbers)}"
        record = self.record(task_id)
        fields = attempt_fields(attempt, [self.identity.device], "n1", VRAM_MIB, CONTEXT_MIB)
        commit = Commit(
            task_id, record.lane, attempt, [self.identity.device], "n1", self.queue, VRAM_MIB, slot(attempt, fields)
        )
        [answer] = self.store.commit(self.epoch, [commit], ahead=100)
        assert answer.status == "committed", answer
        return attempt

    def step(self) -> None:
        """Admit what has come, place whatever waits, and send on what is due."""
        self.admit()
        self.store.release_due(100)
        for record in self.store.list_tasks(State.WAITING, 1000):
            self.place(record.task_id)

    def record(self, task_id: str) -> Record:
        """The record, which is there."""
        record = self.store.record(task_id)
        assert record is not None, task_id
        return record

    def until(self, task_id: str, *states: State, timeout_s: float = 30.0) -> Record:
        """Step until the task is in one of the states; its record."""

        def reached() -> Record | None:
            self.step()
            record = self.store.record(task_id)
            return record if record is not None and record.state in states else None

        what = f"{task_id} is {' or '.join(states)}"
        try:
            return wait_until(reached, what=what, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; its story: {self.store.story(task_id)}") from None

    def _admission(self, source: Peeked) -> Admission:
        envelope, prepared = parse(source.raw), split(source.raw)
        return Admission(
            source,
            envelope.identity,
            envelope.task,
            lane=f"{envelope.task}|{VRAM_MIB}",
            demand=Demand(VRAM_MIB),
            context_mib=CONTEXT_MIB,
            priority=envelope.priority,
            head=prepared.head,
            tail=prepared.tail,
            eta_s=envelope.eta_s,
            expires_s=envelope.expires_s,
            own_attempt=envelope.is_redelivery,
        )


def worker_environment(stage: Stage, settings: Settings) -> dict[str, str]:
    """What a node agent would put into the environment of the device's worker."""
    return {**settings.environment(), **stage.identity.variables(), "BRIM_DEVICES": SPEC}


@pytest.fixture
def settings(valkey_url: str, namespace: str) -> Settings:
    """Settings for the test's server and key prefix."""
    prefix = {"global_keyprefix": namespace}
    app_options = {"result_backend_transport_options": prefix}
    return Settings.model_validate(
        {"redis": {"url": valkey_url}, "broker": prefix, "results": {"app_options": app_options}}
    )


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    """A plain client of the test's server."""
    with redis.Redis.from_url(valkey_url) as client:
        yield client


def device_uuid() -> str:
    """UUID of the simulated device of `SPEC`."""
    return parse_spec(SPEC)[0].uuid
