"""Commands that look at what happens: the devices, model executors, tasks and their stories, and the books."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from brim.core.batching import Batched, ModelKey
from brim.core.model import TERMINAL, Reason, State, canonical
from brim.settings import Settings
from brim.store import Store
from brim.store.connection import address
from brim.store.types import Record
from brim_services.admission import UNESTIMATED
from brim_services.dashboard import Snapshot, executor_table, render, story_lines, task_table
from brim_services.waits import explained

from .common import Json, Refusal, console, open_store, print_json


def status(as_json: Json = False) -> None:
    """Print the availability table, overflow and the queues."""
    settings, store = open_store()
    snapshot = Snapshot.of(store)
    lanes = _lanes(store, snapshot.depths)
    queues = _queues(settings, store, [device.queue for device in snapshot.devices])
    if as_json:
        devices = [
            {**canonical(device), "available_mib": device.available_mib, **snapshot.figures.get(device.uuid, {})}
            for device in snapshot.devices
        ]
        print_json({"devices": devices, "overflow": lanes, "queues": queues, "tasks": snapshot.counts})
        return
    console.print(render(snapshot, f"{len(snapshot.devices)} devices (MiB)"))
    for lane in lanes:
        console.print(f"  {lane['lane']}: {lane['depth']} waiting; the first: {lane['reason']}")
    console.print("queues  " + "  ".join(f"{name} {length}" for name, length in queues.items()))


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


def executors(as_json: Json = False) -> None:
    """List model executors: which model is resident where, and what it is doing."""
    _, store = open_store()
    views = store.executors()
    if as_json:
        print_json([canonical(view) | {"state": view.state, "items": len(view.items)} for view in views])
        return
    console.print(executor_table(views, store.server_ms() / 1000))


def top() -> None:
    """Watch the cluster in the terminal: GPUs, overflow, reasons. `q` quits.

    Where standard output is no terminal it is printed once, as it is now.
    """
    from brim_services.picture import Painter
    from brim_services.top import Top, snapshot

    settings, store = open_store()
    if not sys.stdout.isatty():
        console.print(snapshot(Painter(store, settings).paint()))
        return
    store.server_ms()  # an error is said before the screen is taken
    Top(Painter(store, settings), address(settings.redis.url)).run()


def tasks(
    state: Annotated[State | None, typer.Option(help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 50,
    as_json: Json = False,
) -> None:
    """List tasks that brim knows."""
    _, store = open_store()
    records = explained(store, store.list_tasks(state, limit))
    if as_json:
        print_json([canonical(record) for record in records])
        return
    console.print(task_table(records))


def show(task_id: Annotated[str, typer.Argument(help="The Celery task id.")], as_json: Json = False) -> None:
    """Tell a task's whole story, with times and reasons."""
    _, store = open_store()
    found, story = explained(store, store.records([task_id])), store.story(task_id)
    if not found:
        raise Refusal(
            f"task {task_id} is not known: never admitted, without a profile, or ended longer ago than "
            "placement.retention_s"
        )
    [record] = found
    if as_json:
        print_json({"record": canonical(record), "story": story})
        return
    console.print(Text(f"{record.task}  {record.task_id}", "bold"))
    facts = {
        "state": record.state,
        "reason": record.reason,
        "demand": record.demand if record.batched is None else None,
        "batch": None if record.batched is None else _batch(record.batched),
        "executor": record.executor,
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


def explain_task(
    task_id: Annotated[str, typer.Argument(help="The Celery task id.")],
    limit: Annotated[int, typer.Option(min=1, help="How many candidates, and how many other nodes.")] = 10,
    as_json: Json = False,
) -> None:
    """Show where a task could start now, what each place scores, and what is in the way elsewhere.

    A batched task's places are the executors of its model.
    """
    from brim_services.expecting import expected
    from brim_services.explain import candidate_table, explanation, start_line
    from brim_services.placement import make_planner

    settings, store = open_store()
    records = explained(store, store.records([task_id]))
    if not records:
        raise Refusal(f"task {task_id} is not known")
    [record] = records
    if record.lane.startswith(UNESTIMATED):
        raise Refusal(f"task {task_id} has no demand yet: {record.reason or 'it waits for its profile'}")
    if record.batched is not None:
        _explain_batched(settings, store, record, limit, as_json=as_json)
        return
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
        print_json(canonical(facts) | canonical(found))
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


def _explain_batched(settings: Settings, store: Store, record: Record, limit: int, *, as_json: bool) -> None:
    from brim_services.explain import batch_explanation, resident_table

    found = batch_explanation(store, settings, record)
    if isinstance(found, Reason):
        raise Refusal(f"task {record.task_id}: {found}")
    if as_json:
        names = ("task_id", "task", "state", "reason", "batched", "executor", "node", "devices")
        print_json(canonical({name: getattr(record, name) for name in names}) | canonical(found))
        return
    assert record.batched is not None
    console.print(Text(f"{record.task}  {record.task_id}  {record.state}", "bold"))
    if record.reason is not None:
        console.print(f"reason    {record.reason}")
    console.print(f"batch     {_batch(record.batched)}")
    if record.executor:
        verb = "was" if record.state in TERMINAL else "is"
        console.print(f"{f'{verb} on':9} {record.executor}; below, as if it were given out now")
    if found.before:
        console.print(f"before it {found.before} in its lane")
    console.print(resident_table(found))
    need = found.need
    sizes = f"{need.alone_mib} MiB at least, {need.least_mib} to be useful, {need.full_mib} for full batches"
    console.print(f"one more  would reserve {sizes}" + (f"; not now: {found.no_more}" if found.no_more else ""))
    for site in found.sites[:limit]:
        console.print(
            f"{'out' if site.obstacle else 'room':9} {site.name}" + (f": {site.obstacle}" if site.obstacle else "")
        )
    if len(found.sites) > limit:
        console.print(f"{len(found.sites) - limit} more devices; --limit shows more")


def _batch(batched: Batched) -> str:
    """What a task is batched by, for people."""
    shape = f", shape {batched.shape}" if batched.shape else ""
    return f"model {ModelKey(batched.model, batched.version)}{shape}, a volume of {batched.size:g}"


def audit_books(as_json: Json = False) -> None:
    """Recompute every device's books from the leases; exit 1 if anything differs."""
    _, store = open_store()
    differences = store.audit()
    if as_json:
        print_json({"differences": differences})
    else:
        console.print("\n".join(differences) or "no difference")
    raise typer.Exit(1 if differences else 0)
