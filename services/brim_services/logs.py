"""How services log: lines for people, or JSON lines for machines, on standard error.

A line about a task carries its id, and its attempt and device where it has them, so `grep` for an id follows one
task through intake, placement, the agents and the workers.
"""

from __future__ import annotations

import json
import logging
import time

IDS = ("task_id", "attempt", "device", "node")
"""What a line may be about: given as ``extra=about(...)``, fields of their own in JSON."""


def about(
    task_id: str = "", attempt: str | None = None, device: str | None = None, node: str | None = None
) -> dict[str, str]:
    """The ids of a line, for ``extra``."""
    given = {"task_id": task_id, "attempt": attempt, "device": device, "node": node}
    return {name: value for name, value in given.items() if value}


def _ids(record: logging.LogRecord) -> dict[str, str]:
    fields = record.__dict__
    return {name: str(fields[name]) for name in IDS if name in fields}


class Lines(logging.Formatter):
    """One line for a person; the ids at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._second: tuple[int, str] = (0, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """As usual; the part of it that says the second is written once a second."""
        second = int(record.created)
        if second != self._second[0]:
            self._second = second, time.strftime(self.default_time_format, self.converter(second))
        return f"{self._second[1]},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without a traceback."""
        ids = "  ".join(f"{name}={value}" for name, value in _ids(record).items())
        return super().formatMessage(record) + (f"  {ids}" if ids else "")


class JsonLines(logging.Formatter):
    """One JSON object a line: t (seconds), level, logger, message, ids, error."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(*, as_json: bool, debug: bool) -> None:
    """Log to standard error from now on; records know no more than the lines say, for there is one for each task."""
    logging._srcfile = None  # where the line was written: half of what a record costs
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else Lines())
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler])
