"""Commands that find out beforehand: a demonstration, a simulated cluster, and what is wrong with a configuration."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from brim.core.model import canonical
from brim.core.profiles import TableError
from brim.settings import ConfigurationError, PolicyChoice, Settings
from brim_services.resources import conflicts, load_table

from .common import Json, Refusal, chosen, console, load_settings, print_json

FileFormat = Literal["brim", "openb"]
MixKnowledge = Literal["target", "online"]


def demo(
    tasks: Annotated[int, typer.Option(min=1, help="How many tasks to publish.")] = 300,
    seed: Annotated[int, typer.Option(help="Which tasks: the same seed, the same tasks.")] = 1,
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="Place without looking at memory, to see tasks run out of it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on the last line.")] = False,
) -> None:
    """Run mixed tasks on four simulated GPUs and sum up; exit 0 only if all of it held."""
    from brim_services.demo import Demo

    if chosen.config is not None:
        reason = "the demo has settings of its own; brim up takes a settings file"
        raise typer.BadParameter(reason, param_hint="--config")
    raise typer.Exit(Demo(tasks, seed, ignore_memory=ignore_memory, as_json=as_json).run())


def simulate(
    nodes: Annotated[Path, typer.Option(help="CSV file of worker servers.", show_default=False)],
    tasks: Annotated[Path, typer.Option(help="CSV file of tasks.", show_default=False)],
    form: Annotated[
        FileFormat, typer.Option("--format", help="brim's own columns, or those of the published openb trace.")
    ] = "brim",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeat it to compare. With --timed also `exclusive`, one task per GPU, and NAME-unpromised.",
            show_default="packed; with --timed packed, packed-unpromised, spread and exclusive",
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Random orders.", show_default="10; timed 1")] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Memory asked for ÷ capacity; timed: × run time.", show_default="1.3; timed 1.0"),
    ] = None,
    mix: Annotated[
        MixKnowledge,
        typer.Option(help="The mix of demands that policies expect: the file's; `online`: as well as learnt from it."),
    ] = "target",
    timed: Annotated[bool, typer.Option("--timed", help="With arrivals, run times and overflow.")] = False,
    arrivals: Annotated[int, typer.Option(min=10, help="With --timed: tasks that arrive.")] = 24_000,
    promises: Annotated[
        int, typer.Option(min=-1, help="With --timed: tasks that hold a promise at a time; -1: by cluster size.")
    ] = -1,
    every: Annotated[int, typer.Option(min=1, help="Take every n-th server only.")] = 1,
    add_nodes: Annotated[
        list[str] | None,
        typer.Option(
            help="What if: 4xA100-80 are four servers of eight A100 with 80 GiB, 2xL40S-48x4 two of four L40S.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw into this .png or .svg file.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")] = False,
) -> None:
    """Simulate placement on a cluster: how full it gets, or with --timed how long tasks wait.

    Untimed, tasks arrive one at a time and never leave, and what fits nowhere is dropped. The deciding code is
    placement's own. docs/simulate.md describes the files.
    """
    from brim_services import simulate as simulation
    from brim_services.traces import TraceError, added_servers, read_jobs, read_servers

    chosen = policy or list(simulation.TIMED if timed else ["packed"])
    loads = load or [1.0 if timed else 1.3]
    wrong = [problem for name in chosen if (problem := simulation.unknown_policy(name, timed=timed))]
    if wrong:
        raise Refusal(f"--policy: {wrong[0]}")
    if len(loads) > 1 and not timed:
        raise Refusal("--load: several need --timed")
    if plot is not None and plot.suffix not in {".png", ".svg"}:
        raise Refusal(f"--plot {plot}: the name of a file that ends in .png or .svg")
    if plot is not None and find_spec("matplotlib") is None:
        raise Refusal("--plot needs matplotlib: pip install 'brim[plot]'")
    try:
        servers = read_servers(nodes, openb=form == "openb", every=every)
        added = [server for wish in add_nodes or () for server in added_servers(wish, servers)]
        jobs = read_jobs(tasks, openb=form == "openb")
    except TraceError as error:
        raise Refusal(str(error)) from error
    setup = simulation.Setup(tuple(servers), tuple(added), tuple(jobs), None if promises < 0 else promises, arrivals)
    beside = Console(stderr=True, highlight=False)
    found: dict[str, Any]
    if timed:
        found = simulation.waits(setup, chosen, seeds or 1, loads, beside)
        console.print(simulation.wait_table(found))
    else:
        found = simulation.fills(setup, chosen, seeds or 10, loads[0], online=mix == "online", console=beside)
        console.print(simulation.fill_table(found))
    if plot is not None:
        from brim_services.charts import draw

        draw(found, plot, timed=timed)
        console.print(f"drawn: {plot}")
    if as_json:
        if not timed:
            found = {name: simulation.shown(report) for name, report in found.items()}
        print_json(simulation.plain(found if timed or len(found) > 1 else found[chosen[0]]))


def check_config(as_json: Json = False) -> None:
    """Validate the settings, the resource table and the placement policy."""
    checked, problems = ["settings"], list[str]()
    settings = load_settings()
    for path, load in ((settings.resources.table, load_table), (settings.placement.policy_file, _policy)):
        try:
            load(settings)
            checked.append(str(path) if path.exists() else f"{path}, which is not there: the built-in policy")
        except (ConfigurationError, TableError) as error:
            problems += map(str, error.problems)
    if not problems:
        problems += conflicts(settings, load_table(settings))
    if as_json:
        print_json({"checked": checked, "problems": problems})
    else:
        for name in checked:
            console.print(f"{name}: good")
        for problem in problems:
            print(problem, file=sys.stderr)
    raise typer.Exit(1 if problems else 0)


def doctor(
    celery_app: Annotated[str, typer.Option("-A", "--app", help="The Celery app, as for `celery -A`.")],
    as_json: Json = False,
) -> None:
    """Say what will not work, and why: the app, the tables, the Redis server, this node's GPUs, the clock.

    Exit 1 if there is a fault.
    """
    from brim_services.doctor import Level, examine, worst

    findings = examine(load_settings(), celery_app, os.environ.get("BRIM_DEVICES"))
    if as_json:
        print_json([canonical(finding) for finding in findings])
    else:
        for finding in findings:
            console.print(Text(f"{finding.level:6}{finding.subject:7}{finding.message}", DOCTOR_STYLES[finding.level]))
    raise typer.Exit(1 if worst(findings) is Level.FAULT else 0)


DOCTOR_STYLES = {"good": "green", "note": "yellow", "fault": "bold red"}


def _policy(settings: Settings) -> PolicyChoice:
    return PolicyChoice.load(settings.placement.policy_file)
