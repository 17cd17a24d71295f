"""Where messages lie: the intake queue, and how the app's Redis broker names its lists."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INTAKE_QUEUE = "brim.intake"
"""The queue that brim's tasks are published to, and that everything Celery re-queues comes back to."""


@dataclass(frozen=True, slots=True)
class BrokerLayout:
    """How the app's Redis broker names its keys: kombu's options of the same names."""

    global_keyprefix: str = ""
    sep: str = "\x06\x16"
    priority_steps: tuple[int, ...] = (0, 3, 6, 9)

    @classmethod
    def of(cls, transport_options: Mapping[str, Any]) -> BrokerLayout:
        """The layout that an app's ``broker_transport_options`` give."""
        return cls(
            global_keyprefix=str(transport_options.get("global_keyprefix", cls().global_keyprefix)),
            sep=str(transport_options.get("sep", cls().sep)),
            priority_steps=tuple(sorted(transport_options.get("priority_steps", cls().priority_steps))),
        )

    def lists(self, queue: str = INTAKE_QUEUE) -> list[str]:
        """Names of a queue's priority lists with the key prefix, the most urgent first."""
        return [self.list_for(step, queue) for step in self.priority_steps]

    def list_for(self, priority: int, queue: str = INTAKE_QUEUE) -> str:
        """Name of the list, with the key prefix, that kombu puts a message of this priority into."""
        step = self.priority_steps[max(bisect(self.priority_steps, priority) - 1, 0)]
        return f"{self.global_keyprefix}{queue}{self.sep}{step}" if step else self.global_keyprefix + queue
