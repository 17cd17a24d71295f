"""Watching processes that are not our children: a pidfd for each, and how it ended."""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from brim.gpu.process import is_alive

# ioctl PIDFD_GET_INFO (Linux 6.13; the exit status since 6.15) on struct pidfd_info in its first version.
_INFO = struct.Struct("=Q52xi")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_EXIT = 1 << 3


class Readable(Protocol):
    """Something else to wait for."""

    def fileno(self) -> int:
        """Its descriptor."""


@dataclass(frozen=True, slots=True)
class _Watched:
    worker: str
    proc: str
    handle: int


class Watch:
    """Processes by name ("<pid>.<start ticks>"), each of a worker, from `add` until they end."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._living: dict[str, _Watched] = {}
        self.endings: dict[str, str] = {}
        """How processes ended: "was killed by SIGKILL"; kept until `forget`."""

    def also(self, source: Readable) -> None:
        """Have `wait` return when this is readable, too."""
        self._selector.register(source.fileno(), selectors.EVENT_READ)

    def add(self, worker: str, proc: str) -> None:
        """Watch a process, unless it is watched already or gone."""
        if proc in self._living or proc in self.endings:
            return
        pid = int(proc.partition(".")[0])
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:  # any other error must not pass for its death
            return
        if not is_alive(proc):  # only now: the handle may be that of a later process of this pid
            os.close(handle)
            return
        self._living[proc] = _Watched(worker, proc, handle)
        self._selector.register(handle, selectors.EVENT_READ, proc)

    def living(self, worker: str) -> frozenset[str]:
        """The watched processes of a worker that have not ended."""
        return frozenset(watched.proc for watched in self._living.values() if watched.worker == worker)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a process ends or another source is readable; whether that was so."""
        ready = self._selector.select(max(0.0, timeout_s))
        for key, _ in ready:
            if key.data is not None:
                self._bury(key.data)
        return bool(ready)

    def kill(self, proc: str) -> None:
        """SIGKILL to a watched process."""
        watched = self._living.get(proc)
        if watched is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(watched.handle, signal.SIGKILL)

    def forget(self, *procs: str) -> None:
        """Drop what is known about ended processes."""
        for proc in procs:
            self.endings.pop(proc, None)

    def close(self) -> None:
        """Stop watching everything."""
        for watched in self._living.values():
            os.close(watched.handle)
        self._living.clear()
        self._selector.close()

    def _bury(self, proc: str) -> None:
        watched = self._living.pop(proc)
        self._selector.unregister(watched.handle)
        self.endings[proc] = ending(_wait_status(watched.handle, proc))
        os.close(watched.handle)


def ending(status: int | None) -> str:
    """How a process ended, as the end of a sentence; ``status`` is a wait status, None where it is unknown."""
    if status is None:
        return "is gone"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _wait_status(handle: int, proc: str) -> int | None:
    """The wait status of an ended process: from its handle if it has been reaped, else from the zombie."""
    buffer = bytearray(_INFO.pack(_EXIT, 0))
    with suppress(OSError):  # an older kernel
        fcntl.ioctl(handle, _GET_INFO, buffer)
        mask, status = _INFO.unpack(buffer)
        if mask & _EXIT:
            return int(status)
    pid, _, started = proc.partition(".")
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[19] == started.encode() else None
