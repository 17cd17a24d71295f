"""What Flower, and whoever listens to Celery's events, sees of brim's own services.

A service is a row among the workers, by the heartbeats that Celery's workers send. A task that was placed is told of
anew as sent to its GPU's queue, so that its page names the queue that it waits in; one that brim itself has answered
is told of as revoked or failed, since no worker ever will.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
from collections import deque
from typing import Any

import brim
from brim.celery.answers import REVOKED, answering_app
from brim.core.model import Reason, State
from brim.settings import Settings

log = logging.getLogger("brim")

HEARTBEAT_S = 2.0
FLUSH_S = 0.5
TOGETHER = 200
"""Events that one message carries."""
MOST_DUE = 10_000
"""Tasks that are not told of yet; beyond it the oldest are forgotten: events promise nothing."""


class Events:
    """A thread beside a service. Nothing waits for it, and what goes wrong here stays here."""

    def __init__(self, service: str, settings: Settings, stop: threading.Event) -> None:
        self._app = answering_app(settings)
        self._hostname = f"{service}@{settings.agent.node or socket.gethostname()}"
        self._stop = stop
        self._due: deque[dict[str, Any]] = deque(maxlen=MOST_DUE)

    def placed(self, task_id: str, task: str, queue: str, at_s: float) -> None:
        """A task waits in a GPU's queue since ``at_s`` (seconds since 1970), which is before a worker receives it."""
        told = {"uuid": task_id, "name": task, "queue": queue, "routing_key": queue, "exchange": ""}
        self._due.append({"type": "task-sent", "timestamp": at_s, **told})

    def answered(self, task_id: str, state: State, reason: Reason) -> None:
        """brim has written a task's last answer: it is cancelled, expired or dead."""
        if state in REVOKED:
            told = {"type": "task-revoked", "terminated": False, "signum": None, "expired": state is State.EXPIRED}
        else:
            told = {"type": "task-failed", "exception": str(reason), "traceback": ""}
        self._due.append({"uuid": task_id, **told})

    def run(self) -> None:
        """Tell of it until ``stop``, through outages of the broker."""
        while not self._stop.is_set():
            try:
                self._tell()
            except Exception as error:  # the service itself says what is wrong with Redis
                log.debug("events are not sent: %s", error)
                self._stop.wait(HEARTBEAT_S)

    def _tell(self) -> None:
        facts = {
            "freq": HEARTBEAT_S,
            "sw_ident": "brim",
            "sw_ver": brim.__version__,
            "sw_sys": platform.system(),
            "active": 0,
            "processed": 0,
        }
        with (
            self._app.connection_for_write() as connection,  # type: ignore[no-untyped-call]
            self._app.events.Dispatcher(
                connection, hostname=self._hostname, buffer_group={"task"}, buffer_limit=TOGETHER
            ) as dispatcher,
        ):
            dispatcher.send("worker-online", loadavg=os.getloadavg(), **facts)
            rounds = 0
            while not self._stop.wait(FLUSH_S):
                rounds += 1
                while self._due:
                    dispatcher.send(**self._due.popleft())
                dispatcher.flush()
                if rounds * FLUSH_S % HEARTBEAT_S == 0:
                    dispatcher.send("worker-heartbeat", loadavg=os.getloadavg(), **facts)
            dispatcher.send("worker-offline", **facts)
