"""Waiting for something to become true, instead of sleeping for a guessed time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within_s(seconds: float) -> float:
    """How long something may take that takes ``seconds`` on a machine that is not overloaded; four times at most."""
    return seconds * min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def wait_until(condition: Callable[[], T], *, what: str, timeout_s: float = 20.0) -> T:
    """Ask ``condition`` every 20 ms for its first truthy answer; fail with ``what`` after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
