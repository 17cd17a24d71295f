"""A real node agent with real workers on simulated devices, and a test that plays intake and placement for it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from brim.celery.envelope import attempt_fields, parse, slot, split
from brim.core.model import Demand, Device, State, gpu_queue
from brim.gpu.process import is_alive
from brim.store import Store
from brim.store.runner import Call, Runner
from brim.store.types import Admission, AdmitAnswer, Commit, Record
from support.celery_app import BROKER_ENV, NAMESPACE_ENV, configure
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
APP = "support.apps.device"


@dataclass
class AgentProcess:
    """A running ``brim worker``."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask it to drain and wait for its end; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


class Losing(Runner):
    """Runs scripts, and empties a list in the same transaction, before anybody who waits for it is served."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        super().__init__(client)
        self._queue = queue

    def _send(self, calls: Sequence[Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=True)
        for call in calls:
            pipeline.evalsha(self._digests[call.script], len(call.keys), *call.keys, *call.args)
        pipeline.delete(self._queue)
        return list(pipeline.execute(raise_on_error=False))[:-1]


@dataclass
class Bench:
    """One node of simulated devices under test, on a server and below a key prefix."""

    url: str
    namespace: str
    folder: Path
    devices: str = "sim:1x8GiB"
    executors: int = 2
    node: str = "n1"
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = redis.Redis.from_url(self.url)
        self.store = Store(self.client, f"{self.namespace}brim:")
        self.app = configure(Celery("producer", set_as_current=False), self.url, self.namespace)
        self.agents: list[AgentProcess] = []
        self.services: list[AgentProcess] = []
        self.epoch, _ = self.store.elect("test", 3600)
        self._numbers = itertools.count(1)

    # -- processes -------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What the agent is told."""
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("common", "services", "tests")),
            BROKER_ENV: self.url,
            NAMESPACE_ENV: self.namespace,
            "BRIM_REDIS__URL": self.url,
            "BRIM_BROKER__GLOBAL_KEYPREFIX": self.namespace,
            "BRIM_RESULTS__APP_OPTIONS": json.dumps(
                {"result_backend_transport_options": {"global_keyprefix": self.namespace}}
            ),
            "BRIM_DEVICES": self.devices,
            "BRIM_SIM_DIR": str(self.folder / "devices"),
            "BRIM_AGENT__NODE": self.node,
            "BRIM_AGENT__EXECUTORS_PER_GPU": str(self.executors),
            "BRIM_AGENT__LOG_FOLDER": str(self.folder / "logs"),
            **self.settings,
        }

    def start(self, app: str = APP, **more: str) -> AgentProcess:
        """Start an agent; it is killed with the bench."""
        self.agents.append(self._launch(f"agent{len(self.agents)}", ["worker", "-A", app], more))
        return self.agents[-1]

    def service(self, name: str) -> None:
        """Start ``brim intake`` or ``brim placement``; it is killed with the bench."""
        self.services.append(self._launch(name, [name], {}))

    def _launch(self, name: str, arguments: list[str], more: Mapping[str, str]) -> AgentProcess:
        log_path = self.folder / f"{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "brim_services.cli", *arguments],
                env={**self.environment, **more},
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return AgentProcess(process, log_path)

    def serve(self, **more: str) -> AgentProcess:
        """Start an agent and wait until its devices take tasks."""
        agent = self.start(**more)
        wait_until(lambda: self.up(agent), what="the agent's devices are up", timeout_s=60)
        return agent

    def up(self, agent: AgentProcess) -> bool:
        """Whether all devices are up; fails if the agent has ended."""
        assert agent.process.poll() is None, agent.log
        devices = self.store.devices()
        return bool(devices) and all(device.state == "up" for device in devices)

    def close(self) -> None:
        """Kill what still runs."""
        for agent in (*self.agents, *self.services):
            if agent.process.poll() is None:
                agent.process.kill()
            agent.process.wait()
        self.app.close()
        self.client.close()

    def processes(self) -> dict[int, str]:
        """Living processes of this bench, agents excluded: pid -> command line."""
        mark = f"{NAMESPACE_ENV}={self.namespace}".encode()
        agents = {agent.process.pid for agent in (*self.agents, *self.services)}
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in agents:
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def worker_pid(self, index: int = 0) -> int:
        """The main process of a device's worker."""
        name = f"gpu{index}@{self.node} "
        return next(pid for pid, command in self.processes().items() if name in command)

    # -- intake and placement, played by the test ------------------------------------------------------------

    def admit(self, task: str = "device.hold", vram_mib: int = 1000, guard: str = "off", **kwargs: Any) -> str:
        """Publish a task and admit it; its id."""
        task_id = str(self.app.send_task(task, kwargs=kwargs, queue="brim.intake").id)
        assert self.admit_all(vram_mib, guard)[task_id] is AdmitAnswer.ADMITTED
        return task_id

    def admit_all(self, vram_mib: int = 1000, guard: str = "off") -> dict[str, AdmitAnswer]:
        """Admit what lies in the intake queue: id -> answer."""
        answers = {}
        for peeked in self.store.look([f"{self.namespace}brim.intake"], 100).messages:
            message = parse(peeked.raw)
            prepared = split(message)
            admission = Admission(
                peeked,
                message.identity,
                message.task,
                f"{message.task}|{vram_mib}",
                Demand(vram_mib),
                300,
                0,
                prepared.head,
                prepared.tail,
                own_attempt=message.is_redelivery,
                explanation={"guard": guard},
            )
            answers[message.identity.task_id] = self.store.admit([admission])[0]
        return answers

    def place(self, task_id: str, *indices: int, deliver: bool = True, ahead: int = 1) -> str:
        """Commit a waiting task to one device or several, the first by default; undelivered, its message is lost."""
        record, devices = self.record(task_id), [self.device(index) for index in indices or (0,)]
        attempt = f"{self.epoch}-{next(self._numbers)}"
        vram_mib = record.demand.vram_mib
        uuids = [device.uuid for device in devices]
        fields = attempt_fields(attempt, uuids, self.node, vram_mib, record.context_mib)
        queue = self.namespace + gpu_queue(self.node, [device.index for device in devices])
        commit = Commit(
            task_id,
            record.lane,
            attempt,
            uuids,
            self.node,
            queue,
            vram_mib,
            slot(uuid.uuid4().hex, fields),
        )
        store = Store(self.client, f"{self.namespace}brim:")
        if not deliver:
            store.runner = Losing(self.client, queue)
        answer = store.commit(self.epoch, [commit], ahead)[0]
        assert answer.status == "committed", answer
        return attempt

    def run(self, task: str = "device.hold", on: tuple[int, ...] = (0,), **kwargs: Any) -> str:
        """Admit and place a task, and wait until it runs; its id."""
        task_id = self.admit(task, **kwargs)
        self.place(task_id, *on)
        self.wait_for(task_id, State.RUNNING, timeout_s=60.0 if len(on) > 1 else 20.0)
        return task_id

    # -- what can be seen ------------------------------------------------------------------------------------

    def record(self, task_id: str) -> Record:
        """The task's record."""
        record = self.store.record(task_id)
        assert record is not None
        return record

    def device(self, index: int = 0) -> Device:
        """The device's entry of the availability table."""
        return next(device for device in self.store.devices() if device.index == index)

    def measured_mib(self, index: int = 0) -> int:
        """What the executors of a device hold, by the latest report."""
        uuid = self.device(index).uuid
        return self.store.measured_mib([uuid])[uuid]["measured"]

    def is_idle(self) -> bool:
        """Whether every device is up and has all its executors and no others, and none runs a task."""
        devices = self.store.devices()
        attempts, processes = self.store.books([device.uuid for device in devices])
        # A book names a dead executor for a moment longer than its attempt.
        living = {uuid: len(book) if all(map(is_alive, book)) else 0 for uuid, book in processes.items()}
        return not attempts and all(
            device.state == "up" and living[device.uuid] == self.executors for device in devices
        )

    def wait_for(self, task_id: str, *states: State, timeout_s: float = 20.0) -> Record:
        """Wait until the task is in one of the states."""
        what = f"task {task_id} is {' or '.join(states)}"

        def there() -> bool:
            record = self.store.record(task_id)
            return record is not None and record.state in states

        wait_until(there, what=what, timeout_s=timeout_s)
        return self.record(task_id)

    def executor(self, task_id: str) -> int:
        """The pid of the executor that a task is bound to."""
        attempts, _ = self.store.books([device.uuid for device in self.store.devices()])
        return next(int(a.proc.partition(".")[0]) for a in attempts if a.task_id == task_id)

    def told(self, task_id: str) -> list[str]:
        """The events of a task's story."""
        return [line["event"] for line in self.store.story(task_id)]
