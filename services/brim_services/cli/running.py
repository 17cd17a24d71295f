"""Commands that keep something running: the whole stack, each process of a cluster; and a token for one of them."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from brim_services import logs

from .common import load_settings

JsonLog = Annotated[bool, typer.Option("--json", help="Log JSON lines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Log more.")]


def up(
    celery_app: Annotated[
        str | None,
        typer.Option("-A", "--app", help="Your Celery app, as for `celery -A`.", show_default="brim's example"),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where data and logs are kept.")] = Path(".brim"),
    redis_port: Annotated[int, typer.Option(help="Port of Redis; a free one if it is taken.")] = 6379,
    flower_port: Annotated[int, typer.Option(help="Port of Flower; a free one if it is taken.")] = 5555,
    monitor_port: Annotated[int, typer.Option(help="Port of the page; a free one if it is taken.")] = 8765,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one JSON line.")] = False,
) -> None:
    """Start Redis, brim, an app's workers and Flower; stop them all on Ctrl-C.

    It runs in any folder. Your own app calls `brim.install(app)`, and its table is configs/resources.yaml or what
    BRIM_RESOURCES__TABLE names; its workers here use the Redis that is started, whatever it says itself.
    BRIM_DEVICES chooses the devices (sim:4x24GiB, nvml); by default NVML's where there are any.
    """
    from brim_services.stack import EXAMPLE_APP, Ports
    from brim_services.up import up as run

    ports = Ports.preferred(redis_port, flower_port, monitor_port)
    raise typer.Exit(run(load_settings(), folder, ports, app=celery_app or EXAMPLE_APP, as_json=as_json))


def intake(as_json: JsonLog = False, debug: Debug = False) -> None:
    """Run intake: from the broker into overflow. Any number of replicas."""
    from brim_services.intake import run

    logs.set_up(as_json=as_json, debug=debug)
    run(load_settings())


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
    run(load_settings(), ignore_memory=ignore_memory)


def worker(
    celery_app: Annotated[str, typer.Option("-A", "--app", help="The Celery app, as for `celery -A`.")],
    as_json: JsonLog = False,
    debug: Debug = False,
) -> None:
    """Run this node's agent, which starts one Celery worker for each of its GPUs."""
    from brim_services.agent import run

    logs.set_up(as_json=as_json, debug=debug)
    run(load_settings(), celery_app)


def monitor(as_json: JsonLog = False, debug: Debug = False) -> None:
    """Serve the page, the HTTP API and the cluster's metrics."""
    from brim_services.monitor import run

    logs.set_up(as_json=as_json, debug=debug)
    run(load_settings())


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
