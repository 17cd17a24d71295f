"""`brim`'s command line as the fault tests start it: the same, after what the test has switched off or set.

``BRIM_TEST_DIE=commit:after:2`` kills the process right after its second call of the script ``commit``: the server has
done it, the process has not heard of it. ``before``: the process wanted to, the server knows nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from brim.store.runner import Call, Runner
from brim_services.cli import main
from faults.sabotage import apply_sabotage

DIE_ENV = "BRIM_TEST_DIE"


def die_between_steps() -> None:
    """Have this process killed at the point that the environment names."""
    named = os.environ.get(DIE_ENV)
    if not named:
        return
    script, when, number = named.split(":")
    left = int(number)
    send = Runner._send

    def sending(self: Runner, calls: Sequence[Call]) -> list[Any]:
        nonlocal left
        left -= sum(call.script == script for call in calls)
        if left <= 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answers = send(self, calls)
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers

    Runner._send = sending  # type: ignore[method-assign]


if __name__ == "__main__":
    apply_sabotage()
    die_between_steps()
    main()
