"""What a node agent and the workers that it starts tell each other: environment variables and short messages.

The agent says in a worker's environment which device it serves and where the agent listens. The worker says
by datagram when it is ready, each executor that it exists, and an executor that something has changed, so
that the agent reports memory at once, and which attempt it has done with. What a lost notice would have told, the
agent finds out at its next look; only greetings, and an end that the server then forgets, it could not.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, Self

from celery.signals import worker_process_init, worker_ready

from brim.gpu.process import proc_id

GREETING_TIMEOUT_S = 5.0
"""How long a greeting waits for an agent that is too busy to take it."""

OVER_TIMEOUT_S = 0.05
"""The same of an end. The kernel keeps ten notices."""

HEARD_EVERY_S, HEARD_AT_ONCE = 0.02, 5
"""How often an agent that will look soon hears its workers; more often where more notices than this would gather."""

MAX_BYTES = 512

EXECUTOR = "BRIM_MODEL_EXECUTOR"
"""The environment variable that makes a worker the model executor of that name."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Which devices a worker serves, and for whom. ``boot`` is new at every start of the worker."""

    node: str
    name: str
    """What it is called in its node: "gpu0", and "gpu0-1" if it serves two devices together."""
    queue: str
    """The queue that the worker consumes."""
    devices: tuple[str, ...]
    """UUIDs of the devices, in the order in which CUDA is to count them."""
    boot: str
    agent: str
    """Address of the agent's socket; see `Listener`."""

    @property
    def hostname(self) -> str:
        """The worker's Celery node name."""
        return f"{self.name}@{self.node}"

    def variables(self) -> dict[str, str]:
        """The environment variables that carry this identity, and show the worker its devices only."""
        return {
            "BRIM_NODE": self.node,
            "BRIM_WORKER": self.name,
            "BRIM_QUEUE": self.queue,
            "BRIM_DEVICE": ",".join(self.devices),
            "BRIM_BOOT": self.boot,
            "BRIM_AGENT_ADDRESS": self.agent,
            "CUDA_VISIBLE_DEVICES": ",".join(self.devices),
        }

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """The identity of this process's worker; None where no agent has started it."""
        try:
            return cls(
                environment["BRIM_NODE"],
                environment["BRIM_WORKER"],
                environment["BRIM_QUEUE"],
                tuple(environment["BRIM_DEVICE"].split(",")),
                environment["BRIM_BOOT"],
                environment["BRIM_AGENT_ADDRESS"],
            )
        except KeyError:
            return None


class Event(StrEnum):
    """What a worker tells its agent."""

    READY = "ready"
    """The worker consumes its queue."""
    EXECUTOR = "executor"
    """A pool process exists from now on."""
    CHANGED = "changed"
    """An attempt has ended, or memory has changed otherwise."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One message: ``proc`` ("<pid>.<start ticks>") sent it, a process of the worker with this ``boot``.

    ``over``: the attempt that is none any more, by an answer that the store has given; empty where it is about none.
    """

    event: Event
    boot: str
    proc: str
    over: str = ""


class WorkerSide:
    """The worker's end: greets by itself once attached, and `changed` is called after every end of an attempt."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity

    def attach(self) -> None:
        """Send the greetings when Celery says that the worker is ready and that a pool process has begun."""
        worker_ready.connect(self._on_ready, weak=False, dispatch_uid="brim.agent_link.ready")
        worker_process_init.connect(self._on_process_init, weak=False, dispatch_uid="brim.agent_link.executor")

    def changed(self, over: str = "") -> None:
        """Have the agent look now; hardly ever waits, and does nothing where no agent listens.

        ``over``: the attempt that has just been ended, or given back to be placed again.
        """
        self._tell(Event.CHANGED, OVER_TIMEOUT_S if over else 0.0, over)

    def _on_ready(self, **_: Any) -> None:
        self._tell(Event.READY, GREETING_TIMEOUT_S)

    def _on_process_init(self, **_: Any) -> None:
        self._tell(Event.EXECUTOR, GREETING_TIMEOUT_S)

    def _tell(self, event: Event, timeout_s: float, over: str = "") -> None:
        text = f"{event} {self._identity.boot} {_proc_of(os.getpid())} {over}"
        with suppress(OSError):
            _channel(timeout_s).sendto(text.encode(), f"\0{self._identity.agent}")


_proc_of = lru_cache(maxsize=1)(proc_id)


@cache
def _channel(timeout_s: float) -> socket.socket:
    """A socket to say things through that lives as long as this process, for there is one notice for each task."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.settimeout(timeout_s)
    return channel


class Listener:
    """The agent's end: a socket in Linux's abstract namespace, which leaves no file behind."""

    def __init__(self) -> None:
        self.address = f"brim-agent-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.address}")

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def receive(self) -> list[Notice]:
        """What has come since last time; anything else than a notice is left out."""
        notices: list[Notice] = []
        while True:
            try:
                words = self._socket.recv(MAX_BYTES).decode(errors="replace").split()
            except BlockingIOError:
                return notices
            with suppress(ValueError):
                event, boot, proc, *over = words
                notices.append(Notice(Event(event), boot, proc, *over[:1]))

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
