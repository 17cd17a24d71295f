"""The whole of brim on one machine, for `brim demo` and `brim up`: every process of it under one supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import redis

from brim.settings import DEFAULT_TABLE, PolicyChoice, Resources, Settings
from brim.store import Store
from brim_services import embedded
from brim_services.resources import load_table
from brim_services.supervise import Backoff, Command, Supervisor

EXAMPLE = Path(__file__).parents[2] / "examples" / "vision"
"""The example's folder in the repository; it is no part of the wheel."""
EXAMPLE_APP = "vision"
EXAMPLE_TABLE = EXAMPLE.parents[1] / "configs" / "resources.yaml"

START_TIMEOUT_S = 60.0
STAGE_REDIS, STAGE_BRIM, STAGE_WORKERS = range(3)


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of the loopback interface."""

    redis: int
    flower: int
    monitor: int = 0
    """0: the stack has no monitor."""

    @classmethod
    def preferred(cls, redis: int, flower: int, monitor: int) -> Ports:
        """These, each replaced by a free one where it is taken or 0."""
        return cls(*map(embedded.preferred_port, (redis, flower, monitor)))


def with_files(settings: Settings, app: str) -> Settings:
    """Settings whose files can be read; the example brings its table along to where there is none.

    Raises `ConfigurationError` or `TableError`, before anything is started.
    """
    table = settings.resources.table
    if app == EXAMPLE_APP and table == DEFAULT_TABLE and not table.exists():
        settings = settings.model_copy(update={"resources": Resources(table=EXAMPLE_TABLE)})
    load_table(settings)
    PolicyChoice.load(settings.placement.policy_file)
    return settings


class Stack:
    """Redis, intake, placement, a node agent with an app's workers, its ordinary worker, Flower and the monitor.

    ``app`` is the Celery app, as for ``celery -A``. ``devices`` is the setting BRIM_DEVICES; ``ignore_memory`` makes
    placement blind to memory. Data, logs and simulated devices live in ``folder``.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        folder: Path,
        settings: Settings,
        devices: str,
        ports: Ports,
        restart: Backoff | None = None,
        *,
        app: str = EXAMPLE_APP,
        ignore_memory: bool = False,
    ) -> None:
        if app == EXAMPLE_APP and not (EXAMPLE / "vision").is_dir():
            hint = "it comes with brim's repository; `brim up -A your_app` needs none"
            raise FileNotFoundError(f"the example is not there: {EXAMPLE} ({hint})")
        self.app = app
        self.supervisor = supervisor
        self.folder = folder
        self.devices = devices
        self.ports = ports
        self.restart = restart
        self.ignore_memory = ignore_memory
        url = f"redis://{embedded.HOST}:{ports.redis}/0"
        self.settings = settings.model_copy(
            update={
                "redis": settings.redis.model_copy(update={"url": url}),
                "agent": settings.agent.model_copy(update={"log_folder": folder / "logs"}),
                "monitor": settings.monitor.model_copy(update={"port": ports.monitor or settings.monitor.port}),
            }
        )
        client = redis.Redis.from_url(url, socket_timeout=settings.redis.socket_timeout_s)
        self.store = Store(client, settings.key_prefix)

    @property
    def url(self) -> str:
        """Address of Redis: of the broker, the results and brim's state."""
        return self.settings.redis.url

    @property
    def flower_url(self) -> str:
        """Address of Flower's pages."""
        return f"http://{embedded.HOST}:{self.ports.flower}"

    @property
    def monitor_url(self) -> str:
        """Address of the monitor's page and API."""
        return f"http://{embedded.HOST}:{self.ports.monitor}"

    @property
    def environment(self) -> dict[str, str]:
        """What the processes get, and producers need: settings, devices, where the example is, and an app's broker."""
        paths = [str(EXAMPLE), os.environ.get("PYTHONPATH", "")]
        # Celery lets these win over what an app says of itself.
        redis = {name: self.url for name in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND")}
        return {
            **self.settings.environment(),
            "BRIM_DEVICES": self.devices,
            "BRIM_SIM_DIR": str(self.folder / "devices"),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            **({"VISION_BROKER": self.url} if self.app == EXAMPLE_APP else redis),
        }

    def start(self, say: Callable[[str], None], stop: Callable[[], bool]) -> None:
        """Start everything and return when every worker is ready to take tasks, or when ``stop()``.

        Raises `ChildDied` or `TimeoutError`, each naming the process.
        """
        say("Redis (an embedded Valkey)")
        embedded.start(self.supervisor, self.folder / "valkey", port=self.ports.redis)
        say("intake, placement, the node agent, the ordinary worker and Flower")
        for command in self._commands():
            self.supervisor.start(command)
        say("waiting for the workers")

        def wait(ready: Callable[[], bool], what: str) -> None:
            self.supervisor.wait_until(lambda: stop() or ready(), START_TIMEOUT_S, what)

        wait(self._devices_up, "the node agent registers its devices")
        wait(self._ordinary_up, "the ordinary worker takes tasks")
        if self.ports.monitor:
            wait(self._monitor_up, "the monitor answers")

    def _commands(self) -> list[Command]:
        brim = [sys.executable, "-m", "brim_services.cli"]
        celery = [sys.executable, "-m", "celery", "-A", self.app]
        queues = ["-Q", "vision"] if self.app == EXAMPLE_APP else []
        drain_s = self.settings.agent.drain_grace_s
        auth = self.settings.flower.basic_auth.get_secret_value()
        monitor = [self._command("monitor", [*brim, "monitor"], STAGE_BRIM)] if self.ports.monitor else []
        return [
            *monitor,
            self._command("intake", [*brim, "intake"], STAGE_BRIM),
            self._command("placement", [*brim, "placement", *["--ignore-memory"] * self.ignore_memory], STAGE_BRIM),
            self._command("agent", [*brim, "worker", "-A", self.app], STAGE_WORKERS, grace_s=drain_s + 10.0),
            self._command(
                "ordinary",
                [*celery, "worker", *queues, "-n", "ordinary@%h", "-c", "1", "-l", "INFO"],
                STAGE_WORKERS,
            ),
            self._command(
                "flower",
                [*celery, "flower", f"--address={embedded.HOST}", f"--port={self.ports.flower}"],
                STAGE_WORKERS,
                more={"FLOWER_BASIC_AUTH": auth} if auth else {},  # an empty one would let nobody in
            ),
        ]

    def _command(
        self, name: str, argv: list[str], stage: int, grace_s: float = 10.0, more: Mapping[str, str] | None = None
    ) -> Command:
        environment = {**self.environment, **(more or {})}
        return Command(name, argv, environment=environment, restart=self.restart, grace_s=grace_s, stage=stage)

    def _devices_up(self) -> bool:
        return any(device.state == "up" for device in self.store.devices())

    def _ordinary_up(self) -> bool:
        return "ready." in self.supervisor.children["ordinary"].last_lines(200)

    def _monitor_up(self) -> bool:
        try:
            with urlopen(f"{self.monitor_url}/readyz", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
