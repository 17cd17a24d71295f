"""The app of bench_batching: one model, simulated or measured, computed in batches and one by one."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from celery import Celery

import brim
from brim.core import batching
from brim.core.batching import Claim, Instruction, Staged

PREFIX = os.environ["BENCH_PREFIX"]
NOTES = Path(os.environ["BENCH_NOTES"])
BASE_S, EACH_S = 0.100, 0.002
"""The simulated model's cost: 100 ms for a batch and 2 ms for each item in it."""
SIZE, TIMER_S, TICK_S = 32, 0.5, 0.005
"""The fixed batcher's: so many items, or so long after the first."""
WIDTH, LAYERS, PASSES = 2048, 4, 16
"""The measured model: square matrices, read as often for a batch as for one item."""
CALIBRATION = 7
"""How many batches of a size are timed, after one to warm up."""

app = Celery("bench", broker=os.environ["BENCH_BROKER"], backend=os.environ["BENCH_BROKER"])
app.conf.broker_transport_options = {"global_keyprefix": PREFIX}
app.conf.result_backend_transport_options = {"global_keyprefix": PREFIX}


def spent(model: str, count: int, weights: Sequence[Any]) -> None:
    """Compute a batch of so many items, and note from when to when."""
    began = time.monotonic()
    if model == "simulated":
        time.sleep(BASE_S + EACH_S * count)
    else:
        values = np.ones((count, WIDTH), dtype=np.float32)
        for layer in [*weights] * PASSES:
            values = np.tanh(values @ layer)
    with (NOTES / str(os.getpid())).open("a") as file:
        file.write(f"{model} {began:.6f} {time.monotonic():.6f} {count}\n")


def load() -> list[Any]:
    """The measured model's weights."""
    random = np.random.default_rng(1)
    return [random.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(WIDTH**0.5) for _ in range(LAYERS)]


def calibrate() -> None:
    """Print what the measured model takes for one item and for a full batch, in seconds, as JSON."""
    weights, found = load(), list[float]()
    for count in (1, SIZE):
        spent("calibration", count, weights)
        began = time.monotonic()
        for _ in range(CALIBRATION):
            spent("calibration", count, weights)
        found.append((time.monotonic() - began) / CALIBRATION)
    print(json.dumps(found))


@app.task(name="bench.simulated", base=brim.BatchTask)
def simulated(items: Sequence[brim.Item]) -> list[None]:
    """The simulated model, in batches."""
    spent("simulated", len(items), ())
    return [None] * len(items)


@app.task(name="bench.numpy", base=brim.BatchTask)
def numpy(items: Sequence[brim.Item]) -> list[None]:
    """The measured model, in batches."""
    spent("numpy", len(items), numpy.loaded)
    return [None] * len(items)


numpy.load = load
_alone: list[Any] = []


@app.task(name="bench.alone")
def alone(model: str) -> None:
    """The same, one item at a time."""
    if model == "numpy" and not _alone:
        _alone.extend(load())
    spent(model, 1, _alone)


class FixedBatcher(batching.ExecutorMachine):
    """The same executor, but that a batch begins only when it is full, or its first item has waited for the timer."""

    _since_s: float | None = None

    def _seal(self) -> list[Instruction]:
        now_s = time.monotonic()
        if not self._staged:
            self._since_s = None
            return []
        if self._since_s is None:
            self._since_s = now_s
        if len(self._staged) < SIZE and now_s - self._since_s < TIMER_S:
            return []
        self._since_s = None
        sealed = super()._seal()
        assert all(isinstance(instruction, Claim) for instruction in sealed)
        return sealed


def use_fixed_batcher() -> None:
    """Have this process's model executor wait as a fixed batcher does."""
    from brim.celery import model_executor, plugin

    class Ticking(model_executor.ModelExecutor):
        """It looks at its timer all the time: the machine itself has no clock."""

        def begin(self) -> None:
            super().begin()
            threading.Thread(target=self._tick, daemon=True).start()

        def _tick(self) -> None:
            while True:
                time.sleep(TICK_S)
                self._feed(Staged(()))

    model_executor.ExecutorMachine = FixedBatcher  # type: ignore[misc]
    plugin.ModelExecutor = Ticking  # type: ignore[misc]


if PREFIX != "plain.":
    brim.install(app)
    if PREFIX == "fixed.":
        use_fixed_batcher()
