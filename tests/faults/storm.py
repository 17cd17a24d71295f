"""A random storm over a real cluster: `make test-faults STORM_SECONDS=600 SEED=1`.

Producers publish a mixed workload, batched tasks among it, while one process after the other is killed, paused, or cut
off from the server, and the server itself is killed now and then (it runs with ``appendfsync always``). When it is
over, everything that was published must have come to exactly one end, the books must be clean, no device may ever have
refused memory, and every result must be there. Seeds fix what is published and which faults are drawn; the machine
decides the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import redis
from celery import Celery, chain
from celery.canvas import Signature
from kombu.exceptions import OperationalError

from brim.core.model import TERMINAL, Reason, State
from brim.store.types import CloseAnswer
from brim_services.invariants import overcommitted
from brim_services.supervise import Supervisor
from faults.cluster import Cluster

FAULTS = {
    "executor": 24,
    "model_executor": 12,
    "worker": 8,
    "agent": 4,
    "intake": 18,
    "placement": 18,
    "pause_agent": 2,
    "pause_placement": 8,
    "redis": 3,
    "connections": 8,
    "scripts": 5,
}
"""What strikes, and how often compared with the others."""
MIX = {"work": 70, "long": 12, "chain": 10, "late": 8, "items": 12}
"""What is published, and how often compared with the rest."""
MIX_OF_SEVERAL = {**MIX, "pair": 25, "whole": 8}
"""The same where nodes have several devices: tasks on two of them, and with one to themselves."""
DEMANDS: Mapping[str, Mapping[str, Any]] = {"pair": {"gpus": 2}, "long_pair": {"gpus": 2}, "whole": {"vram_mib": "all"}}
LONG = ("long", "long_pair")
PAUSES = (0.5, 2.0)
"""Shortest and longest pause, in leases of what is paused."""
LEASE_S, LEADER_S = 6.0, 2.0
SETTINGS = {
    "placement__start_timeout_s": 5.0,
    "placement__leader_ttl_s": LEADER_S,
    "placement__max_attempts": 4,
    "agent__restart_backoff_s": 0.1,
    "agent__restart_backoff_max_s": 1.0,
    "agent__headroom_mib": 200,
    "agent__set_idle_s": 3.0,
}
OUTSTANDING = 24
"""How many tasks producers have under way at once."""
LOOK_S = 1.0
"""Between two looks whether what was switched off has shown; what is under way differs in one of them at most."""
SEEN_S = 0.2
"""Between two looks whether a device is up."""
BURST = 8
"""Most items of a batched task that are published at once."""
LATEST_S = 240.0
"""How long everything may take to come to its end once the storm is over."""


@dataclass
class Figures:
    """What a storm came to; everything from ``lost`` on must be 0."""

    seed: int
    seconds: float
    gpus: int = 1
    """Devices of each node."""
    tasks: int = 0
    kills: int = 0
    pauses: int = 0
    redis_restarts: int = 0
    cut_connections: int = 0
    restarts: int = 0
    attempts: int = 0
    attempts_lost: int = 0
    items: int = 0
    """Those of the tasks that are batched."""
    executors_started: int = 0
    """Model executors: one goes when it is killed, when nobody uses it, and when its memory is wanted."""
    longest_down_s: float = 0.0
    """The longest time in which no device was up, or none could be seen."""
    longest_recovery_s: float = 0.0
    """The longest time in which a device was up, a task waited that had lost an attempt, and nothing was placed."""
    longest_wait_s: float = 0.0
    """From the loss of an attempt to the next one's placement: with its turn, for which the least urgent wait long."""
    ended: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    double_finished: int = 0
    overcommit: int = 0
    audit_differences: int = 0
    unanswered: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether nothing was lost, doubled or given away twice."""
        return not (self.lost or self.double_finished or self.overcommit or self.audit_differences or self.unanswered)


class Producer(threading.Thread):
    """Publishes until told to stop; what it was acknowledged, or kept trying until it was, is in ``ids``."""

    def __init__(
        self, app: Celery, cluster: Cluster, seed: int, longest_s: float, mix: Mapping[str, int], outstanding: int
    ) -> None:
        super().__init__(daemon=True)
        self._mix = mix
        self._outstanding = outstanding
        self._app = app
        self._store = cluster.store
        self._draw = random.Random(f"workload {seed}")
        self._longest_s = longest_s
        self.stopping = threading.Event()
        self.ids: list[str] = []
        self.followers: set[str] = set()
        """Ids that are published by another task's end, if it succeeds."""

    def run(self) -> None:
        """Keep so many tasks under way."""
        while not self.stopping.is_set():
            with suppress(redis.RedisError):
                ended = sum(n for state, n in self._store.counts().items() if state in TERMINAL)
                if len(self.ids) - ended < self._outstanding:
                    self._publish()
                    continue
            self.stopping.wait(0.1)

    def _publish(self) -> None:
        kind = self._draw.choices(list(self._mix), list(self._mix.values()))[0]
        if kind == "items":
            self._publish_items()
            return
        options: dict[str, Any] = {}
        if kind == "late":
            options["countdown"] = self._draw.uniform(0.5, 4.0)
        if self._draw.random() < 0.05:
            options["expires"] = self._draw.uniform(1.0, 20.0)
        if kind == "chain":
            first, second = self._task(0.0, 0.2), self._task(0.0, 0.2)
            task = chain(first, second)
            ids = [first.options["task_id"], second.options["task_id"]]
            self.followers.add(ids[1])
        else:
            bounds = (0.6 * self._longest_s, self._longest_s) if kind in LONG else (0.05, 0.4)
            if kind in DEMANDS:
                options["headers"] = {"brim": DEMANDS[kind]}
            task = self._task(*bounds, **options)
            ids = [task.options["task_id"]]
        self._send(task)
        self.ids += ids

    def _publish_items(self) -> None:
        """A burst for the batched task; some items fail by themselves, some make their whole batch raise."""
        for _ in range(self._draw.randint(1, BURST)):
            fault = self._draw.choices(["", "fails", "raises", "retried"], [85, 5, 5, 5])[0]
            kwargs = {"number": self._draw.randint(0, 1000), "seconds": self._draw.uniform(0.0, 0.5), "fault": fault}
            options = {"task_id": self._id(), "priority": self._draw.choice([0, 3, 6, 9])}
            if self._draw.random() < 0.05:
                options["expires"] = self._draw.uniform(1.0, 20.0)
            self._send(self._app.signature("storm.embed", kwargs=kwargs, immutable=True, options=options))
            self.ids.append(options["task_id"])

    def _send(self, task: Signature) -> None:
        while not self._accepted(task):
            time.sleep(0.2)

    def _id(self) -> str:
        return str(uuid.UUID(int=self._draw.getrandbits(128)))

    def _accepted(self, task: Signature) -> bool:
        try:
            task.apply_async()
        except (OperationalError, redis.RedisError, OSError):
            return False
        return True

    def _task(self, shortest_s: float, longest_s: float, **options: Any) -> Signature:
        draw = self._draw
        arguments = {
            "mib": draw.choice([300, 700, 1500, 3000]),
            "seconds": draw.uniform(shortest_s, longest_s),
            "retries": draw.choices([0, 1, 2], [80, 15, 5])[0],
            "fails": draw.random() < 0.04,
        }
        options |= {"task_id": self._id(), "priority": draw.choice([0, 3, 6, 9])}
        return self._app.signature("storm.work", kwargs=arguments, immutable=True, options=options)


class Storm:
    """One storm; `run` returns its figures."""

    def __init__(
        self,
        folder: Path,
        seconds: float,
        seed: int,
        *,
        faults: Mapping[str, int] = FAULTS,
        mix: Mapping[str, int] | None = None,
        outstanding: int = OUTSTANDING,
        lease_s: float = LEASE_S,
        pauses: tuple[float, float] = PAUSES,
        sabotage: str = "",
        longest_s: float = 5.0,
        first_s: float = 1.0,
        every_s: float = 1.0,
        latest_s: float = LATEST_S,
        **shape: int,
    ) -> None:
        self.folder = folder
        self.seconds = seconds
        self.faults = faults
        self.mix = mix or (MIX_OF_SEVERAL if shape.get("gpus", 1) > 1 else MIX)
        self.outstanding = outstanding
        self.lease_s = lease_s
        self.pauses = pauses
        self.sabotage = sabotage
        self.longest_s = longest_s
        self.first_s = first_s
        self.every_s = every_s
        self.latest_s = latest_s
        self.shape = {"nodes": 2, "intakes": 2, "placements": 2, **shape}
        self.draw = random.Random(f"faults {seed}")
        self.figures = Figures(seed, seconds, shape.get("gpus", 1))
        self._paused: dict[int, float] = {}
        self._differences: set[str] = set()
        self._look_at_s = 0.0
        self._changes: list[tuple[float, bool]] = [(0.0, False)]
        """When (ms, as in stories) a device came to be up, and none was any more."""
        self._seen_s = 0.0

    def run(self) -> Figures:
        """Start a cluster, let the storm pass over it, and look what is left."""
        with Supervisor(self.folder / "logs") as supervisor:
            self.cluster = Cluster(
                supervisor,
                self.folder,
                **self.shape,
                device="6GiB",
                settings={**SETTINGS, "placement__lease_timeout_s": self.lease_s},
                sabotage=self.sabotage,
            )
            try:
                self.cluster.start()
                app = self.cluster.producer
                producer = Producer(app, self.cluster, self.figures.seed, self.longest_s, self.mix, self.outstanding)
                producer.start()
                self._rage(producer)
                producer.stopping.set()
                producer.join(60.0)
                self._calm({*producer.ids} - producer.followers)
                self._judge(app, producer)
            finally:
                self._resume(everybody=True)
                self.cluster.close()
        return self.figures

    # -- the storm -------------------------------------------------------------------------------------------

    def _rage(self, producer: Producer) -> None:
        ends_at = time.monotonic() + self.seconds
        strikes_at = time.monotonic() + self.first_s
        while time.monotonic() < ends_at and not self._has_shown():
            self._poll()
            if time.monotonic() >= strikes_at:
                self._strike(producer)
                strikes_at = time.monotonic() + self.draw.uniform(0.5, 1.5) * self.every_s
            time.sleep(0.05)

    def _poll(self) -> None:
        for death in self.cluster.supervisor.poll():
            self.figures.restarts += 1
            if death.code > 0:
                self.figures.examples.append(f"{death} by itself")
        self._resume()
        if time.monotonic() - self._seen_s >= SEEN_S:
            self._seen_s = time.monotonic()
            up = False
            with suppress(redis.RedisError):
                up = any(device.state == "up" for device in self.cluster.store.devices())
            if up != self._changes[-1][1]:
                self._changes.append((time.time() * 1000, up))

    def _strike(self, producer: Producer) -> None:
        kind = self.draw.choices(list(self.faults), list(self.faults.values()))[0]
        with suppress(ProcessLookupError, redis.RedisError):
            if kind == "connections":
                # Our own connection is told of it by its next command.
                self.cluster.client.client_kill_filter(_type="normal", skipme=True)
                self.figures.cut_connections += 1
            elif kind == "scripts":
                self.cluster.client.script_flush()
            elif kind == "redis":
                self.figures.redis_restarts += self._kill(["valkey"])
            elif kind.startswith("pause"):
                self._pause(kind.removeprefix("pause_"))
            else:
                self._kill(self._named(kind))
        if producer.ids and self.draw.random() < 0.15:
            with suppress(redis.RedisError, OperationalError):
                self._cancel(self.draw.choice(producer.ids[-OUTSTANDING:]), producer)

    def _named(self, kind: str) -> Sequence[str] | Sequence[int]:
        match kind:
            case "executor":
                return sorted(self.cluster.executors())
            case "busy_executor":
                attempts, _ = self.cluster.store.books([device.uuid for device in self.cluster.store.devices()])
                return sorted({int(attempt.proc.partition(".")[0]) for attempt in attempts if attempt.proc})
            case "model_executor":
                procs = (view.proc for view in self.cluster.store.executors() if view.proc)
                return sorted(int(proc.partition(".")[0]) for proc in procs)
            case "worker":
                return sorted(self.cluster.workers())
            case "agent":
                return self.cluster.node_names
            case _:
                return [name for name in self.cluster.services if name.startswith(kind)]

    def _victim(self, choices: Sequence[str] | Sequence[int]) -> int | None:
        pids = [self.cluster.pid(choice) if isinstance(choice, str) else choice for choice in choices]
        alive = [pid for pid in pids if pid is not None and pid not in self._paused]
        return self.draw.choice(alive) if alive else None

    def _kill(self, choices: Sequence[str] | Sequence[int]) -> int:
        pid = self._victim(choices)
        if pid is None:
            return 0
        os.kill(pid, signal.SIGKILL)
        self.figures.kills += 1
        return 1

    def _pause(self, kind: str) -> None:
        pid = self._victim(self._named(kind))
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            lease_s = self.lease_s if kind == "agent" else LEADER_S
            self._paused[pid] = time.monotonic() + self.draw.uniform(*self.pauses) * lease_s
            self.figures.pauses += 1

    def _resume(self, *, everybody: bool = False) -> None:
        for pid, until in list(self._paused.items()):
            if everybody or time.monotonic() >= until:
                del self._paused[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _cancel(self, task_id: str, producer: Producer) -> None:
        """As `brim cancel` does; not a chain's task, for Celery leaves what follows a revoked task unanswered."""
        if task_id in producer.followers or any(
            task_id == first and second in producer.followers
            for first, second in zip(producer.ids, producer.ids[1:], strict=False)
        ):
            return
        if self.cluster.store.cancel(task_id, Reason("cancelled", "by the storm")) is CloseAnswer.MARKED:
            self.cluster.producer.control.revoke([task_id], terminate=True)

    # -- afterwards ------------------------------------------------------------------------------------------

    def _calm(self, ids: Collection[str]) -> None:
        """Wait until everything has come to its end, and these are known, as long as it may take."""
        self._resume(everybody=True)

        def over() -> bool:
            counts = self.cluster.store.counts()
            owed = self.cluster.store.keys.outbox
            return (
                not any(counts.get(state) for state in State if state not in TERMINAL)
                and len(self.cluster.store.records(sorted(ids))) == len(ids)
                and not self.cluster.store.queue_lengths([owed])[owed]
                and not any(device.busy for device in self.cluster.store.devices())
            )

        with suppress(TimeoutError):
            self._wait(over)

    def _wait(self, over: Any) -> None:
        deadline = time.monotonic() + self.latest_s
        while time.monotonic() < deadline:
            self._poll()
            with suppress(redis.RedisError):
                if over() or self._has_shown():
                    return
            time.sleep(0.3)

    def _has_shown(self) -> bool:
        """Whether what has been switched off has made itself felt: more of the same would show no more."""
        if not self.sabotage or time.monotonic() < self._look_at_s:
            return False
        self._look_at_s = time.monotonic() + LOOK_S
        with suppress(redis.RedisError):
            before, self._differences = self._differences, set(self.cluster.store.audit())
            stories = self.cluster.store.stories(self.cluster.store.task_ids())
            return bool(before & self._differences) or any(len(_ends(story)) > 1 for story in stories.values())
        return False

    def _judge(self, app: Celery, producer: Producer) -> None:
        figures, store = self.figures, self.cluster.store
        ids = sorted({*producer.ids, *store.task_ids()})
        records = {record.task_id: record for record in store.records(ids)}
        stories = store.stories(ids)
        figures.tasks = len(ids)
        figures.attempts = sum(record.attempts for record in records.values())
        spans = [(after - before) / 1000 for (before, up), (after, _) in pairwise(self._changes) if not up and before]
        figures.longest_down_s = round(max(spans, default=0.0), 2)
        figures.ended = dict(Counter(str(record.state) for record in records.values()))
        placed_ms = sorted(line["t"] for story in stories.values() for line in story if line["event"] == "placed")
        answered = set()
        for task_id in ids:
            if self._is_answered(app, task_id):
                answered.add(task_id)
            else:
                figures.unanswered += 1
        for task_id in ids:
            record = records.get(task_id)
            # What follows a task that has failed is answered with its failure, and was never published.
            never_published = record is None and task_id in producer.followers and task_id in answered
            if not never_published and (record is None or record.state not in TERMINAL):
                figures.lost += 1
                self._example(f"lost: {task_id} is {record.state if record else 'unknown'}", stories[task_id])
            if task_id not in answered:
                self._example(f"unanswered: {task_id}", stories[task_id])
            if len(_ends(stories[task_id])) > 1:
                figures.double_finished += 1
                self._example(f"finished twice: {task_id}", stories[task_id])
            if record is not None and record.task == "storm.embed":
                figures.items += 1
                figures.attempts_lost += sum(line["event"] == "lost" for line in stories[task_id])
            else:  # an item waits for a model executor to be started, if need be, and for its model's pause
                self._count_recoveries(stories[task_id], placed_ms)
        figures.executors_started = sum(line["event"] == "wanted" for line in store.residency())
        differences = store.audit()
        differences = differences and [d for d in store.audit() if d in differences]
        figures.audit_differences = len(differences)
        excess = list(overcommitted(stories.values(), store.devices(), store.residency()))
        for uuid_, seen in self.cluster.witnesses().items():
            if seen.refused or seen.peak_mib > seen.total_mib:
                excess.append(f"{uuid_} refused {seen.refused} allocations, held {seen.peak_mib} of {seen.total_mib}")
        figures.overcommit = len(excess)
        figures.examples += differences[:5] + excess[:5]

    def _is_answered(self, app: Celery, task_id: str) -> bool:
        result = app.AsyncResult(task_id)
        try:
            # A result that is not there by now is not on its way any more; the first few get a little longer.
            patient = self.figures.unanswered < 3 and not self.sabotage
            result.get(timeout=2.0 if patient else 0.1, propagate=False)
        except Exception:
            app.backend.remove_pending_result(result)  # it would be waited for as long as the app lives
            return False
        return True

    def _count_recoveries(self, story: Sequence[Mapping[str, Any]], placed_ms: Sequence[int]) -> None:
        """From each loss of an attempt to the next one's placement, or the task's end; all placements, in order."""
        figures, lost_ms = self.figures, None
        for line in story:
            if line["event"] == "lost":
                lost_ms = line["t"]
                figures.attempts_lost += 1
            elif lost_ms is not None and (line["event"] == "placed" or line["event"] in TERMINAL):
                others = placed_ms[bisect_right(placed_ms, lost_ms) : bisect_left(placed_ms, line["t"])]
                still_s = max(self._longest_up_s(*span) for span in pairwise([lost_ms, *others, line["t"]]))
                figures.longest_recovery_s = max(figures.longest_recovery_s, round(still_s, 2))
                figures.longest_wait_s = max(figures.longest_wait_s, (line["t"] - lost_ms) / 1000)
                lost_ms = None

    def _longest_up_s(self, since_ms: float, until_ms: float) -> float:
        """The longest time within these bounds in which a device was up all the while."""
        changes = [*self._changes, (until_ms, False)]
        spans = [(max(since_ms, on), min(until_ms, off)) for (on, up), (off, _) in pairwise(changes) if up]
        return max(0.0, *((off - on) / 1000 for on, off in spans))

    def _example(self, what: str, story: Sequence[Mapping[str, Any]]) -> None:
        if len(self.figures.examples) < 10:
            self.figures.examples.append(f"{what}: {json.dumps(list(story))}")


def _ends(story: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that closed the task."""
    return [line for line in story if line["event"] in TERMINAL]


def replay(figures: Figures) -> str:
    """How to have the same storm again."""
    several = f" STORM_GPUS={figures.gpus}" if figures.gpus > 1 else ""
    return f"make test-faults STORM_SECONDS={figures.seconds:g} SEED={figures.seed}{several}"


def main() -> int:
    """Exit 0 only if everything held; the figures are the last line, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m faults.storm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults strike (60)")
    parser.add_argument("--seed", type=int, default=1, help="which workload, which faults (1)")
    parser.add_argument("--gpus", type=int, default=1, help="devices of each node; with several, tasks on two (1)")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="brim-storm-"))
    figures = Storm(folder, chosen.seconds, chosen.seed, gpus=chosen.gpus).run()
    if figures.held:
        shutil.rmtree(folder)
    else:
        print(*figures.examples, sep="\n")
        print(f"replay: {replay(figures)}; logs and data are in {folder}")
    print(json.dumps({name: value for name, value in asdict(figures).items() if name != "examples"}), flush=True)
    return 0 if figures.held else 1


if __name__ == "__main__":
    sys.exit(main())
