"""How fast placement decides and commits, and what 100,000 waiting tasks cost.

Prints a table and, as its last line, one JSON object. Decisions are those of ``packed`` on the published openb trace
(docs/performance.md), measured in CPU time of one core; commits and memory on a Valkey server of
the benchmark's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import redis
from celery import Celery
from rich.console import Console
from rich.table import Table

from brim.core.attributes import TaskSignature
from brim.core.model import Demand, Identity, Node
from brim.core.placement import Lane, Planner, PlannerSettings, Waiting, make_policy
from brim.core.placement.board import Board, Spot
from brim.core.placement.fit import milli
from brim.core.placement.rooms import Classes, Reading, Rooms
from brim.core.placement.trial import NOWHERE, Trial
from brim.core.simulation import Job, Server, capacity_of, cluster_of
from brim.core.simulation.replay import arrivals, known_mix, place, rows
from brim.core.simulation.town import TASK
from brim.settings import Settings
from brim.store import Store
from brim.store.types import Admission, Commit, DeviceRegistration, NodeRegistration, Peeked, Record
from brim_services import embedded
from brim_services.supervise import Command, Supervisor, wait_until
from brim_services.traces import read_jobs, read_servers

SEED = 42
POLICY = "packed"
WAITING = 100_000
THROUGH_INTAKE = 20_000
"""Of them, those that the intake service admits; the rest come by its script from here, which is faster."""
EVENTS = 1000
COMMITS, BATCH, ROUNDS = 2000, 64, 10
STRETCHES, IN_A_ROW = 40, 25
WARM = 0.1
"""Part of the decisions that are made before those that count."""


# -- decisions ------------------------------------------------------------------------------------------------------


def board_for(servers: Sequence[Server], jobs: Sequence[Job], rng: random.Random) -> Board:
    """A board over an empty cluster, its servers in random order, that knows the jobs' classes and mix."""
    order = list(servers)
    rng.shuffle(order)
    board = Board(cluster_of(order), make_policy(POLICY), known_mix(jobs))
    board.learn((job.demand, TASK) for job in jobs)
    return board


def fill(servers: Sequence[Server], jobs: Sequence[Job], load: float) -> tuple[float, list[Spot | None], list[float]]:
    """Fill a cluster up to this load: decisions per second of CPU time, all decisions, and what some more took in s."""
    rng = random.Random(SEED)
    board = board_for(servers, jobs, rng)
    queue = arrivals(jobs, capacity_of(servers), load, rng)
    first, known = int(WARM * len(queue)), rows(board, queue)
    spots = [place(board, job, row) for job, row in zip(queue[:first], known, strict=False)]
    with undisturbed():
        began = time.process_time()
        for job, row in zip(queue[first:], known[first:], strict=True):
            spots.append(place(board, job, row))
        seconds = time.process_time() - began
    times = []
    for job in rng.choices(jobs, k=2000):
        row = board.row(job.demand, TASK)
        began = time.process_time()
        place(board, job, row)
        times.append(time.process_time() - began)
    return (len(queue) - first) / seconds, spots, times


def p99_us(times: Sequence[float]) -> float:
    """The 99th percentile of these seconds, in µs."""
    return 1e6 * sorted(times)[int(0.99 * len(times))]


class Afresh:
    """The same rule without a memory: every decision scores the class on every node, vectorised over the nodes.

    About thirty NumPy calls for a decision, each over all nodes or their devices at once; no score from before is used
    again. What is free stands in arrays that a placement updates in one row, so that only scoring is compared.
    """

    def __init__(self, board: Board) -> None:
        """``board`` says which classes there are and what is likely to come; its scores are not looked at."""
        self.board, self.cluster, self.names = board, board.cluster, board.cluster.order()
        self.places = {name: place for place, name in enumerate(self.names)}
        sites = list(self.cluster)
        width = max(len(site.devices) for site in sites)
        self.readings = [self._reading(name) for name in self.names]
        self.rooms = self._rooms(self.names, self.readings)
        assert self.rooms.room.shape[1] == width
        self.cpu = np.array([reading.cpu for reading in self.readings])
        self.ram = np.array([site.node.ram_mib - site.node.ram_used_mib for site in sites])
        self.classes: dict[int, Classes] = {}

    def place(self, job: Job, row: int) -> Spot | None:
        """Place a job of this row for good; None if it fits nowhere."""
        spot = self._best(row, job.demand)
        if spot is not None:
            self.put(spot, job.demand)
        return spot

    def put(self, spot: Spot, demand: Demand) -> None:
        """Hold the demand there, and take over the node's state."""
        name = spot.node
        self.cluster.hold(name, spot.positions, demand)
        self.cluster.settle()
        place, node = self.places[name], self.cluster[name].node
        bits = sum(1 << position for position in spot.positions)
        reading = self.readings[place].again(self.cluster[name], bits, 0, 1, memory=True)
        self.readings[place], self.cpu[place] = reading, reading.cpu
        self.ram[place] = node.ram_mib - node.ram_used_mib
        row, rooms = self._rooms([name], [reading]), self.rooms
        width = row.room.shape[1]
        rooms.room[place], rooms.free[place], rooms.count[place] = -1, 0, 0
        rooms.room[place, :width], rooms.free[place, :width] = row.room[0], row.free[0]
        rooms.count[place, :width] = row.count[0]
        rooms.site_free[place], rooms.cpu[place] = row.site_free[0], row.cpu[0]

    def _best(self, row: int, demand: Demand) -> Spot | None:
        runs = demand.gpus > 1
        classes = self.classes.get(row) or self.classes.setdefault(row, self.board._tabulate([row]))
        trial = Trial(classes, self.rooms, self.board.outlook, runs=runs)
        scores, first = trial.best(self.board.policy.rate(trial))
        scores = np.where((milli(demand.cpus) <= self.cpu) & (demand.ram_mib <= self.ram), scores, NOWHERE)
        place = int(scores.argmax())
        if scores[place] <= NOWHERE // 2:
            return None
        order, chosen = self.readings[place].order, int(first[place])
        at = [] if not demand.gpus else trial._places[place, chosen].tolist() if runs else [chosen]
        return Spot(self.names[place], tuple(sorted(order[each] for each in at)), int(scores[place]))

    def _reading(self, name: str) -> Reading:
        return Reading.of(self.cluster[name], 0, 1, memory=True)

    def _rooms(self, names: Sequence[str], readings: Sequence[Reading]) -> Rooms:
        sites = [self.cluster[name] for name in names]
        forms = [self.board._forms[site.shape] for site in sites]
        return Rooms(sites, readings, forms, self.board.outlook.step_mib, apart=True)


def speedup(servers: Sequence[Server], jobs: Sequence[Job]) -> dict[str, float]:
    """Decisions per second with and without a memory, and how many times as many: medians of `ROUNDS` rounds.

    Both go the same way from the empty cluster to 130 % of load, each by itself, so that neither finds its tables
    driven out of the processor's cache by the other. The board's time is that of all decisions that count; the other
    rule decides `IN_A_ROW` in a row in each of `STRETCHES` stretches of the way, evenly spread, and is told what the
    board decided in between. They must agree.
    """
    rounds = []
    for _ in range(ROUNDS):
        fast, spots, times = fill(servers, jobs, 1.3)
        slow = without_memory(servers, jobs, 1.3, spots)
        rounds.append((fast, p99_us(times), slow, fast / slow))
    names = "decisions_per_s_6212", "decision_p99_us_6212", "full_decisions_per_s", "speedup_vs_full"
    return {name: median(values) for name, values in zip(names, zip(*rounds, strict=True), strict=True)}


def without_memory(servers: Sequence[Server], jobs: Sequence[Job], load: float, spots: Sequence[Spot | None]) -> float:
    """Decisions per second of CPU time of the rule without a memory, which must decide like ``spots``."""
    rng = random.Random(SEED)
    afresh = Afresh(board_for(servers, jobs, rng))
    queue = arrivals(jobs, capacity_of(servers), load, rng)
    known = rows(afresh.board, queue)
    first, seconds = int(WARM * len(queue)), 0.0
    apart = (len(queue) - first) // STRETCHES
    with undisturbed():
        for number, (job, row, expected) in enumerate(zip(queue, known, spots, strict=True), -first):
            if 0 <= number < apart * STRETCHES and number % apart < IN_A_ROW:
                began = time.process_time()
                spot = afresh.place(job, row)
                seconds += time.process_time() - began
                if spot != expected:
                    sys.exit(f"decision {number}: the board says {expected}, scoring afresh {spot}")
            elif expected is not None:
                afresh.put(expected, job.demand)
    return STRETCHES * IN_A_ROW / seconds


def overflow_event_us(servers: Sequence[Server], jobs: Sequence[Job]) -> tuple[float, int]:
    """Mean CPU time in µs of a plan after one departure while 100,000 tasks wait, and their lanes.

    As in the service, the cluster knows since when everything runs.
    """
    rng = random.Random(SEED)
    cluster = cluster_of(servers)
    planner = Planner(make_policy(POLICY), PlannerSettings(ahead=0), known_mix(jobs))
    lanes: dict[Demand, Lane] = {}
    waiting: dict[str, deque[Waiting]] = {}
    for number, job in enumerate(rng.choices(jobs, k=WAITING)):
        if job.demand not in lanes:
            key = str(len(lanes))
            waiting[key] = deque()
            lanes[job.demand] = Lane(key, TASK, job.demand, waiting[key])
        waiting[lanes[job.demand].key].append(Waiting(f"task-{number}", number, 0.0))
    held: list[tuple[str, tuple[int, ...], Demand, float]] = []
    began_s: dict[str, list[float]] = {}
    promises: Mapping[str, Any] = {}
    spent, began = 0.0, 0.0
    with undisturbed():
        for event in range(-3, EVENTS):
            if event >= 0:
                node, positions, demand, since_s = held.pop(rng.randrange(len(held)))
                cluster.release(node, positions, [demand.vram_mib] * len(positions), demand)
                for position in positions:
                    device = cluster[node].devices[position].uuid
                    began_s[device].remove(since_s)
                    cluster.began(device, began_s[device])
            began = time.process_time()
            plan = planner.plan(cluster, lanes.values(), float(event), promises)
            spent += time.process_time() - began if event >= 0 else 0.0
            promises = plan.promises
            for placement in plan.placements:
                waiting[placement.lane].popleft()
                positions = cluster[placement.node].positions(placement.devices)
                cluster.hold(placement.node, positions, placement.demand)
                held.append((placement.node, positions, placement.demand, float(event)))
                for device in placement.devices:
                    began_s.setdefault(device, []).append(float(event))
                    cluster.began(device, began_s[device])
            cluster.settle()
    return 1e6 * spent / EVENTS, len(lanes)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without the garbage collector, as ``timeit`` does it: it would walk over what the benchmark itself has built."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- commits --------------------------------------------------------------------------------------------------------

BARE = """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
redis.call('HSET', KEYS[2], 'state', 'placed', 'attempt', ARGV[2], 'devices', ARGV[3], 'node', ARGV[4],
  'queue', KEYS[7], 'placed_ms', ARGV[5], 'attempts', '1')
redis.call('RPUSH', KEYS[3], ARGV[6])
redis.call('HINCRBY', KEYS[4], 'placed', 1)
redis.call('ZREM', KEYS[5], ARGV[1])
redis.call('HSET', KEYS[6], ARGV[3], ARGV[7])
redis.call('LPUSH', KEYS[7], ARGV[9])
redis.call('HSET', KEYS[8], 'a:' .. ARGV[2], ARGV[8], 'entry', ARGV[7])
redis.call('SADD', KEYS[9], 'd:' .. ARGV[3])
return epoch
"""
"""Touches the keys that a commit touches, one plain command each, and leaves in each what a commit leaves there; all of
that comes ready made: nothing is checked, looked up or summed up."""


class Commits:
    """Tasks that wait in a store, and devices enough for all of them."""

    def __init__(self, client: redis.Redis, envelope: tuple[bytes, bytes]) -> None:
        self.client, self.envelope = client, envelope
        self.prefix = f"bench:{uuid.uuid4().hex[:8]}:"
        self.store = Store(client, self.prefix)
        self.epoch, _ = self.store.elect("bench", 3600)
        devices = [DeviceRegistration(f"GPU-{at}", at, "SIM", 80_000, 512) for at in range(COMMITS // 4)]
        assert self.store.register_node(NodeRegistration(Node("n"), "boot", 8, ["bench.work"], {}, devices))
        source = f"{self.prefix}intake"
        for first in range(0, COMMITS, 500):
            self.store.admit([self._admission(source, number) for number in range(first, first + 500)])
        self.batch = [self._commit(number) for number in range(COMMITS)]

    def _admission(self, source: str, number: int) -> Admission:
        raw = str(number).encode()
        self.client.lpush(source, raw)
        identity = Identity(f"task-{number}", 0, 0)
        return Admission(Peeked(source, raw), identity, "bench.work", "lane", Demand(1000), 300, 5, *self.envelope)

    def _commit(self, number: int) -> Commit:
        device = number % (COMMITS // 4)
        attempt = f"{self.epoch}-{uuid.uuid4().hex[:8]}-{number}"
        slot = json.dumps({"attempt": attempt, "devices": [f"GPU-{device}"], "node": "n", "vram_mib": 1000}).encode()
        queue = f"{self.prefix}gpu.n.{device}"
        return Commit(f"task-{number}", "lane", attempt, [f"GPU-{device}"], "n", queue, 1000, slot)

    def through_the_store(self) -> float:
        """Commits per second of wall time."""
        began = time.perf_counter()
        for first in range(0, COMMITS, BATCH):
            answers = self.store.commit(self.epoch, self.batch[first : first + BATCH], 1)
            assert all(answer.status == "committed" for answer in answers), answers[0]
        return COMMITS / (time.perf_counter() - began)

    def bare(self) -> float:
        """The same batches through the bare script, a call for each commit."""
        keys, digest = self.store.keys, self.client.script_load(BARE)
        story = self._story()
        entry = self.client.hget(keys.availability, "GPU-0")
        message = self.envelope[0] + self.batch[0].slot + self.envelope[1]
        shared = [keys.counts, keys.lane("lane"), keys.availability]
        began = time.perf_counter()
        for first in range(0, COMMITS, BATCH):
            pipeline = self.client.pipeline(transaction=False)
            for c in self.batch[first : first + BATCH]:
                [device] = c.devices
                names = [keys.leader, keys.task(c.task_id), keys.story(c.task_id), *shared, c.queue]
                names += [keys.book(device), keys.changed]
                args: list[Any] = [c.task_id, c.attempt, device, c.node, "1800000000000", story, entry]
                args += [f"{c.vram_mib}|0|0||{c.task_id}", message]
                pipeline.evalsha(digest, len(names), *names, *args)
            pipeline.execute()
        return COMMITS / (time.perf_counter() - began)

    def _story(self) -> str:
        """As long a line as a commit adds to a story."""
        about = {"attempt": self.batch[0].attempt, "node": "n", "devices": "GPU-0", "vram_mib": 1000}
        return json.dumps({"t": 1_800_000_000_000, "event": "placed", **about})


def commit_ratio(client: redis.Redis, url: str) -> tuple[float, float, float]:
    """Commits/s through the store and through the bare script, medians, and the median of the pairs' ratios.

    The store commits several a call of its script (`COMMITS_AT_ONCE`), the bare script one; both send `BATCH` in a
    round trip.
    They go first in turn: whoever does finds less of its data in the processor's cache.
    """
    envelope = envelope_of(url, 1000)
    halves = envelope[: len(envelope) // 2], envelope[len(envelope) // 2 :]
    through, bare = [], []
    for number in range(ROUNDS + 1):
        mine, other = Commits(client, halves), Commits(client, halves)
        if number % 2:
            commits, bare_commits = mine.through_the_store(), other.bare()
        else:
            bare_commits, commits = other.bare(), mine.through_the_store()
        if number:  # the first one loads scripts and warms up
            through.append(commits)
            bare.append(bare_commits)
        client.flushdb()
    return median(through), median(bare), median(t / b for t, b in zip(through, bare, strict=True))


# -- memory ---------------------------------------------------------------------------------------------------------


@cache
def envelope_of(url: str, vram_mib: int) -> bytes:
    """The message that Celery publishes for one task."""
    app = Celery("bench", broker=url, set_as_current=False)
    options = {"url": "s3://images/2026/0123456789.png", "width": 4096}
    app.send_task("bench.work", kwargs=options, queue="bench.one", headers={"brim": {"vram_mib": vram_mib}})
    with redis.Redis.from_url(url) as client:
        raw = client.rpop("bench.one")
    assert isinstance(raw, bytes)
    return raw


def rss_mib(supervisor: Supervisor, url: str, folder: Path) -> dict[str, float]:
    """Resident memory of intake and placement with 100,000 tasks waiting, by service."""
    table = folder / "resources.yaml"
    table.write_text("profiles:\n  bench.work: {vram: 100, context_mib: 0, margin: 1.0}\n")
    settings = Settings.model_validate(
        {"redis": {"url": url}, "results": {"backend": url}, "resources": {"table": table}}
    )
    client = redis.Redis.from_url(url)
    store = Store.of(settings)
    signature = TaskSignature.from_callable(lambda url, width: None).model_dump_json()
    busy = [DeviceRegistration("GPU-0", 0, "SIM", 81_920, 512)]
    node = NodeRegistration(Node("n"), "boot", 1, ["bench.work"], {"bench.work": signature}, busy, "draining")
    assert store.register_node(node)
    paths = [str(Path(__file__).parents[2] / name) for name in ("common", "services")]
    environment = {**settings.environment(), "PYTHONPATH": os.pathsep.join(paths)}
    services = ("intake", "placement")
    for name in services:
        argv = [sys.executable, "-m", "brim_services.cli", name]
        supervisor.start(Command(name, argv, environment=environment))
    sizes = [500 * size for size in range(1, 101)]
    templates = [(raw := envelope_of(url, size), json.loads(raw)["headers"]["id"].encode()) for size in sizes]
    for first in range(0, THROUGH_INTAKE, 1000):
        pipeline = client.pipeline(transaction=False)
        for number in range(first, first + 1000):
            raw, task_id = templates[number % len(templates)]
            pipeline.lpush("brim.intake", raw.replace(task_id, str(uuid.uuid4()).encode()))
        pipeline.execute()
    wait_until(lambda: _waiting(store) == THROUGH_INTAKE, 120, f"{THROUGH_INTAKE} tasks wait")
    lanes = [name.decode() for name in client.hkeys(store.keys.lanes)]
    known = [store.record(store.lane_ids(lane, 1)[0]) for lane in lanes]
    for first in range(THROUGH_INTAKE, WAITING, 500):
        _waiting(store)
        store.admit([_alike(client, record, str(uuid.uuid4()), templates[0][0]) for record in _turns(known, first)])
    wait_until(lambda: _waiting(store) == WAITING, 60, f"{WAITING} tasks wait")
    time.sleep(3)  # a housekeeping round of placement with all of them
    found = {}
    for name in services:
        argv = [process for process in psutil.Process().children(recursive=True) if name in process.cmdline()]
        found[name] = sum(process.memory_info().rss for process in argv) / 2**20
    client.close()
    return found


def _turns(records: Sequence[Record | None], first: int) -> Iterator[Record]:
    """500 of them, in turn."""
    for number in range(first, first + 500):
        record = records[number % len(records)]
        assert record is not None
        yield record


def _alike(client: redis.Redis, record: Record, task_id: str, envelope: bytes) -> Admission:
    """Another task like this one, on its way through the admission script."""
    raw, source = task_id.encode(), "bench.elsewhere"
    client.lpush(source, raw)
    half = len(envelope) // 2
    return Admission(
        Peeked(source, raw),
        Identity(task_id, 0, 0),
        record.task,
        record.lane,
        record.demand,
        record.context_mib,
        record.priority,
        envelope[:half],
        envelope[half:],
    )


def _waiting(store: Store) -> int:
    store.renew("n", "boot")
    return store.counts().get("waiting", 0)


# -- all of it ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[3] / "shared" / "traces" / "fgd"
    parser.add_argument("--trace", type=Path, default=default, help="folder of the openb trace's CSV files")
    parser.add_argument("--only", choices=["decisions", "overflow", "commits", "memory"], action="append")
    chosen = parser.parse_args()
    wanted = chosen.only or ["decisions", "overflow", "commits", "memory"]
    found: dict[str, Any] = {}
    if {"decisions", "overflow"} & set(wanted):
        if not chosen.trace.is_dir():
            sys.exit(f"{chosen.trace} is missing: give the folder of the openb trace with --trace")
        servers = read_servers(chosen.trace / "openb_node_list_gpu_node.csv", openb=True)
        jobs = read_jobs(chosen.trace / "openb_pod_list_default.csv", openb=True)
    if "decisions" in wanted:
        found |= speedup(servers, jobs)
        many = servers * (100_000 // sum(len(server.devices) for server in servers))
        found["decisions_per_s_100k"], _, times = fill(many, jobs, 0.6)
        found["decision_p99_us_100k"] = p99_us(times)
    if "overflow" in wanted:
        found["overflow_event_us_100k"], found["overflow_lanes"] = overflow_event_us(servers, jobs)
    if {"commits", "memory"} & set(wanted):
        with tempfile.TemporaryDirectory() as folder, Supervisor(Path(folder) / "logs") as supervisor:
            server = embedded.start(supervisor, Path(folder) / "valkey")
            client = redis.Redis.from_url(server.url)
            if "commits" in wanted:
                found["commits_per_s"], found["bare_commits_per_s"], found["commit_ratio"] = commit_ratio(
                    client, server.url
                )
            if "memory" in wanted:
                rss = rss_mib(supervisor, server.url, Path(folder))
                found |= {f"rss_mib_{name}": mib for name, mib in rss.items()}
                found["rss_mib_100k_waiting"] = sum(rss.values())
            client.close()
    table = Table("figure", "value")
    for name, value in found.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
