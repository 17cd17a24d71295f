"""The task resource usage table, as the services read it."""

from __future__ import annotations

from brim.core.attributes import place
from brim.core.profiles import Problem, ResourceTable, TableError
from brim.settings import Settings

NOT_RUN = "batches are not run yet: no model executor takes them; without 'batch' (and 'model', 'version'), give 'vram'"


def load_table(settings: Settings) -> ResourceTable:
    """The table that the settings name; one that asks for batches is refused, for its tasks would wait for ever.

    Raises `TableError` with every problem.
    """
    path = settings.resources.table
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TableError((Problem(str(path), "", "", reason),)) from error
    table = ResourceTable.parse(text, str(path))
    batched = [profile.name for profile in table if profile.batch is not None]
    if batched:
        raise TableError(tuple(Problem(str(path), f"profile {name!r}", place(("batch",)), NOT_RUN) for name in batched))
    return table
