"""`brim up` as a test's stack."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

FLOWER_AUTH = "ann:let-me-in"


@dataclass
class Stack:
    """`brim up` in a folder of its own: two simulated GPUs with two executors each."""

    process: subprocess.Popen[str]
    addresses: dict[str, str]
    environment: dict[str, str]

    @property
    def api(self) -> httpx.Client:
        return httpx.Client(base_url=self.addresses["page"], timeout=10)

    def submit(self, **task: Any) -> str:
        """Through the HTTP API; the task's id."""
        with self.api as api:
            answer = api.post("/v1/tasks", json=task)
            assert answer.status_code == 202, answer.text
            return str(answer.json()["id"])

    def publish(self, code: str) -> str:
        """What a producer's code prints; `app` is the example's Celery app."""
        text = f"from vision.celery import app\nfrom vision import tasks\n{code}"
        argv = [sys.executable, "-c", text]
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    def monitor(self) -> psutil.Process:
        """The monitor's process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        [found] = [child for child in children if child.cmdline()[-2:] == ["brim_services.cli", "monitor"]]
        return found
