"""The ready ACL file: the whole example runs with each service under its own user, and a producer can only publish."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery

from brim.store import Store
from support.servers import FLAVOURS, answers, server
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
ADMIN = "user admin on >admin ~* &* +@all"


class Guarded:
    """A server with the ready ACL file, and an administrator who looks on."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port, self.folder = port, folder
        self.admin = self.client("admin", "admin")

    def url(self, user: str) -> str:
        return f"redis://{user}:PASSWORD-{user}@127.0.0.1:{self.port}/0"

    def client(self, user: str, password: str | None = None) -> redis.Redis:
        return redis.Redis(port=self.port, username=user, password=password or f"PASSWORD-{user}")

    def start(self, user: str, *words: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("common", "services", "examples/vision")),
            "BRIM_REDIS__URL": self.url(user),
            "VISION_BROKER": self.url(user),
            "BRIM_DEVICES": "sim:1x24GiB",
            "BRIM_SIM_DIR": str(self.folder / "devices"),
            "BRIM_AGENT__LOG_FOLDER": str(self.folder / "logs"),
            "BRIM_AGENT__EXECUTORS_PER_GPU": "2",
        }
        with (self.folder / f"{user}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words], env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def refusals(self) -> list[str]:
        """What the server has refused to whom since its start.

        The client library asks to tell its name and version (CLIENT SETINFO) and goes on without; Redis 7.0 does not
        know that command, so the file cannot name it.
        """
        found = [entry for entry in self.admin.acl_log() if entry["object"] != "client|setinfo"]
        return [f"{entry['username']}: {entry['reason']} {entry['object']} ({entry['context']})" for entry in found]


@pytest.fixture(params=["valkey", "redis7"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guarded]:
    users = tmp_path / "users.acl"
    users.write_text((ROOT / "deploy" / "redis" / "users.acl").read_text() + ADMIN + "\n")
    with server(request.param, tmp_path / "data", ["--aclfile", str(users)]) as found:
        answers(found, redis.Redis(port=found.port, username="admin", password="admin"))
        yield Guarded(found.port, tmp_path)


@pytest.mark.large
def test_every_service_works_with_exactly_its_rights(guarded: Guarded) -> None:
    brim = "brim_services.cli"
    running = [
        guarded.start("intake", brim, "intake"),
        guarded.start("placement", brim, "placement"),
        guarded.start("worker", brim, "worker", "-A", "vision"),
        guarded.start("app", "celery", "-A", "vision", "worker", "-Q", "vision", "-c", "1", "-n", "ordinary@%h"),
        guarded.start("monitor", brim, "monitor"),
    ]
    try:
        store = Store(guarded.admin)
        wait_until(
            lambda: guarded.refusals() or any(device.state == "up" for device in store.devices()),
            what="the device is up",
            timeout_s=90,
        )
        assert guarded.refusals() == []
        producer = guarded.start("producer", "vision.producer", "--count", "8")
        assert producer.wait(120) == 0, (guarded.folder / "producer.log").read_text() + str(guarded.refusals())
        revoked = Celery(broker=guarded.url("producer"), backend=guarded.url("producer"), set_as_current=False)
        revoked.control.revoke("nobody")
        wait_until(
            lambda: guarded.refusals() or guarded.admin.zscore(store.keys.revoked, "nobody"),
            what="intake has noted what was revoked",
        )
        refused = revoked.send_task("vision.upscale", ("u",), {"width": "wide", "height": 1}, queue="brim.intake")
        with pytest.raises(Exception, match="width"):
            refused.get(timeout=30)
        assert guarded.refusals() == []
        assert all(process.poll() is None for process in running)
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_producer_cannot_touch_brims_keys_beyond_publishing(flavour: str, tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text((ROOT / "deploy" / "redis" / "users.acl").read_text() + ADMIN + "\n")
    with server(flavour, tmp_path / "data", ["--aclfile", str(users)]) as found:
        answers(found, redis.Redis(port=found.port, username="admin", password="admin"))
        guarded = Guarded(found.port, tmp_path)
        producer = guarded.client("producer")
        guarded.admin.hset("brim:profiles", "t", "{}")
        assert producer.hkeys("brim:profiles") == [b"t"]
        assert producer.lpush("brim.intake", "message") == 1
        attempts = [
            ("HSET", "brim:profiles", "t", "{}"),
            ("DEL", "brim:profiles"),
            ("HGETALL", "brim:task:1"),
            ("HSET", "brim:task:1", "state", "succeeded"),
            ("LPUSH", "gpu.n1.0", "forged attempt"),
            ("LPUSH", "brim:outbox", "{}"),
            ("PUBLISH", "brim:reports", "{}"),
            ("LRANGE", "brim.intake", 0, -1),
            ("BRPOP", "brim.intake", 1),
            ("LREM", "brim.intake", 0, "message"),
            ("EVAL", "return 1", 0),
            ("SCRIPT", "FLUSH"),
            ("CONFIG", "GET", "requirepass"),
            ("KEYS", "*"),
            ("FLUSHDB",),
            ("MONITOR",),
        ]
        for words in attempts:
            with pytest.raises(redis.exceptions.NoPermissionError):
                guarded.client("producer").execute_command(*words)
        for user in ("intake", "placement", "worker", "monitor", "app"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                guarded.client(user).flushdb()
            with pytest.raises(redis.exceptions.NoPermissionError):
                guarded.client(user).get("somebody:else")
        with pytest.raises(redis.exceptions.NoPermissionError):
            guarded.client("app").hset("brim:task:1", "state", "succeeded")
        with pytest.raises(redis.exceptions.NoPermissionError):
            guarded.client("intake").lpush("gpu.n1.0", "forged attempt")


def test_no_user_is_without_a_password_and_none_may_do_everything() -> None:
    lines = (ROOT / "deploy" / "redis" / "users.acl").read_text().splitlines()
    assert lines[0] == "user default off"
    for line in lines[1:]:
        assert re.search(r" >PASSWORD-\w+ ", line), line
        assert "nopass" not in line
        assert "+@" not in line
        assert " ~* " not in line
