"""The project's stand-in for NVML's library: builds it, writes its state, and probes it in a process of its own.

A process of its own because a library once loaded stays: each variant of it, and each start of NVML, needs a
fresh one. The ``nvidia-ml-py`` in that process is unmodified; it finds the stand-in through ``LD_LIBRARY_PATH``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.core.model import Reason
from brim.gpu.probe import DeviceFault, DeviceInfo, NodeFault, Sample

HERE = Path(__file__).parent
COMMON = HERE.parents[2] / "common"
GIB = 1 << 30

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND = 3, 4, 9, 13
NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH, UNKNOWN = 6, 15, 16, 18, 999


def build(folder: Path, *defines: str) -> Path:
    """Compiles the stand-in, without some functions when told so, and returns the folder to find it in."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
        + [f"-D{name}" for name in defines]
        + ["-o", str(library), str(HERE / "standin.c")],
        check=True,
    )
    return folder


@dataclass
class Driver:
    """What the stand-in says; ``write`` makes it true, also for processes that run. Amounts in bytes."""

    path: Path
    lines: dict[str, str] = field(default_factory=dict)

    def write(self) -> Driver:
        new = self.path.with_suffix(".new")
        new.write_text("".join(line + "\n" for line in self.lines.values()))
        os.replace(new, self.path)
        return self

    def gpu(self, uuid: str, total: int = 24 * GIB, reserved: int = 0, used: int = 0, name: str = "NVIDIA X") -> Driver:
        self.lines[uuid] = f"gpu {uuid} {total} {reserved} {total - reserved - used} {name}"
        return self

    def mig(self, gpu: str, uuid: str, total: int, used: int = 0, name: str = "NVIDIA X MIG 1g.5gb") -> Driver:
        self.lines[uuid] = f"mig {gpu} {uuid} {total} 0 {total - used} {name}"
        return self

    def mig_mode(self, gpu: str) -> Driver:
        self.lines[f"{gpu} mode"] = f"mig_mode {gpu}"
        return self

    def process(self, uuid: str, pid: int, used: int | None, kind: str = "Compute") -> Driver:
        self.lines[f"{uuid} {kind} {pid}"] = f"process {uuid} {kind} {pid} {-1 if used is None else used}"
        return self

    def answer(self, uuid: str, function: str, code: int) -> Driver:
        self.lines[f"{uuid} {function}"] = f"answer {uuid} {function} {code}"
        return self

    def xid(self, gpu: str, number: int) -> Driver:
        self.lines[f"xid {len(self.lines)}"] = f"xid {gpu} {number}"
        return self

    def set(self, statement: str, value: int) -> Driver:
        self.lines[statement] = f"{statement} {value}"
        return self

    def without(self, *names: str) -> Driver:
        for name in names:
            del self.lines[name]
        return self


class Prober:
    """A process with an NvmlProbe on the stand-in; what it answers, it answers as the probe's own values."""

    def __init__(self, library: Path, state: Path, environment: Mapping[str, str] | None = None, **options: Any):
        paths = [str(COMMON), *(path for path in [(environment or {}).get("PYTHONPATH")] if path)]
        cleared = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "prober.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=cleared
            | {"LD_LIBRARY_PATH": str(library), "NVML_STATE": str(state)}
            | dict(environment or {})
            | {"PYTHONPATH": ":".join(reversed(paths))},
        )

    def ask(self, command: str, *arguments: Any) -> Any:
        """What the command answers; a NodeFault there is raised here."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([command, *arguments]) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, f"the prober died of {command!r}: {self._process.wait()}"
        answer = json.loads(line)
        if isinstance(answer, dict) and "node_fault" in answer:
            raise NodeFault(Reason(*answer["node_fault"]))
        return answer

    def devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(**info) for info in self.ask("devices")]

    def sample(self, command: str = "sample") -> dict[str, Sample | DeviceFault]:
        return {uuid: _value(fields) for uuid, fields in self.ask(command).items()}

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


def _value(fields: dict[str, Any]) -> Sample | DeviceFault:
    if "reason" in fields:
        return DeviceFault(fields["uuid"], Reason(**fields["reason"]))
    processes = {int(pid): mib for pid, mib in fields.pop("processes").items()}
    return Sample(processes=processes, **fields)
