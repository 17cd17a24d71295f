"""brim's reading of Celery's wire format, held against messages that the installed Celery publishes."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from celery import Celery, chain, chord, group
from kombu.transport.virtual import Message
from kombu.utils.json import loads as loads_any

from brim.celery.envelope import (
    INTAKE_QUEUE,
    AttemptHeader,
    BrokerLayout,
    MalformedMessage,
    is_genuine,
    join,
    parse,
    request_context,
    sign,
    slot,
    split,
)
from brim.core.model import Identity
from support.celery_app import configure, worker
from support.waiting import wait_until

QUEUE = "gpu.n1.0"
ATTEMPT = AttemptHeader("7-1", ("GPU-a",), "n1", 4000, 350, nesting=0, retries=0)
Take = Callable[[], bytes]


@pytest.fixture
def app(valkey_url: str, namespace: str) -> Iterator[Celery]:
    """A producer without brim whose messages land in the intake queue."""
    app = configure(Celery("producer", set_as_current=False), valkey_url, namespace)
    app.conf.task_default_queue = INTAKE_QUEUE
    yield app
    app.close()


@pytest.fixture
def executor(valkey_url: str, namespace: str, tmp_path: Path) -> Iterator[None]:
    """A real Celery worker on a device's queue."""
    log = tmp_path / "executor.log"
    with worker("support.apps.plain", [QUEUE], url=valkey_url, namespace=namespace, log_path=log):
        yield


@pytest.fixture
def layout(app: Celery) -> BrokerLayout:
    return BrokerLayout.of(app.conf.broker_transport_options)


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture
def take(client: redis.Redis, layout: BrokerLayout) -> Take:
    """Take the one message that waits in the intake queue, whatever its priority."""

    def take() -> bytes:
        [raw] = [raw for name in layout.lists() if (raw := client.rpop(name)) is not None]
        return bytes(raw)

    return take


@pytest.fixture
def place(client: redis.Redis, layout: BrokerLayout) -> Callable[[], None]:
    """Stand in for intake and placement: move what waits in the intake queue to the device's queue."""

    def place() -> None:
        for name in layout.lists():
            while (raw := client.rpop(name)) is not None:
                tag = f"tag-{time.monotonic_ns()}"
                client.lpush(layout.list_for(0, QUEUE), join(split(parse(raw)), tag, ATTEMPT.fields()))

    return place


def published(app: Celery, take: Take, *args: Any, name: str = "add", **options: Any) -> bytes:
    app.send_task(name, args or (2, 3), **options)
    return take()


class TestParse:
    def test_a_plain_call(self, app: Celery, take: Take) -> None:
        envelope = parse(published(app, take, task_id="t-1", argsrepr="<hidden>"))

        assert envelope.task == "add"
        assert envelope.identity == Identity("t-1", 0, 0)
        assert (envelope.root_id, envelope.parent_id) == ("t-1", None)
        assert envelope.reply_to == app.thread_oid
        assert (envelope.priority, envelope.eta_s, envelope.expires_s) == (0, None, None)
        assert (envelope.brim, envelope.attempt) == ({}, None)
        assert (envelope.argsrepr, envelope.kwargsrepr) == ("<hidden>", "{}")
        body = envelope.body()
        assert (body.args, body.kwargs) == ([2, 3], {})
        assert body.embed == {"callbacks": None, "errbacks": None, "chain": None, "chord": None}

    def test_identity_priority_times_limits_and_headers(self, app: Celery, take: Take) -> None:
        eta = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
        header = {"vram_mib": 900, "attributes": {"batch": 8}}

        raw = published(
            app,
            take,
            priority=6,
            eta=eta,
            expires=eta + timedelta(hours=1),
            time_limit=30,
            soft_time_limit=20,
            retries=2,
            replaced_task_nesting=1,
            root_id="root",
            parent_id="parent",
            reply_to="replies",
            headers={"brim": header, "tenant": "blue"},
        )

        envelope = parse(raw)
        assert envelope.identity.rank == (1, 2)
        assert envelope.priority == 6
        assert (envelope.eta_s, envelope.expires_s) == (eta.timestamp(), eta.timestamp() + 3600)
        assert envelope.headers["timelimit"] == [30, 20]
        assert envelope.headers["tenant"] == "blue"
        assert envelope.brim == header
        assert (envelope.root_id, envelope.parent_id, envelope.reply_to) == ("root", "parent", "replies")

    def test_countdown_and_relative_expiry_are_points_in_time(self, app: Celery, take: Take) -> None:
        before = time.time()

        envelope = parse(published(app, take, countdown=60, expires=120))

        assert envelope.eta_s == pytest.approx(before + 60, abs=5)
        assert envelope.expires_s == pytest.approx(before + 120, abs=5)

    def test_a_time_without_offset_is_read_in_the_given_timezone(self, app: Celery, take: Take) -> None:
        raw = published(app, take, eta=datetime(2031, 1, 1, 12, 0, 0))

        noon_s = datetime(2031, 1, 1, 12, tzinfo=UTC).timestamp()
        assert parse(raw).eta_s == noon_s
        assert parse(raw, timezone=timezone(timedelta(hours=2))).eta_s == noon_s - 7200

    @pytest.mark.parametrize("compression", ["gzip", "bzip2", "lzma"])
    def test_compressed_bodies(self, app: Celery, take: Take, compression: str) -> None:
        assert parse(published(app, take, compression=compression)).body().args == [2, 3]

    def test_values_that_kombu_marks_in_json(self, app: Celery, take: Take) -> None:
        when = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)

        assert parse(published(app, take, when, b"\x00\xff")).body().args == [when, b"\x00\xff"]

    def test_a_body_that_the_transport_left_as_text(self, app: Celery, take: Take) -> None:
        app.conf.broker_transport_options = {**app.conf.broker_transport_options, "body_encoding": "utf-8"}

        assert parse(published(app, take, "grün", 3)).body().args == ["grün", 3]

    def test_workflows_stand_in_the_body(self, app: Celery, take: Take) -> None:
        signature = app.signature
        chain(signature("add", (1, 2), link_error=[signature("oops")]), signature("add", (10,))).apply_async()

        embed = parse(take()).body().embed

        assert [one["task"] for one in embed["errbacks"]] == ["oops"]
        assert [one["args"] for one in embed["chain"]] == [[10]]


@pytest.mark.parametrize("steps", [None, [0, 5], list(range(10))])
def test_the_layout_names_the_list_that_kombu_uses(
    app: Celery, client: redis.Redis, namespace: str, steps: list[int] | None
) -> None:
    options = {"global_keyprefix": namespace, "sep": ":p"} | ({"priority_steps": steps} if steps else {})
    app.conf.broker_transport_options = options
    layout = BrokerLayout.of(options)

    for priority in range(10):
        app.send_task("add", (1, 2), priority=priority)

        assert client.rpop(layout.list_for(priority)) is not None
        assert layout.list_for(priority) in layout.lists()
    assert layout.lists()[0] == f"{namespace}{INTAKE_QUEUE}"


class TestAttempts:
    def test_an_attempt_has_its_header_and_a_fresh_tag_but_no_eta_and_no_redelivery(
        self, app: Celery, take: Take
    ) -> None:
        headers = {"brim": {"gpu_model": "A100"}, "tenant": "x"}
        message = json.loads(published(app, take, countdown=5, expires=600, headers=headers))
        message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True

        raw = join(split(parse(json.dumps(message).encode())), "tag-1", ATTEMPT.fields())

        placed = json.loads(raw)
        assert placed["body"] == message["body"]
        assert placed["properties"]["delivery_tag"] == "tag-1"
        assert placed["properties"]["delivery_info"] == {"exchange": "", "routing_key": INTAKE_QUEUE}
        assert placed["headers"]["eta"] is None
        assert placed["headers"]["expires"] == message["headers"]["expires"]
        assert placed["headers"]["tenant"] == "x"
        assert "redelivered" not in placed["headers"]
        envelope = parse(raw)
        assert envelope.attempt == ATTEMPT
        assert envelope.brim == {"gpu_model": "A100"}
        assert envelope.is_redelivery

    def test_a_second_attempt_replaces_the_first_and_keeps_what_the_producer_asked_for(
        self, app: Celery, take: Take
    ) -> None:
        raw = published(app, take, headers={"brim": {"vram_mib": 9000}})
        message = json.loads(join(split(parse(raw)), "tag-1", ATTEMPT.fields()))
        message["headers"]["retries"] = 1
        retried = json.dumps(message).encode()
        assert not parse(retried).is_redelivery

        again = parse(join(split(parse(retried)), "tag-2", {**ATTEMPT.fields(), "attempt": "7-2"}))

        assert again.attempt is not None
        assert again.attempt.attempt == "7-2"
        assert again.is_redelivery
        assert again.brim == {"vram_mib": 9000}

    def test_the_parts_are_joined_by_plain_concatenation(self, app: Celery, take: Take) -> None:
        asked = {"gpu_model": 'quo"te', "attributes": {"text": "ü"}}
        prepared = split(parse(published(app, take, headers={"brim": asked})))

        envelope = parse(prepared.head + slot('odd"tag', {}) + prepared.tail)

        assert envelope.properties["delivery_tag"] == 'odd"tag'
        assert (envelope.brim, envelope.attempt) == (asked, None)

    def test_a_worker_runs_an_attempt_as_if_it_came_straight_from_the_producer(
        self, app: Celery, client: redis.Redis, layout: BrokerLayout, take: Take, executor: None
    ) -> None:
        sent = app.send_task(
            "note",
            ({"k": [1, 2]},),
            priority=3,
            countdown=3600,
            expires=7200,
            time_limit=50,
            soft_time_limit=40,
            compression="gzip",
            headers={"tenant": "blue", "brim": {"vram_mib": 5}},
        )
        raw = take()
        client.lpush(layout.list_for(0, QUEUE), join(split(parse(raw)), "tag-1", ATTEMPT.fields()))

        seen = sent.get(timeout=20)

        assert seen["id"] == seen["root_id"] == sent.id
        assert seen["priority"] == 3
        assert seen["expires"] == json.loads(raw)["headers"]["expires"]
        assert seen["timelimit"] == [50, 40]
        assert seen["eta"] is None
        assert seen["headers"]["tenant"] == "blue"
        assert seen["headers"]["brim"]["attempt"] == "7-1"
        assert seen["routing_key"] == INTAKE_QUEUE
        assert seen["args"] == [{"k": [1, 2]}]

    def test_workflows_go_on_behind_attempts(
        self, app: Celery, place: Callable[[], None], namespace: str, executor: None
    ) -> None:
        add, total, fail = (partial(app.signature, name) for name in ("add", "total", "fail"))
        linked = add((100,), task_id=f"{namespace}linked")
        add((1, 2), link=[linked]).apply_async()
        on_error = total(([7],), immutable=True, task_id=f"{namespace}on-error")
        failed = fail(link_error=[on_error]).apply_async()
        results = {
            "link": (app.AsyncResult(linked.id), 103),
            "link_error": (app.AsyncResult(on_error.id), 7),
            "chain": (chain(add((1, 2)), add((10,)), add((100,))).apply_async(), 113),
            "group": (group(add((i, i)) for i in range(4)).apply_async(), [0, 2, 4, 6]),
            "chord": (chord((add((i, i)) for i in range(4)), total()).apply_async(), 12),
        }

        def answered() -> bool:
            place()
            return all(result.ready() for result, _ in results.values())

        wait_until(answered, what="every workflow ended")

        assert {name: result.get(timeout=5) for name, (result, _) in results.items()} == {
            name: expected for name, (_, expected) in results.items()
        }
        assert isinstance(failed.result, ValueError)


class TestSigned:
    """With a key only intake's and placement's own headers count."""

    KEY = b"k" * 32

    def placed(self, raw: bytes, key: bytes = KEY) -> dict[str, Any]:
        task_id = parse(raw).identity.task_id
        message: dict[str, Any] = json.loads(
            join(split(parse(raw), key), "tag-1", sign(ATTEMPT.fields(), task_id, key))
        )
        return message

    def genuine(self, message: dict[str, Any], key: bytes = KEY) -> bool:
        # as kombu's JSON reads it, which makes dates of what its own writer has made of dates
        return is_genuine(cast(Message, SimpleNamespace(_raw=loads_any(json.dumps(message)))), key)

    def test_what_intake_sealed_and_placement_signed_is_genuine_in_each_attempt(self, app: Celery, take: Take) -> None:
        asked = {"brim": {"gpu_model": "A100"}, "when": datetime(2030, 1, 1, tzinfo=UTC), "tenant": "ü"}
        message = self.placed(published(app, take, 1, 2.5, headers=asked, countdown=5, expires=60, priority=3))
        assert self.genuine(message)
        message["properties"]["delivery_tag"] = "another attempt's"
        assert self.genuine(message)
        assert self.genuine(self.placed(published(app, take), key=b""), key=b"")

        retried = {**message, "headers": {**message["headers"], "retries": 1}}
        assert not self.genuine(retried)
        assert self.genuine(self.placed(json.dumps(retried).encode()))

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.update(body=base64.b64encode(b"[[9], {}, {}]").decode()),
            lambda m: m["headers"].update(task="other"),
            lambda m: m["headers"].update(id="another-id"),
            lambda m: m["headers"].update(timelimit=[None, None, 1]),
            lambda m: m["properties"].update(reply_to="elsewhere"),
            lambda m: m["headers"]["brim"].update(attempt="7-2"),
            lambda m: m["headers"]["brim"].update(vram_mib=1),
            lambda m: m["headers"]["brim"].update(nesting=3),
            lambda m: m["headers"]["brim"].update(asked={"vram_mib": 1}),
            lambda m: m["headers"]["brim"].update(more="of it"),
            lambda m: m["headers"]["brim"].pop("seal"),
            lambda m: m["headers"]["brim"].pop("signature"),
            lambda m: m["headers"]["brim"].update(signature=None),
        ],
    )
    def test_nothing_of_it_may_be_changed(
        self, app: Celery, take: Take, change: Callable[[dict[str, Any]], None]
    ) -> None:
        message = self.placed(published(app, take))
        change(message)
        assert not self.genuine(message)

    def test_another_key_and_no_key_are_told_apart(self, app: Celery, take: Take) -> None:
        raw = published(app, take)
        assert not self.genuine(self.placed(raw, key=b"x" * 32))
        assert not self.genuine(self.placed(raw, key=b""))

    def test_an_attempt_that_nobody_signed_does_not_count_at_intake(self, app: Celery, take: Take) -> None:
        raw = published(app, take, headers={"brim": {"vram_mib": 9}})
        genuine = json.dumps(self.placed(raw)).encode()
        forged = join(split(parse(raw)), "tag-1", ATTEMPT.fields())

        assert parse(genuine, key=self.KEY).is_redelivery
        assert parse(forged).is_redelivery
        assert parse(forged, key=self.KEY).attempt is None
        assert parse(forged, key=self.KEY).brim == {"vram_mib": 9}


def test_the_context_for_answers_is_the_one_that_a_worker_builds(app: Celery, take: Take) -> None:
    part = app.signature("add", (1, 2), link_error=[app.signature("oops")])
    chord((part,), app.signature("total")).apply_async(priority=3, headers={"tenant": "x"})
    raw = take()
    prepared = split(parse(raw))

    context = request_context(prepared.head, prepared.tail)

    envelope = parse(raw)
    assert context.id == envelope.identity.task_id
    assert context.args == [1, 2]
    assert context.chord["task"] == "total"
    assert (context.group, context.group_index) == (envelope.headers["group"], 0)
    assert "oops" in [signature["task"] for signature in context.errbacks]
    assert context.root_id == envelope.root_id
    assert context.delivery_info["priority"] == 3
    assert context.headers["tenant"] == "x"
    assert context.reply_to == envelope.reply_to


class TestMalformed:
    def test_pickle_is_refused_with_the_setting_to_change(self, app: Celery, take: Take) -> None:
        raw = published(app, take, serializer="pickle", task_id="t-9")

        envelope = parse(raw)

        with pytest.raises(MalformedMessage, match="task_serializer") as refused:
            envelope.body()
        assert refused.value.reason.code == "serializer"
        assert (refused.value.task_id, refused.value.task) == ("t-9", "add")
        prepared = split(parse(raw))
        assert request_context(prepared.head, prepared.tail).id == "t-9"

    def test_the_old_protocol_is_named_and_its_id_kept(self, app: Celery, take: Take) -> None:
        app.conf.task_protocol = 1

        raw = published(app, take, task_id="t-1")

        with pytest.raises(MalformedMessage, match="protocol 1") as refused:
            parse(raw)
        assert (refused.value.task_id, refused.value.task) == ("t-1", "add")

    @pytest.mark.parametrize(
        ("raw", "says"),
        [
            (b"\xff", "not JSON"),
            (b"[]", "expected an object, got list"),
            (b'{"headers": {}}', "'properties' is missing"),
            (b'{"headers": {}, "properties": {}}', "'id' and 'task' are missing"),
        ],
    )
    def test_noise_is_refused_with_what_is_wrong(self, raw: bytes, says: str) -> None:
        with pytest.raises(MalformedMessage, match=says):
            parse(raw)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"retries": "2"}, "retries: expected a whole number, got '2'"),
            ({"eta": "soon"}, "eta: expected an ISO 8601 time, got 'soon'"),
            ({"brim": [1]}, "header 'brim': expected an object"),
            ({"brim": {"attempt": "1-1"}}, "not an attempt of brim's own making"),
        ],
    )
    def test_a_bad_header_is_named_with_the_task(
        self, app: Celery, take: Take, change: dict[str, Any], says: str
    ) -> None:
        message = json.loads(published(app, take, task_id="t-1"))
        message["headers"].update(change)

        with pytest.raises(MalformedMessage, match=says) as refused:
            parse(json.dumps(message).encode())
        assert refused.value.task_id == "t-1"

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (b"{", "body: not JSON"),
            (b"[1, 2]", r"expected \[args, kwargs, embed\]"),
            (b"[[], [], {}]", r"expected \[args, kwargs, embed\]"),
        ],
    )
    def test_a_body_of_another_shape_is_refused(self, app: Celery, take: Take, body: bytes, says: str) -> None:
        message = json.loads(published(app, take))
        message["body"] = base64.b64encode(body).decode()

        with pytest.raises(MalformedMessage, match=says):
            parse(json.dumps(message).encode()).body()

    def test_a_body_that_unpacks_to_too_much_is_refused(
        self, app: Celery, take: Take, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("brim.celery.envelope.bodies.MAX_BODY_BYTES", 1024 * 1024)

        raw = published(app, take, "x" * 2**21, compression="gzip")

        assert len(raw) < 20_000
        with pytest.raises(MalformedMessage, match="unpacks to more than 1 MiB") as refused:
            parse(raw).body()
        assert refused.value.reason.code == "message_too_large"
