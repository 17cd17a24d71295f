"""The Celery app of the fault tests: tasks that take memory and time, and misbehave in every way that is known."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis
from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded

import brim
from brim.gpu import simulated
from faults.sabotage import apply_sabotage
from support.celery_app import configure

apply_sabotage()
app = configure(Celery("storm", set_as_current=False))
app.conf.result_backend_transport_options["retry_policy"] = {"max_retries": 3, "interval_step": 0.1}
brim.install(app)


@app.task(name="storm.work", bind=True, max_retries=5, shared=False)
def work(self: Task[Any, Any], *, mib: int, seconds: float, retries: int = 0, fails: bool = False) -> int:
    """Take memory of each device in two steps, hold it for some time; then be retried so often, and fail or return."""
    share = random.Random(self.request.id).uniform(0.3, 1.0)
    with ExitStack() as held:
        memories = [held.enter_context(simulated.allocate(int(mib * share / 2), uuid)) for uuid in simulated.visible()]
        time.sleep(seconds / 2)
        for memory in memories:
            memory.resize(int(mib * share))
        time.sleep(seconds / 2)
    if self.request.retries < retries:
        raise self.retry(countdown=random.choice([0, 1]))
    if fails:
        raise ValueError("it was told to fail")
    return mib


def load() -> None:
    """The batched task's model takes its memory for as long as its process lives."""
    simulated.allocate(400)


@app.task(
    name="storm.embed",
    base=brim.BatchTask,
    autoretry_for=(KeyError,),
    max_retries=5,
    default_retry_delay=0,
    shared=False,
)
def embed(items: Sequence[brim.Item]) -> list[Any]:
    """Hold memory for each item, as long as the slowest takes; some fail, alone or with their whole batch."""
    with simulated.allocate(50 * len(items)):
        time.sleep(max(float(item.kwargs["seconds"]) for item in items))
    answers: list[Any] = []
    for item in items:
        number, fault = int(item.kwargs["number"]), str(item.kwargs["fault"])
        if fault == "raises":
            raise ValueError(f"{number} makes its batch raise")
        if fault == "retried" and random.random() < 0.7:
            answers.append(brim.Failed(KeyError(number)))
        else:
            answers.append(brim.Failed(ValueError(number)) if fault == "fails" else number)
    return answers


embed.load = load


@app.task(name="storm.hold", bind=True, shared=False)
def hold(self: Task[Any, Any], *, mib: int, go: str, seconds: float = 300.0) -> str:
    """Hold memory until the file ``go`` exists; each attempt leaves a line in ``<go>.log``, with its node's time."""
    deadline = time.monotonic() + seconds
    with open(f"{go}.log", "a", encoding="ascii") as log:
        log.write(f"{self.request.id} {time.time()}\n")
    with simulated.allocate(mib):
        while time.monotonic() < deadline and not Path(go).exists():
            time.sleep(0.02)
    return "held"


@app.task(name="storm.grow", shared=False)
def grow(*, mib: int, to_mib: int, go: str = "") -> int:
    """Take ``mib``, and then so much altogether."""
    with simulated.allocate(mib) as memory:
        memory.resize(to_mib)
        while go and not Path(go).exists():
            time.sleep(0.02)
    return to_mib


@app.task(name="storm.grow_later", shared=False)
def grow_later(*, mib: int, go: str) -> int:
    """Take a little; take what was reserved once the file ``go`` exists."""
    with simulated.allocate(100) as memory:
        while not Path(go).exists():
            time.sleep(0.02)
        memory.resize(mib)
    return mib


@app.task(name="storm.backend_away", bind=True, shared=False)
def backend_away(self: Task[Any, Any], *, mib: int, tries: int) -> int:
    """The result backend refuses so many writes from now on."""
    write, left = self.backend._set, tries

    def refuse(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            self.backend._set = write
            return write(*arguments)
        raise redis.ConnectionError("the result backend is away")

    self.backend._set = refuse
    return mib


@app.task(name="storm.raise", shared=False)
def raise_(*, mib: int) -> None:
    """Fail."""
    raise ValueError(f"with {mib} MiB")


@app.task(name="storm.unserialisable", shared=False)
def unserialisable(*, mib: int) -> Any:
    """Return what no serializer takes."""
    return object()


@app.task(name="storm.exit", shared=False)
def exit_(*, mib: int) -> None:
    """End the executor."""
    os._exit(3)


@app.task(name="storm.leak", shared=False)
def leak(*, mib: int, child_mib: int, go: str) -> int:
    """Leave a child process behind that holds memory until the file ``go`` exists."""
    code = (
        "import sys, time, pathlib; from brim.gpu import simulated\n"
        "with simulated.allocate(int(sys.argv[1])):\n"
        "    while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(child_mib), go], start_new_session=True).pid


@app.task(name="storm.patient", shared=False)
def patient(*, mib: int, seconds: float) -> str:
    """Say so if a soft time limit ends the wait."""
    try:
        time.sleep(seconds)
    except SoftTimeLimitExceeded:
        return "stopped in time"
    return "slept"


FOREIGN = {
    "torch": ("torch", "OutOfMemoryError", RuntimeError, "CUDA out of memory. Tried to allocate 20.00 MiB"),
    "cupy": ("cupy.cuda.memory", "OutOfMemoryError", MemoryError, "Out of memory allocating 1,024 bytes"),
    "jax": ("jaxlib.xla_extension", "XlaRuntimeError", RuntimeError, "RESOURCE_EXHAUSTED: Out of memory"),
    "tensorflow": ("tensorflow.python.framework.errors_impl", "ResourceExhaustedError", Exception, "OOM"),
}


@app.task(name="storm.foreign", bind=True, shared=False)
def foreign(self: Task[Any, Any], *, mib: int, framework: str, enough_mib: int) -> int:
    """Run out of memory as a framework says it, until enough is reserved; what was reserved then."""
    reserved = int(self.request.brim["vram_mib"])
    if reserved < enough_mib:
        module, name, base, text = FOREIGN[framework]
        raise type(name, (base,), {"__module__": module})(text)
    return reserved
