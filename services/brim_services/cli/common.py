"""What all commands share: the settings chosen, the store they name, the console, JSON, and a refusal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from brim.settings import Settings
from brim.store import Store

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


class Refusal(Exception):
    """What a user asked for cannot be done; the message says why."""


class _Chosen:
    """What stands before the command."""

    config: Path | None = None


chosen = _Chosen()


def load_settings() -> Settings:
    """The settings of the file chosen, and of the environment."""
    return Settings.load(chosen.config)


def open_store() -> tuple[Settings, Store]:
    """The settings, and the store that they name."""
    settings = load_settings()
    return settings, Store.of(settings)


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(value))
