"""Celery's revokes where they would be lost: of tasks that no worker holds yet.

`app.control.revoke` is a broadcast that workers remember in their memory. A task that waits in intake's queue, in
overflow or for its eta is in no worker, so intake listens as well: it cancels what brim knows, and remembers the
ids for what comes later, which is cancelled at admission.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from kombu.messaging import Consumer

from brim.settings import Settings
from brim.store import Store
from brim.store.intake import REVOKED

from .answers import answering_app

log = logging.getLogger("brim.intake")

LOOK_S = 1.0


class Revokes(threading.Thread):
    """Listens until ``stop``, through outages of the broker; any number of replicas may do so."""

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        super().__init__(name="revokes", daemon=True)
        self._app = answering_app(settings)
        self._store = Store.of(settings)
        self._stopping = stop

    def run(self) -> None:
        """Listen; what was broadcast while the broker was away reaches nobody, as it is with Celery."""
        while not self._stopping.is_set():
            try:
                self._listen()
            except Exception as error:  # the service itself says that the broker is away
                log.debug("not listening for revokes: %s", error)
                self._stopping.wait(LOOK_S)

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            queue = self._app.control.mailbox.get_queue(f"brim-intake@{socket.gethostname()}")
            with Consumer(connection, [queue], callbacks=[self._hear], accept=["json"], no_ack=True):
                while not self._stopping.is_set():
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=LOOK_S)

    def _hear(self, body: Any, _: Any) -> None:
        if not isinstance(body, dict) or body.get("method") not in ("revoke", "terminate") or body.get("destination"):
            return
        arguments = body.get("arguments") or {}
        ids = arguments.get("task_id") or ()
        ids = [ids] if isinstance(ids, str) else [str(task_id) for task_id in ids]
        self._store.remember_revoked(ids)
        terminate = bool(arguments.get("terminate")) or body["method"] == "terminate"
        cancel(self._store, ids, running=terminate)


def cancel(store: Store, ids: Iterable[str], *, running: bool) -> None:
    """Cancel what brim knows of these ids; a ``running`` one is left to its worker, but not placed again."""
    for task_id in ids:
        answer = store.cancel(task_id, REVOKED, running=running)
        log.debug("%s: revoked: %s", task_id, answer)
