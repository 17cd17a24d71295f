"""Taking a node over from whoever had it before: an agent that lives is not disturbed, a dead one's affairs are
settled.

An agent's boot id says which process of which machine it is, so that its successor on the same machine knows at
once whether it lives; elsewhere only its renewals tell.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from brim.core.model import AttemptView, Reason
from brim.gpu.process import is_alive, proc_id
from brim.settings import ConfigurationError, Problem
from brim.store import Store
from brim.store.types import ExecutorView, NodeView
from brim_services.supervise import wait_until

WATCH_S = 3.0
"""A living agent renews at least once a second; this long without a renewal, and it does not live."""
KILL_S = 10.0

Settle = Callable[[AttemptView, Reason], None]
Bury = Callable[[ExecutorView, Reason], None]


@dataclass(frozen=True, slots=True)
class Boot:
    """Which agent process this is: "<random>@<machine>:<pid>.<start ticks>"."""

    token: str
    machine: str
    proc: str

    @classmethod
    def mine(cls) -> Boot:
        """A new boot of the calling process."""
        return cls(secrets.token_hex(8), _machine(), proc_id() or "")

    @classmethod
    def parse(cls, text: str) -> Boot:
        """The boot that wrote itself like this; of no machine if it is none."""
        token, _, place = text.partition("@")
        machine, _, proc = place.partition(":")
        return cls(token, machine, proc)

    def __str__(self) -> str:
        return f"{self.token}@{self.machine}:{self.proc}"

    @property
    def is_here(self) -> bool:
        """Whether its processes are, or were, among those that this process sees."""
        return self.machine == _machine()


def take_over(
    store: Store, node: str, uuids: Collection[str], lease_timeout_s: float, settle: Settle, bury: Bury
) -> None:
    """Clear the table of what earlier agents of this node, or of its devices, have left there.

    Their attempts go to ``settle``, their model executors to ``bury``; their processes are ended where they are this
    machine's. Raises `ConfigurationError` if one of those agents lives.
    """
    for view in store.nodes():
        shared = sorted(set(view.devices) & set(uuids))
        if view.node.name != node and not shared:
            continue
        if _lives(store, view, lease_timeout_s):
            what = f"node {node}" if view.node.name == node else f"device {shared[0]} (as node {view.node.name})"
            reason = f"another agent serves {what} and is alive: {_where(view)}"
            raise ConfigurationError(Problem("agent", "node", reason))
        _clear(store, view, settle, bury)


def _clear(store: Store, view: NodeView, settle: Settle, bury: Bury) -> None:
    """End what is left of a dead agent's boot and take its node out of the table."""
    name, boot = view.node.name, Boot.parse(view.boot)
    store.set_device_state(name, view.boot, view.devices, "starting")  # nothing is placed there from now on
    attempts, processes = store.books(view.devices)
    if boot.is_here:
        _end([proc for book in processes.values() for proc in book])
    reason = Reason("agent_died", f"the agent of node {name} ended, and its executors with it")
    for attempt in attempts:
        settle(attempt, reason)
    for executor in store.executors_on(view.devices):
        bury(executor, reason)
    store.leave(name, view.boot)


def _lives(store: Store, view: NodeView, lease_timeout_s: float) -> bool:
    boot = Boot.parse(view.boot)
    if boot.is_here:
        return boot.proc != proc_id() and is_alive(boot.proc)
    if view.state == "lost" or store.server_ms() / 1000 - view.renewed_s > lease_timeout_s:
        return False

    def renewed() -> bool:
        return any(
            other.node.name == view.node.name and other.boot == view.boot and other.renewed_s > view.renewed_s
            for other in store.nodes()
        )

    try:
        wait_until(renewed, WATCH_S, "the other agent renewed", interval_s=0.2)
    except TimeoutError:
        return False
    return True


def _where(view: NodeView) -> str:
    boot = Boot.parse(view.boot)
    if boot.is_here:
        return f"process {boot.proc.partition('.')[0]} of this machine"
    return "it renews its lease from another machine or container; choose another name in agent.node"


def _end(procs: Collection[str]) -> None:
    """SIGKILL what still lives of a dead agent's executors, and see it gone."""
    for proc in procs:
        pid = int(proc.partition(".")[0])
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                if is_alive(proc):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
    wait_until(lambda: not any(map(is_alive, procs)), KILL_S, "the executors of the agent before are gone")


def _machine() -> str:
    """This boot of this machine, and the pid namespace in it."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        names = file.read() + os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(names.encode()).hexdigest()[:16]
