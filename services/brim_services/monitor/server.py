"""`brim monitor`: serves until it is told to stop."""

from __future__ import annotations

import logging
from types import FrameType

import uvicorn

from brim.celery.answers import answering_app
from brim.settings import Settings
from brim.store import Store

from .access import LOOPBACK
from .app import build
from .feed import Feed

log = logging.getLogger("brim.monitor")

MOST_CONNECTIONS = 1000
GRACE_S = 3
"""How long requests that are under way may take when it is told to stop."""


def address(settings: Settings) -> str:
    """Where to listen: on this machine only while there are no tokens."""
    monitor = settings.monitor
    if monitor.tokens or monitor.host in LOOPBACK:
        return monitor.host
    log.warning(
        "monitor.host is %s, but there are no monitor.tokens: listening on 127.0.0.1 only. `brim token` makes a token",
        monitor.host,
    )
    return "127.0.0.1"


class Server(uvicorn.Server):
    """Ends event streams when it is told to stop, instead of waiting for them."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT."""
        self._feed.stop()
        super().handle_exit(sig, frame)


def run(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. It starts without Redis, and says on the page that it is away."""
    store = Store.of(settings)
    app = build(store, settings, answering_app(settings))
    host = address(settings)
    server = Server(
        uvicorn.Config(
            app,
            host=host,
            port=settings.monitor.port,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=GRACE_S,
        ),
        app.state.feed,
    )
    who = "whoever has a token" if settings.monitor.tokens else "this machine only, since there are no tokens"
    log.info("monitor: http://%s:%d for %s", host, settings.monitor.port, who)
    server.run()
