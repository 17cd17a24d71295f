"""How services log: lines for people, or JSON lines for machines, on standard error."""

from __future__ import annotations

import json
import logging


class JsonLines(logging.Formatter):
    """One JSON object a line: t (seconds), level, logger, message, error."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(*, as_json: bool, debug: bool) -> None:
    """Log to standard error from now on."""
    handler = logging.StreamHandler()
    if as_json:
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler])
