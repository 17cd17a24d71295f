"""Commands that act on tasks: cancel them, and try dead letters again or remove them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from brim.core.model import Reason, State
from brim.store import Store
from brim.store.types import CloseAnswer, Record
from brim_services.admission import UNESTIMATED

from . import looking
from .common import Json, Refusal, console, open_store, print_json


def cancel(
    task_ids: Annotated[list[str], typer.Argument(help="Celery task ids.")],
    as_json: Json = False,
) -> None:
    """Cancel tasks wherever they are; a running one is terminated."""
    from brim.celery.answers import answering_app
    from brim_services import cancelling

    settings, store = open_store()
    reason = Reason("cancelled", "cancelled by `brim cancel`")
    answers = cancelling.cancel(store, answering_app(settings), task_ids, reason)
    if as_json:
        print_json(answers)
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

dead = typer.Typer(help="Dead letters: tasks that brim gave up.", no_args_is_help=True)

DeadIds = Annotated[list[str] | None, typer.Argument(help="Celery task ids.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter.")]


@dead.command("list")
def dead_list(
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 50,
    as_json: Json = False,
) -> None:
    """List dead letters, with the reason of each."""
    looking.tasks(State.DEAD, limit, as_json)


@dead.command("show")
def dead_show(task_id: Annotated[str, typer.Argument(help="The Celery task id.")], as_json: Json = False) -> None:
    """Tell a dead letter's whole story."""
    _, store = open_store()
    record = store.record(task_id)
    if record is not None and record.state is not State.DEAD:
        raise Refusal(f"task {task_id} is no dead letter: it is {record.state}")
    looking.show(task_id, as_json)


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
    _, store = open_store()
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
        print_json({task_id: refusals.get(task_id, done) for task_id in ids})
    for task_id in ids:
        if not as_json:
            console.print(
                f"{task_id}: not {done}: {refusals[task_id]}" if task_id in refusals else f"{task_id}: {done}"
            )
    if refusals:
        raise typer.Exit(1)
