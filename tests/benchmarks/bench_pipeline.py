"""What brim costs: the same tasks, workers and server, once through plain Celery and once through brim, in turn.

Both workers have the same flags, the same number of pool processes and, unless ``--ahead`` says otherwise, as many
messages at hand: Celery's default prefetching.

Prints a table and, as its last line, one JSON object; every claim is a ratio of the two in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import redis
from celery import Celery
from celery.result import AsyncResult
from rich.console import Console
from rich.table import Table

from brim.settings import Settings
from brim.store import Store
from brim_services import embedded
from brim_services.supervise import Command, Supervisor, wait_until

HERE = Path(__file__).parent
TABLE = "profiles:\n  bench.work: {vram: 100, context_mib: 0, margin: 1.0}\n"
EXECUTORS = 2
PREFETCHED = 4 * EXECUTORS
"""Messages that a plain worker holds: Celery's default multiplier times its processes."""
TIMEOUT_S = 120.0

Samples = dict[str, list[float]]
"""Contestant -> measurements."""


@dataclass
class Contestant:
    """One way to run the tasks: its Celery app on this side, and a queue (None: brim's router decides)."""

    name: str
    app: Celery
    queue: str | None

    def send(self, seconds: float) -> AsyncResult:
        """Publishes one task."""
        options = {"queue": self.queue} if self.queue else {}
        return self.app.send_task("bench.work", (seconds,), **options)

    def run(self, count: int, seconds: float, client: redis.Redis) -> tuple[float, list[tuple[int, float, float]]]:
        """Publishes ``count`` tasks and waits for all: seconds from first publish to last end, and each one's run."""
        began = time.time()
        results = [self.send(seconds) for _ in range(count)]
        keys = [f"{self.name}.celery-task-meta-{result.id}" for result in results]
        wait_until(lambda: client.exists(*keys) == count, TIMEOUT_S, f"{self.name}: all results", interval_s=0.05)
        runs = [tuple(json.loads(raw)["result"]) for raw in client.mget(keys)]
        client.delete(*keys)
        return max(end for _, _, end in runs) - began, runs


def gaps_ms(runs: Sequence[tuple[int, float, float]]) -> list[float]:
    """Times between the end of a task and the start of the next one in the same process, in ms."""
    by_process: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for pid, start, end in runs:
        by_process[pid].append((start, end))
    found: list[float] = []
    for spans in by_process.values():
        spans.sort()
        found += [(after[0] - before[1]) * 1000 for before, after in itertools.pairwise(spans)]
    return found


def latencies_ms(contestant: Contestant, count: int) -> list[float]:
    """Publish to result, one task at a time, in ms."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        contestant.send(0.0).get(timeout=30)
        found.append((time.perf_counter() - began) * 1000)
    return found


@contextmanager
def stack(folder: Path, ahead: int) -> Iterator[tuple[redis.Redis, Callable[[str], Contestant]]]:
    """One Valkey with both contestants' processes on it."""
    table = folder / "resources.yaml"
    table.write_text(TABLE)
    with Supervisor(folder / "logs") as supervisor:
        server = embedded.start(supervisor, folder / "valkey")
        paths = [str(HERE), str(HERE.parents[1] / "common"), str(HERE.parents[1] / "services")]
        environment = {"BENCH_BROKER": server.url, "PYTHONPATH": os.pathsep.join(paths)}
        settings = Settings.model_validate(
            {
                "redis": {"url": server.url},
                "broker": {"global_keyprefix": "brim."},
                "results": {"app_options": {"result_backend_transport_options": {"global_keyprefix": "brim."}}},
                "resources": {"table": table},
                "placement": {"ahead": ahead},
                "agent": {"executors_per_gpu": EXECUTORS, "drain_grace_s": 1.0},
            }
        )
        brim_environment = {
            **environment,
            **settings.environment(),
            "BENCH_PREFIX": "brim.",
            "BRIM_DEVICES": "sim:1x24GiB",
            "BRIM_SIM_DIR": str(folder / "devices"),
        }
        # The flags that node agents give their workers: events for Flower, a log line for each task.
        flags = ["--task-events", "--without-mingle", "--without-gossip", "-l", "INFO"]
        worker = ["worker", "-c", str(EXECUTORS), "-Q", "plain", "-n", "plain@%h", *flags]
        cli = [sys.executable, "-m", "brim_services.cli"]
        for command in (
            Command(
                "plain",
                [sys.executable, "-m", "celery", "-A", "pipeline_app", *worker],
                environment={**environment, "BENCH_PREFIX": "plain."},
                stage=2,
            ),
            Command("intake", [*cli, "intake"], environment=brim_environment, stage=1),
            Command("placement", [*cli, "placement"], environment=brim_environment, stage=1),
            Command("agent", [*cli, "worker", "-A", "pipeline_app"], environment=brim_environment, stage=2),
        ):
            supervisor.start(command)
        client = redis.Redis.from_url(server.url)
        store = Store(client, "brim.brim:")
        supervisor.wait_until(lambda: any(d.state == "up" for d in store.devices()), 60, "brim's device")
        yield client, lambda name: contestant(name, server.url)


def contestant(name: str, url: str) -> Contestant:
    """The producer's side of a contestant."""
    app = Celery(name, broker=url, backend=url, set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": f"{name}."}
    app.conf.result_backend_transport_options = {"global_keyprefix": f"{name}."}
    if name == "brim":
        import brim

        brim.install(app)
        return Contestant(name, app, None)
    return Contestant(name, app, "plain")


def main() -> None:
    """Runs all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=600, help="tasks a round and kind")
    parser.add_argument("--single", type=int, default=100, help="tasks of the latency measurement")
    parser.add_argument(
        "--ahead",
        type=int,
        default=PREFETCHED - EXECUTORS,
        help="placement.ahead (default: what plain Celery prefetches)",
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder), chosen.ahead) as (client, make):
        both = [make("plain"), make("brim")]
        for each in both:
            each.run(50, 0.0, client)
        noop: Samples = defaultdict(list)
        slow: Samples = defaultdict(list)
        gaps: Samples = defaultdict(list)
        rest: Samples = defaultdict(list)
        for _ in range(chosen.rounds):
            for each in both:
                seconds, _ = each.run(chosen.tasks, 0.0, client)
                noop[each.name].append(chosen.tasks / seconds)
            for each in both:
                seconds, runs = each.run(chosen.tasks // 2, 0.02, client)
                slow[each.name].append(chosen.tasks / 2 / seconds)
                gaps[each.name] += gaps_ms(runs)
        for _ in range(4):
            for each in both:
                rest[each.name] += latencies_ms(each, chosen.single // 4)
    summary = summarise(noop, slow, gaps, rest)
    report(summary)
    print(json.dumps(summary))


def summarise(
    noop: dict[str, list[float]],
    slow: dict[str, list[float]],
    gaps: dict[str, list[float]],
    rest: dict[str, list[float]],
) -> dict[str, Any]:
    """The figures: medians, and medians of the ratios of pairs of rounds."""
    p50 = {name: median(values) for name, values in rest.items()}
    p99 = {name: quantiles(values, n=100)[98] for name, values in rest.items()}
    gap = {name: median(values) for name, values in gaps.items()}
    return {
        "plain_tasks_per_s": round(median(noop["plain"]), 1),
        "brim_tasks_per_s": round(median(noop["brim"]), 1),
        "ratio_noop": round(median(b / p for b, p in zip(noop["brim"], noop["plain"], strict=True)), 3),
        "ratio_20ms": round(median(b / p for b, p in zip(slow["brim"], slow["plain"], strict=True)), 3),
        "plain_p50_ms": round(p50["plain"], 2),
        "added_p50_ms": round(p50["brim"] - p50["plain"], 2),
        "added_p99_ms": round(p99["brim"] - p99["plain"], 2),
        "added_p50_ratio": round((p50["brim"] - p50["plain"]) / p50["plain"], 3),
        "plain_gap_p50_ms": round(gap["plain"], 2),
        "feed_gap_p50_ms": round(gap["brim"], 2),
        "feed_gap_ratio": round(gap["brim"] / gap["plain"], 3),
    }


def report(summary: dict[str, Any]) -> None:
    """The table for people."""
    table = Table("figure", "value")
    for name, value in summary.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
