"""Run by path as a small program of its own, so that nothing a supervisor started outlives it.

``launch PARENT ARGV…`` becomes ARGV, to be killed by the kernel when PARENT dies.
``watch`` reads ``+SESSION`` and ``-SESSION`` lines from standard input. At its end, which comes when
the supervisor is gone for whatever reason, it kills every process of the sessions still listed.

It imports the standard library only: it starts in about 20 ms and stays small.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

PR_SET_PDEATHSIG = 1


def launch(parent: int, argv: list[str]) -> None:
    """Replace this process by ``argv``, tied to the life of ``parent`` (exactly: of its starting thread)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the supervisor died while it started this process")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


def members(sessions: Iterable[int]) -> list[int]:
    """Living processes (zombies excluded) of the sessions, by `/proc`."""
    wanted = set(sessions)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                # After the command, which may itself hold spaces and parentheses:
                # state, ppid, pgrp, session, …
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in wanted and fields[0] not in (b"Z", b"X"):
            found.append(int(name))
    return found


def kill_sessions(sessions: Iterable[int], timeout_s: float = 10.0) -> list[int]:
    """SIGKILL every process of the sessions until none lives; returns those that would not go in time."""
    wanted = set(sessions)
    deadline = time.monotonic() + timeout_s
    while (alive := members(wanted)) and time.monotonic() < deadline:
        for pid in alive:
            _kill_member(pid, wanted)
        time.sleep(0.005)
    return alive


def _kill_member(pid: int, sessions: set[int]) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # The id may have been given to another process since it was listed; the handle pins it.
        if os.getsid(pid) in sessions:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def watch() -> None:
    """Kill what is left of the sessions announced on standard input when it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        change, session = line[0], int(line[1:])
        if change == "+":
            sessions.add(session)
        else:
            sessions.discard(session)
    kill_sessions(sessions)


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(int(sys.argv[2]), sys.argv[3:])
    else:
        watch()
