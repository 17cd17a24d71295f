"""A device's worker as an agent starts it (prefork, spawn): every way a task can end, seen in record and result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery

import brim
from brim.core.model import State
from brim.settings import Settings
from support.celery_app import WorkerProcess, configure, worker
from support.stage import Stage, device_uuid, worker_environment

pytestmark = pytest.mark.timeout(180)
TERMINAL = (State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED, State.DEAD)


@pytest.fixture
def stage(client: redis.Redis, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "devices"))
    monkeypatch.setenv("BRIM_TEST_MARKERS", str(tmp_path))
    stage = Stage(client, namespace, device_uuid())
    yield stage
    assert stage.store.audit() == []


@pytest.fixture
def app(valkey_url: str, namespace: str) -> Iterator[Celery]:
    app = configure(Celery("producer", set_as_current=False), valkey_url, namespace)
    brim.install(app, tasks=["*"])
    yield app
    app.close()


@pytest.fixture
def gpu_worker(
    stage: Stage, settings: Settings, namespace: str, valkey_url: str, tmp_path: Path
) -> Iterator[WorkerProcess]:
    with worker(
        "support.apps.gpu",
        [stage.identity.queue],
        url=valkey_url,
        namespace=namespace,
        log_path=tmp_path / "gpu0.log",
        options=["--concurrency=2"],
        env=worker_environment(stage, settings),
    ) as running:
        yield running
        assert "Traceback" not in running.log.replace("Traceback (most recent call last):\n  File", "")


def test_tasks_end_as_they_do_in_plain_celery(app: Celery, stage: Stage, gpu_worker: WorkerProcess) -> None:
    sent = app.send_task("add", (2, 3))
    record = stage.until(sent.id, *TERMINAL)
    print(gpu_worker.log)
    assert sent.get(timeout=5) == 5
    assert record.state is State.SUCCEEDED
