"""The task resource usage table, as the services read it."""

from __future__ import annotations

from brim.core.profiles import Problem, ResourceTable, TableError
from brim.settings import Settings


def load_table(settings: Settings) -> ResourceTable:
    """The table that the settings name. Raises `TableError` with every problem."""
    path = settings.resources.table
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TableError((Problem(str(path), "", "", reason),)) from error
    return ResourceTable.parse(text, str(path))
