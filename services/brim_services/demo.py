"""`brim demo`: the main job, end to end on this machine, with a summary that tells whether it held."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from brim.core.model import TERMINAL, State
from brim.core.patterns import best_match
from brim.gpu import simulated
from brim.settings import Settings
from brim.store.types import MemoryReport
from brim_services import summary
from brim_services.dashboard import Snapshot, render
from brim_services.embedded import free_port
from brim_services.invariants import check_invariants
from brim_services.stack import EXAMPLE, EXAMPLE_APP, STAGE_WORKERS, Ports, Stack, with_files
from brim_services.summary import Summary
from brim_services.supervise import ChildDied, Command, Supervisor, termination_requested

DEVICES = "sim:4x24GiB"
TIME_LIMIT_S = 80.0
"""From the start of the demo; what has not ended by then is reported as it stands."""
REFRESH_S = 0.25
CELERY_STATES = {"SUCCESS": State.SUCCEEDED, "FAILURE": State.FAILED, "REVOKED": State.CANCELLED}


@dataclass
class Published:
    """What the producer holds: results by task id, and which ids went to brim."""

    at_s: float
    results: dict[str, Any] = field(default_factory=dict)
    through_brim: set[str] = field(default_factory=set)

    @property
    def ordinary(self) -> dict[str, Any]:
        """Results of the tasks that have no profile."""
        return {i: result for i, result in self.results.items() if i not in self.through_brim}


class Demo:
    """One run; `run` returns the exit code."""

    def __init__(self, tasks: int, seed: int, *, ignore_memory: bool, as_json: bool) -> None:
        self.tasks = tasks
        self.seed = seed
        self.ignore_memory = ignore_memory
        self.as_json = as_json
        self.console = Console(stderr=as_json)
        self.began_at = time.monotonic()
        self.peak_measured_mib: dict[str, int] = {}
        settings = with_files(Settings(), EXAMPLE_APP)
        self.folder = Path(tempfile.mkdtemp(prefix="brim-demo-"))
        self.settings = settings.model_copy(update={"agent": settings.agent.model_copy(update={"drain_grace_s": 5.0})})

    def run(self) -> int:
        """0 only if every task succeeded, none ran out of memory, and the invariants held."""
        try:
            result = self._run()
        except (ChildDied, TimeoutError) as error:
            self.console.print(f"[red]demo failed:[/] {escape(str(error))}", highlight=False)
            self._keep_logs()
            return 1
        if result is None:
            self.console.print("interrupted")
            shutil.rmtree(self.folder)
            return 130
        self.console.print(_tables(result), highlight=False)
        if result.good:
            shutil.rmtree(self.folder)
        else:
            self._keep_logs()
        if self.as_json:
            print(json.dumps(result.as_json()), flush=True)
        return 0 if result.good else 1

    def _run(self) -> Summary | None:
        with termination_requested() as stop, Supervisor(self.folder / "logs") as supervisor:
            ports = Ports(free_port(), free_port())
            stack = Stack(supervisor, self.folder, self.settings, DEVICES, ports, ignore_memory=self.ignore_memory)
            stack.start(lambda what: self.console.print(f"[dim]starting:[/] {what}", highlight=False), stop)
            if stop():
                return None
            self.console.print(f"[dim]Flower:[/] {stack.flower_url}   [dim]logs:[/] {self.folder / 'logs'}")
            outside = stack.store.devices()[0].uuid
            supervisor.start(
                Command(
                    "outsider",
                    [sys.executable, "-m", "brim_services.outsider", outside],
                    environment=stack.environment,
                    stage=STAGE_WORKERS,
                )
            )
            published = self._publish(stack)
            self._watch(stack, published, stop)
            return None if stop() else self._sum_up(stack, published)

    def _publish(self, stack: Stack) -> Published:
        os.environ.update(stack.environment)
        sys.path.insert(0, str(EXAMPLE))
        producer = importlib.import_module("vision.producer")
        profiles = stack.store.profile_names()
        published = Published(at_s=time.time())
        for signature in producer.workload(self.tasks, self.seed):
            result = signature.apply_async()
            published.results[result.id] = result
            if best_match(signature.task, profiles):
                published.through_brim.add(result.id)
        return published

    def _watch(self, stack: Stack, published: Published, stop: Any) -> None:
        """Show progress until everything has ended, time is up, or someone wants to stop."""
        with (
            stack.store.client.pubsub(ignore_subscribe_messages=True) as reports,
            Live(console=self.console, auto_refresh=False, transient=True) as live,
        ):
            reports.subscribe(stack.store.keys.reports)
            next_line = time.monotonic()
            ended = False
            while not ended and not stop() and time.monotonic() - self.began_at < TIME_LIMIT_S:
                for death in stack.supervisor.poll():
                    if death.name != "outsider":
                        raise ChildDied(death, stack.supervisor.children[death.name].last_lines())
                self._note(reports)
                snapshot = Snapshot.of(stack.store)
                ended = self._ended(snapshot.counts, published)
                title = f"{self._done(snapshot.counts)} of {len(published.through_brim)} GPU tasks have ended"
                if self.console.is_terminal:
                    live.update(render(snapshot, title), refresh=True)
                elif time.monotonic() >= next_line:
                    next_line += 5.0
                    self.console.print(f"{title}; overflow {snapshot.waiting}", highlight=False)
                time.sleep(REFRESH_S)

    @staticmethod
    def _done(counts: Mapping[State, int]) -> int:
        return sum(count for state, count in counts.items() if state in TERMINAL)

    def _ended(self, counts: Mapping[State, int], published: Published) -> bool:
        return self._done(counts) >= len(published.through_brim) and all(
            result.ready() for result in published.ordinary.values()
        )

    def _note(self, reports: Any) -> None:
        while (message := reports.get_message(timeout=0.0)) is not None:
            for uuid, figures in MemoryReport.model_validate_json(message["data"]).devices.items():
                self.peak_measured_mib[uuid] = max(self.peak_measured_mib.get(uuid, 0), figures.used_mib)

    def _sum_up(self, stack: Stack, published: Published) -> Summary:
        store = stack.store
        records = store.records(sorted(published.through_brim))
        devices = store.devices()
        witnesses = simulated.witness(self.folder / "devices")
        states = Counter(record.state for record in records)
        last_end_s = max((record.ended_s or 0.0 for record in records), default=published.at_s)
        for result in published.ordinary.values():
            states[CELERY_STATES.get(result.state, State.WAITING)] += 1
            if result.date_done is not None:
                last_end_s = max(last_end_s, result.date_done.timestamp())
        breaches = check_invariants(store, settled=True, witness=witnesses)
        if len(records) != len(published.through_brim):
            breaches.append(f"no loss: {len(published.through_brim)} tasks were published, {len(records)} recorded")
        breaches += [f"answered: {i} has no result" for i, r in published.results.items() if not r.ready()]
        return Summary(
            tasks={state.value: states[state] for state in State if states[state]},
            oom=sum(witness.refused for witness in witnesses.values()),
            overflow=summary.overflow(records),
            gpus=summary.gpus(devices, records, self.peak_measured_mib),
            makespan_s=round(last_end_s - published.at_s, 3),
            exclusive_makespan_s=round(summary.exclusive_makespan_s(records, len(devices)), 3),
            breaches=breaches,
        )

    def _keep_logs(self) -> None:
        self.console.print(f"logs are kept in {self.folder / 'logs'}", highlight=False)


def _tables(result: Summary) -> Table:
    gpus = Table(box=None, pad_edge=False)
    for column in ("device", "peak reserved", "peak measured", "capacity", "most tasks at once"):
        gpus.add_column(column, justify="left" if column == "device" else "right")
    for gpu in result.gpus:
        gpus.add_row(
            gpu.device,
            f"{gpu.peak_reserved_mib:,} MiB",
            f"{gpu.peak_measured_mib:,} MiB",
            f"{gpu.capacity_mib:,} MiB",
            str(gpu.max_concurrent),
        )
    waits = result.overflow
    ratio = result.makespan_s / result.exclusive_makespan_s if result.exclusive_makespan_s else 0.0
    facts = Table(box=None, show_header=False, pad_edge=False)
    rows: Sequence[tuple[str, str]] = [
        ("tasks", ", ".join(f"{count} {state}" for state, count in result.tasks.items())),
        ("out of memory", str(result.oom)),
        (
            "waited in overflow",
            f"{waits.count} tasks, median {waits.median_wait_s:.1f} s, longest {waits.max_wait_s:.1f} s",
        ),
        ("makespan", f"{result.makespan_s:.1f} s"),
        ("one task per GPU", f"{result.exclusive_makespan_s:.1f} s at best: brim took {ratio:.2f} of it"),
        ("invariants", "\n".join(result.breaches) or "held"),
    ]
    for name, value in rows:
        facts.add_row(name, value)
    whole = Table.grid()
    whole.add_row(gpus)
    whole.add_row(facts)
    return whole
