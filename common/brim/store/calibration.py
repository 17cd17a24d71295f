"""Peaks of attempts on their way to the learner, and what it has learned on its way to intake."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from brim.core.model import Reason

from .base import Base, FencedError
from .codec import dump
from .runner import Arg, Call
from .types import Peak


class CalibrationSide(Base):
    """The agents' samples, the learner's list and state, and what intake reads of it."""

    def sampled(self, peaks: Iterable[tuple[str, str, int]]) -> None:
        """Notes the most memory (MiB) that samples have shown so far of live attempts: (task id, attempt, MiB)."""
        self.runner.run_many([Call("sampled", [self.keys.task(i)], [attempt, mib]) for i, attempt, mib in peaks])

    def outgrown(self, task_id: str, attempt: str, reason: Reason) -> None:
        """Tells in its task's story that a live attempt uses more than is reserved for it."""
        self.runner.run("outgrown", [self.keys.task(task_id), self.keys.story(task_id)], [attempt, dump(reason)])

    def peaks(self, limit: int) -> list[Peak]:
        """The oldest peaks that nobody has learned from."""
        return [Peak(**json.loads(line)) for line in self.client.lrange(self.keys.peaks, 0, limit - 1)]

    def keep_learned(self, epoch: int, taken: int, states: Mapping[str, bytes]) -> None:
        """Keeps what was learned, by profile, and takes the ``taken`` oldest peaks off the list, both or neither.

        Raises `FencedError` once the placement of this epoch is not the active one.
        """
        keys = self.keys
        names = [keys.leader, keys.peaks, keys.calibration, keys.calibration_version]
        args: list[Arg] = [epoch, taken, *(part for state in states.items() for part in state)]
        if int(self.runner.run("learned", names, args)) < 0:
            raise FencedError

    def calibration_version(self) -> int:
        """Goes up whenever something was learned."""
        return int(self.client.get(self.keys.calibration_version) or 0)

    def calibrations(self) -> dict[str, bytes]:
        """Profile -> what was learned about it, as JSON."""
        return {name.decode(): state for name, state in self.client.hgetall(self.keys.calibration).items()}

    def calibration(self, profile: str) -> bytes | None:
        """What was learned about one profile, as JSON."""
        found: bytes | None = self.client.hget(self.keys.calibration, profile)
        return found

    def publish_stand_ins(self, profiles: Mapping[str, str]) -> None:
        """Publishes the profiles that tasks without one got: task name -> profile as JSON."""
        self.client.hset(self.keys.stand_ins, mapping=dict(profiles))

    def stand_ins(self) -> dict[str, str]:
        """Task name -> the profile that it got from intake, as JSON."""
        return {name.decode(): text.decode() for name, text in self.client.hgetall(self.keys.stand_ins).items()}
