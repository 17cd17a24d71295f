"""How long recoveries take: `python -m faults.recovery`; figures for docs/reliability.md, as a table and as JSON.

Times are those of stories, by the server's clock: from the signal to the placement of the task that was struck (or was
published right after it), and to its start in an executor. The lease is 5 s here, 15 s by default.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import redis

from faults.cluster import cluster
from faults.conftest import SETTINGS
from faults.town import Town

Times = tuple[float, float]


def struck(town: Town, kill: Callable[[Town, str], None]) -> Times:
    """A task runs, something of it is killed; when it is placed again, and begins again."""
    go, [result] = town.hold()
    since_ms = town.store.server_ms()
    kill(town, result.id)
    town.wait_until(lambda: town.begun(go, result) == 2, "it has begun again", 60.0)
    go.touch()
    town.get(result)
    return _since(town, result.id, since_ms)


def published(town: Town, since_ms: int) -> Times:
    """A task is published; when it is placed, and begins."""
    while True:
        with suppress(Exception):
            result = town.publish("work", mib=300, seconds=0.0)
            break
        time.sleep(0.02)
    town.get(result, 60.0)
    return _since(town, result.id, since_ms)


def _since(town: Town, task_id: str, since_ms: int) -> Times:
    story = town.store.story(task_id)
    last = {line["event"]: line["t"] for line in story if line["event"] in ("placed", "started")}
    return (last["placed"] - since_ms) / 1000, (last["started"] - since_ms) / 1000


def child(town: Town) -> Times:
    """The executor of a task."""

    def kill(town: Town, task_id: str) -> None:
        os.kill(town.executor(town.app.AsyncResult(task_id)), signal.SIGKILL)

    return struck(town, kill)


def worker(town: Town) -> Times:
    """The main process of its worker."""

    def kill(town: Town, task_id: str) -> None:
        node = town.record(town.app.AsyncResult(task_id)).node
        os.kill(next(pid for pid, of in town.cluster.workers().items() if of == node), signal.SIGKILL)

    return struck(town, kill)


def node(town: Town) -> Times:
    """Everything of its node: the agent is frozen, the workers are killed."""
    frozen = []

    def kill(town: Town, task_id: str) -> None:
        name = town.record(town.app.AsyncResult(task_id)).node
        assert name is not None
        frozen.append(name)
        town.cluster.signal(name, signal.SIGSTOP)
        for pid, of in town.cluster.workers().items():
            if of == name:
                os.kill(pid, signal.SIGKILL)

    try:
        return struck(town, kill)
    finally:
        town.cluster.signal(frozen[0], signal.SIGCONT)


def placement(town: Town) -> Times:
    """The active placement, while another stands by."""
    town.wait_until(town.active, "one is active")
    since_ms = town.store.server_ms()
    town.cluster.kill(town.active())
    return published(town, since_ms)


def server(town: Town) -> Times:
    """Redis; it is started again after 0.1 s."""
    since_ms = town.store.server_ms()
    town.cluster.kill("valkey")
    town.cluster.wait_until(town.cluster.answers, "it is there again")
    return published(town, since_ms)


MEASURES = {measure.__name__: measure for measure in (child, worker, placement, server, node)}


def main() -> None:
    """Measure each recovery so many times."""
    parser = argparse.ArgumentParser(prog="python -m faults.recovery", description=__doc__)
    parser.add_argument("what", nargs="*", choices=sorted(MEASURES), default=list(MEASURES), help="only these")
    parser.add_argument("--times", type=int, default=20, help="how often each (20)")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="brim-recovery-"))
    figures = {}
    with cluster(folder, nodes=2, placements=2, device="8GiB", settings=SETTINGS) as made:
        for measure in map(MEASURES.__getitem__, chosen.what):
            found = []
            for number in range(chosen.times):
                town = Town(made, folder / f"{measure.__name__}{number}")
                town.folder.mkdir()
                town.settle()
                try:
                    found.append(measure(town))
                except (TimeoutError, redis.RedisError) as error:
                    print(f"{measure.__name__}: {error}", flush=True)
            figures[measure.__name__] = {
                "n": len(found),
                "placed_median_s": round(statistics.median(placed for placed, _ in found), 2),
                "placed_worst_s": round(max(placed for placed, _ in found), 2),
                "running_median_s": round(statistics.median(begun for _, begun in found), 2),
                "running_worst_s": round(max(begun for _, begun in found), 2),
            }
            print(measure.__name__, figures[measure.__name__], f"load {os.getloadavg()[0]:.1f}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
