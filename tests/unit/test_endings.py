"""A soft time limit may strike while an end is handed over, at any line: the end is told all the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded

from brim.celery.endings import Endings
from brim.store.types import EndAnswer

HAND_OVER = {"_Job.__init__", "_Job.wait", "Endings._hand_over", "Endings._take_back"}


class Talk:
    """Attempts on one connection, on which one question may be open."""

    asks_ahead = True

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.open = 0
        self.said: list[str] = []

    def ask_complete(self, *_: Any) -> Callable[[], bool]:
        if self.fails:
            raise SoftTimeLimitExceeded
        self.open += 1
        return self.heard

    def heard(self) -> bool:
        self.open -= 1
        self.said.append("heard")
        return True

    def hang_up(self) -> None:
        self.open = 0

    def complete(self, *_: Any) -> EndAnswer:
        assert not self.open
        self.said.append("complete")
        return EndAnswer.ENDED


def strike(at: int) -> Callable[..., Any]:
    """A trace function by which the limit strikes at that line of the hand-over."""
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line" and frame.f_code.co_qualname in HAND_OVER:
            left -= 1
            if left == 0:
                raise SoftTimeLimitExceeded
        return trace

    return trace


@pytest.mark.timeout(30)
@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("fails", [False, True])
def test_an_end_is_told_wherever_a_soft_time_limit_strikes(fails: bool, at: int) -> None:
    talk, endings = Talk(fails=fails), Endings()
    execution: Any = SimpleNamespace(attempts=talk, task_id="t", attempt=None, proc="p", unclaimed=True)
    kept: Any = SimpleNamespace(apart=False, result=None)
    outcome: Any = None

    before = sys.gettrace()
    sys.settrace(strike(at))
    try:
        endings.tell(execution, outcome, kept)
        endings.wait()
    finally:
        sys.settrace(before)

    assert {"heard", "complete"} & set(talk.said)
    assert not talk.open


def test_the_thread_that_waits_does_not_keep_the_process() -> None:
    Endings()
    assert {thread.daemon for thread in threading.enumerate() if thread.name == "brim-end"} == {True}
