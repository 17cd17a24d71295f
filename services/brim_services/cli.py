"""The command line, `brim`: entry points of the processes, and a look at what they do.

Commands are thin. With ``--json`` standard output carries JSON alone (services log JSON lines); errors go to
standard error with an exit code other than 0.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import redis
import typer
from rich.console import Console
from rich.text import Text

from brim.core.attributes import BrimHeader, EstimateError
from brim.core.model import Reason, State, canonical
from brim.core.profiles import TableError, estimate
from brim.gpu.probe import NodeFault
from brim.settings import ConfigurationError, PolicyChoice, Settings
from brim.store import Store
from brim.store.connection import ServerRefused, address
from brim.store.types import CloseAnswer, Record
from brim_services import logs
from brim_services.admission import UNESTIMATED
from brim_services.dashboard import Snapshot, executor_table, render, story_lines, task_table
from brim_services.resources import load_table
from brim_services.waits import explained

app = typer.Typer(
    help="A GPU-memory-aware scheduler for Celery.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
profiles_app = typer.Typer(help="What the table declares, and what measured peaks suggest.", no_args_is_help=False)
app.add_typer(profiles_app, name="profiles")
console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)

FileFormat = Literal["brim", "openb"]
MixKnowledge = Literal["target", "online"]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
JsonLog = Annotated[bool, typer.Option("--json", help="Log JSON lines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Log more.")]


class Refusal(Exception):
    """What a user asked for cannot be done; the message says why."""


def main() -> None:
    """Runs the command line; a user's error is one message, never a traceback."""
    try:
        app()
    except (ConfigurationError, TableError, ServerRefused, NodeFault, Refusal, FileNotFoundError) as error:
        sys.exit(f"brim: {error}")
    except redis.RedisError as error:
        where = address(Settings.load(_chosen.config).redis.url)
        sys.exit(f"brim: Redis at {where}: {error}")


class _Chosen:
    """What stands before the command."""

    config: Path | None = None


_chosen = _Chosen()


@app.callback()
def common(
    config: Annotated[
        Path | None,
        typer.Option(
            help="Settings file (default: BRIM_CONFIG, else configs/brim.toml if it exists). "
            "BRIM_<SECTION>__<NAME> variables override it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """A GPU-memory-aware scheduler for Celery."""
    _chosen.config = config


# -- everything on one machine ---------------------------------------------------------------------------------


@app.command()
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

    if _chosen.config is not None:
        reason = "the demo has settings of its own; brim up takes a settings file"
        raise typer.BadParameter(reason, param_hint="--config")
    raise typer.Exit(Demo(tasks, seed, ignore_memory=ignore_memory, as_json=as_json).run())


@app.command()
def up(
    folder: Annotated[Path, typer.Option(help="Where data and logs are kept.")] = Path(".brim"),
    redis_port: Annotated[int, typer.Option(help="Port of Redis; a free one if it is taken.")] = 6379,
    flower_port: Annotated[int, typer.Option(help="Port of Flower; a free one if it is taken.")] = 5555,
    monitor_port: Annotated[int, typer.Option(help="Port of the page; a free one if it is taken.")] = 8765,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one JSON line.")] = False,
) -> None:
    """Start Redis, brim, the example's workers and Flower; stop them all on Ctrl-C.

    BRIM_DEVICES chooses the devices (sim:4x24GiB, nvml); by default NVML's where there are any.
    """
    from brim_services.stack import Ports
    from brim_services.up import up as run

    raise typer.Exit(run(_settings(), folder, Ports.preferred(redis_port, flower_port, monitor_port), as_json=as_json))


# -- the processes of a cluster --------------------------------------------------------------------------------


@app.command()
def intake(as_json: JsonLog = False, debug: Debug = False) -> None:
    """Run intake: from the broker into overflow. Any number of replicas."""
    from brim_services.intake import run

    logs.set_up(as_json=as_json, debug=debug)
    run(_settings())


@app.command()
def placement(
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="Place without looking at memory; only for demonstration.")
    ] = False,
    as_json: JsonLog = False,
    debug: Debug = False,
) -> None:
    """Run placement: from overflow to the GPUs. One is active, others stand by."""
    from brim_services.placement import run

    logs.set_up(as_json=as_json, debug=debug)
    run(_settings(), ignore_memory=ignore_memory)


@app.command()
def worker(
    celery_app: Annotated[str, typer.Option("-A", "--app", help="The Celery app, as for `celery -A`.")],
    as_json: JsonLog = False,
    debug: Debug = False,
) -> None:
    """Run this node's agent, which starts one Celery worker for each of its GPUs."""
    from brim_services.agent import run

    logs.set_up(as_json=as_json, debug=debug)
    run(_settings(), celery_app)


@app.command()
def monitor(as_json: JsonLog = False, debug: Debug = False) -> None:
    """Serve the page, the HTTP API and the cluster's metrics."""
    from brim_services.monitor import run

    logs.set_up(as_json=as_json, debug=debug)
    run(_settings())


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    submit: Annotated[bool, typer.Option("--submit", help="It may also submit, cancel and retry tasks.")] = False,
) -> None:
    """Make a token for the HTTP API: the secret for its user, and the entry for the settings."""
    from brim_services.monitor.access import digest

    secret = secrets.token_urlsafe(32)
    print(f"token, shown only now:  {secret}\n\n[[monitor.tokens]]")
    for field, value in (("name", name), ("sha256", digest(secret)), ("scope", "submit" if submit else "read")):
        print(f"{field} = {json.dumps(value)}")


# -- looking at it ---------------------------------------------------------------------------------------------


@app.command()
def status(as_json: Json = False) -> None:
    """Print the availability table, overflow and the queues."""
    settings, store = _open()
    snapshot = Snapshot.of(store)
    lanes = _lanes(store, snapshot.depths)
    queues = _queues(settings, store, [device.queue for device in snapshot.devices])
    if as_json:
        devices = [
            {**canonical(device), "available_mib": device.available_mib, **snapshot.figures.get(device.uuid, {})}
            for device in snapshot.devices
        ]
        _print_json({"devices": devices, "overflow": lanes, "queues": queues, "tasks": snapshot.counts})
        return
    console.print(render(snapshot, f"{len(snapshot.devices)} devices (MiB)"))
    for lane in lanes:
        console.print(f"  {lane['lane']}: {lane['depth']} waiting; the first: {lane['reason']}")
    console.print("queues  " + "  ".join(f"{name} {length}" for name, length in queues.items()))


@app.command()
def executors(as_json: Json = False) -> None:
    """List model executors: which model is resident where, and what it is doing."""
    _, store = _open()
    views = store.executors()
    if as_json:
        _print_json([canonical(view) | {"state": view.state, "items": len(view.items)} for view in views])
        return
    console.print(executor_table(views, store.server_ms() / 1000))


@app.command()
def top() -> None:
    """Watch the cluster in the terminal: GPUs, overflow, reasons. `q` quits."""
    from brim_services.picture import Painter
    from brim_services.top import Top

    settings, store = _open()
    store.server_ms()  # an error is said before the screen is taken
    Top(Painter(store, settings), address(settings.redis.url)).run()


@app.command()
def tasks(
    state: Annotated[State | None, typer.Option(help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 50,
    as_json: Json = False,
) -> None:
    """List tasks that brim knows."""
    _, store = _open()
    records = explained(store, store.list_tasks(state, limit))
    if as_json:
        _print_json([canonical(record) for record in records])
        return
    console.print(task_table(records))


@app.command()
def show(task_id: Annotated[str, typer.Argument(help="The Celery task id.")], as_json: Json = False) -> None:
    """Tell a task's whole story, with times and reasons."""
    _, store = _open()
    found, story = explained(store, store.records([task_id])), store.story(task_id)
    if not found:
        raise Refusal(
            f"task {task_id} is not known: never admitted, without a profile, or ended longer ago than "
            "placement.retention_s"
        )
    [record] = found
    if as_json:
        _print_json({"record": canonical(record), "story": story})
        return
    console.print(Text(f"{record.task}  {record.task_id}", "bold"))
    facts = {
        "state": record.state,
        "reason": record.reason,
        "demand": record.demand,
        "peak": None if record.peak_mib is None else f"{record.peak_mib} MiB",
        "priority": record.priority,
        "node": record.node,
        "devices": ", ".join(record.devices),
        "attempts": f"{record.attempts}, {record.losses} lost",
    }
    for name, value in facts.items():
        if value not in (None, ""):
            console.print(f"{name:9} {value}")
    for line in story_lines(story):
        console.print(line)


@app.command("explain")
def explain_task(
    task_id: Annotated[str, typer.Argument(help="The Celery task id.")],
    limit: Annotated[int, typer.Option(min=1, help="How many candidates, and how many other nodes.")] = 10,
    as_json: Json = False,
) -> None:
    """Show where a task could start now, what each place scores, and what is in the way elsewhere."""
    from brim_services.expecting import expected
    from brim_services.explain import candidate_table, explanation, start_line
    from brim_services.placement import make_planner

    settings, store = _open()
    records = explained(store, store.records([task_id]))
    if not records:
        raise Refusal(f"task {task_id} is not known")
    [record] = records
    if record.lane.startswith(UNESTIMATED):
        raise Refusal(f"task {task_id} has no demand yet: {record.reason or 'it waits for its profile'}")
    planner = make_planner(settings)
    found = explanation(store, planner, record)
    start = expected(store, record)
    facts = {
        "task_id": record.task_id,
        "task": record.task,
        "state": record.state,
        "reason": record.reason,
        "demand": record.demand,
        "node": record.node,
        "devices": record.devices,
        "policy": planner.policy.name,
        "weights": {name: weight for name, weight, _ in planner.policy.scores},
        "expected_start": None if isinstance(start, Reason) else start,
        "expected_note": start if isinstance(start, Reason) else None,
    }
    if as_json:
        _print_json(canonical(facts) | canonical(found))
        return
    console.print(Text(f"{record.task}  {record.task_id}  {record.state}", "bold"))
    if record.reason is not None:
        console.print(f"reason    {record.reason}")
    console.print(
        f"demand    {record.demand.vram_mib} MiB" + f" on {record.demand.gpus} GPUs" * (record.demand.gpus > 1)
    )
    if record.devices:
        console.print(f"is on     {', '.join(record.devices)} of {record.node}; below, as if it were placed now")
    if record.state is State.WAITING:
        console.print(f"starts    {start_line(start)}")
    console.print(f"policy    {planner.policy.name}; each part of a score is times its weight")
    console.print(candidate_table(found, limit))
    for more, what in ((len(found.candidates) - limit, "candidates"), (len(found.out) - limit, "nodes that are out")):
        if more > 0:
            console.print(f"{more} more {what}; --limit shows more")
    for out in found.out[:limit]:
        console.print(f"out       {out.node}: {out.reason}")


@app.command()
def cancel(
    task_ids: Annotated[list[str], typer.Argument(help="Celery task ids.")],
    as_json: Json = False,
) -> None:
    """Cancel tasks wherever they are; a running one is terminated."""
    from brim.celery.answers import answering_app
    from brim_services import cancelling

    settings, store = _open()
    reason = Reason("cancelled", "cancelled by `brim cancel`")
    answers = cancelling.cancel(store, answering_app(settings), task_ids, reason)
    if as_json:
        _print_json(answers)
    for task_id, answer in answers.items():
        if not as_json:
            console.print(f"{task_id}: {CANCELLED[answer]}")
    if not all(answer in (CloseAnswer.CLOSED, CloseAnswer.MARKED) for answer in answers.values()):
        raise typer.Exit(1)


CANCELLED = {
    CloseAnswer.CLOSED: "cancelled",
    CloseAnswer.MARKED: "runs; its worker has been told to terminate it",
    CloseAnswer.REFUSED: "not cancelled: it has ended, or is just ending",
    CloseAnswer.UNKNOWN: "not cancelled: brim does not know it",
}


# -- dead letters ----------------------------------------------------------------------------------------------

dead = typer.Typer(help="Dead letters: tasks that brim gave up.", no_args_is_help=True)
app.add_typer(dead, name="dead")

DeadIds = Annotated[list[str] | None, typer.Argument(help="Celery task ids.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter.")]


@dead.command("list")
def dead_list(
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 50,
    as_json: Json = False,
) -> None:
    """List dead letters, with the reason of each."""
    tasks(State.DEAD, limit, as_json)


@dead.command("show")
def dead_show(task_id: Annotated[str, typer.Argument(help="The Celery task id.")], as_json: Json = False) -> None:
    """Tell a dead letter's whole story."""
    _, store = _open()
    record = store.record(task_id)
    if record is not None and record.state is not State.DEAD:
        raise Refusal(f"task {task_id} is no dead letter: it is {record.state}")
    show(task_id, as_json)


@dead.command("retry")
def dead_retry(task_ids: DeadIds = None, everything: All = False, as_json: Json = False) -> None:
    """Try dead letters again, with a new run; their demand is worked out anew."""
    reason = Reason("revived", "tried again by `brim dead retry`")

    def retry(store: Store, record: Record) -> bool:
        return store.revive(record.task_id, UNESTIMATED + record.task, reason)

    _to_dead(task_ids, everything, as_json, retry, "tried again", "its message could not be kept")


@dead.command("purge")
def dead_purge(task_ids: DeadIds = None, everything: All = False, as_json: Json = False) -> None:
    """Remove dead letters and their stories for good."""
    _to_dead(task_ids, everything, as_json, lambda store, record: store.purge(record.task_id), "removed", "")


def _to_dead(
    task_ids: list[str] | None,
    everything: bool,
    as_json: bool,
    action: Callable[[Store, Record], bool],
    done: str,
    otherwise: str,
) -> None:
    """Do something to the dead letters chosen; exit 1 if it could not be done to each."""
    if bool(task_ids) == everything:
        raise Refusal("name task ids, or --all")
    _, store = _open()
    ids = store.ids_in(State.DEAD) if everything else task_ids or []
    found = {record.task_id: record for record in store.records(ids)}
    refusals = {}
    for task_id in ids:
        record = found.get(task_id)
        if record is None:
            refusals[task_id] = "brim does not know it"
        elif record.state is not State.DEAD:
            refusals[task_id] = f"it is no dead letter: it is {record.state}"
        elif not action(store, record):
            refusals[task_id] = " or ".join(filter(None, [otherwise, "its producer has not been answered yet"]))
    if as_json:
        _print_json({task_id: refusals.get(task_id, done) for task_id in ids})
    for task_id in ids:
        if not as_json:
            console.print(
                f"{task_id}: not {done}: {refusals[task_id]}" if task_id in refusals else f"{task_id}: {done}"
            )
    if refusals:
        raise typer.Exit(1)


@app.command("audit")
def audit_books(as_json: Json = False) -> None:
    """Recompute every device's books from the leases; exit 1 if anything differs."""
    _, store = _open()
    differences = store.audit()
    if as_json:
        _print_json({"differences": differences})
    else:
        console.print("\n".join(differences) or "no difference")
    raise typer.Exit(1 if differences else 0)


# -- before it runs --------------------------------------------------------------------------------------------


@app.command("estimate")
def estimate_demand(
    task: Annotated[str, typer.Argument(help="The task's name.")],
    attr: Annotated[list[str] | None, typer.Option(help="An attribute, as width=4096; repeat it.")] = None,
    as_json: Json = False,
) -> None:
    """Show how much memory a task would reserve, and why."""
    table = load_table(_settings())
    profile = table.profile(task)
    if profile is None:
        raise Refusal(f"no profile for {task}; the table has: {', '.join(row.name for row in table)}")
    try:
        found = estimate(profile, BrimHeader(), dict(map(_attribute, attr or [])))
    except EstimateError as error:
        raise Refusal(f"{task}: {error.reason}") from error
    if as_json:
        _print_json({"task": task, **canonical(found)})
        return
    console.print(f"{task}: profile {found.profile}")
    console.print(f"{found}")


@app.command()
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
        _print_json(simulation.plain(found if timed or len(found) > 1 else found[chosen[0]]))


@profiles_app.callback(invoke_without_command=True)
def profiles(context: typer.Context, as_json: Json = False) -> None:
    """List profiles: declared, suggested, effective; peaks learned from, their error (peak over declared need)."""
    from brim_services.learning import stand_ins
    from brim_services.profiles import standings, standings_table

    if context.invoked_subcommand is not None:
        return
    settings, store = _open()
    found = list(standings(load_table(settings), store.calibrations(), stand_ins(store)))
    if as_json:
        _print_json([standing.to_json() for standing in found])
    else:
        console.print(standings_table(found))


@profiles_app.command("apply")
def apply_suggestions(
    names: Annotated[list[str] | None, typer.Argument(help="Profiles; by default all with a suggestion.")] = None,
    as_json: Json = False,
) -> None:
    """Write suggestions into the resource table; comments and order stay."""
    from brim_services.profiles import apply, standings

    settings, store = _open()
    found = {standing.profile.name: standing for standing in standings(load_table(settings), store.calibrations(), {})}
    for name in names or []:
        if name not in found or found[name].suggestion is None:
            why = "too few peaks are known of it as it is declared now" if name in found else "the table has none"
            raise Refusal(f"no suggestion for profile {name}: {why}")
    changes = apply(settings.resources.table, [found[name] for name in names or found])
    if as_json:
        _print_json({"changes": changes})
        return
    for change in changes:
        console.print(change)
    console.print(f"{settings.resources.table}: " + ("written; restart intake to use it" if changes else "unchanged"))


@app.command("profile")
def profile_task(
    task: Annotated[str, typer.Argument(help="The task's name.")],
    celery_app: Annotated[str, typer.Option("-A", "--app", help="The Celery app, as for `celery -A`.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: the call's arguments, by position or as NAME=VALUE.")
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option(help="An argument and its values, as width=512,1024,2048; repeat it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a task alone on an idle GPU, once for each size, and print its row of the resource table.

    It does what the task does: choose arguments that may be run.
    """
    from brim_services.measure import CannotMeasure, calls, measure, row

    named = dict(_attribute(text) for text in arguments or [] if _is_named(text))
    positional = [_value(text) for text in arguments or [] if not _is_named(text)]
    varied = {name: [_value(value) for value in str(values).split(",")] for name, values in map(_pair, vary or [])}
    try:
        wanted = list(calls(positional, named, varied))
        measured = measure(celery_app, task, wanted, os.environ.get("BRIM_DEVICES"))
        found = row(celery_app, task, measured)
    except (CannotMeasure, EstimateError) as error:
        raise Refusal(str(error)) from error
    if as_json:
        _print_json({"measured": [canonical(one) for one in measured], "row": found})
        return
    for one in measured:
        context = "" if one.context_mib is None else f", {one.context_mib} of them its context"
        console.print(f"# {dict(one.call.kwargs)}: {one.peak_mib} MiB{context}")
    console.print(found)


@app.command("check-config")
def check_config(as_json: Json = False) -> None:
    """Validate the settings, the resource table and the placement policy."""
    checked, problems = ["settings"], list[str]()
    settings = _settings()
    for path, load in ((settings.resources.table, load_table), (settings.placement.policy_file, _policy)):
        try:
            load(settings)
            checked.append(str(path))
        except (ConfigurationError, TableError) as error:
            problems += map(str, error.problems)
    if as_json:
        _print_json({"checked": checked, "problems": problems})
    else:
        for name in checked:
            console.print(f"{name}: good")
        for problem in problems:
            print(problem, file=sys.stderr)
    raise typer.Exit(1 if problems else 0)


@app.command()
def doctor(
    celery_app: Annotated[str, typer.Option("-A", "--app", help="The Celery app, as for `celery -A`.")],
    as_json: Json = False,
) -> None:
    """Say what will not work, and why: the app, the tables, the Redis server, this node's GPUs, the clock.

    Exit 1 if there is a fault.
    """
    from brim_services.doctor import Level, examine, worst

    findings = examine(_settings(), celery_app, os.environ.get("BRIM_DEVICES"))
    if as_json:
        _print_json([canonical(finding) for finding in findings])
    else:
        for finding in findings:
            console.print(Text(f"{finding.level:6}{finding.subject:7}{finding.message}", DOCTOR_STYLES[finding.level]))
    raise typer.Exit(1 if worst(findings) is Level.FAULT else 0)


DOCTOR_STYLES = {"good": "green", "note": "yellow", "fault": "bold red"}


# -- helpers ---------------------------------------------------------------------------------------------------


def _settings() -> Settings:
    return Settings.load(_chosen.config)


def _open() -> tuple[Settings, Store]:
    settings = _settings()
    return settings, Store.of(settings)


def _policy(settings: Settings) -> PolicyChoice:
    return PolicyChoice.load(settings.placement.policy_file)


def _print_json(value: Any) -> None:
    print(json.dumps(value))


def _attribute(text: str) -> tuple[str, Any]:
    """``width=4096``: a number, true or false, else a text."""
    name, value = _pair(text)
    return name, _value(value)


def _pair(text: str) -> tuple[str, str]:
    if not _is_named(text):
        raise Refusal(f"{text}: give it as NAME=VALUE")
    name, _, value = text.partition("=")
    return name, value


def _is_named(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(equals) and name.isidentifier()


def _value(text: str) -> Any:
    for read in (int, float, {"true": True, "false": False}.__getitem__):
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    return text


def _lanes(store: Store, depths: Mapping[str, int]) -> list[dict[str, Any]]:
    lanes = []
    for lane, depth in sorted(depths.items(), key=lambda item: -item[1]):
        first = explained(store, store.records(store.lane_ids(lane, 1)))
        lanes.append({"lane": lane, "depth": depth, "reason": str(first[0].reason) if first else None})
    return lanes


def _queues(settings: Settings, store: Store, device_queues: list[str]) -> dict[str, int]:
    """Messages in the broker's lists, by queue."""
    from brim.celery.envelope import INTAKE_QUEUE, BrokerLayout

    layout = BrokerLayout.of(settings.broker.model_dump())
    lists = {queue: layout.lists(queue) for queue in [INTAKE_QUEUE, *device_queues]}
    lengths = store.queue_lengths([name for names in lists.values() for name in names])
    return {queue: sum(lengths[name] for name in names) for queue, names in lists.items()}


if __name__ == "__main__":
    main()
