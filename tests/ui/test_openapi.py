"""The API against its own OpenAPI document: schemathesis, with all of its checks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from brim.core.model import Reason
from brim.settings import Monitor
from brim_services.monitor import feed
from brim_services.monitor.access import digest
from integration.test_monitor_api import serving
from support.cluster import FakeCluster
from support.stage import settings_for

CONFIG = Path(__file__).parent / "schemathesis.toml"


@pytest.mark.timeout(300)
def test_schemathesis_finds_nothing(valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "STREAM_S", 0.2)  # a stream of events has to end for it
    token = {"name": "schemathesis", "sha256": digest("secret"), "scope": "submit"}
    limits = Monitor.model_validate({"tokens": [token], "request_rate": 10_000, "burst": 100_000})
    settings = settings_for(valkey_url, namespace).model_copy(update={"monitor": limits})
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert command
    with redis.Redis.from_url(valkey_url) as client:
        cluster = FakeCluster(client, namespace)
        cluster.run("GPU-000-0")
        cluster.admit(refusal=Reason("no_profile", "none"))
        cluster.report()
        with serving(settings) as url:
            argv = [command, "--config-file", str(CONFIG), "run", f"{url}/openapi.json", "--max-examples", "15"]
            argv += ["--checks", "all", "--request-timeout", "10"]
            argv += ["--header", "Authorization: Bearer secret"]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
        assert cluster.store.audit() == []

    assert done.returncode == 0, done.stdout[-8000:]
