"""Naming processes so that a reused pid is never mistaken for the process that had it before."""

from __future__ import annotations

import os


def proc_id(pid: int | None = None) -> str | None:
    """The name ``"<pid>.<start_ticks>"`` of a process (default: the calling one), or None when it is gone.

    ``start_ticks`` is field 22 of ``/proc/<pid>/stat``: clock ticks from boot to the start of the process.
    A zombie counts as gone: its memory, on the host and on every device, has been given back.
    """
    pid = os.getpid() if pid is None else pid
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    return None if state in {b"Z", b"X"} else f"{pid}.{int(fields[18])}"


def is_alive(proc: str) -> bool:
    """Whether the process of that name still runs."""
    return proc_id(int(proc.partition(".")[0])) == proc


def pids_are_the_hosts() -> bool:
    """Whether this process's pids are those of the host, hence those that a driver reports.

    Only the host's pid namespace has this inode number (``PROC_PID_INIT_INO`` of Linux); a container has another
    unless it shares the host's pids (``pid: host``).
    """
    try:
        return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
    except OSError:
        return False
