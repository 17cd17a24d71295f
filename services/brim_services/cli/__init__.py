"""The command line, `brim`: its commands, what stands before them, and how a user's error is said.

Commands are thin. With ``--json`` standard output carries JSON alone (services log JSON lines); errors go to
standard error with an exit code other than 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import redis
import typer

from brim.core.profiles import TableError
from brim.gpu.probe import NodeFault
from brim.settings import ConfigurationError
from brim.store.connection import ServerRefused, address

from . import acting, looking, needs, running, trying
from .common import Refusal, chosen, load_settings

app = typer.Typer(
    help="A GPU-memory-aware scheduler for Celery.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# In the order of `brim --help`.
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": trying.demo,
    "up": running.up,
    "intake": running.intake,
    "placement": running.placement,
    "worker": running.worker,
    "monitor": running.monitor,
    "token": running.token,
    "status": looking.status,
    "executors": looking.executors,
    "top": looking.top,
    "tasks": looking.tasks,
    "show": looking.show,
    "explain": looking.explain_task,
    "cancel": acting.cancel,
    "audit": looking.audit_books,
    "estimate": needs.estimate_demand,
    "simulate": trying.simulate,
    "profile": needs.profile_task,
    "check-config": trying.check_config,
    "doctor": trying.doctor,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(needs.profiles_app, name="profiles")
app.add_typer(acting.dead, name="dead")


@app.callback()
def choose_settings(
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
    chosen.config = config


def main() -> None:
    """Runs the command line; a user's error is one message, never a traceback."""
    try:
        app()
    except (ConfigurationError, TableError, ServerRefused, NodeFault, Refusal, FileNotFoundError) as error:
        sys.exit(f"brim: {error}")
    except redis.RedisError as error:
        where = address(load_settings().redis.url)
        sys.exit(f"brim: Redis at {where}: {error}")
