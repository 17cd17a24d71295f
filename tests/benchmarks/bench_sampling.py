"""What following memory costs a node agent: CPU share for 8 GPUs with 8 processes each, on the stand-in for NVML.

Usage: ``python tests/benchmarks/bench_sampling.py [SECONDS]``. The last line is one JSON object: percent of a core
while the memory of every device moves all the time and while it rests, and milliseconds of CPU for one sample.
The stand-in answers faster than a driver and parses its state file in the measured process; what is measured is
brim's and nvidia-ml-py's own work. Fails when memory that moves costs more than 3 % of a core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "common"), str(ROOT / "tests")]

from brim.core.model import AttemptView, State  # noqa: E402
from brim.gpu import process  # noqa: E402
from brim.gpu.probe import Sample, open_probe  # noqa: E402
from brim.gpu.sampling import REST_S, Peaks, Samples, moved, next_interval_s  # noqa: E402
from contract.nvml_standin import GIB, Driver, build  # noqa: E402

MIB = 1 << 20
GPUS, PROCESSES = 8, 8
MOST_PERCENT = 3.0


def node(folder: Path, *, used: int) -> Driver:
    driver = Driver(folder / "state")
    for gpu in range(GPUS):
        uuid = f"GPU-{gpu:08x}"
        driver.gpu(uuid, total=80 * GIB, used=PROCESSES * used)
        for number in range(PROCESSES):
            driver.process(uuid, 1000 + 100 * gpu + number, used)
    return driver


def follow(seconds: float) -> None:
    """The agent's part: samples as the policy says, keeps every process's peak, prints CPU seconds and samples."""
    process.pids_are_the_hosts = lambda: True  # the stand-in's pids are nobody's, here or on a host
    probe, peaks = open_probe("nvml", quarantine_xids=[79]), Peaks()
    probe.devices()
    attempts = [
        AttemptView(f"{uuid}.{pid}", f"{uuid}.{pid}", (uuid,), 1000, f"{pid}.1", State.RUNNING, "b", 0.0, 0.0, "l", 300)
        for uuid, sample in probe.sample().items()
        if isinstance(sample, Sample)
        for pid in sample.processes
    ]
    before: Samples = {}
    interval_s, count = REST_S, 0
    end, cpu_s = time.monotonic() + seconds, time.process_time()
    while time.monotonic() < end:
        samples = probe.sample()
        peaks.observe(attempts, samples)
        interval_s = next_interval_s(interval_s, moving=moved(before, samples))
        before, count = samples, count + 1
        time.sleep(interval_s)
    print(json.dumps([time.process_time() - cpu_s, count]))


def measure(folder: Path, seconds: float, *, moving: bool) -> tuple[float, int]:
    node(folder, used=GIB).write()
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "NVML_STATE": str(folder / "state")}
    command = [sys.executable, __file__, "follow", str(seconds)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as follower:
        step = 0
        while moving and follower.poll() is None:
            step += 1
            node(folder, used=GIB + step * MIB).write()
            time.sleep(0.05)
        output, _errors = follower.communicate()
    cpu_s, count = json.loads(output)
    return cpu_s, count


def main(seconds: float) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = build(Path(name))
        moving_s, moving_count = measure(folder, seconds, moving=True)
        rest_s, _rest_count = measure(folder, seconds, moving=False)
    figures = {
        "gpus": GPUS,
        "processes": GPUS * PROCESSES,
        "percent_of_a_core_moving": round(100 * moving_s / seconds, 2),
        "percent_of_a_core_at_rest": round(100 * rest_s / seconds, 2),
        "ms_per_sample": round(1000 * moving_s / moving_count, 2),
        "samples_per_s_moving": round(moving_count / seconds, 1),
    }
    print(json.dumps(figures))
    return int(figures["percent_of_a_core_moving"] > MOST_PERCENT)


if __name__ == "__main__":
    if sys.argv[1:2] == ["follow"]:
        follow(float(sys.argv[2]))
    else:
        sys.exit(main(float(sys.argv[1]) if sys.argv[1:] else 10.0))
