"""`brim demo` and `brim up` as a newcomer runs them: real processes, the summary, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Celery

from brim_services.supervise import wait_until

BRIM = [sys.executable, "-m", "brim_services.cli"]


@contextmanager
def brim(tmp_path: Path, *argv: str, folder: Path | None = None, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A brim process in a folder, whose temporary files lie below ``tmp_path``; ended with the block."""
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        [*BRIM, *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def started_below(folder: Path) -> list[int]:
    """Processes of a stack whose simulated devices lie below ``folder``, by their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"BRIM_SIM_DIR={folder}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.large
@pytest.mark.timeout(180)
def test_the_demo_sums_up_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with brim(tmp_path, "demo", "--tasks", "60", "--seed", "7", "--json") as process:
        out, err = process.communicate(timeout=120)

    summary = json.loads(out.splitlines()[-1])
    assert process.returncode == 0, err
    assert summary["tasks"] == {"succeeded": 60}
    assert summary["oom"] == 0
    assert summary["invariants"] == "held"
    assert [gpu["capacity_mib"] for gpu in summary["gpus"]] == [24_576] * 4
    for gpu in summary["gpus"]:
        assert 0 < gpu["peak_measured_mib"] <= gpu["capacity_mib"]
        assert 0 < gpu["peak_reserved_mib"] <= gpu["capacity_mib"]
    assert 0 < summary["makespan_s"] < summary["exclusive_makespan_s"]
    assert started_below(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


NEARLY_A_GPU = """\
defaults: {context_mib: 0, margin: 1.0}
profiles:
  vision.segment: &whole {vram: "24000"}
  vision.detect: *whole
  vision.caption: *whole
  vision.upscale: *whole
  vision.embed: *whole
  vision.tag: {model: tagger, weights_mib: 700, batch: {max_items: 32}}
"""


@pytest.mark.timeout(180)
def test_the_demo_fails_when_placement_ignores_memory(tmp_path: Path) -> None:
    """How much the example's tasks take, and which of them meet on a device, is drawn anew for each run.

    So they are given a table here with which each takes at least half of what a device has: whichever meet, however
    fast the machine is, they run out of memory.
    """
    temporary, table = tmp_path / "tmp", tmp_path / "resources.yaml"
    temporary.mkdir()
    table.write_text(NEARLY_A_GPU)
    argv = ("demo", "--tasks", "40", "--seed", "7", "--json", "--ignore-memory")
    with brim(temporary, *argv, BRIM_RESOURCES__TABLE=str(table)) as process:
        out, err = process.communicate(timeout=120)

    summary = json.loads(out.splitlines()[-1])
    assert process.returncode == 1, err
    assert summary["oom"] > 0
    told = "\n".join(summary["invariants"])
    assert "MiB were reserved at once on" in told
    assert "refused" in told
    assert started_below(temporary) == []


@contextmanager
def up(tmp_path: Path, *argv: str, number: signal.Signals) -> Iterator[dict[str, str]]:
    """`brim up` in a folder that is not the repository, with one GPU; its addresses. Ended by the signal."""
    folder = tmp_path / "up"
    ports = [part for name in ("redis", "flower", "monitor") for part in (f"--{name}-port", "0")]
    options = {"BRIM_DEVICES": "sim:1x24GiB", "BRIM_AGENT__EXECUTORS_PER_GPU": "2"}
    with brim(tmp_path, "up", "--folder", str(folder), "--json", *ports, *argv, folder=tmp_path, **options) as process:
        assert process.stdout
        yield json.loads(process.stdout.readline())
        assert started_below(folder)
        process.send_signal(number)
        process.wait(timeout=60)
    wait_until(lambda: not started_below(folder), 20, "every process has ended")


@pytest.mark.large
@pytest.mark.timeout(180)
def test_up_serves_the_example_until_it_is_interrupted(tmp_path: Path) -> None:
    with up(tmp_path, number=signal.SIGINT) as addresses:
        environment = {**os.environ, "BRIM_REDIS__URL": addresses["redis"]}
        environment["PYTHONPATH"] = os.pathsep.join(["examples/vision", *filter(None, sys.path)])
        environment["VISION_BROKER"] = addresses["redis"]
        producer = [sys.executable, "-m", "vision.producer", "--count", "8", "--seed", "3"]
        printed = subprocess.run(producer, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert len(printed.stdout.splitlines()) == 8
        status = subprocess.run([*BRIM, "status", "--json"], env=environment, capture_output=True, check=True)
        assert [device["total_mib"] for device in json.loads(status.stdout)["devices"]] == [24_576]


TEXTAPP = """\
from celery import Celery

import brim

app = Celery("textapp", broker="redis://elsewhere:6379/0", backend="redis://elsewhere:6379/0")
brim.install(app)


@app.task(base=brim.BatchTask)
def embed(items: list[brim.Item]) -> list:
    return [embed.loaded * len(item.kwargs["text"]) for item in items]


embed.load = lambda: 2
"""
TABLE = "profiles: {textapp.embed: {model: m, batch: {max_items: 8, volume: len(text), max_volume: 64}}}"


@pytest.mark.timeout(180)
def test_up_serves_one_s_own_batches_and_is_ended_with_everything_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "textapp.py").write_text(TEXTAPP)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "resources.yaml").write_text(TABLE)

    with up(tmp_path, "-A", "textapp", number=signal.SIGKILL) as addresses:
        producer = Celery("p", broker=addresses["redis"], backend=addresses["redis"], set_as_current=False)
        asked = producer.send_task("textapp.embed", kwargs={"text": "abc"}, queue="brim.intake")
        assert asked.get(timeout=60) == 6


def test_up_names_the_setting_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    with brim(tmp_path, "up", "-A", "textapp", folder=tmp_path) as process:
        _, err = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "brim: configs/resources.yaml: No such file" in err
    assert "BRIM_RESOURCES__TABLE" in err


@pytest.mark.timeout(120)
def test_up_says_why_it_cannot_start(tmp_path: Path) -> None:
    folder = tmp_path / "up"
    argv = ("up", "--folder", str(folder), "--redis-port", "0", "--flower-port", "0")
    with brim(tmp_path, *argv, BRIM_DEVICES="sim:many") as process:
        out, _ = process.communicate(timeout=90)

    assert process.returncode == 1
    assert "brim up failed" in out
    assert "BRIM_DEVICES='sim:many'" in " ".join(out.split())
    assert started_below(folder) == []
