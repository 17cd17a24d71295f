"""Learning from measured peaks what a profile's tasks truly need (A2; `docs/estimating.md`, "Calibration").

Per profile and GPU model, in two steps over the declared need ``d = s₀ + s₁ + …`` (fixed part and terms):

1. *How much each summand truly weighs*: a robust linear fit ``need = Σ cᵢ·sᵢ`` of the newest peaks. It is made
   on shares, ``peak/d ≈ Σ cᵢ·(sᵢ/d)``, so that large and small tasks count alike and everything is a number
   near 1; Huber's weights keep outliers from moving it, and a weak pull towards one common factor decides what
   the samples leave open (tasks that all had the same size say nothing about single coefficients).
2. *How far peaks scatter around it*: a streaming quantile sketch of ``peak/need``, for all shapes and for each
   shape bucket (half octave of ``d``). The amount to reserve is ``need`` times a high quantile of it.

Estimates rise fast and fall slowly:

- While fewer than ``MIN_SAMPLES`` peaks are known, the estimate only rises above the declared amount: to what three
  of the newest tasks have shown. No higher peak makes it lower.
- Once it has settled, three of the newest tasks above their estimates (a drift: a new model version needs more)
  begin a new generation. The old one stays the lower bound until the new one has settled, so a drift lowers nothing.
  Fewer than three may be outliers, and hardly move anything.
- Samples that lower an estimate have to fill the window first.
- The peak of an attempt that ran out of memory is a lower bound of its need: it can count as a task above its
  estimate, and as nothing else, so it never lowers anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from brim.core.formula import Formula
from brim.core.profiles import MAX_MARGIN, Profile
from brim.core.robust import OUTLIERS, Scatter, fit

MIN_SAMPLES = 20
"""Peaks that it takes before an estimate may be lower than the declared one."""
TOLERATED = 0.002
"""Share of tasks that may need more than is reserved for them."""
EVIDENCE = OUTLIERS + 1
"""Tasks above their estimate, among the newest ``RECENT``, that raise it."""
RECENT = 20
RAISE = 1.1
"""Factor on such evidence while too little is known to fit."""
LOWEST, HIGHEST = 0.25, 4.0
"""A learned amount stays within these multiples of the declared need."""
WINDOW = 128
"""The newest peaks, which the fit looks at."""
GENERATION = 2000
"""Samples after which sketches begin anew, so that what was long ago is forgotten."""
BUCKET_SAMPLES = 60
"""Samples from which a shape bucket speaks for itself."""
SAME = 0.02
"""A fit that moves no estimate by more than this share is the same fit."""
MARGIN_STEPS = 100
"""A suggested margin is rounded up to hundredths."""

StoredScatter = Annotated[Scatter, PlainValidator(Scatter), PlainSerializer(Scatter.to_json)]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one attempt has shown: its `Estimate.summands` and its process's measured peak, in MiB.

    ``out_of_memory``: it wanted more than its peak, nobody knows how much more.
    """

    task_id: str
    gpu_model: str
    summands: tuple[float, ...]
    peak_mib: float
    out_of_memory: bool = False


def bucket_of(declared_mib: float) -> int:
    """The shape bucket of a declared need: half octaves."""
    return math.floor(2 * math.log2(max(declared_mib, 1.0)))


@dataclass
class Generation:
    """What one unbroken stretch of samples has taught."""

    window: list[tuple[float, ...]] = field(default_factory=list)
    """The newest samples: the summands, then the peak."""
    coefficients: tuple[float, ...] = ()
    scatter: StoredScatter = field(default_factory=Scatter)
    buckets: dict[int, StoredScatter] = field(default_factory=dict)
    samples: int = 0
    next_fit: int = MIN_SAMPLES
    sizes_mib: tuple[float, float] | None = None
    """The smallest and the largest declared need that it has seen."""

    @property
    def settled(self) -> bool:
        """Whether it has seen enough to be followed."""
        return bool(self.coefficients) and self.samples >= MIN_SAMPLES

    def covers(self, declared_mib: float) -> bool:
        """Whether it has seen tasks about as large."""
        smallest, largest = self.sizes_mib or (math.inf, 0.0)
        return smallest / 1.25 <= declared_mib <= largest * 1.25

    def need_mib(self, summands: Sequence[float]) -> float:
        """The typical need of a task, by the fit."""
        need = sum(factor * part for factor, part in zip(self.coefficients, summands, strict=True))
        return max(need, LOWEST * sum(summands))

    def reserve_mib(self, summands: Sequence[float]) -> float:
        """The amount for a task; it must have settled."""
        bucket = self.buckets.get(bucket_of(sum(summands)))
        scatter = bucket if bucket is not None and len(bucket) >= BUCKET_SAMPLES else self.scatter
        return self.need_mib(summands) * scatter.exceeded_by(TOLERATED)

    def add(self, summands: Sequence[float], peak_mib: float) -> None:
        """Learn one measured peak."""
        declared_mib = sum(summands)
        smallest, largest = self.sizes_mib or (declared_mib, declared_mib)
        self.sizes_mib = (min(smallest, declared_mib), max(largest, declared_mib))
        self.window = [*self.window, (*summands, peak_mib)][-WINDOW:]
        self.samples += 1
        if self.coefficients:
            self._count(summands, peak_mib)
        if self.samples >= self.next_fit:
            self.next_fit = self.samples + min(max(self.samples // 4, 1), WINDOW // 2)
            self._fit()

    def successor(self) -> Generation:
        """The same knowledge of the need, with empty sketches."""
        return Generation(window=self.window, coefficients=self.coefficients, sizes_mib=self.sizes_mib)

    def _count(self, summands: Sequence[float], peak_mib: float) -> None:
        ratio = peak_mib / self.need_mib(summands)
        self.scatter.add(ratio)
        self.buckets.setdefault(bucket_of(sum(summands)), Scatter()).add(ratio)

    def _fit(self) -> None:
        """Fit the window; where that changes estimates, the sketches begin anew with the window's peaks."""
        samples = np.array(self.window)
        declared = samples[:, :-1].sum(axis=1)
        shares = samples[:, :-1] / declared[:, None]
        found = fit(shares, samples[:, -1] / declared)
        if self.coefficients:
            before = np.maximum(shares @ np.array(self.coefficients), LOWEST)
            if np.all(np.abs(shares @ found - before) <= SAME * before):
                return
        self.coefficients = tuple(float(value) for value in found)
        self.scatter, self.buckets = Scatter(), {}
        for *summands, peak_mib in self.window:
            self._count(summands, peak_mib)


@dataclass(frozen=True, slots=True)
class Recent:
    """One of the newest tasks: its attempt with the highest peak, and whether any attempt outgrew its estimate."""

    task_id: str
    summands: tuple[float, ...]
    peak_mib: float
    out_of_memory: bool
    outgrown: bool

    @property
    def ratio(self) -> float:
        """Peak over declared need."""
        return self.peak_mib / sum(self.summands)


@dataclass
class Learner:
    """What is known of a profile's tasks on one GPU model."""

    current: Generation = field(default_factory=Generation)
    previous: Generation | None = None
    recent: list[Recent] = field(default_factory=list)
    errors: StoredScatter = field(default_factory=Scatter)
    """Peak over declared need, of all samples."""
    out_of_memory: int = 0

    @property
    def followed(self) -> Generation | None:
        """The generation whose word counts: the current one once it has settled, until then the one before."""
        return self.current if self.current.settled else self.previous

    def evidence(self) -> float:
        """The multiple of the declared need that recent tasks ask for while the current generation is young."""
        if self.current.settled or len(self.recent) < EVIDENCE:
            return 0.0
        return RAISE * sorted(task.ratio for task in self.recent)[-EVIDENCE]

    def reserve_mib(self, summands: Sequence[float], declared_mib: float) -> float:
        """The amount for a task; sizes never seen may raise the declared one, but not lower it."""
        followed = self.followed
        if followed is None:
            learned_mib = declared_mib
        else:
            learned_mib = followed.reserve_mib(summands)
            if not followed.covers(sum(summands)):
                learned_mib = max(learned_mib, declared_mib)
        return max(learned_mib, self.evidence() * sum(summands))

    def learn(self, sample: Sample, declared_mib: float) -> None:
        """Take in what an attempt has shown."""
        outgrown = sample.peak_mib > self.reserve_mib(sample.summands, declared_mib)
        if sample.out_of_memory:
            self.out_of_memory += 1
            if not outgrown:
                return
        else:
            self.errors.add(sample.peak_mib / sum(sample.summands))
            self.current.add(sample.summands, sample.peak_mib)
        self._remember(sample, outgrown=outgrown and self.current.settled)
        if sum(task.outgrown for task in self.recent) >= EVIDENCE:
            self._turn()
        elif self.current.samples >= GENERATION:
            self.previous, self.current = self.current, self.current.successor()

    def _remember(self, sample: Sample, *, outgrown: bool) -> None:
        """Keep one entry for each task, so that attempts of one outlier never count as several tasks."""
        newest = Recent(sample.task_id, sample.summands, sample.peak_mib, sample.out_of_memory, outgrown)
        for earlier in self.recent:
            if earlier.task_id == sample.task_id:
                told = max(newest, earlier, key=lambda attempt: attempt.peak_mib)
                newest = replace(told, outgrown=newest.outgrown or earlier.outgrown)
        others = [task for task in self.recent if task.task_id != sample.task_id]
        self.recent = [*others, newest][-RECENT:]

    def _turn(self) -> None:
        """Begin a new generation with the tasks that showed that needs have grown."""
        self.recent = [replace(task, outgrown=False) for task in self.recent if task.outgrown]
        self.previous, self.current = self.current, Generation()
        for task in self.recent:
            if not task.out_of_memory:
                self.current.add(task.summands, task.peak_mib)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is known of a profile on one GPU model, for people; errors are measured peak over declared need."""

    gpu_model: str
    samples: int
    out_of_memory: int
    settled: bool
    median_error: float | None
    p99_error: float | None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A profile's fields as measured peaks would have them."""

    vram: Formula
    margin: float


class Calibration:
    """What measured peaks have taught about one profile; for one thread at a time.

    Estimates are made before a GPU model is chosen, so they cover the neediest of those that are allowed.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.learners: dict[str, Learner] = {}

    @classmethod
    def from_json(cls, profile: Profile, state: str | bytes) -> Self:
        """What `to_json` kept; nothing if the profile declares something else by now. Raises ``ValueError``."""
        kept = _STATE.validate_json(state)
        calibration = cls(profile)
        if kept.formula_id == profile.formula_id:
            calibration.learners = kept.learners
        return calibration

    def to_json(self) -> bytes:
        """Everything that was learned."""
        return _STATE.dump_json(_State(self.profile.formula_id, self.learners))

    def learn(self, sample: Sample) -> None:
        """Take in what an attempt has shown; its summands are of the profile as it is now."""
        if len(sample.summands) != len(self.profile.vram.terms) + 1 or sum(sample.summands) <= 0:
            return
        learner = self.learners.setdefault(sample.gpu_model, Learner())
        learner.learn(sample, self.declared_mib(sample.summands))

    def declared_mib(self, summands: Sequence[float]) -> float:
        """What the table reserves for a task."""
        return self._resident_mib + self.profile.margin * (sum(summands) - self._resident_mib)

    def newest(self) -> tuple[float, ...] | None:
        """The summands of a task that was learned from lately; None if there was none."""
        tasks = [learner.recent[-1].summands for learner in self.learners.values() if learner.recent]
        return tasks[-1] if tasks else None

    def reserve_mib(self, summands: Sequence[float], declared_mib: float, gpu_models: Sequence[str]) -> float | None:
        """The amount to reserve instead of the declared one; None while nothing speaks against that.

        Never below context and weights, and within ``LOWEST`` and ``HIGHEST`` times the declared need.
        """
        asked = [self.learners[model] for model in gpu_models or self.learners if model in self.learners]
        need_mib = sum(summands)
        raised_mib = max((learner.evidence() * need_mib for learner in asked), default=0.0)
        followed_mib = [learner.reserve_mib(summands, declared_mib) for learner in asked if learner.followed]
        if not followed_mib and raised_mib <= declared_mib:
            return None
        floor_mib = max(self._resident_mib, LOWEST * need_mib)
        return max(floor_mib, min(max(raised_mib, *followed_mib, 0.0), HIGHEST * need_mib))

    def lessons(self) -> list[Lesson]:
        """What is known, by GPU model."""
        return [
            Lesson(
                gpu_model=model,
                samples=len(learner.errors),
                out_of_memory=learner.out_of_memory,
                settled=learner.followed is not None,
                median_error=learner.errors.at(0.5) if len(learner.errors) else None,
                p99_error=learner.errors.at(0.99) if len(learner.errors) else None,
            )
            for model, learner in sorted(self.learners.items())
        ]

    def suggestion(self) -> Suggestion | None:
        """The table's fields that come nearest to what is reserved by now, for the neediest GPU model."""
        followed = [learner.followed for learner in self.learners.values() if learner.followed]
        if not followed:
            return None
        typical = followed[0].window[-1][:-1]
        return self._suggest(max(followed, key=lambda generation: generation.reserve_mib(typical)))

    def _suggest(self, generation: Generation) -> Suggestion:
        """Context and weights stay as declared; what the fit says beyond them is the formula's."""
        resident = self._resident_mib
        fixed_factor, *factors = generation.coefficients
        fixed_mib = generation.window[-1][0]
        constant = max(0.0, fixed_factor * fixed_mib - resident)
        margin = 1.0
        for *summands, _ in generation.window:
            vram_mib = constant + sum(factor * term for factor, term in zip(factors, summands[1:], strict=True))
            if vram_mib >= 1:
                margin = max(margin, (generation.reserve_mib(summands) - resident) / vram_mib)
        margin = min(math.ceil(margin * MARGIN_STEPS) / MARGIN_STEPS, MAX_MARGIN)
        return Suggestion(self.profile.vram.rescaled(constant, factors), margin)

    @property
    def _resident_mib(self) -> int:
        return self.profile.context_mib + self.profile.weights_mib


@dataclass(frozen=True)
class _State:
    formula_id: str
    learners: dict[str, Learner]


_STATE = TypeAdapter(_State)
