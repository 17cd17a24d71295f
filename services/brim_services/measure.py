"""`brim profile`: runs a task by itself on an idle device, measures what it uses, and writes its row of the table.

Each measurement is a process of its own (``python -m brim_services.measure``), so that none finds what another left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.celery.executor import OwnMemory
from brim.core.attributes import TaskSignature
from brim.core.profiles import ProfileDefaults
from brim.core.shapes import Shape, shape_of
from brim.gpu import frameworks
from brim.gpu.probe import DeviceInfo, Probe, Sample, open_probe
from brim_services.agent.app import load_app

SAMPLE_S = 0.05
STDERR = 2
"""Where what the task prints goes: standard output is the row's."""
IDLE_SHARE = 0.05
"""A device that uses at most this share of its memory is idle."""


class CannotMeasure(Exception):
    """The task could not be run or measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the task."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one call used at its peak, in MiB: the whole process, and its context of that (None: unknown)."""

    call: Call
    peak_mib: int
    context_mib: int | None


def calls(args: Sequence[Any], kwargs: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]) -> Iterator[Call]:
    """The call with every combination of the varied arguments."""
    for values in itertools.product(*vary.values()):
        yield Call(args, {**kwargs, **dict(zip(vary, values, strict=True))})


def measure(app_name: str, task: str, wanted: Sequence[Call], spec: str | None) -> list[Measured]:
    """Runs each call on an idle device. Raises `CannotMeasure`, ``NodeFault`` or ``ConfigurationError``."""
    if task not in load_app(app_name).tasks:
        raise CannotMeasure(f"the app {app_name} has no task {task}")
    with contextlib.closing(open_probe(spec)) as probe:
        device = _idle_device(probe)
        return [_measure(app_name, task, call, device, probe) for call in wanted]


def row(app_name: str, task: str, measured: Sequence[Measured]) -> str:
    """The task's row of the table, with what it rests on as comments."""
    contexts = [found.context_mib for found in measured if found.context_mib is not None]
    unmeasured_mib = min(ProfileDefaults().context_mib, *(found.peak_mib for found in measured))
    context_mib = max(contexts, default=unmeasured_mib)
    signature = TaskSignature.from_callable(load_app(app_name).tasks[task].run)
    needs = [
        (_numbers(signature.bind(task, found.call.args, found.call.kwargs)), max(0.0, found.peak_mib - context_mib))
        for found in measured
    ]
    shape: Shape = shape_of(needs)
    basis = f"measured {len(measured)} times, missed by at most {100 * shape.error:.1f} %"
    guessed = "" if contexts else "   # not measured by itself"
    return f"  {task}:   # {basis}\n    context_mib: {context_mib}{guessed}\n    vram: {shape.formula}"


def _numbers(attributes: Mapping[str, Any]) -> dict[str, float]:
    """The attributes that a formula can multiply."""
    return {
        name: float(value)
        for name, value in attributes.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _idle_device(probe: Probe) -> DeviceInfo:
    devices, samples = probe.devices(), probe.sample()
    for device in devices:
        sample = samples.get(device.uuid)
        if isinstance(sample, Sample) and sample.used_mib <= IDLE_SHARE * sample.total_mib:
            return device
    raise CannotMeasure(f"none of {len(devices)} devices is idle: a task is measured alone on its device")


def _measure(app_name: str, task: str, call: Call, device: DeviceInfo, probe: Probe) -> Measured:
    """Runs one call in a process that sees the device alone, and samples that process meanwhile."""
    visible = {"CUDA_VISIBLE_DEVICES": device.uuid, "BRIM_DEVICE": device.uuid}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        order = json.dumps([app_name, task, list(call.args), dict(call.kwargs), device.uuid])
        command = [sys.executable, "-m", "brim_services.measure", str(answer), order]
        with subprocess.Popen(command, env={**os.environ, **visible}, stdout=STDERR) as process:
            sampled_mib = 0
            while process.poll() is None:
                sample = probe.sample().get(device.uuid)
                if isinstance(sample, Sample):
                    sampled_mib = max(sampled_mib, sample.of(process.pid) or 0)
                time.sleep(SAMPLE_S)
        if not answer.exists():
            raise CannotMeasure(f"{task} with {dict(call.kwargs)}: its process ended with code {process.returncode}")
        told = json.loads(answer.read_text())
    if told["error"] is not None:
        raise CannotMeasure(f"{task} with {dict(call.kwargs)}: {told['error']}")
    if told["counted_mib"] is None and not sampled_mib:
        raise CannotMeasure(f"{task} with {dict(call.kwargs)}: it used no device memory that could be measured")
    if told["counted_mib"] is None or told["beside_mib"] is None:
        return Measured(call, max(sampled_mib, told["counted_mib"] or 0), None)
    return Measured(call, told["counted_mib"] + told["beside_mib"], told["beside_mib"])


def _run(app_name: str, task: str, args: list[Any], kwargs: dict[str, Any], uuid: str) -> dict[str, Any]:
    """In the process of one measurement: the call, and what frameworks have counted of it."""
    app = load_app(app_name)
    memory = OwnMemory(os.environ.get("BRIM_DEVICES"))
    frameworks.begin()
    error = None
    try:
        app.tasks[task].apply(args, kwargs, throw=True)
    except Exception as raised:  # whatever the task raises is the answer
        error = f"{type(raised).__name__}: {raised}"
    held_mib = memory.leftover_mib([uuid])
    beside_mib = None if held_mib is None else max(0, held_mib[0] - frameworks.pool().held_mib)
    return {"error": error, "counted_mib": frameworks.peak_mib(), "beside_mib": beside_mib}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_run(*json.loads(sys.argv[2]))))
