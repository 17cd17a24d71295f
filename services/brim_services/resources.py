"""The task resource usage table, as the services read it."""

from __future__ import annotations

from brim.core.profiles import Problem, ResourceTable, TableError
from brim.settings import Settings

NO_TABLE = (
    "resources.table (BRIM_RESOURCES__TABLE) names the table of what tasks need, "
    "and `profiles: {your.task: {vram: 2GiB}}` is enough to begin with"
)


def conflicts(settings: Settings, table: ResourceTable) -> list[str]:
    """What table and settings, each good by itself, ask for together and cannot have."""
    if settings.executor.recycle != "never":
        return []
    whole = [f"profile {profile.name!r}" for profile in table if profile.whole]
    whole += [f"intake.unknown: {settings.intake.unknown}"] if settings.intake.unknown != "reject" else []
    reason = "asks for whole GPUs, and executor.recycle: never lets idle executors keep memory on them"
    return [
        f"{what} {reason}: once a task has run on a GPU it waits until that worker is started anew" for what in whole
    ]


def load_table(settings: Settings) -> ResourceTable:
    """The table that the settings name. Raises `TableError` with every problem."""
    path = settings.resources.table
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise TableError((Problem(str(path), "", "", f"{error.strerror}; {NO_TABLE}"),)) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TableError((Problem(str(path), "", "", reason),)) from error
    return ResourceTable.parse(text, str(path))
