"""A stand-in for intake, placement and the agent's books, so that workers can be tested by themselves."""

from __future__ import annotations

import itertools

import redis

from brim.celery.agent_link import WorkerIdentity
from brim.celery.envelope import BrokerLayout, attempt_fields, join, parse, sign, slot, split
from brim.core.model import AttemptView, Demand, Node, Reason, State
from brim.gpu.probe import Sample
from brim.gpu.process import is_alive
from brim.gpu.simulated import SimulatedProbe, parse_spec
from brim.settings import Settings
from brim.store import Store
from brim.store.types import (
    Admission,
    AdmitAnswer,
    Commit,
    DeviceFigures,
    DeviceRegistration,
    LoseAnswer,
    MemoryReport,
    NodeRegistration,
    Peeked,
    Record,
)
from support.waiting import wait_until

SPEC = "sim:1x8GiB"
VRAM_MIB, CONTEXT_MIB = 1000, 300


class Stage:
    """One node with one simulated device; every message of the intake queue is admitted and placed there at once."""

    def __init__(self, client: redis.Redis, namespace: str, uuid: str, executors: int = 2, key: bytes = b"") -> None:
        self.client = client
        self.key = key
        self.identity = WorkerIdentity("n1", "gpu0", "gpu.n1.0", (uuid,), "b00t", "no-agent")
        self.layout = BrokerLayout(namespace)
        self.store = Store(client, f"{namespace}brim:")
        self.epoch, _ = self.store.elect("stage", 3600)
        self._numbers = itertools.count(1)
        self._probe = SimulatedProbe(SPEC)
        device = DeviceRegistration(uuid, 0, "SIM", 8192, 192)
        assert self.store.register_node(NodeRegistration(Node("n1"), "agent", executors, ["*"], {}, [device]))

    @property
    def queue(self) -> str:
        """The device's list."""
        return self.layout.list_for(0, self.identity.queue)

    def admit(self) -> list[tuple[str, AdmitAnswer]]:
        """Take everything from the intake queue into records."""
        peeked = self.store.look(self.layout.lists(), 1000).messages
        admissions = [self._admission(source) for source in peeked]
        return [
            (admission.identity.task_id, answer)
            for admission, answer in zip(admissions, self.store.admit(admissions), strict=True)
        ]

    def place(self, task_id: str) -> str | None:
        """Commit one waiting task to the device; its attempt, None where it does not fit now."""
        attempt = f"{self.epoch}-{next(self._numbers)}"
        record = self.record(task_id)
        fields = attempt_fields(attempt, [self.identity.devices[0]], "n1", VRAM_MIB, CONTEXT_MIB)
        signed = slot(attempt, sign(fields, task_id, self.key))
        uuids = list(self.identity.devices)
        commit = Commit(task_id, record.lane, attempt, uuids, "n1", self.queue, VRAM_MIB, signed)
        [answer] = self.store.commit(self.epoch, [commit], ahead=100)
        assert answer.status in ("committed", "refused"), answer
        return attempt if answer.status == "committed" else None

    def report(self) -> None:
        """Tell the books what lives and what it holds, as an agent does."""
        uuid, sampled_ms = self.identity.devices[0], self.store.server_ms()
        sample = self._probe.sample()[uuid]
        assert isinstance(sample, Sample)
        attempts, processes = self.store.books([uuid])
        bound = {view.proc for view in attempts}
        living = {proc: sample.processes.get(int(proc.split(".")[0]), 0) for proc in processes[uuid] if is_alive(proc)}
        for proc in processes[uuid].keys() - living.keys() - bound:
            self.store.process_gone(uuid, proc)
        figures = DeviceFigures(
            total_mib=sample.total_mib, used_mib=sample.used_mib, free_mib=sample.free_mib, processes=living
        )
        report = MemoryReport(node="n1", boot="agent", sampled_ms=sampled_ms, devices={uuid: figures})
        assert self.store.report(report)

    def step(self) -> None:
        """Report, admit what has come, send on what is due, and place whatever waits."""
        self.report()
        self.admit()
        self.store.release_due(100)
        for record in self.store.list_tasks(State.WAITING, 1000):
            self.place(record.task_id)

    def record(self, task_id: str) -> Record:
        """The record, which is there."""
        record = self.store.record(task_id)
        assert record is not None, task_id
        return record

    def view(self, task_id: str) -> AttemptView:
        """The task's live attempt as the books show it."""
        views = self.store.books([self.identity.devices[0]])[0]
        return next(view for view in views if view.task_id == task_id)

    def unacked(self) -> int:
        """How many messages the device's worker holds, by its own key; kombu's common one stays empty."""
        assert not self.client.exists(f"{self.layout.global_keyprefix}unacked")
        return int(self.client.hlen(f"{self.layout.global_keyprefix}unacked.{self.identity.queue}"))  # type: ignore[arg-type]

    def lose(self, view: AttemptView, max_attempts: int = 3) -> LoseAnswer:
        """What an agent or placement does when an attempt was lost."""
        return self.store.lose(view, Reason("test", "lost by the test"), counts=True, max_attempts=max_attempts)

    def push(self, raw: bytes, attempt: str) -> None:
        """Put a message into the device's queue past the books."""
        fields = attempt_fields(attempt, [self.identity.devices[0]], "n1", VRAM_MIB, CONTEXT_MIB)
        self.client.lpush(self.queue, join(split(parse(raw)), f"{attempt}-again", fields))

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
        envelope = parse(source.raw, key=self.key)
        prepared = split(envelope, self.key)
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


def settings_for(url: str, namespace: str) -> Settings:
    """Settings for a server and a key prefix."""
    prefix = {"global_keyprefix": namespace}
    app_options = {"result_backend_transport_options": prefix} if namespace else {}
    return Settings.model_validate({"redis": {"url": url}, "broker": prefix, "results": {"app_options": app_options}})


def device_uuid() -> str:
    """UUID of the simulated device of `SPEC`."""
    return parse_spec(SPEC)[0].uuid
