"""Learning: from the peaks of attempts that are over to what intake reserves (`docs/estimating.md`, "Calibration")."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from brim.core.calibration import Calibration, Sample
from brim.core.profiles import Profile
from brim.settings import Settings
from brim.store import FencedError, Store
from brim.store.types import Peak

from .loop import patiently

log = logging.getLogger("brim.placement")

BATCH = 1000
LOOK_S = 0.5


class Learning:
    """A thread beside the active placement: what is learned is kept under that one's epoch only."""

    def __init__(self, settings: Settings, stop: threading.Event, epoch: Callable[[], int]) -> None:
        self._epoch = epoch
        """The epoch of the placement beside which it works; 0 while that one stands by."""
        self._stop = stop
        self._url = settings.redis.url
        self._store = Store.of(settings)
        self._known: dict[str, Calibration] = {}

    def run(self) -> None:
        """Learns until ``stop``."""
        while not self._stop.wait(LOOK_S):
            if self._epoch():
                patiently(self.step, self._url, self._stop)
            else:
                self._known.clear()

    def step(self) -> None:
        """Learns from the oldest peaks; what could not be kept is learned again from what was kept before."""
        try:
            self._learn(self._epoch())
        except FencedError:
            self._known.clear()
        except Exception:
            self._known.clear()
            raise

    def _learn(self, epoch: int) -> None:
        peaks = self._store.peaks(BATCH)
        if not peaks:
            return
        texts = {**self._store.stand_ins(), **self._store.published_profiles()}
        profiles = {name: Profile.model_validate_json(text) for name, text in texts.items()}
        changed = set()
        for peak in peaks:
            profile = teaches(peak, profiles)
            if profile is not None:
                self._calibration(profile).learn(sample_of(peak))
                changed.add(profile.name)
        states = {name: self._known[name].to_json() for name in changed}
        self._store.keep_learned(epoch, len(peaks), states)

    def _calibration(self, profile: Profile) -> Calibration:
        known = self._known.get(profile.name)
        if known is None or known.profile != profile:
            kept = known.to_json() if known else self._store.calibration(profile.name)
            self._known[profile.name] = restored(profile, kept)
        return self._known[profile.name]


def restored(profile: Profile, kept: bytes | None) -> Calibration:
    """What was kept about a profile; nothing if that cannot be read (it is of another version of brim)."""
    if kept is not None:
        try:
            return Calibration.from_json(profile, kept)
        except ValueError:
            log.warning("what was learned about %s cannot be read, it is learned anew", profile.name)
    return Calibration(profile)


def teaches(peak: Peak, profiles: Mapping[str, Profile]) -> Profile | None:
    """The profile that a peak says something about: one that learns, and was not changed since the estimate.

    The memory of batched tasks is their executor's, not theirs.
    """
    profile = profiles.get(peak.estimate.get("profile") or "")
    if (
        profile is None
        or profile.calibration == "off"
        or profile.batch is not None
        or not peak.estimate.get("summands")
    ):
        return None
    return profile if peak.estimate["formula_id"] == profile.formula_id else None


def sample_of(peak: Peak) -> Sample:
    """The peak as calibration takes it."""
    return Sample(
        peak.task_id, peak.gpu_model, tuple(peak.estimate["summands"]), float(peak.peak_mib), peak.out_of_memory
    )


def stand_ins(store: Store) -> dict[str, Profile]:
    """The profiles that intake gave to tasks without one."""
    return {name: Profile.model_validate_json(text) for name, text in store.stand_ins().items()}


class Learned:
    """What was learned, by profile, as those see it who estimate demands."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._version = -1
        self._states: dict[str, bytes] = {}
        self.by_profile: dict[str, Calibration] = {}

    def refresh(self, profiles: Mapping[str, Profile]) -> None:
        """Reads what has changed since the last time, for these profiles and those that stand in for missing ones."""
        version = self._store.calibration_version()
        if version == self._version:
            return
        states = self._store.calibrations()
        profiles = {**stand_ins(self._store), **profiles}
        for name, state in states.items():
            if name in profiles and profiles[name].calibration != "off" and self._states.get(name) != state:
                self.by_profile[name] = restored(profiles[name], state)
        self._version, self._states = version, states
