"""What a cluster could hold, and how long tasks would wait, under one policy or another (``brim simulate``)."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from brim.core.placement import PRESETS, PlannerSettings, make_policy
from brim.core.simulation import Job, Server, possible, replay, resample
from brim.core.simulation import simulate as run_timed

FIRST_SEED = 42
LOADS = (80, 90, 100, 110, 130)
"""Loads in per cent that are shown, as far as a replay reaches them."""
BLOCK = 50
"""Consecutive tasks that a timed simulation draws together, so that bursts stay bursts."""

UNPROMISED = "-unpromised"
EXCLUSIVE = "exclusive"
TIMED = ("packed", f"packed{UNPROMISED}", "spread", EXCLUSIVE)
"""Policies that a timed simulation compares by default."""

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs share; ``promises`` as in `PlannerSettings`, ``arrivals`` of a timed simulation.

    ``added`` servers are there as well, but the load of a timed simulation is what it would be without them.
    """

    servers: tuple[Server, ...]
    added: tuple[Server, ...]
    jobs: tuple[Job, ...]
    promises: int | None = None
    arrivals: int = 24_000

    @property
    def town(self) -> tuple[Server, ...]:
        """All servers."""
        return self.servers + self.added


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of many."""

    policy: str
    seed: int
    load: float
    online: bool = False


def unknown_policy(name: str, *, timed: bool) -> str | None:
    """What is wrong with a policy's name; None if nothing is."""
    if name.removesuffix(UNPROMISED) in PRESETS if timed else name in PRESETS:
        return None
    if timed and name == EXCLUSIVE:
        return None
    known = [*PRESETS, *((EXCLUSIVE, f"NAME{UNPROMISED}") if timed else ())]
    return f"{name} is not one of {', '.join(known)}"


# -- untimed --------------------------------------------------------------------------------------------------------


def fills(
    setup: Setup, policies: Sequence[str], seeds: int, load: float, *, online: bool, console: Console
) -> dict[str, Report]:
    """By policy how full the cluster gets, means over the seeds; all loads that occur.

    With ``online`` each report has another one in it, ``online``: the same with a mix that the policy learns from the
    arrivals so far.
    """
    ways = (False, True) if online else (False,)
    runs = [Run(policy, FIRST_SEED + seed, load, way) for policy in policies for way in ways for seed in range(seeds)]
    done = dict(_all(setup, runs, _replay, console))
    reports = {}
    for policy in policies:
        of_ways = [[done[run] for run in runs if (run.policy, run.online) == (policy, way)] for way in ways]
        reports[policy] = {"policy": policy, **_fill_report(of_ways[0])}
        if online:
            reports[policy]["online"] = _fill_report(of_ways[1])
    return reports


def _replay(setup: Setup, run: Run) -> Report:
    result = replay(
        setup.town,
        setup.jobs,
        make_policy(run.policy),
        seed=run.seed,
        load=run.load,
        online=run.online,
        clock=time.process_time,
    )
    return {
        "allocated": result.allocated,
        "fragmentation": result.fragmentation,
        "decisions_per_s": result.decisions / result.decision_s,
    }


def _fill_report(results: Sequence[Report]) -> Report:
    """Means over the seeds, in per cent of the capacity by load."""
    loads = sorted(set.intersection(*(set(result["allocated"]) for result in results)))
    allocated = {load: [result["allocated"][load] for result in results] for load in loads}
    fragments = {load: [result["fragmentation"][load] for result in results] for load in loads}
    return {
        "allocated_pct": {str(load): fmean(allocated[load]) for load in loads},
        "allocated_sd": {str(load): stdev(allocated[load]) if len(results) > 1 else 0.0 for load in loads},
        "fragmentation_pct": {str(load): fmean(fragments[load]) for load in loads},
        "decisions_per_s": fmean(result["decisions_per_s"] for result in results),
    }


def shown(report: Report) -> Report:
    """The report at the loads that are shown: `LOADS`, or of a replay below them the last one it reached."""
    reached = report["allocated_pct"]
    loads = [load for load in map(str, LOADS) if load in reached] or [max(reached, key=int)]

    def short(value: Any) -> Any:
        return {load: value[load] for load in loads} if isinstance(value, Mapping) else value

    short_report = {name: shown(value) if name == "online" else short(value) for name, value in report.items()}
    return short_report


def fill_table(reports: Mapping[str, Report]) -> Table:
    """Allocation, its standard deviation over the seeds, and fragmentation."""
    rows = []
    for policy, report in reports.items():
        rows.append((policy, shown(report)))
        if "online" in report:
            rows.append((f"{policy}, learning the mix", shown(report["online"])))
    table = Table(title="% of all GPU memory: allocated ± sd, fragmented; by memory asked for so far")
    table.add_column("policy")
    loads = list(rows[0][1]["allocated_pct"])
    for load in loads:
        table.add_column(f"at {load} %", justify="right")
    table.add_column("decisions/s", justify="right")
    for name, row in rows:
        cells = [
            f"{row['allocated_pct'][load]:.2f} ± {row['allocated_sd'][load]:.2f}, {row['fragmentation_pct'][load]:.2f}"
            for load in loads
        ]
        table.add_row(name, *cells, f"{row['decisions_per_s']:,.0f}")
    return table


# -- timed ----------------------------------------------------------------------------------------------------------


def waits(
    setup: Setup, policies: Sequence[str], seeds: int, loads: Sequence[float], console: Console
) -> dict[str, dict[str, Report]]:
    """By load and policy how long tasks wait, means over the seeds."""
    jobs = possible(setup.town, setup.jobs)
    if len(jobs) < len(setup.jobs):
        console.print(f"left out: {len(setup.jobs) - len(jobs)} of {len(setup.jobs)} tasks that fit no server")
    setup = replace(setup, jobs=tuple(jobs))
    runs = [Run(policy, FIRST_SEED + seed, load) for load in loads for policy in policies for seed in range(seeds)]
    done = dict(_all(setup, runs, _simulate, console))
    return {
        str(load): {
            policy: _wait_report([done[run] for run in runs if (run.policy, run.load) == (policy, load)])
            for policy in policies
        }
        for load in loads
    }


def _simulate(setup: Setup, run: Run) -> Report:
    rng = random.Random(run.seed)
    jobs = resample(setup.jobs, setup.servers, load=run.load, number=setup.arrivals, block=BLOCK, rng=rng)
    exclusive = run.policy == EXCLUSIVE
    promised = not run.policy.endswith(UNPROMISED)
    policy = make_policy("best-fit" if exclusive else run.policy.removesuffix(UNPROMISED))
    settings = PlannerSettings(ahead=0, promises=setup.promises if promised else 0)
    result = run_timed(setup.town, jobs, policy, settings, exclusive=exclusive)
    ordered = sorted(result.waits_s) or [0.0]
    return {
        "utilisation_pct": 100 * result.utilisation,
        "makespan_s": result.makespan_s,
        "mean_wait_s": fmean(ordered),
        "p99_wait_s": ordered[int(0.99 * (len(ordered) - 1))],
        "wait_by_gpus": {str(gpus): fmean(of_gpus) for gpus, of_gpus in result.waits_by_gpus_s.items()},
    }


def _wait_report(results: Sequence[Report]) -> Report:
    gpus = sorted({gpus for result in results for gpus in result["wait_by_gpus"]}, key=int)
    by_gpus = {
        number: fmean(result["wait_by_gpus"][number] for result in results if number in result["wait_by_gpus"])
        for number in gpus
    }
    names = ("utilisation_pct", "mean_wait_s", "p99_wait_s", "makespan_s")
    return {name: fmean(result[name] for result in results) for name in names} | {"wait_by_gpus": by_gpus}


def wait_table(reports: Mapping[str, Mapping[str, Report]]) -> Table:
    """Utilisation, waits and makespan by load and policy."""
    table = Table(title="waits in minutes")
    for column in ("load", "policy", "utilisation %", "mean", "p99", "mean by GPUs", "makespan h"):
        table.add_column(column, justify="left" if column in {"policy", "mean by GPUs"} else "right")
    for load, policies in reports.items():
        for policy, row in policies.items():
            by_gpus = ", ".join(f"{gpus}: {wait / 60:.1f}" for gpus, wait in row["wait_by_gpus"].items())
            means = [f"{row[name] / 60:.1f}" for name in ("mean_wait_s", "p99_wait_s")]
            table.add_row(
                load, policy, f"{row['utilisation_pct']:.1f}", *means, by_gpus, f"{row['makespan_s'] / 3600:.1f}"
            )
    return table


# -- running --------------------------------------------------------------------------------------------------------


def _all(
    setup: Setup, runs: Sequence[Run], work: Callable[[Setup, Run], Report], console: Console
) -> Iterator[tuple[Run, Report]]:
    """Do all runs, on every CPU, with a progress bar on a terminal."""
    columns = TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(runs))
        for run, report in _done(setup, runs, work):
            progress.advance(bar)
            yield run, report


def _done(setup: Setup, runs: Sequence[Run], work: Callable[[Setup, Run], Report]) -> Iterator[tuple[Run, Report]]:
    workers = min(len(runs), len(os.sched_getaffinity(0)))
    if workers <= 1:
        for run in runs:
            yield run, work(setup, run)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_share, initargs=(setup,)) as pool:
        futures = {pool.submit(_with_shared, work, run): run for run in runs}
        for future in as_completed(futures):
            yield futures[future], future.result()


@cache
def _shared() -> list[Setup]:
    """A worker process's setup."""
    return []


def _share(setup: Setup) -> None:
    _shared().append(setup)


def _with_shared(work: Callable[[Setup, Run], Report], run: Run) -> Report:
    return work(_shared()[0], run)


def plain(value: Any) -> Any:
    """The same for JSON, with four decimals."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value
