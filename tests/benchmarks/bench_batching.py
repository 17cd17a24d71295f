"""What two-level batching is worth: the same model and load for brim, plain Celery and a fixed batcher, in turn.

Every contestant has one worker that computes. A model costs a + b·n for a batch of n; tasks come by a Poisson process
that does not wait for answers (open loop), at ``rest`` (30 % of what plain Celery can do) and at 50, 90 and 150 % of
what full batches can. The simulated model sleeps, and 32 items in 164 ms are what it can do. The other one multiplies
matrices on one processor, beside a pipeline that takes processor time and memory: what brim's executor can do is
measured first, with more than it can take. Latency runs from when a task was due to be published until its result was
stored; one that was not done at the end of the load, and of a grace after it, counts with what it had waited by then.
Throughput is what was done while the load lasted, but for its first second.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import redis
from celery import Celery
from rich.console import Console
from rich.table import Table

from brim.settings import Settings
from brim.store import Store
from brim_services import embedded
from brim_services.supervise import Command, Supervisor, wait_until

HERE = Path(__file__).parent
CONTESTANTS = ("brim", "plain", "fixed")
SIZE = 32
TABLE = """
defaults: {context_mib: 0, margin: 1.0}
profiles:
  bench.simulated: {model: simulated, weights_mib: 100, batch: {max_items: 32}}
  bench.numpy: {model: numpy, weights_mib: 100, batch: {max_items: 32}}
"""
TIMEOUT_S = 60.0
GRACE_S = 2.0
WARM_UP_S = 1.0
"""So long throughput is not counted: nothing waits yet when a load begins."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The NumPy model computes on one processor, as a GPU would beside the rest: the others are for the pipelines."""

Row = dict[str, float]


@dataclass(frozen=True)
class Model:
    """What a batch of n costs: ``base_s`` + ``each_s`` · n; ``saturation`` is what brim's executor can do, in 1/s."""

    name: str
    base_s: float
    each_s: float
    saturation: float

    def seconds(self, count: int) -> float:
        """What a batch of so many items costs."""
        return self.base_s + self.each_s * count

    def rate(self, load: str) -> float:
        """Tasks a second."""
        if load == "rest":
            return 0.3 / self.seconds(1)
        return int(load) / 100 * self.saturation


@dataclass
class Contestant:
    """One stack under load."""

    name: str
    app: Celery
    client: redis.Redis
    notes: Path

    def send(self, model: str) -> str:
        """Publish one task; its id."""
        if self.name == "plain":
            result = self.app.send_task("bench.alone", (model,), queue="plain")
        else:
            result = self.app.send_task(f"bench.{model}", queue="brim.intake")
        return str(result.id)

    def done_s(self, ids: list[str]) -> list[float | None]:
        """When results were stored, in seconds since the epoch."""
        keys = [f"{self.name}.celery-task-meta-{task_id}" for task_id in ids]
        return [
            datetime.fromisoformat(json.loads(raw)["date_done"]).timestamp() if raw else None
            for raw in self.client.mget(keys)
        ]

    def batches(self, model: str, since: float) -> list[tuple[float, float, int]]:
        """What the model has computed since: (from, to, items), by the monotonic clock."""
        lines = [line.split() for path in self.notes.iterdir() for line in path.read_text().splitlines()]
        found = [(float(began), float(ended), int(count)) for name, began, ended, count in lines if name == model]
        return sorted(batch for batch in found if batch[0] >= since)

    def load(self, model: Model, load: str, seconds: float, random_: random.Random) -> tuple[Row, list[float]]:
        """Publish at the load's rate for so long; what came of it, and the gaps between batches in ms."""
        since, began, due_s = time.monotonic(), time.time(), 0.0
        due: dict[str, float] = {}
        while (due_s := due_s + random_.expovariate(model.rate(load))) < seconds:
            time.sleep(max(0.0, began + due_s - time.time()))
            due[self.send(model.name)] = began + due_s
        ids = list(due)

        def answered() -> bool:
            return time.time() > began + seconds + GRACE_S or None not in self.done_s(ids)

        wait_until(answered, TIMEOUT_S, "the load's end", interval_s=0.1)
        done = self.done_s(ids)
        batches = self.batches(model.name, since)
        now_s = time.time()
        latencies = sorted((ended or now_s) - due[task_id] for task_id, ended in zip(ids, done, strict=True))
        in_time = sum(ended is not None and WARM_UP_S <= ended - began <= seconds for ended in done)
        row = {
            "throughput": round(in_time / (seconds - WARM_UP_S), 2),
            "p50_ms": round(1000 * latencies[len(latencies) // 2], 1),
            "p99_ms": round(1000 * latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))], 1),
            "mean_batch": round(sum(count for *_, count in batches) / max(1, len(batches)), 2),
            "sent": len(ids),
            "unfinished": done.count(None),
        }
        return row, [(after[0] - before[1]) * 1000 for before, after in pairwise(batches)]

    def drain(self) -> None:
        """Throw away what it could not keep up with, and let the rest end."""
        self.client.delete("plain.plain")
        wait_until(self._is_idle, TIMEOUT_S, "what is left has ended", interval_s=0.2)

    def _is_idle(self) -> bool:
        if self.name == "plain":
            return not self.client.exists("plain.unacked")
        return not any(
            count
            for state, count in Store(self.client, f"{self.name}.brim:").counts().items()
            if state not in ("succeeded", "failed", "dead", "cancelled", "expired")
        )


@contextmanager
def stack(name: str, folder: Path) -> Iterator[Contestant]:
    """One contestant's processes, on a Valkey of their own."""
    (folder / "resources.yaml").write_text(TABLE)
    notes = folder / "notes"
    notes.mkdir()
    prefix = f"{name}."
    with Supervisor(folder / "logs") as supervisor:
        server = embedded.start(supervisor, folder / "valkey")
        paths = [str(HERE), str(HERE.parents[1] / "common"), str(HERE.parents[1] / "services")]
        settings = Settings.model_validate(
            {
                "redis": {"url": server.url},
                "broker": {"global_keyprefix": prefix},
                "results": {"app_options": {"result_backend_transport_options": {"global_keyprefix": prefix}}},
                "resources": {"table": folder / "resources.yaml"},
                "placement": {"policy_file": HERE.parents[1] / "configs/placement.yaml"},
                "agent": {"executors_per_gpu": 1, "drain_grace_s": 1.0, "log_folder": folder / "workers"},
            }
        )
        environment = {
            "BENCH_BROKER": server.url,
            "BENCH_PREFIX": prefix,
            "BENCH_NOTES": str(notes),
            "PYTHONPATH": os.pathsep.join(paths),
            **ONE_THREAD,
        }
        cli = [sys.executable, "-m", "brim_services.cli"]
        brim_environment = {
            **environment,
            **settings.environment(),
            "BRIM_DEVICES": "sim:1x24GiB",
            "BRIM_SIM_DIR": str(folder / "devices"),
        }
        worker = ["worker", "-c", "1", "-Q", "plain", "-n", "plain@%h", "-O", "fair", "-l", "WARNING"]
        celery = [sys.executable, "-m", "celery", "-A", "batching_app", *worker, "--prefetch-multiplier", "1"]
        if name == "plain":
            commands = [Command("plain", celery, environment=environment)]
        else:
            roles = {"intake": ["intake"], "placement": ["placement"], "agent": ["worker", "-A", "batching_app"]}
            commands = [
                Command(role, [*cli, *words], environment=brim_environment, grace_s=12.0)
                for role, words in roles.items()
            ]
        for command in commands:
            supervisor.start(command)
        client = redis.Redis.from_url(server.url)
        app = Celery("bench", broker=server.url, backend=server.url, set_as_current=False)
        app.conf.broker_transport_options = app.conf.result_backend_transport_options = {"global_keyprefix": prefix}
        yield Contestant(name, app, client, notes)
        app.close()


def warm_up(contestant: Contestant, model: str) -> None:
    """Have the model loaded."""
    ids = [contestant.send(model)]
    wait_until(lambda: None not in contestant.done_s(ids), TIMEOUT_S, f"{contestant.name} has begun", interval_s=0.1)


def saturated(contestant: Contestant, model: Model, seconds: float) -> Model:
    """The model with what the contestant can do beside its own pipeline, which takes processor time and memory."""
    row, _ = contestant.load(model, "130", seconds, random.Random(0))
    contestant.drain()
    print(f"{contestant.name} saturates {model.name} at {row['throughput']}/s", file=sys.stderr, flush=True)
    return replace(model, saturation=row["throughput"])


def measured_model() -> Model:
    """What the NumPy model costs on this machine, by batches of 1 and 32, in a process as the contestants' are."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"BENCH_PREFIX": "plain.", "BENCH_BROKER": "redis://127.0.0.1:0", "BENCH_NOTES": folder}
        environment |= {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        code = "import batching_app; batching_app.calibrate()"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=HERE, check=True, stdout=subprocess.PIPE
        )
    one, full = json.loads(done.stdout)
    each = max(0.0, (full - one) / (SIZE - 1))
    return Model("numpy", one - each, each, SIZE / full)


def table_of(title: str, loads: Mapping[str, Mapping[str, Row]]) -> Table:
    """For a terminal."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold")
    for column in ("load", "contestant", "throughput /s", "p50 ms", "p99 ms", "mean batch", "sent", "unfinished"):
        table.add_column(column, justify="left" if column in ("load", "contestant") else "right")
    for load, rows in loads.items():
        for name, row in rows.items():
            table.add_row(load, name, *(f"{value:g}" for value in row.values()))
    return table


def main() -> None:
    """Measure all, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each load lasts; 0 leaves it out")
    parser.add_argument("--rest-seconds", type=float, default=16.0, help="how long the load at rest lasts")
    parser.add_argument(
        "--numpy-seconds", type=float, default=10.0, help="the same for the NumPy model; 0 leaves it out"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    plan: list[tuple[Model, float, float]] = []
    if arguments.seconds:
        plan.append((Model("simulated", 0.100, 0.002, SIZE / 0.164), arguments.seconds, arguments.rest_seconds))
    if arguments.numpy_seconds:
        plan.append((measured_model(), arguments.numpy_seconds, arguments.numpy_seconds))
    found: dict[str, dict[str, dict[str, Row]]] = {model.name: {} for model, *_ in plan}
    gaps: list[float] = []
    for name in CONTESTANTS:
        with tempfile.TemporaryDirectory() as folder, stack(name, Path(folder)) as contestant:
            for index, (assumed, seconds, rest_seconds) in enumerate(plan):
                warm_up(contestant, assumed.name)
                print(f"{name} has loaded {assumed.name}", file=sys.stderr, flush=True)
                measures = name == "brim" and assumed.name == "numpy"
                model = saturated(contestant, assumed, seconds) if measures else assumed
                plan[index] = (model, seconds, rest_seconds)
                for load in ("rest", "50", "90", "150"):
                    lasts = rest_seconds if load == "rest" else seconds
                    row, between = contestant.load(model, load, lasts, random.Random(arguments.seed))
                    found[model.name].setdefault(load, {})[name] = row
                    print(f"{name}, {model.name} at {load}: {row}", file=sys.stderr, flush=True)
                    contestant.drain()
                    if name == "brim" and model.name == "simulated" and load == "150":
                        gaps = between
    console = Console()
    for model, *_ in plan:
        cost = f"{1000 * model.base_s:.0f} ms + {1000 * model.each_s:.2f} ms each"
        cost = f"{model.name}: {cost}, saturated at {model.saturation:.0f}/s"
        console.print(table_of(cost, found[model.name]))
    result: dict[str, object] = {}
    if "simulated" in found:
        result = {"loads": found["simulated"], "gap_ms": round(median(gaps), 2)}
    if "numpy" in found:
        result["numpy"] = found["numpy"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
