"""Attempts that outgrow their reservation, and whether that endangers others. Pure: samples in, findings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brim.core.model import AttemptView, Reason, State
from brim.gpu.probe import Sample
from brim.gpu.sampling import Samples

OUTGREW = "outgrew"


@dataclass(frozen=True, slots=True)
class Excess:
    """A guarded attempt whose process uses more than is reserved for it, by more than the tolerance.

    ``endangers``: its device has less memory free than its neighbours may still take of what is reserved for them.
    """

    attempt: AttemptView
    used_mib: int
    endangers: bool

    @property
    def ends(self) -> bool:
        """Whether the attempt has to end."""
        return self.endangers and self.attempt.guard == "hard" and self.attempt.state is State.RUNNING

    @property
    def reason(self) -> Reason:
        """What is wrong, for the task's story."""
        text = f"its process uses {self.used_mib} MiB, {self.attempt.vram_mib} MiB are reserved for it"
        if self.endangers:
            text += ", and its device has not enough left for what is reserved for others"
        return Reason(OUTGREW, text)


def excesses(attempts: Sequence[AttemptView], samples: Samples, tolerance: float) -> list[Excess]:
    """The guarded attempts that have outgrown their reservation by more than the share ``tolerance`` of it.

    What samples do not know accuses nobody.
    """
    found = []
    for attempt in attempts:
        if attempt.guard == "off" or not attempt.proc:
            continue
        for uuid in attempt.devices:
            sample = samples.get(uuid)
            used_mib = _used_mib(attempt, sample)
            if isinstance(sample, Sample) and used_mib > attempt.vram_mib * (1 + tolerance):
                endangers = sample.free_mib < _owed_mib(attempt, attempts, uuid, sample)
                found.append(Excess(attempt, used_mib, endangers))
                break
    return found


def _owed_mib(attempt: AttemptView, attempts: Sequence[AttemptView], uuid: str, sample: Sample) -> int:
    """What the others on a device may still take of what is reserved for them."""
    others = (other for other in attempts if other is not attempt and uuid in other.devices)
    return sum(max(0, other.vram_mib - _used_mib(other, sample)) for other in others if _is_known(other, sample))


def _used_mib(attempt: AttemptView, sample: object) -> int:
    """What an attempt's process uses; 0 before it has one, or where that is unknown."""
    if not attempt.proc or not isinstance(sample, Sample):
        return 0
    return sample.of(int(attempt.proc.partition(".")[0])) or 0


def _is_known(attempt: AttemptView, sample: Sample) -> bool:
    return not attempt.proc or sample.of(int(attempt.proc.partition(".")[0])) is not None
