"""Ways to cut a node off from the server, and to let it back."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import threading
from contextlib import suppress
from typing import Self

import pytest

from brim_services.embedded import HOST
from brim_services.supervise import Command
from faults.cluster import Cluster

SERVER_SIDE, NODE_SIDE = "10.213.87.1", "10.213.87.2"
"""Addresses of the two ends of the link between a namespace and this one."""


class Line:
    """A relay in the test's process: while it is cut, nothing passes, and no end of a connection is told."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
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

    def node(self, name: str) -> Command:
        """How to run a node at the other end."""
        return self._cluster.node(name, f"{HOST}:{self.port}")

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
        with here, suppress(OSError), socket.create_connection((HOST, self._cluster.port), 5.0) as there:
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


class Namespace:
    """A network namespace for the node, with interfaces of its own to this one; cut off, its own is down.

    Skips where the machine does not allow it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._name = f"brim{os.getpid()}"
        self._inside, self._outside = f"{self._name}i", f"{self._name}o"

    def __enter__(self) -> Self:
        if shutil.which("ip") is None or os.geteuid() != 0:
            pytest.skip("network namespaces need root and iproute2")
        try:
            self._ip("netns", "add", self._name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no network namespaces: {error.stderr.strip()}")
        self._ip("link", "add", self._outside, "type", "veth", "peer", "name", self._inside, "netns", self._name)
        self._ip("address", "add", f"{SERVER_SIDE}/30", "dev", self._outside)
        self._ip("-netns", self._name, "address", "add", f"{NODE_SIDE}/30", "dev", self._inside)
        self._ip("link", "set", self._outside, "up")
        self._ip("-netns", self._name, "link", "set", "lo", "up")
        self.mend()
        self._cluster.client.config_set("protected-mode", "no")
        self._cluster.client.config_set("bind", f"{HOST} {SERVER_SIDE}")
        return self

    def __exit__(self, *_: object) -> None:
        self._ip("link", "delete", self._outside)
        self._ip("netns", "delete", self._name)
        self._cluster.client.config_set("bind", HOST)

    def node(self, name: str) -> Command:
        """How to run a node in the namespace."""
        return self._cluster.node(name, f"{SERVER_SIDE}:{self._cluster.port}", ["ip", "netns", "exec", self._name])

    def cut(self) -> None:
        """Take its interface down."""
        self._ip("-netns", self._name, "link", "set", self._inside, "down")

    def mend(self) -> None:
        """Take it up."""
        self._ip("-netns", self._name, "link", "set", self._inside, "up")

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
