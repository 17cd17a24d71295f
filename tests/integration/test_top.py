"""`brim top` through a pseudo-terminal of 80 columns: what it shows, sorting, filtering, and leaving."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pyte
import pytest
import redis

from brim.core.model import Reason
from support.cluster import FakeCluster
from support.waiting import wait_until


class Terminal:
    """A program in a pseudo-terminal, and the screen that it has drawn."""

    def __init__(self, argv: list[str], environment: dict[str, str], columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._main, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            argv, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True
        )
        os.close(child)

    def text(self) -> str:
        """The screen as it is now."""
        while select.select([self._main], [], [], 0.02)[0]:
            try:
                self._stream.feed(os.read(self._main, 65536))
            except OSError:
                break
        return "\n".join(self.screen.display)

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal(valkey_url: str, namespace: str) -> Iterator[Terminal]:
    """`brim top` on a cluster of two GPUs: a task runs on the second, another waits."""
    with redis.Redis.from_url(valkey_url) as client:
        cluster = FakeCluster(client, namespace)
        cluster.run("GPU-000-1", vram_mib=9344)
        waits = cluster.admit("vision.caption", 20_000)
        cluster.store.note_waits(cluster.epoch, {waits: Reason("memory", "too little memory")})
        cluster.report()
        environment = {
            **os.environ,
            "BRIM_REDIS__URL": valkey_url,
            "BRIM_BROKER__GLOBAL_KEYPREFIX": namespace,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TERM": "xterm-256color",
        }
        shown = Terminal([sys.executable, "-m", "brim_services.cli", "top"], environment)
        yield shown
        shown.close()


def test_it_shows_sorts_filters_and_quits(terminal: Terminal) -> None:
    def shows(*parts: str) -> None:
        try:
            wait_until(lambda: all(part in terminal.text() for part in parts), what=str(parts), timeout_s=60)
        except AssertionError as error:
            raise AssertionError(f"{error} in:\n{terminal.text()}") from None

    def idle_first() -> bool:
        drawn = terminal.text()
        return drawn.index("0/4") < drawn.index("1/4")

    shows("0/4", "1/4", "9.1/24.0", "segment", "vision.caption", "too little memory")
    shows("running 1", "waiting 1", "Quit")
    assert idle_first()

    terminal.press("ss")
    shows("sorted by taken")
    wait_until(lambda: not idle_first(), what="the fullest GPU comes first")

    terminal.press("/")
    shows("name, task, state")
    terminal.press("segment")
    wait_until(lambda: "0/4" not in terminal.text(), what="only the GPU with that task is left")
    shows("1/4")
    terminal.press("\x1b")
    shows("0/4", "1/4")

    terminal.press("q")
    wait_until(lambda: terminal.process.poll() is not None, what="q quits")
    assert terminal.process.returncode == 0


def test_without_redis_it_says_so_and_takes_no_screen() -> None:
    environment = {
        **os.environ,
        "BRIM_REDIS__URL": "redis://127.0.0.1:1/0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "brim_services.cli", "top"], env=environment, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert "Redis at redis://127.0.0.1:1/0" in done.stderr
