"""Watching other processes' children, with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from brim.gpu.process import proc_id
from brim_services.agent.watch import Watch, ending
from support.waiting import wait_until

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
if sys.argv[2] == "reaps":
    child.wait()
sys.stdin.read()
"""


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


def grandchild(code: str, parent: str) -> Iterator[str]:
    command = [sys.executable, "-c", PARENT, code, parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        proc = proc_id(int(process.stdout.readline()))
        assert proc is not None
        yield proc
        process.kill()


@pytest.mark.parametrize("parent", ["reaps", "leaves a zombie"])
def test_a_killed_grandchild_is_seen_at_once_with_its_signal(watch: Watch, parent: str) -> None:
    for proc in grandchild("import time; time.sleep(60)", parent):
        watch.add("GPU-a", proc)
        watch.add("GPU-a", proc)
        assert watch.living("GPU-a") == {proc}
        assert watch.living("GPU-b") == frozenset()
        assert not watch.wait(0.0)

        watch.kill(proc)

        assert watch.wait(10.0)
        assert watch.living("GPU-a") == frozenset()
        assert watch.endings == {proc: "was killed by SIGKILL"}
        watch.add("GPU-a", proc)
        watch.forget(proc)
        assert (watch.living("GPU-a"), watch.endings) == (frozenset(), {})


def test_an_exit_code_is_told(watch: Watch) -> None:
    for proc in grandchild("import sys, time; time.sleep(0.5); sys.exit(3)", "leaves a zombie"):
        watch.add("GPU-a", proc)
        wait_until(lambda: watch.wait(0.1), what="it ended")
        assert watch.endings == {proc: "exited with code 3"}


def test_a_process_that_is_gone_is_not_watched(watch: Watch) -> None:
    watch.add("GPU-a", "1.1")
    watch.add("GPU-a", "999999999.1")
    assert watch.living("GPU-a") == frozenset()


def test_endings_are_put_into_words() -> None:
    assert ending(None) == "is gone"
    assert ending(3 << 8) == "exited with code 3"
    assert ending(int(signal.SIGSEGV)) == "was killed by SIGSEGV"
    assert ending(50) == "was killed by signal 50"
