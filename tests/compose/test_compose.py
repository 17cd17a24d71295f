"""docker-compose.yml on a real engine: it comes up healthy, runs tasks, scales, and loses nothing when services die.

`make test-compose` runs these; PYTHON_IMAGE and REDIS_IMAGE name other base images than the files' defaults.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from brim_services.embedded import free_port
from support.waiting import wait_until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PASSWORD, FLOWER_AUTH = "a-password", "ann:secret"
SERVICES = {"redis": 1, "intake": 1, "placement": 2, "worker": 1, "ordinary": 1, "monitor": 1, "flower": 1}


class Project:
    """One compose project of the test's own, with ports and a volume of its own."""

    def __init__(self) -> None:
        self.redis_port, self.flower_port, self.monitor_port = free_port(), free_port(), free_port()
        self.prometheus_port = free_port()
        self.times_s: dict[str, float] = {}
        self._environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": f"brim-test-{os.getpid()}",
            "BRIM_TAG": "test",
            "BRIM_DEVICES": "sim:1x24GiB",
            "REDIS_PASSWORD": PASSWORD,
            "FLOWER_BASIC_AUTH": FLOWER_AUTH,
            "REDIS_PORT": str(self.redis_port),
            "FLOWER_PORT": str(self.flower_port),
            "MONITOR_PORT": str(self.monitor_port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
        }

    def compose(self, *words: str) -> str:
        done = subprocess.run(
            ["docker", "compose", *words],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, f"docker compose {' '.join(words)}:\n{done.stdout}{done.stderr}\n{self._logs()}"
        return done.stdout

    def up(self, *words: str) -> float:
        begun_s = time.monotonic()
        self.compose("up", "--wait", "--no-build", *words)
        return time.monotonic() - begun_s

    def containers(self, service: str) -> list[dict[str, Any]]:
        ids = self.compose("ps", "-aq", service).split()
        return list(json.loads(subprocess.check_output(["docker", "inspect", *ids])))

    def brim(self, *words: str) -> Any:
        return json.loads(self.compose("exec", "-T", "intake", "brim", *words, "--json"))

    def producer(self, count: int, seed: int = 1) -> subprocess.Popen[str]:
        """The example's producer on the host, by the published port."""
        path = [ROOT / "common", ROOT / "services", ROOT / "examples" / "vision"]
        environment = {
            **os.environ,
            "VISION_BROKER": f"redis://:{PASSWORD}@127.0.0.1:{self.redis_port}/0",
            "PYTHONPATH": os.pathsep.join(map(str, path)),
        }
        command = [sys.executable, "-m", "vision.producer", "--count", str(count), "--seed", str(seed)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def flower(self, path: str, auth: str | None = None) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.flower_port}{path}")
        if auth:
            request.add_header("Authorization", f"Basic {b64encode(auth.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def monitor(self, path: str, token: str) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.monitor_port}{path}")
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def prometheus(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}", timeout=20) as answer:
            return json.load(answer)["data"]

    def _logs(self) -> str:
        command = ["docker", "compose", "logs", "--tail", "20"]
        return subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False
        ).stdout


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    if shutil.which("docker") is None:
        pytest.skip("no docker command here")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no docker engine answers")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("docker has no compose plugin")
    project = Project()
    begun_s = time.monotonic()
    project.compose("build", "intake")
    project.times_s["build"] = time.monotonic() - begun_s
    try:
        project.times_s["up --wait"] = project.up()
        yield project
        for what, seconds in project.times_s.items():
            print(f"{what}: {seconds:.1f} s")
    finally:
        project.compose("--profile", "monitoring", "down", "--volumes", "--timeout", "10")


def finished(producer: subprocess.Popen[str], count: int) -> None:
    """The producer has got all its results, and no error."""
    output, _ = producer.communicate(timeout=300)
    assert producer.returncode == 0, output
    assert len(output.splitlines()) == count, output


def test_every_service_comes_up_healthy(project: Project) -> None:
    for service, replicas in SERVICES.items():
        found = project.containers(service)
        assert [container["State"]["Health"]["Status"] for container in found] == ["healthy"] * replicas, service


def test_the_examples_tasks_succeed(project: Project) -> None:
    begun_s = time.monotonic()
    finished(project.producer(20), 20)
    project.times_s["20 example tasks"] = time.monotonic() - begun_s
    counts = project.brim("status")["tasks"]
    assert set(counts) == {"succeeded"}, counts
    assert project.brim("audit") == {"differences": []}


def test_the_image_has_an_ordinary_user_a_read_only_root_and_no_build_tools(project: Project) -> None:
    [container] = project.containers("intake")
    assert container["HostConfig"]["ReadonlyRootfs"]
    assert container["HostConfig"]["CapDrop"] == ["ALL"]
    assert project.compose("exec", "-T", "intake", "id", "-u").strip() == "10001"
    probe = "for tool in pip pip3 gcc cc make git; do command -v $tool; done; python -c 'import pip' 2>&1; true"
    assert project.compose("exec", "-T", "intake", "sh", "-c", probe).strip().endswith("No module named 'pip'")
    assert len(project.compose("exec", "-T", "intake", "sh", "-c", probe).strip().splitlines()) <= 4


def test_flower_is_there_behind_its_password(project: Project) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        project.flower("/api/workers")
    # Flower asks its workers in the background when it has been up for a moment.
    names = wait_until(lambda: project.flower("/api/workers?refresh=1", FLOWER_AUTH), what="Flower knows workers")
    assert any(name.startswith("gpu0@") for name in names), names


def test_the_monitor_answers_who_has_the_token(project: Project) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        project.monitor("/v1/cluster", "guessed")
    assert project.monitor("/v1/cluster", "brim-dev")


def test_prometheus_scrapes_every_service(project: Project) -> None:
    """Profile ``monitoring``. Grafana's image is not started: what it loads is checked in tests/contract."""
    config = json.loads(project.compose("--profile", "monitoring", "config", "--format", "json"))
    name = config["services"]["prometheus"]["image"]
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"no image {name} here (PROMETHEUS_IMAGE names another)")
    project.compose("--profile", "monitoring", "up", "--wait", "--no-recreate", "prometheus")
    wanted = {"brim-monitor": 1, "brim-intake": 1, "brim-placement": 2, "brim-agent": 1}

    def up() -> bool:
        targets = project.prometheus("targets")["activeTargets"]
        return Counter(t["labels"]["job"] for t in targets if t["health"] == "up") == wanted

    wait_until(up, what="every replica of every service is scraped", timeout_s=90)
    [leader] = project.prometheus("query?query=brim_placement_leader")["result"]
    assert leader["value"][1] == "1"
    [group] = project.prometheus("rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    project.compose("--profile", "monitoring", "rm", "--stop", "--force", "prometheus")


def test_three_workers_are_three_nodes(project: Project) -> None:
    project.times_s["up --wait --scale worker=3"] = project.up("--scale", "worker=3", "--no-recreate")
    devices = project.brim("status")["devices"]
    assert len({device["node"] for device in devices}) == 3
    assert len({device["uuid"] for device in devices}) == 3
    finished(project.producer(24, seed=2), 24)
    project.times_s["back to one"] = project.up("--scale", "worker=1", "--no-recreate")
    assert len({device["node"] for device in project.brim("status")["devices"]}) == 1


@pytest.mark.parametrize("service", ["intake", "placement", "worker", "redis"])
def test_a_killed_service_comes_back_and_nothing_is_lost(project: Project, service: str) -> None:
    before = project.containers(service)
    producer = project.producer(30, seed=hash(service) % 1000)
    wait_until(lambda: project.brim("status")["tasks"].get("running"), what="tasks run", timeout_s=60)
    # By the process, not by `docker kill`: the engine takes that for a wish and does not restart.
    for container in before:
        os.kill(container["State"]["Pid"], signal.SIGKILL)
    begun_s = time.monotonic()
    restarts = [container["RestartCount"] for container in before]
    wait_until(
        lambda: [c["RestartCount"] for c in project.containers(service)] > restarts, what="restarted", timeout_s=60
    )
    finished(producer, 30)
    project.times_s[f"30 tasks, {service} killed: rest of the run"] = time.monotonic() - begun_s
    project.up("--no-recreate")
    assert settled(project.brim("status")["tasks"])
    assert project.brim("audit") == {"differences": []}


def settled(counts: Mapping[str, int]) -> bool:
    """Whether every task has succeeded."""
    return set(counts) == {"succeeded"}
