"""The service's tasks. They are ordinary Celery tasks: nothing in them knows about brim, but the one that is batched.

The models are pretended: on simulated devices a task takes GPU memory and time as a model would, elsewhere it
only takes time. `configs/resources.yaml` has a profile for each task that uses a GPU.
"""

from __future__ import annotations

import time
from typing import Any

from celery import Task

import brim
from vision.celery import app
from vision.pretend import hold_model, run_model


@app.task(bind=True, name="vision.segment")
def segment(self: Task, url: str, *, width: int, height: int) -> dict[str, Any]:
    """Masks of the objects in an image."""
    megapixels = width * height / 1e6
    run_model(self.request, weights_mib=900, seconds=0.4 + 0.06 * megapixels)
    return {"url": url, "masks": max(1, int(megapixels))}


@app.task(bind=True, name="vision.detect")
def detect(self: Task, url: str, *, width: int = 1280, height: int = 1280) -> dict[str, Any]:
    """Bounding boxes of the objects in an image."""
    run_model(self.request, weights_mib=600, seconds=0.9)
    return {"url": url, "boxes": [[0, 0, width // 2, height // 2]]}


@app.task(bind=True, name="vision.caption")
def caption(self: Task, url: str, *, max_tokens: int = 128) -> str:
    """A sentence about an image."""
    run_model(self.request, weights_mib=7168, seconds=0.6 + 0.01 * max_tokens)
    return f"a picture from {url}"


@app.task(bind=True, name="vision.upscale")
def upscale(self: Task, url: str, *, width: int, height: int, factor: int = 2) -> dict[str, Any]:
    """The image with ``factor`` times as many pixels in each direction."""
    run_model(self.request, weights_mib=300, seconds=0.5 + 0.2 * width * height * factor**2 / 1e6)
    return {"url": url, "width": width * factor, "height": height * factor}


@app.task(bind=True, name="vision.embed")
def embed(self: Task, text: str) -> list[float]:
    """The text as a vector."""
    run_model(self.request, weights_mib=1200, seconds=0.7)
    return [float(len(text)), float(sum(map(ord, text)) % 997)]


@app.task(base=brim.BatchTask, name="vision.tag")
def tag(items: list[brim.Item]) -> list[list[str]]:
    """Tags of many texts at once, on a model that stays on its GPU: calls look like those of any other task."""
    time.sleep(0.1 + 0.002 * len(items))
    return [sorted(set(item.staged)) for item in items]


tag.load = lambda: hold_model(weights_mib=700)
tag.stage = lambda item: item.kwargs["text"].lower().split()


@app.task(name="vision.thumbnail")
def thumbnail(url: str) -> str:
    """A small copy of an image; needs no GPU, so it has no profile and keeps its usual queue."""
    return f"{url}?thumbnail"


@app.task(name="vision.notify")
def notify(address: str, text: str) -> str:
    """A message to a person; needs no GPU either."""
    return f"{address}: {text}"
