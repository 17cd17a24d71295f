"""Celery apps and workers for tests: real ones, on the session's server, under the test's own key prefix."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from celery import Celery

from support.waiting import wait_until

BROKER_ENV, NAMESPACE_ENV, TRANSPORT_ENV = "BRIM_TEST_BROKER", "BRIM_TEST_NAMESPACE", "BRIM_TEST_TRANSPORT"


def configure(app: Celery, url: str | None = None, namespace: str | None = None) -> Celery:
    """Point an app's broker and result backend at the test's server and key prefix.

    A worker process gets both from its environment (`worker` sets it).
    """
    url = url or os.environ.get(BROKER_ENV, "redis://127.0.0.1:0/0")
    prefix = {"global_keyprefix": namespace or os.environ.get(NAMESPACE_ENV, "")}
    app.conf.update(
        broker_url=url,
        result_backend=url,
        broker_transport_options={**prefix, **json.loads(os.environ.get(TRANSPORT_ENV, "{}"))},
        result_backend_transport_options=prefix,
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )
    return app


@dataclass
class WorkerProcess:
    """A running ``celery worker``; ``process.pid`` is its main process, which leads a process group."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return self.log_path.read_text(errors="replace")

    def stop(self, timeout_s: float = 20.0) -> int:
        """Ask for a warm shutdown, kill the group if it takes too long; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        return self.process.returncode


@contextmanager
def worker(
    app: str,
    queues: Sequence[str],
    *,
    url: str,
    namespace: str,
    log_path: Path,
    options: Sequence[str] = ("--pool=solo",),
    env: Mapping[str, str] | None = None,
) -> Iterator[WorkerProcess]:
    """Run ``celery -A app worker`` on ``queues`` until the block ends; ready when the block begins."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(str(part) for part in (tests, tests.parent / "common", tests.parent / "services"))
    environment = {**os.environ, "PYTHONPATH": path, BROKER_ENV: url, NAMESPACE_ENV: namespace, **(env or {})}
    command = [sys.executable, "-m", "celery", "-A", app, "worker", "-Q", ",".join(queues), "-l", "INFO"]
    command += ["--without-mingle", "--without-gossip", "-n", f"{log_path.stem}@%h", *options]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    running = WorkerProcess(process, log_path)
    try:
        wait_until(lambda: process.poll() is not None or " ready." in running.log, what="the worker is ready")
        assert process.poll() is None, running.log
        yield running
    finally:
        running.stop()
