"""One Celery worker per device, under the agent's supervisor."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from brim.celery.agent_link import WorkerIdentity
from brim.core.oversight import Worker
from brim.gpu.probe import DeviceInfo
from brim.gpu.process import proc_id
from brim.settings import Settings
from brim_services import keeper
from brim_services.supervise import Backoff, Child, Command, Supervisor

from .watch import Watch, ending

log = logging.getLogger("brim.agent")

MAIN = ""
"""In place of a device, for a worker's main process."""
GRACE_S = 10.0
"""How long an idle worker may take to stop."""
STEADY_S = 10.0
"""A worker that lived this long was no failure to start: its next pause is the shortest again."""
SLOW_S = 60.0
"""A worker that is not ready after this long is not waited for any more, though it may still become so."""


class DeviceWorker:
    """The worker of one device: who it is now, and whether it has said that it is ready."""

    def __init__(self, device: DeviceInfo, node: str, agent: str) -> None:
        self.device = device
        self.name = f"gpu{device.index}"
        self.child: Child | None = None
        self.said_ready = False
        self.identity = self._new_identity(node, agent)

    def begin(self) -> Mapping[str, str]:
        """A new boot, and the environment that says so."""
        self.said_ready = False
        self.identity = self._new_identity(self.identity.node, self.identity.agent)
        return self.identity.variables()

    @property
    def runs(self) -> bool:
        """Whether its main process is there."""
        return self.child is not None and self.child.pid is not None

    def is_settled(self, seen: Worker, executors: int) -> bool:
        """Whether all of it is there, or need not be waited for: it has died before, or takes too long."""
        if self.child is None or self.child.failures > 0 or time.monotonic() - self.child.started_at > SLOW_S:
            return True
        return seen.ready and len(seen.executors) >= executors

    def seen(self, watch: Watch) -> Worker:
        """What is seen of it; without executors it is not ready, whatever it says."""
        executors = watch.living(self.device.uuid)
        if not self.runs:
            return Worker(executors=executors)
        return Worker(self.identity.boot, self.said_ready and bool(executors), executors)

    def _new_identity(self, node: str, agent: str) -> WorkerIdentity:
        return WorkerIdentity(node, self.device.uuid, self.device.index, secrets.token_hex(8), agent)


class Workers:
    """All workers of the node. They start, die and start again here; what that means is decided elsewhere."""

    def __init__(self, supervisor: Supervisor, settings: Settings, app: str, watch: Watch) -> None:
        self._supervisor = supervisor
        self._settings = settings
        self._app = app
        self._watch = watch
        self.by_device: dict[str, DeviceWorker] = {}
        self.endings: dict[str, str] = {}
        """How worker processes ended, by boot."""

    def start(self, devices: Sequence[DeviceInfo], node: str, agent: str) -> None:
        """Start a worker for each device, which greets the ``agent`` at that address when it is ready."""
        self.by_device = {device.uuid: DeviceWorker(device, node, agent) for device in devices}
        self.endings.clear()
        for worker in self.by_device.values():
            worker.child = self._supervisor.start(self._command(worker))
            log.info("%s: worker started, log in %s", worker.identity.hostname, worker.child.log)
        self._watch_mains()

    def seen(self) -> dict[str, Worker]:
        """What is seen of the workers, by device."""
        return {uuid: worker.seen(self._watch) for uuid, worker in self.by_device.items()}

    @property
    def settled(self) -> bool:
        """Whether the node can be of use: some workers are ready, and the others need not be waited for."""
        seen, executors = self.seen(), self._settings.agent.executors_per_gpu
        return any(worker.ready for worker in seen.values()) and all(
            worker.is_settled(seen[uuid], executors) for uuid, worker in self.by_device.items()
        )

    def poll(self) -> None:
        """Notice deaths, start again what is due, and watch what runs."""
        before = {w.name: (w.identity.boot, w.said_ready) for w in self.by_device.values()}
        for death in self._supervisor.poll():
            boot, was_ready = before[death.name]
            self.endings[boot] = ending(-death.code if death.code < 0 else death.code << 8)
            log.warning("%s", death)
            if not was_ready:
                lines = self._supervisor.children[death.name].last_lines(10)
                log.warning("%s never was ready; its log ends:\n%s", death.name, lines)
        self._watch_mains()

    def next_restart_s(self) -> float | None:
        """Seconds until a dead worker is started again; None where none is due."""
        due = [w.child.restart_at for w in self.by_device.values() if w.child and w.child.restart_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def of_boot(self, boot: str) -> DeviceWorker | None:
        """The worker that runs with this boot."""
        return next((w for w in self.by_device.values() if w.identity.boot == boot and w.runs), None)

    def kill(self, uuid: str) -> None:
        """End a device's worker, and its executors with it; it counts as a death and starts again."""
        child = self.by_device[uuid].child
        if child is not None and child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """End all workers at once, and do not start them again."""
        keeper.kill_sessions([w.child.pid for w in self.by_device.values() if w.child and w.child.pid])
        self.stop()

    def stop(self) -> None:
        """Stop all workers in order, idle ones within `GRACE_S`."""
        if self.by_device:
            self._supervisor.stop(*(worker.name for worker in self.by_device.values()))

    def _watch_mains(self) -> None:
        """Have the agent wake up when a worker's main process ends; it serves no device as an executor does."""
        for worker in self.by_device.values():
            pid = worker.child.pid if worker.child else None
            proc = proc_id(pid) if pid else None
            if proc is not None:
                self._watch.add(MAIN, proc)

    def _command(self, worker: DeviceWorker) -> Command:
        agent = self._settings.agent
        options = {
            "--hostname": worker.identity.hostname,
            "--queues": worker.identity.queue,
            "--concurrency": str(agent.executors_per_gpu),
            "--pool": "prefork",
            "--prefetch-multiplier": "1",
            "--loglevel": "INFO",
        }
        flags = ["--task-events", "--without-mingle", "--without-gossip"]
        arguments = [part for option in options.items() for part in option]
        return Command(
            worker.name,
            [sys.executable, "-m", "celery", "--app", self._app, "worker", *arguments, *flags],
            environment=self._settings.environment(),
            variables=worker.begin,
            restart=Backoff(agent.restart_backoff_s, agent.restart_backoff_max_s, STEADY_S),
            grace_s=GRACE_S,
        )
