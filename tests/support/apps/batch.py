"""A Celery app whose tasks are computed in batches."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery

import brim
from brim.gpu import simulated
from support.celery_app import configure

app = configure(Celery("batch", set_as_current=False))
brim.install(app, tasks=["*"])

LOG = os.environ.get("BRIM_TEST_BATCHES", "")


def note(**fields: Any) -> None:
    """Let the test know what happened here, a line each."""
    if LOG:
        with open(LOG, "a") as file:
            file.write(json.dumps({"pid": os.getpid(), **fields}) + "\n")


def load() -> str:
    """A model takes a gigabyte of the device."""
    simulated.allocate(1024)
    note(event="load")
    return "the model"


def noted(item: brim.Item) -> None:
    """The item has come to the executor."""
    note(event="staged", id=item.id)


def stage(item: brim.Item) -> str:
    """Upper case, unless the text cannot be staged."""
    noted(item)
    if item.kwargs.get("text") == "unstageable":
        raise ValueError("cannot be staged")
    time.sleep(item.kwargs.get("stage_s", 0.0))
    return str(item.kwargs.get("text", "")).upper()


def compute(items: Sequence[brim.Item]) -> None:
    """Take as long as the slowest item does, and until every file exists that one of them waits for."""
    deadline = time.monotonic() + 60.0
    time.sleep(max(float(item.kwargs.get("seconds", 0.0)) for item in items))
    files = [Path(item.kwargs["until"]) for item in items if "until" in item.kwargs]
    while time.monotonic() < deadline and not all(path.exists() for path in files):
        time.sleep(0.02)
    if files:
        time.sleep(0.1)  # the executor may be about to hear of what has just been staged


@app.task(name="embed", base=brim.BatchTask)
def embed(items: Sequence[brim.Item]) -> list[Any]:
    texts = [str(item.kwargs.get("text", "")) for item in items]
    note(event="batch", texts=texts)
    compute(items)
    for text in texts:
        if text.startswith("guilty"):
            raise ValueError(text)
    return [brim.Failed(KeyError(text)) if text.startswith("bad") else f"{text}!" for text in texts]


embed.load = load
embed.stage = noted


@app.task(name="staged", base=brim.BatchTask)
def staged(items: Sequence[brim.Item]) -> list[Any]:
    note(event="batch", texts=[item.staged for item in items], task="staged")
    compute(items)
    return [item.staged for item in items]


staged.stage = stage


@app.task(name="hungry", base=brim.BatchTask)
def hungry(items: Sequence[brim.Item]) -> list[Any]:
    """Takes 1500 MiB of the device for each item while it computes."""
    note(event="batch", texts=[str(item.kwargs["text"]) for item in items], task="hungry")
    held = simulated.allocate(1500 * len(items))
    held.free()
    compute(items)
    return [len(items)] * len(items)


hungry.stage = noted


@app.task(name="bulk", base=brim.BatchTask)
def bulk(items: Sequence[brim.Item]) -> list[int]:
    """One in a hundred is guilty."""
    numbers = [int(item.kwargs["number"]) for item in items]
    for number in numbers:
        if number % 100 == 7:
            raise ValueError(f"{number} is guilty")
    return numbers


@app.task(name="retrying", base=brim.BatchTask, autoretry_for=(KeyError,), max_retries=2, default_retry_delay=0)
def retrying(items: Sequence[brim.Item]) -> list[Any]:
    """Every item fails once."""
    return [_at_first(item) for item in items]


def _at_first(item: brim.Item) -> Any:
    marker = f"{LOG}.{item.id}"
    if os.path.exists(marker):
        return "second time"
    open(marker, "w").close()
    return brim.Failed(KeyError("first time"))


@app.task(name="plain")
def plain(mib: int, seconds: float = 0.0) -> str:
    held = simulated.allocate(mib)
    time.sleep(seconds)
    held.free()
    return "done"


@app.task(name="add")
def add(x: int, y: int) -> int:
    return x + y
