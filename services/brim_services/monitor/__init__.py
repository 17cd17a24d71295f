"""The monitor: the page, the HTTP API, and metrics of the whole cluster, in one process (`brim monitor`)."""

from .server import run

__all__ = ["run"]
