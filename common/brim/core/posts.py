"""The posts of a node: a worker for each GPU, which always stands, and workers that stand on demand.

An attempt on several GPUs calls for a worker that sees exactly those, and that no other attempt is waiting for: what
is desired follows from the books alone, so a demand that could not be met is simply found again at the next look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice

from brim.core.model import AttemptView


@dataclass(frozen=True, slots=True)
class Post:
    """What a worker is there for."""

    name: str
    """Unique in its node; the first part of the worker's Celery node name."""
    queue: str
    """The queue that it consumes; several workers may share one."""
    devices: tuple[str, ...]
    """UUIDs of the devices that it sees: these and no others."""
    concurrency: int = 1
    pool: str = "prefork"
    standing: bool = False
    """It is there as long as its node is; others start and end on demand."""
    linger_s: float = 0.0
    """How long a worker on demand stays when nothing calls for it any more, in seconds."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables that only this worker gets."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A post's worker as it is now; ``boot`` is empty while its process does not run."""

    post: Post
    boot: str = ""
    ready: bool = False
    executors: frozenset[str] = frozenset()
    """Pool processes that live."""
    failures: int = 0
    """How often in a row it has ended soon after its start."""
    trouble: str = ""
    """How it ended last: "exited with code 1"."""
    ending: bool = False
    """It was asked to end, and takes no further tasks."""


def for_sets(attempts: Iterable[AttemptView], workers: Mapping[str, Worker], linger_s: float) -> Iterator[Post]:
    """The posts that attempts on several devices call for: one each, old ones first.

    A claimed attempt keeps the worker that has claimed it; for the others any free worker of the same devices will do.
    """
    queues: dict[str, list[AttemptView]] = {}
    for attempt in attempts:
        if len(attempt.devices) > 1:
            queues.setdefault(attempt.queue, []).append(attempt)
    for queue, group in queues.items():
        there = [worker for worker in workers.values() if worker.post.queue == queue]
        boots = {attempt.boot for attempt in group if attempt.boot}
        yield from (worker.post for worker in there if worker.boot in boots)
        free = [worker.post for worker in there if not worker.ending and worker.boot not in boots]
        waiting = sum(not attempt.boot for attempt in group)
        fresh = _fresh(Post("", queue, group[0].devices, linger_s=linger_s), workers)
        yield from [*free, *islice(fresh, max(0, waiting - len(free)))][:waiting]


def _fresh(post: Post, taken: Mapping[str, Worker]) -> Iterator[Post]:
    """The post under names that nobody has: "gpu0-1", "gpu0-1.2", and so on."""
    stem = f"gpu{post.queue.rpartition('.')[2]}"
    for number in count(1):
        name = stem if number == 1 else f"{stem}.{number}"
        if name not in taken:
            yield replace(post, name=name)
