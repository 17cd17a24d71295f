"""A line between a node and the server that a test can cut: a relay of TCP connections in a thread of the test."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from typing import Self

from brim_services.embedded import HOST


class Line:
    """Connections to ``port`` go on to the server at ``to``; while it is cut, nothing passes and nothing is told."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._cut = threading.Event()
        self._closing = threading.Event()
        self._door = socket.create_server((HOST, 0))
        self._door.settimeout(0.2)
        self.port: int = self._door.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(5.0)
        self._door.close()

    def cut(self) -> None:
        """From now on packets are dropped, as by a network that is down."""
        self._cut.set()

    def mend(self) -> None:
        """What was on its way arrives; what comes new passes."""
        self._cut.clear()

    def _listen(self) -> None:
        while not self._closing.is_set():
            with suppress(TimeoutError):
                here, _ = self._door.accept()
                threading.Thread(target=self._relay, args=(here,), daemon=True).start()

    def _relay(self, here: socket.socket) -> None:
        with here, suppress(OSError), socket.create_connection((HOST, self._to), 5.0) as there:
            while not self._closing.is_set():
                for ready in select.select([here, there], [], [], 0.2)[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if not self._pass(there if ready is here else here, data):
                        return

    def _pass(self, to: socket.socket, data: bytes) -> bool:
        """Send it as soon as nothing is cut any more."""
        while self._cut.is_set():
            if self._closing.wait(0.05):
                return False
        to.sendall(data)
        return True
