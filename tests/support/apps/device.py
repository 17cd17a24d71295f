"""An app whose tasks use a simulated device, for tests of agents and of the whole pipeline."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from celery import Celery, Task

import brim
from brim.gpu import simulated
from support.celery_app import configure

if os.environ.get("BRIM_TEST_NO_SETS") and "," in os.environ.get("BRIM_DEVICE", ""):
    raise SystemExit("this app does not start where it sees several devices")

app = configure(Celery("device", set_as_current=False))
brim.install(app)


@app.task(name="device.hold", bind=True, shared=False)
def hold(self: Task[Any, Any], *, mib: int = 500, until: str = "", seconds: float = 60.0) -> dict[str, Any]:
    """Hold memory on each device until the file ``until`` exists, or for some seconds; tells who ran it."""
    deadline = time.monotonic() + seconds
    with ExitStack() as held:
        for uuid in simulated.visible():
            held.enter_context(simulated.allocate(mib, uuid))
        while time.monotonic() < deadline and not (until and Path(until).exists()):
            time.sleep(0.02)
    return {"pid": os.getpid(), "device": os.environ["BRIM_DEVICE"], "attempt": self.request.brim["attempt"]}


@app.task(name="device.train", bind=True, shared=False)
def train(self: Task[Any, Any], *, mib: int = 500, until: str = "", seconds: float = 60.0) -> dict[str, Any]:
    """The same under a name that has a profile of its own."""
    held: dict[str, Any] = hold.run.__func__(self, mib=mib, until=until, seconds=seconds)
    return held


@app.task(name="device.creep", shared=False)
def creep(*, mib: int, until: str, step: int = 200, outside: bool = False) -> int:
    """Take memory in steps, ``outside`` of every framework's pool if so, and keep it until the file exists."""
    with simulated.hold(os.environ["BRIM_DEVICE"], 1) if outside else simulated.allocate(1) as block:
        for size in range(step, mib + 1, step):
            block.resize(size)
            time.sleep(0.1)
        while not Path(until).exists():
            time.sleep(0.02)
    return mib


@app.task(name="device.end_process", shared=False)
def end_process(*, code: int) -> None:
    """End the executor."""
    os._exit(code)


class DiesAfterItsResult(Task[Any, Any]):
    """Its executor is killed between its result and the end of its attempt."""

    def on_success(self, *_: Any) -> None:
        """Celery calls this when the result is in the backend."""
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="device.die_after_result", base=DiesAfterItsResult, shared=False)
def die_after_result() -> str:
    """The result is out, the attempt has not ended."""
    return "out"


class DeadlyOnce(dict[str, str]):
    """Kills the process that serializes it, unless the file ``marker`` exists."""

    def items(self) -> Any:
        """The JSON encoder asks for these."""
        marker = Path(self["marker"])
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().items()


@app.task(name="device.die_before_result", shared=False)
def die_before_result(*, marker: str) -> dict[str, str]:
    """The function is over, the result is not out."""
    return DeadlyOnce(marker=marker)
