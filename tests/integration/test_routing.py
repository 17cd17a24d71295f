"""What a producer meets: which tasks go to intake, which keep their queues, and what is refused at once."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Queue

import brim
from brim.celery import routing
from brim.celery.envelope import INTAKE_QUEUE, parse
from brim.celery.routing import IntakeRouter
from support.celery_app import configure

QUEUES = [INTAKE_QUEUE, "celery", "images", "special"]
Where = Callable[[], list[str]]


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture
def app(valkey_url: str, namespace: str) -> Iterator[Celery]:
    app = configure(Celery("producer", set_as_current=False), valkey_url, namespace)
    yield app
    app.close()


@pytest.fixture
def where(client: redis.Redis, namespace: str) -> Where:
    """The queues that hold messages, one entry a message."""

    def where() -> list[str]:
        return [queue for queue in QUEUES for _ in range(client.llen(namespace + queue))]

    return where


def publish_profiles(client: redis.Redis, namespace: str, *names: str) -> None:
    client.hset(f"{namespace}brim:profiles", mapping=dict.fromkeys(names, "{}"))


def test_tasks_with_a_profile_go_to_intake_and_the_others_keep_their_queues(
    app: Celery, client: redis.Redis, namespace: str, where: Where
) -> None:
    publish_profiles(client, namespace, "vision.segment", "models.*")
    brim.install(app)

    app.send_task("vision.segment")
    app.send_task("models.tiny")
    app.send_task("vision.resize")

    assert where() == [INTAKE_QUEUE, INTAKE_QUEUE, "celery"]


def test_a_task_with_a_header_goes_to_intake_without_any_profile(app: Celery, where: Where) -> None:
    brim.install(app)

    app.send_task("anything", headers={"brim": {"vram_mib": 900}})

    assert where() == [INTAKE_QUEUE]


def test_a_queue_that_the_caller_names_wins(app: Celery, client: redis.Redis, namespace: str, where: Where) -> None:
    publish_profiles(client, namespace, "vision.segment")
    brim.install(app)

    app.send_task("vision.segment", queue="special")
    app.send_task("vision.segment", headers={"brim": {"vram_mib": 900}}, exchange="own", routing_key="images")

    assert where() == ["special"]


@pytest.mark.parametrize(
    "routes",
    [
        {"vision.*": {"queue": "images"}},
        [{"vision.*": "images"}],
        ({"vision.*": "images"},),
        [[("vision.*", {"queue": "images"})]],
        "test_routing_helper.to_images",
        lambda name, *_, **__: "images" if name.startswith("vision.") else None,
    ],
    ids=["dict", "list", "tuple", "pairs", "name", "function"],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_apps_own_routes_stand_whatever_their_shape_and_whenever_they_are_set(
    app: Celery,
    client: redis.Redis,
    namespace: str,
    where: Where,
    routes: Any,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    helper = type(sys)("test_routing_helper")
    helper.to_images = lambda name, *_, **__: "images" if name.startswith("vision.") else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "test_routing_helper", helper)
    publish_profiles(client, namespace, "vision.segment")

    if when == "before":
        app.conf.task_routes = routes
    brim.install(app)
    if when == "after":
        app.conf.task_routes = routes

    for name in ("vision.segment", "vision.resize", "other"):
        app.send_task(name)
    assert where() == [INTAKE_QUEUE, "celery", "images"]


def test_installing_twice_is_installing_once(app: Celery) -> None:
    brim.install(app, tasks=["old"])
    app.conf.task_routes  # noqa: B018  (configures the app)

    brim.install(app, tasks=["new"])

    routers = [route for route in app.conf.task_routes if isinstance(route, IntakeRouter)]
    assert len(routers) == 1
    assert pickle.loads(pickle.dumps(routers[0]))._tasks == ("new",)


class TestBeforeAnyProfileIsPublished:
    def test_named_tasks_wait_in_intake_and_one_warning_says_so(
        self, app: Celery, where: Where, caplog: pytest.LogCaptureFixture
    ) -> None:
        brim.install(app, tasks=["vision.*"])

        with caplog.at_level(logging.WARNING, "brim"):
            for name in ("vision.segment", "other", "third"):
                app.send_task(name)

        assert where() == [INTAKE_QUEUE, "celery", "celery"]
        assert [record.getMessage() for record in caplog.records] == [
            "no resource profiles are published yet: only tasks named in brim.install(app, tasks=...) or carrying "
            "a 'brim' header go through brim, the others keep their queues"
        ]

    def test_profiles_count_once_they_are_there(
        self, app: Celery, client: redis.Redis, namespace: str, where: Where, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(routing, "REFRESH_S", 0.0)
        brim.install(app, tasks=["vision.*"])
        app.send_task("segment")

        publish_profiles(client, namespace, "segment")
        app.send_task("segment")
        app.send_task("vision.resize")

        assert where() == [INTAKE_QUEUE, "celery", "celery"]

    def test_names_stay_known_while_the_broker_cannot_be_asked(
        self, app: Celery, client: redis.Redis, namespace: str, where: Where, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(routing, "REFRESH_S", 0.0)
        publish_profiles(client, namespace, "segment")
        brim.install(app)
        app.send_task("segment")

        def away(*_: Any) -> list[str]:
            raise redis.ConnectionError("away")

        monkeypatch.setattr(routing, "published_names", away)
        app.send_task("segment")

        assert where() == [INTAKE_QUEUE, INTAKE_QUEUE]


def test_an_app_that_must_not_create_queues_still_reaches_intake(
    app: Celery, client: redis.Redis, namespace: str, where: Where
) -> None:
    publish_profiles(client, namespace, "segment")
    app.conf.update(task_create_missing_queues=False, task_queues=[Queue("celery")], task_default_exchange_type="topic")
    brim.install(app)

    app.send_task("segment")

    assert where() == [INTAKE_QUEUE]
    assert list(app.amqp.queues.consume_from) == ["celery"]


class TestRefusedAtOnce:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"serializer": "pickle"}, "serializer is 'pickle', but brim reads JSON and msgpack"),
            ({"compression": "zstd"}, "compression is 'zstd', but brim reads gzip, bzip2 and lzma"),
            ({"headers": {"brim": {"vram_mib": "9GiB"}}}, "field 'vram_mib'"),
            ({"headers": {"brim": {"vram": 9}}}, "field 'vram': unknown field"),
            ({"headers": {"brim": [9]}}, "header 'brim'"),
        ],
    )
    def test_a_message_that_intake_could_not_read(
        self, app: Celery, where: Where, options: dict[str, Any], says: str
    ) -> None:
        brim.install(app, tasks=["segment"])

        with pytest.raises(brim.PublishRefused, match=says):
            app.send_task("segment", **options)

        assert where() == []

    def test_pickle_as_the_apps_serializer(self, app: Celery, where: Where) -> None:
        app.conf.task_serializer = "pickle"
        brim.install(app, tasks=["segment"])

        with pytest.raises(brim.PublishRefused, match="task_serializer"):
            app.send_task("segment")
        app.send_task("other")

        assert where() == ["celery"]

    def test_another_broker(self) -> None:
        app = Celery("producer", broker="memory://", set_as_current=False)
        brim.install(app)
        with pytest.raises(brim.SetupError, match="brim needs Redis or Valkey as the broker"):
            app.send_task("segment")

        with pytest.raises(brim.SetupError, match="not memory://"):
            brim.install(app)


def test_eager_apps_run_their_tasks_inline(app: Celery, where: Where) -> None:
    app.conf.task_always_eager = True
    brim.install(app, tasks=["add"])

    @app.task(name="add", shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    assert add.delay(1, 2).get() == 3
    assert where() == []


def test_a_time_without_offset_is_sent_with_the_apps_own(app: Celery, client: redis.Redis, namespace: str) -> None:
    app.conf.timezone = "Asia/Tokyo"
    brim.install(app, tasks=["segment"])
    noon = datetime(2031, 1, 1, 12, 0)

    app.send_task("segment", eta=noon, expires=noon + timedelta(hours=1))

    raw = client.rpop(f"{namespace}{INTAKE_QUEUE}")
    assert isinstance(raw, bytes)
    assert json.loads(raw)["headers"]["eta"] == "2031-01-01T12:00:00+09:00"
    envelope = parse(raw)
    assert (envelope.eta_s, envelope.expires_s) == (1925002800.0, 1925006400.0)


def test_importing_brim_imports_neither_celery_nor_redis() -> None:
    script = "import brim, sys; sys.exit(any(name in sys.modules for name in ('celery', 'redis', 'pydantic')))"

    assert (
        subprocess.run([sys.executable, "-c", script], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )
