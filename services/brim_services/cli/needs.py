"""Commands about how much memory tasks need: by the table, by measured peaks, and by a run of one on purpose."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from brim.core.attributes import BrimHeader, EstimateError
from brim.core.model import canonical
from brim.core.profiles import estimate
from brim_services.resources import load_table

from .common import Json, Refusal, console, load_settings, open_store, print_json

profiles_app = typer.Typer(help="What the table declares, and what measured peaks suggest.", no_args_is_help=False)


def estimate_demand(
    task: Annotated[str, typer.Argument(help="The task's name.")],
    attr: Annotated[list[str] | None, typer.Option(help="An attribute, as width=4096; repeat it.")] = None,
    as_json: Json = False,
) -> None:
    """Show how much memory a task would reserve, and why; of a batched one, what its model executor would."""
    from brim.core.batching.sizing import footprint
    from brim_services.explain import batch_lines

    table = load_table(load_settings())
    profile = table.profile(task)
    if profile is None:
        raise Refusal(f"no profile for {task}; the table has: {', '.join(row.name for row in table)}")
    try:
        found = estimate(profile, BrimHeader(), dict(map(_attribute, attr or [])))
    except EstimateError as error:
        raise Refusal(f"{task}: {error.reason}") from error
    need = footprint(profile, [found.batched.size]) if found.batched is not None else None
    if as_json:
        print_json({"task": task, **canonical(found), **({"executor": canonical(need)} if need else {})})
        return
    console.print(f"{task}: profile {found.profile}")
    console.print(f"{found}")
    if found.batched is not None:
        console.print("\n".join(batch_lines(profile, found.batched.size)))


@profiles_app.callback(invoke_without_command=True)
def profiles(context: typer.Context, as_json: Json = False) -> None:
    """List profiles: declared, suggested, effective; peaks learned from, their error (peak over declared need)."""
    from brim_services.learning import stand_ins
    from brim_services.profiles import standings, standings_table

    if context.invoked_subcommand is not None:
        return
    settings, store = open_store()
    found = list(standings(load_table(settings), store.calibrations(), stand_ins(store)))
    if as_json:
        print_json([standing.to_json() for standing in found])
    else:
        console.print(standings_table(found))


@profiles_app.command("apply")
def apply_suggestions(
    names: Annotated[list[str] | None, typer.Argument(help="Profiles; by default all with a suggestion.")] = None,
    as_json: Json = False,
) -> None:
    """Write suggestions into the resource table; comments and order stay."""
    from brim_services.profiles import apply, standings

    settings, store = open_store()
    found = {standing.profile.name: standing for standing in standings(load_table(settings), store.calibrations(), {})}
    for name in names or []:
        if name not in found or found[name].suggestion is None:
            why = "too few peaks are known of it as it is declared now" if name in found else "the table has none"
            raise Refusal(f"no suggestion for profile {name}: {why}")
    changes = apply(settings.resources.table, [found[name] for name in names or found])
    if as_json:
        print_json({"changes": changes})
        return
    for change in changes:
        console.print(change)
    console.print(f"{settings.resources.table}: " + ("written; restart intake to use it" if changes else "unchanged"))


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
        print_json({"measured": [canonical(one) for one in measured], "row": found})
        return
    for one in measured:
        context = "" if one.context_mib is None else f", {one.context_mib} of them its context"
        console.print(f"# {dict(one.call.kwargs)}: {one.peak_mib} MiB{context}")
    console.print(found)


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
