"""The task resource usage table, as the services read it."""

from __future__ import annotations

from brim.core.profiles import Problem, ResourceTable, TableError
from brim.settings import Settings

NO_TABLE = (
    "resources.table (BRIM_RESOURCES__TABLE) names the table of what tasks need, "
    "and `profiles: {your.task: {vram: 2GiB}}` is enough to begin with"
)


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
