"""Child processes that end with their supervisor, are restarted when they die, and are stopped in order.

Each child gets a session of its own (a terminal's Ctrl-C reaches the supervisor only), a log file, and a
parent-death signal. What a child leaves behind in its session is killed as soon as the child is gone; when
the supervisor itself is killed, its keeper (see `brim_services.keeper`) does the same.

Nothing happens behind the owner's back: the owner's loop calls `Supervisor.poll`, or waits by
`Supervisor.wait_until`, which does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

from brim_services import keeper

KEEPER = [sys.executable, "-I", "-S", keeper.__file__]


def wait_until(condition: Callable[[], object], timeout_s: float, what: str, interval_s: float = 0.02) -> None:
    """Return as soon as ``condition()`` is true; `TimeoutError` names ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(interval_s)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses before restarts: ``first_s``, doubled up to ``longest_s``; anew after a life of ``steady_s``."""

    first_s: float = 0.5
    longest_s: float = 30.0
    steady_s: float = 30.0

    def pause_s(self, failures: int) -> float:
        """The pause after this many deaths in a row, counted from 1."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 32))


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. ``variables()`` is asked at every start and adds to ``environment``.

    ``restart`` is how deaths are answered; None: the child stays down. ``grace_s`` is how long it may take
    to end by itself after SIGTERM. Children of a higher ``stage`` rely on those of lower ones, which are
    stopped after them.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    variables: Callable[[], Mapping[str, str]] = dict
    directory: Path | None = None
    restart: Backoff | None = None
    grace_s: float = 10.0
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Death:
    """A child that ended while nobody waited for it: negative ``code`` is a signal's number."""

    name: str
    pid: int
    code: int
    restart_in_s: float | None

    def __str__(self) -> str:
        how = f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"
        then = "" if self.restart_in_s is None else f", starts again in {self.restart_in_s:g} s"
        return f"{self.name} (pid {self.pid}) ended: {how}{then}"


class Child:
    """One command and the process that runs it now, if any."""

    def __init__(self, command: Command, log: Path) -> None:
        self.command = command
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.starts = 0
        self.failures = 0
        self.restart_at: float | None = None
        self.asked = False
        """Whether it was asked to end, and is not to start again."""

    @property
    def pid(self) -> int | None:
        """Process id while it runs; also the id of its session and process group."""
        return self.process.pid if self.process else None

    def last_lines(self, count: int = 20) -> str:
        """The end of its log, for an error message."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""


class Supervisor:
    """Starts, watches, restarts and stops children; a context manager that stops them all at its end.

    The parent-death signal follows the thread that starts a process, so one thread does it all: the one that
    made the supervisor, and it must live as long.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.children: dict[str, Child] = {}
        self._thread = threading.get_ident()
        self._keeper: subprocess.Popen[bytes] | None = None
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, command: Command) -> Child:
        """Run ``command``; its output is appended to ``<logs>/<name>.log``."""
        known = self.children.get(command.name)
        if known is not None and known.process is not None:
            raise ValueError(f"{command.name} runs already (pid {known.pid})")
        child = Child(command, self.logs / f"{command.name}.log")
        self.children[command.name] = child
        self._run(child)
        return child

    def poll(self) -> list[Death]:
        """Reap the dead and what they left behind, restart what is due; tells the deaths since last time."""
        self._same_thread()
        now = time.monotonic()
        deaths = []
        if self._keeper is not None and self._keeper.poll() is not None:
            self._replace_keeper()
        for child in list(self.children.values()):
            if child.process is not None and _ended(child.process.pid):
                deaths.append(self._bury(child, now))
            if child.process is None and child.restart_at is not None and now >= child.restart_at:
                self._run(child)
        return deaths

    def wait_until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """As the function of that name, polling the children meanwhile; one that dies ends the wait: `ChildDied`."""

        def ready() -> bool:
            for death in self.poll():
                raise ChildDied(death, self.children[death.name].last_lines())
            return bool(condition())

        wait_until(ready, timeout_s, what)

    def stop(self, *names: str) -> None:
        """Stop the named children, or all: highest stage first, those of one stage together.

        Each gets SIGTERM, and SIGKILL after its grace time.
        """
        self._same_thread()
        chosen = [self.children[name] for name in names or self.children]
        for child in chosen:
            child.restart_at = None
        for stage in sorted({child.command.stage for child in chosen}, reverse=True):
            self._stop_together([child for child in chosen if child.command.stage == stage])
        if not names and self._keeper is not None:
            self._dismiss_keeper(self._keeper)
            self._keeper = None

    def ask_to_end(self, name: str) -> None:
        """SIGTERM to a child, without waiting; it does not start again, and `poll` tells when it has ended."""
        self._same_thread()
        child = self.children[name]
        child.asked, child.restart_at = True, None
        if child.process is not None:
            os.kill(child.process.pid, signal.SIGTERM)

    def forget(self, name: str) -> None:
        """Drop a child that does not run; it does not start again."""
        if self.children[name].process is not None:
            raise ValueError(f"{name} runs (pid {self.children[name].pid})")
        del self.children[name]

    def _stop_together(self, children: Sequence[Child]) -> None:
        running = [(child, child.process.pid) for child in children if child.process is not None]
        for _, pid in running:
            os.kill(pid, signal.SIGTERM)  # `Popen.terminate` would reap one that has just died, and free its id
        asked_at = time.monotonic()
        for child, pid in running:
            left_s = asked_at + child.command.grace_s - time.monotonic()
            with suppress(TimeoutError):
                wait_until(partial(_ended, pid), left_s, "ended by itself")
            self._forget(child)

    def _run(self, child: Child) -> None:
        self._same_thread()
        command = child.command
        if self._keeper is None:
            self._replace_keeper()
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                [*KEEPER, "launch", str(os.getpid()), *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=command.directory,
                env={**os.environ, **command.environment, **command.variables()},
                start_new_session=True,
            )
        child.started_at = time.monotonic()
        child.starts += 1
        child.restart_at = None
        self._tell_keeper(f"+{child.process.pid}")

    def _bury(self, child: Child, now: float) -> Death:
        assert child.process
        pid, restart = child.process.pid, child.command.restart
        code = self._forget(child)
        pause_s = None
        if restart is not None and not child.asked:
            steady = now - child.started_at >= restart.steady_s
            child.failures = 1 if steady else child.failures + 1
            pause_s = restart.pause_s(child.failures)
            child.restart_at = now + pause_s
        return Death(child.command.name, pid, code, pause_s)

    def _forget(self, child: Child) -> int:
        """Kill what remains of a child's session, and only then reap the child, which frees the id."""
        assert child.process
        session = child.process.pid
        keeper.kill_sessions([session])
        code = child.process.wait()
        child.process = None
        self._tell_keeper(f"-{session}")
        return code

    def _replace_keeper(self) -> None:
        if self._keeper is not None:
            self._dismiss_keeper(self._keeper)
        self._keeper = subprocess.Popen(
            [*KEEPER, "watch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        for child in self.children.values():
            if child.process is not None:
                self._tell_keeper(f"+{child.process.pid}")

    def _tell_keeper(self, line: str) -> None:
        assert self._keeper
        assert self._keeper.stdin
        try:
            self._keeper.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            self._replace_keeper()

    @staticmethod
    def _dismiss_keeper(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        process.stdin.close()
        process.wait()

    def _same_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a supervisor belongs to the thread that made it: its children die with that")


def _ended(pid: int) -> bool:
    """Whether our child has ended; it stays a zombie, so that its id is not given away yet."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class ChildDied(RuntimeError):
    """A child that was waited for ended instead."""

    def __init__(self, death: Death, log: str) -> None:
        super().__init__(f"{death}\n{log}".rstrip())
        self.death = death


@contextmanager
def termination_requested() -> Iterator[Callable[[], bool]]:
    """SIGINT, SIGTERM and SIGHUP set a flag instead of ending the process; the yielded function tells it."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
