"""The HTTP API over a real store: what it shows, admits, cancels and refuses."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis
import uvicorn

from brim.celery.answers import answering_app
from brim.core.model import Demand, Reason, State
from brim.settings import Monitor, Settings
from brim.store import Store
from brim.store.types import AdmitAnswer
from brim_services.intake import Intake
from brim_services.monitor import access, streaming
from brim_services.monitor.access import digest
from brim_services.monitor.app import build
from brim_services.monitor.server import Server, address
from support.cluster import TABLE, FakeCluster
from support.stage import settings_for
from support.waiting import wait_until, within_s

READ, SUBMIT = "read-token", "submit-token"


@contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """The monitor on a free port, in a thread of this process."""
    client = redis.Redis.from_url(settings.redis.url, socket_timeout=5)
    store = Store(client, settings.broker.global_keyprefix + settings.redis.prefix)
    app = build(store, settings, answering_app(settings))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
        server = Server(config, app.state.feed)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        wait_until(lambda: server.started, what="the monitor serves")
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        app.state.feed.stop()
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
    client.close()


@pytest.fixture
def settings(valkey_url: str, namespace: str) -> Settings:
    return settings_for(valkey_url, namespace)


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture
def cluster(client: redis.Redis, namespace: str) -> Iterator[FakeCluster]:
    made = FakeCluster(client, namespace)
    made.report()
    yield made
    assert made.store.audit() == []


@pytest.fixture
def api(settings: Settings, cluster: FakeCluster) -> Iterator[httpx.Client]:
    with serving(settings) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client


@pytest.fixture
def guarded(settings: Settings, cluster: FakeCluster) -> Iterator[httpx.Client]:
    """An API with two tokens, small limits, and no token sent by itself."""
    monitor = Monitor.model_validate(
        {
            "tokens": [
                {"name": "reader", "sha256": digest(READ), "scope": "read"},
                {"name": "producer", "sha256": digest(SUBMIT), "scope": "submit"},
            ],
            "max_body_bytes": 10_000,
            "request_rate": 1.0,
            "burst": 20,
        }
    )
    with (
        serving(settings.model_copy(update={"monitor": monitor})) as url,
        httpx.Client(base_url=url, timeout=10) as client,
    ):
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def problem(answer: httpx.Response) -> dict[str, Any]:
    """The problem document, checked to be one."""
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == answer.status_code
    assert document["type"] == f"urn:brim:problem:{document['code']}"
    return document


# -- looking ---------------------------------------------------------------------------------------------------


def test_the_cluster_shows_gpus_their_tasks_and_why_others_wait(api: httpx.Client, cluster: FakeCluster) -> None:
    runs = cluster.run("GPU-000-0", vram_mib=3200)
    waits = cluster.admit("vision.caption", 9344)
    cluster.store.note_waits(cluster.epoch, {waits: Reason("memory", "too little")})
    cluster.report(external_mib=1000)

    told = api.get("/v1/cluster").json()

    gpu = told["gpus"][0]
    assert (gpu["reserved_mib"], gpu["measured_mib"], gpu["external_mib"]) == (3200, 2560, 1000)
    assert gpu["available_mib"] == 24_576 - 512 - 1000 - 3200
    [task] = gpu["tasks"]
    assert (task["task_id"], task["state"], task["measured_mib"]) == (runs, "running", 2560)
    [lane] = told["lanes"]
    assert (lane["head_id"], lane["depth"], lane["reason"]) == (waits, 1, {"code": "memory", "message": "too little"})
    assert told["counts"] == {"running": 1, "waiting": 1}
    assert told["healthy"]


def test_a_task_shows_its_story_and_its_result(api: httpx.Client, cluster: FakeCluster, settings: Settings) -> None:
    task_id = cluster.run("GPU-000-0")
    cluster.end(task_id)
    answering_app(settings).backend.mark_as_done(task_id, {"pixels": 7})

    told = api.get(f"/v1/tasks/{task_id}").json()

    assert (told["state"], told["result"], told["error"]) == ("succeeded", {"pixels": 7}, None)
    assert [event["event"] for event in told["story"]][:2] == ["admitted", "placed"]
    assert told["peak_mib"] == 1043


def test_a_waiting_task_tells_when_it_is_likely_to_start(api: httpx.Client, cluster: FakeCluster) -> None:
    full = [cluster.run(gpu, vram_mib=11_000) for gpu in ("GPU-000-0", "GPU-000-0", "GPU-000-1", "GPU-000-1")]
    waits, behind = (cluster.admit(vram_mib=11_000) for _ in range(2))

    told = api.get(f"/v1/tasks/{waits}").json()
    assert told["expected_start"] is None
    note = {"code": "run_times", "message": "it is not known yet how long vision.segment runs"}
    assert told["expected_note"] == note

    for _ in range(3):
        done = cluster.run("GPU-000-0", vram_mib=500)
        half_a_minute_ago = cluster.store.server_ms() - 30_000
        cluster.client.hset(cluster.store.keys.task(done), "started_ms", half_a_minute_ago)
        cluster.end(done)
    soon, later = (api.get(f"/v1/tasks/{task_id}").json()["expected_start"] for task_id in (waits, behind))
    assert 0.0 < soon[0] <= soon[1] < 35.0
    assert 0.0 < later[0] <= later[1] < 35.0
    cluster.end(full[0])
    told = api.get(f"/v1/tasks/{waits}").json()
    assert (told["expected_start"], told["expected_note"]) == ([0.0, 0.0], None)


def test_tasks_come_in_pages_newest_first(api: httpx.Client, cluster: FakeCluster) -> None:
    ids = [cluster.admit() for _ in range(5)]
    running = cluster.run("GPU-000-0")

    pages, after = [], None
    while True:
        page = api.get("/v1/tasks", params={"limit": 2, **({"after": after} if after else {})}).json()
        pages.append([task["id"] for task in page["tasks"]])
        after = page["next"]
        if after is None:
            break

    assert [i for page in pages for i in page] == [running, *reversed(ids)]
    assert all(len(page) <= 2 for page in pages)
    only = api.get("/v1/tasks", params={"state": "running"}).json()
    assert [task["id"] for task in only["tasks"]] == [running]


def test_profiles_are_those_that_intake_published(api: httpx.Client) -> None:
    assert set(api.get("/v1/profiles").json()["profiles"]) == {"vision.segment", "vision.caption"}


def test_health_readiness_and_metrics(api: httpx.Client, cluster: FakeCluster) -> None:
    cluster.run("GPU-000-0", vram_mib=3200)
    assert api.get("/healthz").json() == {"status": "alive"}
    assert api.get("/readyz").json() == {"status": "ready"}

    def shown() -> str:
        return api.get("/metrics").text

    reserved = 'brim_gpu_memory_bytes{gpu="0",kind="reserved",node="node000"} 3.3554432e+09'
    wait_until(lambda: reserved in shown(), what="the reservation is in the metrics")
    assert 'brim_tasks{state="running"} 1.0' in shown()
    assert 'brim_tasks_total{state="succeeded"} 0.0' in shown()


def test_without_redis_it_says_so(settings: Settings, api: httpx.Client) -> None:
    away = settings.model_copy(update={"redis": settings.redis.model_copy(update={"url": "redis://127.0.0.1:1/0"})})
    with serving(away) as url:
        answer = httpx.get(f"{url}/readyz")
        assert (answer.status_code, problem(answer)["code"]) == (503, "redis_away")
        assert httpx.get(f"{url}/healthz").status_code == 200
        with httpx.stream("GET", f"{url}/v1/events", timeout=5) as stream:
            event = json.loads(next(line for line in stream.iter_lines() if line.startswith("data:"))[5:])
        assert event["full"]


# -- submitting ------------------------------------------------------------------------------------------------


def test_a_submission_is_admitted_like_celerys_own_message(api: httpx.Client, cluster: FakeCluster) -> None:
    answer = api.post("/v1/tasks", json={"name": "vision.segment", "kwargs": {"n": 3}, "priority": 3})

    told = answer.json()
    assert (answer.status_code, told["state"], told["vram_mib"], told["position"]) == (202, "waiting", 3328, 0)
    assert told["reason"]["code"] == "not_tried"
    record = cluster.store.record(told["id"])
    assert record is not None
    assert (record.demand.vram_mib, record.priority) == (3328, 3)
    assert cluster.store.queue_lengths(cluster.layout.lists()) == dict.fromkeys(cluster.layout.lists(), 0)


def test_a_submission_says_what_comes_before_it_and_why(api: httpx.Client, cluster: FakeCluster) -> None:
    ids = [api.post("/v1/tasks", json={"name": "vision.caption"}).json()["id"] for _ in range(2)]
    cluster.store.note_waits(cluster.epoch, {ids[0]: Reason("memory", "1 MiB is short")})

    told = api.post("/v1/tasks", json={"name": "vision.caption"}).json()

    assert told["position"] == 2
    assert told["reason"]["code"] == "memory"
    assert "1 MiB is short" in told["reason"]["message"]


def test_an_idempotency_key_gives_the_same_task(api: httpx.Client, cluster: FakeCluster) -> None:
    body = {"name": "vision.segment", "kwargs": {"n": 2}, "idempotency_key": "order-17"}

    first, second = (api.post("/v1/tasks", json=body).json() for _ in range(2))
    other = api.post("/v1/tasks", json={**body, "kwargs": {"n": 3}})

    assert first["id"] == second["id"]
    assert (first["repeated"], second["repeated"]) == (False, True)
    assert cluster.store.counts() == {State.WAITING: 1}
    assert (other.status_code, problem(other)["errors"][0]["field"]) == (409, "body.idempotency_key")


def test_a_refused_submission_does_not_use_its_key_up(api: httpx.Client) -> None:
    body = {"name": "vision.nothing", "idempotency_key": "k"}
    assert api.post("/v1/tasks", json=body).status_code == 422

    assert api.post("/v1/tasks", json={**body, "name": "vision.segment"}).status_code == 202


def test_what_was_pushed_but_not_admitted_is_admitted_by_intake(
    api: httpx.Client, cluster: FakeCluster, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "admit", lambda self, batch: [AdmitAnswer.GONE] * len(batch))  # dies after the push
    told = api.post("/v1/tasks", json={"name": "vision.segment", "idempotency_key": "k"}).json()
    monkeypatch.undo()
    assert cluster.store.record(told["id"]) is None

    from brim.core.profiles import ResourceTable

    stop = threading.Event()
    intake = Intake(cluster.store, settings, ResourceTable.parse(TABLE, "table"), stop)
    intake.learn_signatures()
    assert len(intake.admit(cluster.store.look(intake.lists, 10).messages)) == 1
    stop.set()

    again = api.post("/v1/tasks", json={"name": "vision.segment", "idempotency_key": "k"}).json()
    assert (again["id"], again["repeated"]) == (told["id"], True)
    assert cluster.store.counts() == {State.WAITING: 1}


def test_a_batch_accepts_and_refuses_each_by_itself(api: httpx.Client) -> None:
    tasks = [{"name": "vision.segment", "kwargs": {"n": n}} for n in (1, "many", 100)]

    answers = api.post("/v1/tasks:batch", json={"tasks": [*tasks, {"name": "vision.none"}]}).json()["tasks"]

    assert answers[0]["accepted"]["state"] == "waiting"
    assert [answer["problem"] and answer["problem"]["code"] for answer in answers[1:]] == [
        "bad_attribute",
        "above_bound",
        "no_profile",
    ]
    assert answers[3]["problem"]["errors"][0]["field"] == "body.tasks.3.name"


def test_several_gpus_whole_ones_and_host_resources_can_be_demanded(api: httpx.Client, cluster: FakeCluster) -> None:
    demand = {"vram_mib": "all", "gpus": 2.0, "cpus": 4, "ram_mib": 2048}
    answer = api.post("/v1/tasks", json={"name": "free.form", "demand": demand})

    assert answer.status_code == 202, answer.text
    task = api.get(f"/v1/tasks/{answer.json()['id']}").json()
    record = cluster.store.record(task["id"])
    assert record is not None
    assert record.demand == Demand(512, gpus=2, cpus=4.0, ram_mib=2048, whole=True)
    assert (task["gpus"], task["whole"], task["lane"].partition("|")[2][:5]) == (2, True, "2xall")


def test_eta_and_demand_are_honoured(api: httpx.Client, cluster: FakeCluster) -> None:
    body = {"name": "free.form", "demand": {"vram_mib": 2000, "gpu_model": "H200"}, "eta": "2040-01-01T00:00:00+01:00"}

    told = api.post("/v1/tasks", json=body).json()

    record = cluster.store.record(told["id"])
    assert record is not None
    assert (record.state, record.demand.gpu_models, record.eta_s) == (State.SCHEDULED, ("H200",), 2_208_985_200)


def test_level_1_full_is_429(settings: Settings, cluster: FakeCluster) -> None:
    small = settings.model_copy(update={"intake": settings.intake.model_copy(update={"level1_limit": 1})})
    with serving(small) as url:
        assert httpx.post(f"{url}/v1/tasks", json={"name": "vision.caption"}).status_code == 202
        answer = httpx.post(f"{url}/v1/tasks", json={"name": "vision.caption"})
    assert (answer.status_code, problem(answer)["code"]) == (429, "level1_full")
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "vision.segment", "priority": 12}, "body.priority"),
        ({"name": "vision.segment", "colour": "red"}, "body.colour"),
        ({"name": "two words"}, "body.name"),
        ({"name": "vision.segment", "eta": "2040-01-01T00:00:00"}, "body.eta"),
        ({"name": "vision.segment", "attributes": {"a b": 1}}, "body.attributes.a b.[key]"),
        ({"name": "vision.segment", "demand": {"vram_mib": -1}}, "body.demand.vram_mib"),
        ({"name": "vision.segment", "demand": {"vram_mib": "most"}}, "body.demand.vram_mib"),
        ({"name": "vision.segment", "demand": {"gpus": 0}}, "body.demand.gpus"),
        ({"name": "vision.segment", "demand": {"cpus": "2"}}, "body.demand.cpus"),
        ({"name": "vision.segment", "demand": {"ram_mib": 0.5}}, "body.demand.ram_mib"),
        ({}, "body.name"),
    ],
)
def test_a_refusal_names_the_field(api: httpx.Client, body: dict[str, object], field: str) -> None:
    answer = api.post("/v1/tasks", json=body)

    assert answer.status_code == 400
    assert problem(answer)["errors"][0]["field"] == field


def test_what_admission_refuses_is_422_with_its_reason(api: httpx.Client) -> None:
    answer = api.post("/v1/tasks", json={"name": "vision.segment", "args": [1, 2, 3]})

    assert (answer.status_code, problem(answer)["code"]) == (422, "unbindable_arguments")
    assert problem(answer)["errors"][0]["field"] == "body.args"


def test_an_estimate_shows_its_parts(api: httpx.Client, cluster: FakeCluster) -> None:
    told = api.post("/v1/estimate", json={"name": "vision.segment", "args": [2]}).json()

    assert (told["vram_mib"], told["attributes"]) == (2304, {"n": 2})
    assert sum(part["mib"] for part in told["parts"]) == 2300
    assert cluster.store.counts() == {}


# -- cancelling and retrying -----------------------------------------------------------------------------------


def test_cancelling(api: httpx.Client, cluster: FakeCluster) -> None:
    waits, runs = cluster.admit(), cluster.run("GPU-000-0")

    cancelled = api.delete(f"/v1/tasks/{waits}")
    assert (cancelled.status_code, cancelled.json()["status"]) == (303, "cancelled")
    assert api.get(cancelled.headers["location"]).json()["state"] == "cancelled"
    assert api.delete(f"/v1/tasks/{runs}").json()["status"] == "cancelling"
    again, unknown = api.delete(f"/v1/tasks/{waits}"), api.delete("/v1/tasks/nobody")
    assert (again.status_code, problem(again)["code"]) == (409, "ended")
    assert (unknown.status_code, problem(unknown)["code"]) == (404, "unknown_task")


def test_a_dead_letter_is_tried_again(api: httpx.Client, cluster: FakeCluster) -> None:
    task_id = cluster.admit(refusal=Reason("no_profile", "none"))
    early = api.post(f"/v1/tasks/{task_id}/retry")
    assert (early.status_code, problem(early)["code"]) == (409, "not_dead")
    for owed in cluster.store.owed(10):
        cluster.store.answered(owed)

    told = api.post(f"/v1/tasks/{task_id}/retry").json()

    assert told["state"] == "waiting"


# -- who may, and how much -------------------------------------------------------------------------------------


def test_tokens_and_their_scopes(guarded: httpx.Client) -> None:
    body = {"name": "vision.segment"}
    none = guarded.get("/v1/cluster")
    assert (none.status_code, problem(none)["code"]) == (401, "no_token")
    assert "Bearer" in none.headers["www-authenticate"]
    assert guarded.get("/v1/cluster", headers=bearer("wrong")).status_code == 401
    assert guarded.get("/metrics").status_code == 401
    assert guarded.get("/healthz").status_code == 200
    assert guarded.get("/v1/cluster", headers=bearer(READ)).status_code == 200
    assert guarded.post("/v1/estimate", json=body, headers=bearer(READ)).status_code == 200
    refused = guarded.post("/v1/tasks", json=body, headers=bearer(READ))
    assert (refused.status_code, problem(refused)["code"]) == (403, "read_only")
    assert guarded.post("/v1/tasks", json=body, headers=bearer(SUBMIT)).status_code == 202


def test_rates_are_limited_by_client(guarded: httpx.Client) -> None:
    answers = [guarded.get("/v1/profiles", headers=bearer(READ)) for _ in range(25)]

    limited = [answer for answer in answers if answer.status_code == 429]
    assert 0 < len(limited) <= 5
    assert int(limited[0].headers["retry-after"]) >= 1
    assert guarded.get("/v1/profiles", headers=bearer(SUBMIT)).status_code == 200


def test_bodies_are_limited_by_size(guarded: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 1000

    for content in (b" " * 10_001, endless()):
        answer = guarded.post(
            "/v1/tasks", content=content, headers={**bearer(SUBMIT), "Content-Type": "application/json"}
        )
        assert (answer.status_code, problem(answer)["code"]) == (413, "too_large")


def test_a_slow_body_is_cut_off(guarded: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BODY_TIMEOUT_S", 0.3)
    url = guarded.base_url
    with socket.create_connection((url.host, url.port or 0)) as slow:
        head = f"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SUBMIT}\r\n"
        slow.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        slow.settimeout(5)
        assert b"408" in slow.recv(10_000).split(b"\r\n")[0]
    assert guarded.get("/healthz").status_code == 200


def test_without_tokens_other_hosts_and_other_sites_are_refused(api: httpx.Client) -> None:
    rebound = api.get("/v1/cluster", headers={"Host": "evil.example"})
    foreign = api.delete("/v1/tasks/x", headers={"Origin": "https://evil.example"})

    assert (rebound.status_code, problem(rebound)["code"]) == (403, "foreign_host")
    assert (foreign.status_code, problem(foreign)["code"]) == (403, "foreign_origin")


def test_without_tokens_it_listens_on_this_machine_only(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings.model_validate({"monitor": {"host": "0.0.0.0"}})

    assert address(settings) == "127.0.0.1"
    assert "no monitor.tokens" in caplog.text


def test_the_page_asks_nobody_else(api: httpx.Client) -> None:
    answer = api.get("/")

    assert "default-src 'none'" in answer.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"#]+)"', answer.text)
    assert links
    assert all(api.get(f"/{link}").status_code == 200 and "://" not in link for link in links)


# -- events ----------------------------------------------------------------------------------------------------


def events(stream: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """(id, data) of each event."""
    last = ""
    for line in stream.iter_lines():
        if line.startswith("id: "):
            last = line[4:]
        elif line.startswith("data: "):
            yield last, json.loads(line[6:])


def test_events_tell_changes_within_a_second(api: httpx.Client, cluster: FakeCluster) -> None:
    with api.stream("GET", "/v1/events") as stream:
        heard = events(stream)
        _, first = next(heard)
        assert first["full"]
        cluster.report(external_mib=700)
        began_s = time.monotonic()
        for _, event in heard:
            if any(gpu["external_mib"] == 700 for gpu in event.get("gpus", ())):
                break
        assert not event["full"]
        assert time.monotonic() - began_s < within_s(1.0)


def test_a_reader_that_comes_back_gets_what_it_missed(api: httpx.Client, cluster: FakeCluster) -> None:
    with api.stream("GET", "/v1/events") as stream:
        heard = events(stream)
        last = next(mark for mark, event in heard if event.get("gpus"))
    cluster.report(external_mib=300)

    with api.stream("GET", "/v1/events", headers={"Last-Event-ID": last}) as stream:
        told = [event for _, event in zip(range(4), (event for _, event in events(stream)), strict=False)]

    assert not any(event["full"] for event in told)
    assert any(gpu["external_mib"] == 300 for event in told for gpu in event["gpus"])
    with api.stream("GET", "/v1/events", headers={"Last-Event-ID": "another-7"}) as stream:
        assert next(events(stream))[1]["full"]


def test_readers_that_leave_or_do_not_read_are_forgotten(
    settings: Settings, client: redis.Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SEND_TIMEOUT_S", 0.5)
    cluster = FakeCluster(client, namespace, nodes=40, gpus=8)
    cluster.report()
    app = build(cluster.store, settings, answering_app(settings))
    feed = app.state.feed
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        server = Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2), feed)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        wait_until(lambda: server.started, what="the monitor serves")
        port = listening.getsockname()[1]
        with httpx.stream("GET", f"http://127.0.0.1:{port}/v1/events") as stream:
            lines = stream.iter_lines()  # closes the stream when it is collected
            next(lines)
            assert feed.watchers == 1
        wait_until(lambda: feed.watchers == 0, what="the reader that left is forgotten")

        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: feed.watchers == 1, what="the deaf reader is heard of")

        def cut_off() -> bool:
            cluster.report(external_mib=time.monotonic_ns() % 1000)
            return bool(feed.watchers == 0)

        wait_until(cut_off, what="the deaf reader is cut off")
        deaf.close()
        server.handle_exit(2, None)
        thread.join(10)
        assert not thread.is_alive()
