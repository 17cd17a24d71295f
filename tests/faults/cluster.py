"""A whole cluster of real processes on one machine: a server, intakes, placements, and nodes with their devices."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import psutil
import redis
from celery import Celery
from redis.backoff import NoBackoff
from redis.retry import Retry

import brim
from brim.core.model import State
from brim.gpu import simulated
from brim.store import Store
from brim.store.types import Record
from brim_services import embedded
from brim_services.supervise import Backoff, Command, Supervisor
from faults.sabotage import SABOTAGE_ENV
from support.celery_app import BROKER_ENV, NAMESPACE_ENV, TRANSPORT_ENV, configure

ROOT = Path(__file__).parents[2]
SERVER, BRIM, NODES = range(3)
NAMESPACE = "storm:"
QUICKLY = Backoff(first_s=0.1, longest_s=1.0, steady_s=1.0)
STARTING_S = 120.0


class Cluster:
    """Starts it all, restarts what dies (unless told otherwise), and knows every process by what it is."""

    def __init__(
        self,
        supervisor: Supervisor,
        folder: Path,
        *,
        nodes: int = 1,
        intakes: int = 1,
        placements: int = 1,
        gpus: int = 1,
        device: str = "8GiB",
        executors: int = 2,
        appendfsync: Literal["always", "everysec"] = "always",
        settings: Mapping[str, Any] | None = None,
        sabotage: str = "",
        transport: Mapping[str, Any] | None = None,
        clocks: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.supervisor = supervisor
        self.folder = folder
        self.gpus = gpus
        self.device = device
        self._clocks = clocks or {}
        self.port = embedded.free_port()
        self.url = f"redis://{embedded.HOST}:{self.port}/0"
        self.namespace = NAMESPACE
        self.client = redis.Redis.from_url(
            self.url, socket_timeout=5.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0)
        )
        self.store = Store(self.client, f"{NAMESPACE}brim:")
        self.node_names = [f"n{i + 1}" for i in range(nodes)]
        self.services = [f"intake{i + 1}" for i in range(intakes)] + [f"placement{i + 1}" for i in range(placements)]
        prefix = {"global_keyprefix": NAMESPACE}
        self.environment = {
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("common", "services", "tests")),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            BROKER_ENV: self.url,
            NAMESPACE_ENV: NAMESPACE,
            TRANSPORT_ENV: json.dumps(transport or {}),
            SABOTAGE_ENV: sabotage,
            "BRIM_REDIS__URL": self.url,
            "BRIM_BROKER__GLOBAL_KEYPREFIX": NAMESPACE,
            "BRIM_RESULTS__APP_OPTIONS": json.dumps({"result_backend_transport_options": prefix}),
            "BRIM_RESOURCES__TABLE": str(ROOT / "tests/faults/resources.yaml"),
            "BRIM_PLACEMENT__POLICY_FILE": str(ROOT / "configs/placement.yaml"),
            "BRIM_AGENT__EXECUTORS_PER_GPU": str(executors),
            **{f"BRIM_{name}".upper(): str(value) for name, value in (settings or {}).items()},
        }
        command = embedded.command(folder / "valkey", self.port, appendfsync)
        self._server = dataclasses.replace(command, restart=QUICKLY)

    # -- processes -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Return when every device takes tasks."""
        self.start_server()
        for name in self.services:
            self.supervisor.start(self.service(name))
        for name in self.node_names:
            self.supervisor.start(self.node(name))
        self.wait_until(self.is_complete, "every device is up", STARTING_S)

    def start_server(self) -> None:
        """Run the server again on its data, until it answers."""
        self.supervisor.start(self._server)
        self.wait_until(self.answers, "the server answers", STARTING_S)

    def service(self, name: str) -> Command:
        """How to run an intake or a placement."""
        argv = [sys.executable, "-m", "faults.service", name.rstrip("0123456789")]
        return Command(name, argv, environment=self.environment, restart=QUICKLY, stage=BRIM)

    def node(self, name: str, server: str = "", prefix: Sequence[str] = ()) -> Command:
        """How to run a node's agent; it may reach the server at another ``host:port``, and be run by something."""
        url = f"redis://{server}/0" if server else self.url
        environment = {
            **self.environment,
            **self._clocks.get(name, {}),
            BROKER_ENV: url,
            "BRIM_REDIS__URL": url,
            "BRIM_DEVICES": f"sim:{self.gpus}x{self.device}",
            "BRIM_SIM_DIR": str(self.folder / "devices" / name),
            "BRIM_AGENT__NODE": name,
            "BRIM_AGENT__LOG_FOLDER": str(self.folder / "logs" / name),
        }
        argv = [*prefix, sys.executable, "-m", "faults.service", "worker", "-A", "faults.app"]
        return Command(name, argv, environment=environment, restart=QUICKLY, stage=NODES, grace_s=70.0)

    @contextmanager
    def server_is_slow(self, seconds: float) -> Iterator[None]:
        """Started again in the block, the server takes so long to load what it knows, and says so meanwhile."""
        self.client.bgrewriteaof()
        self.wait_until(lambda: not self.client.info("persistence")["aof_rewrite_in_progress"], "all is in one file")
        delay = ["--key-load-delay", str(round(seconds * 1e6 / self.client.dbsize()))]
        child = self.supervisor.children["valkey"]
        argv = [*self._server.argv, *delay, "--loading-process-events-interval-bytes", "1024"]
        child.command = dataclasses.replace(self._server, argv=argv)
        try:
            yield
        finally:
            child.command = self._server

    def pid(self, name: str) -> int | None:
        """Of a service, a node's agent, or the server (``valkey``)."""
        return self.supervisor.children[name].pid

    def signal(self, name: str, number: int) -> None:
        """Send one of them a signal."""
        pid = self.pid(name)
        assert pid is not None, f"{name} does not run"
        os.kill(pid, number)

    def kill(self, name: str) -> None:
        """SIGKILL one of them."""
        self.signal(name, signal.SIGKILL)

    def workers(self) -> dict[int, str]:
        """Main processes of workers: pid -> node."""
        return {process.pid: node for node, process in self._workers()}

    def executors(self) -> dict[int, str]:
        """Pool processes: pid -> node."""
        found = {}
        for node, worker in self._workers():
            with suppress(psutil.Error):
                for child in worker.children():
                    if "spawn_main" in " ".join(child.cmdline()):
                        found[child.pid] = node
        return found

    def _workers(self) -> Iterator[tuple[str, psutil.Process]]:
        for node in self.node_names:
            with suppress(psutil.Error, KeyError):
                agent = psutil.Process(self.pid(node) or -1)
                for child in agent.children():
                    if "celery" in (words := child.cmdline()) and any(word.endswith(f"@{node}") for word in words):
                        yield node, child

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> None:
        """Wait, while whatever is killed is restarted and the server may be away; nothing may end by itself."""

        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for death in self.supervisor.poll():
                assert death.code <= 0, f"{death}\n{self.supervisor.children[death.name].last_lines()}"
            with suppress(redis.RedisError):
                if condition():
                    return
            time.sleep(0.02)
        raise TimeoutError(f"not within {timeout_s:g} s: {what}")

    # -- what can be seen ------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """Whether the server that we started answers."""
        try:
            info: Any = self.client.info()
        except redis.RedisError:
            return False
        return bool(info["process_id"] == self.pid("valkey") and not info["loading"])

    def is_complete(self) -> bool:
        """Whether every device is up, with all its executors."""
        try:
            devices = self.store.devices()
        except redis.RedisError:
            return False
        return len(devices) == self.gpus * len(self.node_names) and all(device.state == "up" for device in devices)

    def record(self, task_id: str) -> Record | None:
        """The task's record."""
        return self.store.record(task_id)

    def state(self, task_id: str) -> State | None:
        """Where the task is."""
        record = self.store.record(task_id)
        return record.state if record else None

    def witnesses(self) -> dict[str, simulated.Witness]:
        """What the simulated devices of all nodes saw."""
        found: dict[str, simulated.Witness] = {}
        for name in self.node_names:
            found |= simulated.witness(self.folder / "devices" / name)
        return found

    @cached_property
    def producer(self) -> Celery:
        """An app as producers have it; it knows tasks by name only."""
        app = configure(Celery("producer", set_as_current=False), self.url, NAMESPACE)
        app.conf.update(task_publish_retry=False, redis_socket_timeout=5.0, redis_socket_connect_timeout=1.0)
        app.conf.broker_transport_options |= {"socket_timeout": 5.0, "socket_connect_timeout": 1.0}
        brim.install(app)
        return app

    def close(self) -> None:
        """Kill the processes: their end is no part of the test."""
        for name, child in self.supervisor.children.items():
            if child.pid is not None and name != "valkey":
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGCONT)
                    os.kill(child.pid, signal.SIGKILL)
        # Celery's results unsubscribe when they are collected: not after their server is gone.
        gc.collect()
        self.producer.close()
        self.client.close()


@contextmanager
def cluster(folder: Path, **options: Any) -> Iterator[Cluster]:
    """A running cluster until the block ends."""
    with Supervisor(folder / "logs") as supervisor:
        made = Cluster(supervisor, folder, **options)
        try:
            made.start()
            yield made
        finally:
            made.close()
