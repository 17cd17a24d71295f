"""What a test of one fault says and asks about a running cluster."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from celery.result import AsyncResult

from brim.core.model import State
from brim.gpu.process import is_alive
from brim.store.types import Record
from brim_services.invariants import check_invariants
from faults.cluster import STARTING_S, Cluster
from support.waiting import within_s


class Town:
    """A cluster, the tasks of one test, and the files that let them go."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.store = cluster.store
        self.app = cluster.producer
        self.folder = folder
        self.results: list[AsyncResult[Any]] = []
        self._gates = itertools.count(1)
        self._opened: list[Path] = []

    # -- tasks -----------------------------------------------------------------------------------------------

    def publish(self, name: str, *, options: dict[str, Any] | None = None, **kwargs: Any) -> AsyncResult[Any]:
        """Publish a task; its ``mib`` is what it demands beside its context."""
        result = self.app.signature(f"storm.{name}", kwargs=kwargs, options=options or {}).apply_async()
        self.results.append(result)
        return result

    def gate(self) -> Path:
        """A file that tasks wait for, by name; it does not exist yet."""
        path = self.folder / f"gate{next(self._gates)}"
        self._opened.append(path)
        return path

    def hold(self, count: int = 1, mib: int = 700, **options: Any) -> tuple[Path, list[AsyncResult[Any]]]:
        """Tasks that run until the file exists; returns when they do."""
        go = self.gate()
        results = [self.publish("hold", mib=mib, go=str(go), options=dict(options)) for _ in range(count)]
        for result in results:
            self.wait_for(result, State.RUNNING)
            self.wait_until(lambda result=result: self.begun(go, result), f"{result.id} has begun")
        return go, results

    def begun(self, go: Path, result: AsyncResult[Any]) -> int:
        """How often a task that waits for this file has been begun."""
        log = Path(f"{go}.log")
        return log.read_text().split().count(result.id) if log.exists() else 0

    def wait_for(self, result: AsyncResult[Any], *states: State, timeout_s: float = 20.0) -> Record:
        """Wait until the task is in one of the states."""
        what = f"{result.id} is {' or '.join(states)}"
        try:
            self.wait_until(lambda: self.cluster.state(result.id) in states, what, timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}; its story: {self.store.story(result.id)}") from None
        return self.record(result)

    def record(self, result: AsyncResult[Any]) -> Record:
        """The task's record."""
        record = self.store.record(result.id)
        assert record is not None
        return record

    def get(self, result: AsyncResult[Any], timeout_s: float = 20.0) -> Any:
        """The result, while what dies is restarted."""
        self.wait_until(result.ready, f"{result.id} has a result", timeout_s)
        return result.get(timeout=5)

    def told(self, result: AsyncResult[Any]) -> list[str]:
        """The events of the task's story."""
        return [line["event"] for line in self.store.story(result.id)]

    def losses(self, result: AsyncResult[Any]) -> list[str]:
        """Why attempts of it were lost."""
        return [line["reason"]["code"] for line in self.store.story(result.id) if line["event"] == "lost"]

    def executor(self, result: AsyncResult[Any]) -> int:
        """The pid of the executor that it runs in."""
        attempts, _ = self.store.books([device.uuid for device in self.store.devices()])
        return next(int(a.proc.partition(".")[0]) for a in attempts if a.task_id == result.id)

    # -- the cluster -----------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
        """Wait, longer on an overloaded machine, while what dies is restarted."""
        self.cluster.wait_until(condition, what, within_s(timeout_s))

    def took(self, condition: Callable[[], Any], what: str) -> float:
        """Wait, and say how many seconds it was."""
        since = time.monotonic()
        self.wait_until(condition, what, 60.0)
        return time.monotonic() - since

    def log(self, name: str) -> str:
        """What a service or agent has printed."""
        return self.cluster.supervisor.children[name].log.read_text(errors="replace")

    def active(self) -> str:
        """The name of the placement that is the active one."""
        holder = (self.store.client.hget(self.store.keys.leader, "holder") or b"--").decode()
        pid = int(holder.split("-")[-2] or 0)
        return next((name for name in self.placements() if self.cluster.pid(name) == pid), "")

    def placements(self) -> Sequence[str]:
        """Names of the placements."""
        return [name for name in self.cluster.services if name.startswith("placement")]

    def is_without_redis(self, seconds: float) -> None:
        """While tasks run, the server does not answer for so long; they run on, and none is started twice."""
        go, results = self.hold(2)
        self.cluster.signal("valkey", signal.SIGSTOP)
        time.sleep(seconds)
        self.cluster.signal("valkey", signal.SIGCONT)
        self.wait_until(self.active, "placement is back")
        back_ms = self.store.server_ms()
        self.wait_until(lambda: all(node.renewed_s * 1000 > back_ms for node in self.store.nodes()), "all renew again")
        later = self.publish("work", mib=300, seconds=0.0)
        assert self.get(later) == 300
        go.touch()

        assert [self.get(result) for result in results] == ["held"] * 2
        assert [self.begun(go, result) for result in results] == [1, 1]

    def has_placement_paused(self, seconds: float) -> None:
        """The active placement stops, a standby takes over within 5 s, and the old one's word counts no more."""
        self.wait_until(self.active, "one is active")
        paused = self.active()
        before = len(self.log(paused))
        since = time.monotonic()
        self.cluster.signal(paused, signal.SIGSTOP)
        try:
            self.wait_until(lambda: self.active() not in ("", paused), "the other has taken over")
            assert time.monotonic() - since < within_s(5.0)
            meanwhile = self.publish("work", mib=300, seconds=0.0)
            assert self.get(meanwhile) == 300
            self.wait_until(lambda: time.monotonic() - since >= seconds, "the pause is over", seconds + 5.0)
        finally:
            self.cluster.signal(paused, signal.SIGCONT)

        self.wait_until(lambda: "has taken over" in self.log(paused)[before:], "it has noticed")
        after = self.publish("work", mib=300, seconds=0.0)
        assert self.get(after) == 300
        assert self.active() != paused

    def release(self) -> None:
        """Let every task go."""
        for path in self._opened:
            path.touch()

    def settle(self) -> None:
        """Wait until every device is up and idle, and nothing is under way."""

        def idle() -> bool:
            counts = self.store.counts()
            devices = self.store.devices()
            _, processes = self.store.books([device.uuid for device in devices])
            return (
                self.cluster.is_complete()
                and not any(counts.get(state) for state in (State.WAITING, State.SCHEDULED, State.HANDED_OVER))
                and not any(device.busy for device in devices)
                and all(len(processes[device.uuid]) == device.executors for device in devices)
                and all(is_alive(proc) for book in processes.values() for proc in book)
            )

        self.cluster.wait_until(idle, "the cluster is complete and idle", STARTING_S)

    def check(self) -> None:
        """The invariants hold; every producer of this test has been answered."""
        assert check_invariants(self.store, settled=False) == []
        for result in self.results:
            self.wait_until(result.ready, f"{result.id} is answered")
            result.forget()
