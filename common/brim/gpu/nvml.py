"""Real devices, through NVML and the module ``pynvml`` of the package ``nvidia-ml-py``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

from brim.core.model import Reason
from brim.gpu.probe import DeviceFault, DeviceInfo, NodeFault, Sample

_MIB = 1 << 20
_NO_GPUS_IS_FINE = 1  # NVML_INIT_FLAG_NO_GPUS, which pynvml does not name


class NvmlProbe:
    """The NVIDIA GPUs of this node, by UUID."""

    def __init__(self) -> None:
        self._nvml = _import_pynvml()
        self._pid: int | None = None
        self._handles: dict[str, Any] = {}
        self._initialise()

    def devices(self) -> list[DeviceInfo]:
        """The GPUs that answer now, by index; none is no fault. Raises NodeFault."""
        self._initialise()
        found = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
                model = _text(self._nvml.nvmlDeviceGetName(handle))
                total_mib, _free_mib = self._memory_mib(handle)
            except self._nvml.NVMLError:
                continue  # a lost GPU cannot even be named; it is listed again once it answers
            self._handles[uuid] = handle
            found.append(DeviceInfo(uuid, index, model, total_mib))
        return found

    def sample(self) -> dict[str, Sample | DeviceFault]:
        """The memory of every device that ``devices`` has named. Raises NodeFault."""
        self._initialise()
        return {uuid: self._sample(uuid) for uuid in self._handles}

    def close(self) -> None:
        """Shuts NVML down in this process."""
        if self._pid == os.getpid():
            self._nvml.nvmlShutdown()
        self._pid = None

    def _initialise(self) -> None:
        """NVML's state belongs to one process: after a fork, initialise again and find the handles anew."""
        if self._pid == os.getpid():
            return
        try:
            self._nvml.nvmlInitWithFlags(_NO_GPUS_IS_FINE)
        except self._nvml.NVMLError as error:
            raise NodeFault(Reason("nvml_unavailable", f"NVML does not start: {error}")) from error
        self._pid = os.getpid()
        for uuid in self._handles:
            self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def _sample(self, uuid: str) -> Sample | DeviceFault:
        handle = self._handles[uuid]
        try:
            total_mib, free_mib = self._memory_mib(handle)
        except self._nvml.NVMLError as error:
            return DeviceFault(uuid, Reason("device_unreadable", f"NVML cannot read {uuid}: {error}"))
        return Sample(total_mib, total_mib - free_mib, free_mib, self._processes(handle))

    def _memory_mib(self, handle: Any) -> tuple[int, int]:
        """(total, free): what processes can get at most, and what they can get now.

        The driver's own reserve is left out of the total where NVML tells it (version 2 of the call).
        """
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
            total = memory.total - memory.reserved
        except self._nvml.NVMLError:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            total = memory.total
        return total // _MIB, memory.free // _MIB

    def _processes(self, handle: Any) -> dict[int, int | None]:
        nvml = self._nvml
        calls: Iterable[Callable[[Any], Any]] = (
            nvml.nvmlDeviceGetComputeRunningProcesses,
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
        )
        used: dict[int, int | None] = {}
        for call in calls:
            try:
                running = call(handle)
            except nvml.NVMLError:
                continue
            for process in running:
                memory = process.usedGpuMemory
                used[process.pid] = None if memory is None else math.ceil(memory / _MIB)
        return used


def _import_pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise NodeFault(Reason("nvml_missing", "nvidia-ml-py is not installed: pip install 'brim[worker]'")) from error
    if not str(pynvml.__file__).endswith("pynvml.py"):
        raise NodeFault(
            Reason(
                "nvml_shadowed",
                f"{pynvml.__file__} is the deprecated package 'pynvml', which hides nvidia-ml-py: "
                "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py",
            )
        )
    return pynvml


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
