"""Calibration in a closed loop: a table that is wrong, peaks that come back late, and what is reserved from then on.

Thirty kinds of task. Each declares ``vram: base + unit * width * height``; in truth its base and its unit each differ
from that by −50 % to +200 %, peaks scatter around it, a few are outliers, GPU models differ a little, and in
the second half some kinds need more from one task to the next (a new model version). An attempt whose need exceeds its
reservation runs out of memory, shows a peak below its need, and is tried again with half as much more. What an
attempt has shown is learned only after the next ``IN_FLIGHT`` attempts have been placed.

``oom_rate`` is out-of-memory attempts ÷ attempts, ``overreserve`` the mean of reserved/peak − 1 over the attempts that
ended well, both over the last half of the run; ``off`` reserves what the table declares, ``on`` what was learned.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import tarfile
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from brim.core.attributes import BrimHeader
from brim.core.calibration import Calibration, Sample
from brim.core.profiles import Profile, estimate

KINDS = 30
IN_FLIGHT = 64
SCATTER = 0.05
"""Standard deviation of a peak's logarithm around the true need."""
OUTLIER_SHARE, OUTLIER_FACTOR = 0.0005, 1.6
GPU_MODELS = {"A100": 1.0, "L4": 1.04}
DRIFTING, DRIFT_FACTOR = 4, 1.4
RETRY_FACTOR = 1.5


@dataclass(frozen=True)
class Kind:
    """One kind of task: its profile, and what it truly needs besides context and weights."""

    profile: Profile
    true_base_mib: float
    true_unit_mib: float
    typical_side: float
    drifts: bool

    def attributes(self, random: Random) -> dict[str, int]:
        """Sizes as they come: from a quarter to four times the typical area."""
        return {name: round(self.typical_side * 2 ** random.uniform(-1, 1)) for name in ("width", "height")}

    def need_mib(self, attributes: dict[str, int], progress: float, random: Random) -> float:
        """What one attempt truly needs on the neediest model; ``progress`` is the share of the run that is over."""
        volume = attributes["width"] * attributes["height"]
        vram_mib = self.true_base_mib + self.true_unit_mib * volume
        vram_mib *= math.exp(random.gauss(0, SCATTER))
        if self.drifts and progress > 0.75:
            vram_mib *= DRIFT_FACTOR
        if random.random() < OUTLIER_SHARE:
            vram_mib *= OUTLIER_FACTOR
        return self.profile.context_mib + self.profile.weights_mib + vram_mib


@dataclass
class Tally:
    """What is counted of one run, over its last half."""

    attempts: int = 0
    out_of_memory: int = 0
    ended: int = 0
    excess: float = 0.0

    @property
    def oom_rate(self) -> float:
        return self.out_of_memory / self.attempts

    @property
    def overreserve(self) -> float:
        return self.excess / self.ended

    def count(self, reserved_mib: float, need_mib: float) -> None:
        self.attempts += 1
        if need_mib > reserved_mib:
            self.out_of_memory += 1
        else:
            self.ended += 1
            self.excess += reserved_mib / need_mib - 1


def kinds(seed: int) -> list[Kind]:
    """The thirty kinds of one seed."""
    random = Random(seed)
    return [_kind(number, random) for number in range(KINDS)]


def _kind(number: int, random: Random) -> Kind:
    base_mib = random.uniform(100, 1500)
    side = random.uniform(500, 3000)
    unit_mib = random.uniform(200, 4000) / side**2
    profile = Profile(
        name=f"kind.{number}",
        context_mib=400,
        weights_mib=random.choice([0, 0, 500, 2000]),
        vram=f"{base_mib:.1f} + {unit_mib:.8f} * width * height",
    )
    return Kind(
        profile=profile,
        true_base_mib=base_mib * random.uniform(0.5, 3.0),
        true_unit_mib=unit_mib * random.uniform(0.5, 3.0),
        typical_side=side,
        drifts=number < DRIFTING,
    )


def simulate(all_kinds: list[Kind], calibration: str, tasks: int, seed: int) -> Tally:
    """One run of the closed loop."""
    random = Random(seed)
    profiles = [kind.profile.model_copy(update={"calibration": calibration}) for kind in all_kinds]
    learned = [Calibration(profile) for profile in profiles]
    under_way: deque[tuple[Calibration, Sample]] = deque()
    tally = Tally()
    for number in range(tasks):
        progress = number / tasks
        index = random.randrange(len(all_kinds))
        attributes = all_kinds[index].attributes(random)
        model, factor = random.choice(list(GPU_MODELS.items()))
        need_mib = all_kinds[index].need_mib(attributes, progress, random) * factor
        found = estimate(profiles[index], BrimHeader(), attributes, learned[index])
        for reserved_mib, sample in attempts(
            f"{number}", model, found.summands, found.demand.vram_mib, need_mib, random
        ):
            if progress >= 0.5:
                tally.count(reserved_mib, need_mib)
            under_way.append((learned[index], sample))
            while len(under_way) > IN_FLIGHT:
                calibrated, shown = under_way.popleft()
                calibrated.learn(shown)
    return tally


def attempts(
    task_id: str, model: str, summands: tuple[float, ...], reserved_mib: float, need_mib: float, random: Random
) -> Iterator[tuple[float, Sample]]:
    """The attempts of one task, each with half as much memory again, until one ends well."""
    while need_mib > reserved_mib:
        peak_mib = reserved_mib * random.uniform(0.95, 1.0)
        yield reserved_mib, Sample(task_id, model, summands, peak_mib, out_of_memory=True)
        reserved_mib *= RETRY_FACTOR
    yield reserved_mib, Sample(task_id, model, summands, need_mib)


def trace_peaks(folder: Path) -> dict[str, list[float]]:
    """Real peaks in MiB by pod: the highest of each ten samples in a row of a pod that used its GPU all the time."""
    pods: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tarfile.open(folder / "gpu-memory" / "pod_gpu_memory_used_bytes_anon.tar.gz") as archive:
        member = next(entry for entry in archive if entry.name.endswith(".csv"))
        stream = archive.extractfile(member)
        assert stream is not None
        for row in csv.DictReader(line.decode() for line in stream):
            pods[row["container_ip"]].append((float(row["timestamp_anon"]), float(row["value"]) / 2**20))
    found = {}
    for pod, samples in pods.items():
        used = [mib for _, mib in sorted(samples)]
        peaks = [max(used[start : start + 10]) for start in range(0, len(used) - 9, 10)]
        if len(peaks) >= 100 and min(peaks) > 1024:
            found[pod] = peaks
    return found


def simulate_trace(pods: dict[str, list[float]], calibration: str, seed: int) -> Tally:
    """The same loop over real peaks: each pod is a kind whose declared amount is wrong by −50 % to +200 %."""
    random = Random(seed)
    tally = Tally()
    for pod, peaks in sorted(pods.items()):
        typical = sorted(peaks)[len(peaks) // 2]
        declared_mib = round(typical / random.uniform(0.5, 3.0))
        profile = Profile(name=pod, context_mib=0, vram=declared_mib, calibration=calibration)
        learned = Calibration(profile)
        for number, need_mib in enumerate(peaks):
            found = estimate(profile, BrimHeader(), {}, learned)
            shown = attempts(f"{number}", "any", found.summands, found.demand.vram_mib, need_mib, random)
            for reserved_mib, sample in shown:
                if number >= len(peaks) / 2:
                    tally.count(reserved_mib, need_mib)
                learned.learn(sample)
    return tally


def main() -> None:
    """Run both modes and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("BRIM_TRACES", "../shared/traces")))
    options = parser.parse_args()

    runs = {mode: simulate(kinds(options.seed), mode, options.tasks, options.seed) for mode in ("off", "on")}
    figures = {f"oom_rate_{mode}": round(tally.oom_rate, 5) for mode, tally in runs.items()}
    figures |= {f"overreserve_{mode}": round(tally.overreserve, 4) for mode, tally in runs.items()}
    for mode, tally in runs.items():
        print(_row(f"simulated, calibration {mode}", tally))
    try:
        pods = trace_peaks(options.traces)
    except OSError as error:
        print(f"real peaks: skipped, {error}")
    else:
        real = {mode: simulate_trace(pods, mode, options.seed) for mode in ("off", "on")}
        for mode, tally in real.items():
            print(_row(f"{len(pods)} real pods, calibration {mode}", tally))
            figures[f"trace_oom_rate_{mode}"] = round(tally.oom_rate, 5)
            figures[f"trace_overreserve_{mode}"] = round(tally.overreserve, 4)
    print(json.dumps(figures))


def _row(name: str, tally: Tally) -> str:
    per_thousand = 1000 * tally.oom_rate
    return (
        f"{name:32} {tally.attempts:7} attempts  {per_thousand:7.2f} out of memory per 1,000  "
        f"{100 * tally.overreserve:6.1f} % reserved above the peak"
    )


if __name__ == "__main__":
    main()
