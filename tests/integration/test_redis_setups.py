"""brim on Redis as people run it: another server, a socket, TLS, Sentinel; each carries tasks and answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

import brim
from brim.celery.answers import answering_app, celery_url
from brim.celery.errors import TaskRejected
from brim.core.attributes import TaskSignature
from brim.core.model import Node, State
from brim.core.profiles import ResourceTable
from brim.settings import ConfigurationError, Settings
from brim.store.connection import address, connect, is_outage
from brim.store.types import DeviceRegistration, NodeRegistration, Outcome
from brim_services.answerer import Answerer
from brim_services.embedded import free_port
from brim_services.intake import Intake
from brim_services.loop import open_store, serve
from brim_services.placement import PlacementService, make_planner
from support.servers import FLAVOURS, answers, certificates, seconds_since, server, watched
from support.waiting import wait_until

TABLE = ResourceTable.parse('profiles: {t.run: {vram: "10 * n", context_mib: 300, margin: 1.0}}', "table")


class Running:
    """Intake, placement and the answerer as threads, and a producer; the test plays the worker."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.stop = settings, threading.Event()
        self.store = open_store(settings, self.stop)
        signature = TaskSignature.from_callable(lambda n=1: n).model_dump_json()
        device = DeviceRegistration("GPU-0", 0, "SIM", 100_000, 500)
        node = NodeRegistration(Node("n1"), "boot", 1000, ["t.run"], {"t.run": signature}, [device])
        assert self.store.register_node(node)
        self.app = Celery("t", broker=celery_url(settings.redis.url), backend=celery_url(settings.redis.url))
        self.app.conf.broker_transport_options = answering_app(settings).conf.broker_transport_options
        self.app.conf.result_backend_transport_options = {"master_name": settings.redis.sentinel_master}
        brim.install(self.app, tasks=["t.*"])
        answerer = Answerer(settings, self.stop)
        intake = Intake(open_store(settings, self.stop), settings, TABLE, self.stop)
        placement = PlacementService(open_store(settings, self.stop), settings, make_planner(settings), answerer)
        self._threads = [
            threading.Thread(target=serve, args=(intake, settings, self.stop), daemon=True),
            threading.Thread(target=serve, args=(placement, settings, self.stop), daemon=True),
            threading.Thread(target=answerer.run, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, n: Any = 1) -> str:
        """Publish as a producer does."""
        return str(self.app.send_task("t.run", kwargs={"n": n}).id)

    def placed(self, task_id: str, timeout_s: float = 20.0) -> None:
        """Wait until the task is on the device."""

        def there() -> bool:
            record = self.store.record(task_id)
            return record is not None and record.state is State.PLACED

        wait_until(there, what=f"{task_id} is placed", timeout_s=timeout_s)

    def end(self, task_id: str) -> None:
        """Play the worker: the task runs and succeeds."""
        record = self.store.record(task_id)
        assert record is not None
        assert record.attempt is not None
        self.store.claim(task_id, record.attempt, "w1")
        self.store.bind(task_id, record.attempt, record.devices, "1.1")
        self.store.finish(task_id, record.attempt, "1.1")
        self.store.end(task_id, record.attempt, record.devices, Outcome(State.SUCCEEDED, leftover_mib=[0]))

    def close(self) -> None:
        """End the threads; the books are in order."""
        self.stop.set()
        for thread in self._threads:
            thread.join(10)
        self.app.close()
        assert self.store.audit() == []


Serve = Callable[..., Running]


@pytest.fixture
def running() -> Iterator[Serve]:
    """Starts brim by the settings of section redis; it is closed before its server, which the test holds."""
    started: list[Running] = []

    def start(**section: Any) -> Running:
        policy = Path(__file__).parents[2] / "configs" / "placement.yaml"
        settings = {"redis": section, "placement": {"policy_file": str(policy), "leader_ttl_s": 1.0}}
        started.append(Running(Settings.model_validate(settings)))
        return started[-1]

    yield start
    for one in started:
        one.stop.set()


def carries_tasks_and_answers(one: Running) -> None:
    """A task is placed and ends; one that cannot be estimated is answered to its producer."""
    good, bad = one.send(3), one.send("many")
    one.placed(good)
    one.end(good)
    with pytest.raises(TaskRejected, match="n"):
        one.app.AsyncResult(bad).get(timeout=20)
    one.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_with_a_password_over_tcp(flavour: str, tmp_path: Path, running: Serve) -> None:
    with server(flavour, tmp_path, ["--requirepass", "p:w/d"]) as found:
        answers(found, redis.Redis(port=found.port, password="p:w/d"))
        carries_tasks_and_answers(running(url=f"redis://:p%3Aw%2Fd@127.0.0.1:{found.port}/2"))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_by_a_unix_socket(flavour: str, tmp_path: Path, running: Serve) -> None:
    path = tmp_path / "redis.sock"
    with server(flavour, tmp_path, ["--unixsocket", str(path)], port=0) as found:
        wait_until(path.exists, what="the socket")
        answers(found, redis.Redis(unix_socket_path=str(path)))
        carries_tasks_and_answers(running(url=f"unix://{path}?db=1"))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_by_tls_with_an_authority_and_client_certificates_of_its_own(
    flavour: str, tmp_path: Path, running: Serve
) -> None:
    files = certificates(tmp_path / "tls")
    port = free_port()
    tls = ["--tls-port", str(port), "--tls-auth-clients", "yes", "--tls-ca-cert-file", str(files["ca.pem"])]
    tls += ["--tls-cert-file", str(files["server.pem"]), "--tls-key-file", str(files["server.key"])]
    with server(flavour, tmp_path, tls, port=0) as found:
        begun = wait_until(found.log_path.read_text, what="the server says something")
        wait_until(lambda: found.process.poll() is not None or "onnection" in found.log_path.read_text(), what=begun)
        if found.process.poll() is not None and "tls" in found.log_path.read_text().lower():
            pytest.skip(f"this {flavour} is built without TLS")
        client = {"ssl_certfile": files["client.pem"], "ssl_keyfile": files["client.key"]}
        options = {"ssl_cert_reqs": "required", "ssl_ca_certs": files["ca.pem"], **client}
        url = f"rediss://127.0.0.1:{port}/0?" + "&".join(f"{name}={value}" for name, value in options.items())
        answers(found, redis.Redis.from_url(url))
        carries_tasks_and_answers(running(url=url))
        with pytest.raises(redis.ConnectionError):
            redis.Redis.from_url(f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=required").ping()


class Load:
    """Publishes until the block ends, whatever comes of it."""

    def __init__(self, one: Running) -> None:
        self._one = one
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self.sent: list[str] = []
        self.refused = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(60)

    def _publish(self) -> None:
        while not self._done.is_set():
            try:
                self.sent.append(self._one.send(1))
            except (OperationalError, redis.RedisError, OSError):
                self.refused += 1
            self._done.wait(0.02)


@pytest.mark.large
@pytest.mark.timeout(180)
def test_a_master_that_dies_under_load_is_replaced_and_the_books_stay_in_order(tmp_path: Path, running: Serve) -> None:
    with watched(tmp_path) as cluster:
        one = running(url=cluster.url, sentinel_master="brim", socket_timeout_s=2.0)
        with Load(one) as load:
            wait_until(lambda: len(load.sent) >= 50, what="there is load")
            before = len(load.sent)
            assert one.store.client.wait(1, 10_000) == 1  # the replica has what is there already
            cluster.master.kill()
            killed_s = time.monotonic()
            wait_until(lambda: len(load.sent) > before + 20, what="publishing goes on", timeout_s=60)
            published_again_s = seconds_since(killed_s)
            last = load.sent[-1]

            def there() -> bool:
                try:
                    found = one.store.record(last)
                except Exception as error:
                    assert is_outage(error), error
                    return False
                return found is not None and found.state is State.PLACED

            wait_until(there, what="placement goes on", timeout_s=60)
            placed_again_s = seconds_since(killed_s)

        def lost() -> int:
            return sum(one.store.record(task_id) is None for task_id in load.sent)

        # What the master had acknowledged and not yet replicated is gone with it; Redis promises no more.
        wait_until(lambda: lost() <= 20, what="all but the last few have a record", timeout_s=30)
        figures = {"publish again": f"{published_again_s:.1f} s", "place again": f"{placed_again_s:.1f} s"}
        print({**figures, "sent": len(load.sent), "refused while away": load.refused, "lost with the master": lost()})
        one.close()


def test_sentinels_without_a_masters_name_are_refused() -> None:
    with pytest.raises((ConfigurationError, ValueError), match="sentinel_master must name the master"):
        Settings.model_validate({"redis": {"url": "sentinel://127.0.0.1:26379"}})


def test_no_address_tells_a_password() -> None:
    url = "sentinel://ann:secret@a:1/2;sentinel://ann:secret@b:2"
    assert address(url) == "sentinel://a:1/2;sentinel://b:2"
    assert "secret" not in address("rediss://:secret@a:1/0?ssl_cert_reqs=required")


def test_the_store_reaches_the_master_with_its_credentials() -> None:
    section = {"url": "sentinel://ann:p%40w@a:1/3;sentinel://b:2", "sentinel_master": "brim"}
    pool: Any = connect(Settings.model_validate({"redis": section}).redis).connection_pool
    assert pool.connection_kwargs["db"] == 3
    assert (pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == ("ann", "p@w")
    assert [(s.connection_pool.connection_kwargs["host"]) for s in pool.sentinel_manager.sentinels] == ["a", "b"]
