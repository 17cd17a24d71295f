"""A producer: `python -m vision.producer --count 20` publishes mixed tasks and prints their results."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator

from celery import group
from celery.canvas import Signature

from vision import tasks

SIZES = [(1280, 720), (1920, 1080), (3840, 2160), (4096, 4096), (5120, 5120), (6000, 4000)]


def segment(draw: random.Random, url: str) -> Signature:
    """One image of any size; large ones are urgent here."""
    width, height = draw.choice(SIZES)
    return tasks.segment.s(url, width=width, height=height).set(priority=0 if width > 5000 else 3)


def detect(draw: random.Random, url: str) -> Signature:
    """At the resolution that the model was trained for, or twice that."""
    side = draw.choice([1280, 1280, 2560])
    return tasks.detect.s(url, width=side, height=side)


def caption(draw: random.Random, url: str) -> Signature:
    """Short or long."""
    return tasks.caption.s(url, max_tokens=draw.choice([32, 64, 128, 192]))


def upscale(draw: random.Random, url: str) -> Signature:
    """Mostly twice the size; three times takes most of a GPU."""
    width, height = draw.choice(SIZES[:2])
    return tasks.upscale.s(url, width=width, height=height, factor=draw.choice([2, 2, 2, 2, 2, 3]))


def embed(draw: random.Random, url: str) -> Signature:
    """A few words about the image."""
    return tasks.embed.s(f"what is on {url}? " * draw.randint(1, 40)).set(priority=6)


def thumbnail(draw: random.Random, url: str) -> Signature:
    """Needs no GPU."""
    return tasks.thumbnail.s(url)


def notify(draw: random.Random, url: str) -> Signature:
    """Needs no GPU."""
    return tasks.notify.s("owner@example.org", f"{url} has arrived")


MIX: dict[Callable[[random.Random, str], Signature], int] = {
    segment: 30,
    detect: 24,
    caption: 10,
    upscale: 12,
    embed: 14,
    thumbnail: 6,
    notify: 4,
}
"""How often each kind comes, in per cent."""


def workload(count: int, seed: int) -> Iterator[Signature]:
    """``count`` tasks, the same for the same seed."""
    draw = random.Random(seed)
    kinds, weights = list(MIX), list(MIX.values())
    for number, kind in enumerate(draw.choices(kinds, weights, k=count)):
        yield kind(draw, f"s3://images/{number:05}.png")


def main() -> None:
    """Publish, wait, and print what came back."""
    parser = argparse.ArgumentParser(prog="python -m vision.producer", description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="number of tasks (20)")
    parser.add_argument("--seed", type=int, default=1, help="which tasks (1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="longest wait for all results in s (300)")
    chosen = parser.parse_args()
    result = group(workload(chosen.count, chosen.seed)).apply_async()
    for value in result.get(timeout=chosen.timeout):
        print(value)


if __name__ == "__main__":
    main()
