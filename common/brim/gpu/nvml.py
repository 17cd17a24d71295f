"""Real devices, through NVML and the module ``pynvml`` of the package ``nvidia-ml-py``.

How NVML fails decides who suffers: a driver that is missing or does not match its library is a NodeFault; a GPU
that is lost or wants a reset is a DeviceFault until it can be read again; what is not supported, not permitted or
not there is merely unknown.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from brim.core.model import Reason
from brim.gpu import process
from brim.gpu.mask import granted
from brim.gpu.probe import DeviceFault, DeviceInfo, NodeFault, Sample

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_NO_GPUS_IS_FINE = 1  # NVML_INIT_FLAG_NO_GPUS, which pynvml does not name
_PID_MAX = 1 << 22  # Linux never gives a higher pid
_RESTART_S = 5.0  # between two restarts of NVML while a device is faulty: a GPU that was reset needs one


@dataclass(slots=True)
class _Device:
    """A device that has been listed: the GPU it is or is a part of, and its handle while that is good."""

    gpu: str
    handle: Any | None


class NvmlProbe:
    """The NVIDIA GPUs and MIG devices of this node that an outer ``CUDA_VISIBLE_DEVICES`` grants.

    A GPU in MIG mode is not a device, its instances are. A whole GPU's index is NVML's; instance ``n`` of GPU
    ``g`` has the index ``100 * (g + 1) + n``. An Xid event of ``quarantine_xids`` makes its GPU, with all its
    instances, a fault for ``quarantine_s`` seconds from the latest one; without any, no events are watched.
    """

    def __init__(self, quarantine_xids: Collection[int], quarantine_s: float) -> None:
        self._nvml = _import_pynvml()
        self._xids, self._quarantine_s = frozenset(quarantine_xids), quarantine_s
        self._pid: int | None = None
        self._known: dict[str, _Device] = {}
        self._events: Any | None = None
        self._watched: set[str] = set()
        self._quarantined: dict[str, tuple[float, Reason]] = {}
        self._restart_at: float | None = None
        self._version = ""  # of the call that lists processes; "_v2" once the newest has proved wrong
        with self._driver():
            pass

    # --- the protocol ------------------------------------------------------------------------------------------

    def devices(self) -> list[DeviceInfo]:
        """The devices that answer now, by index; none is no fault. Raises NodeFault."""
        with self._driver():
            listed = list(self._list())
            infos = granted(
                [info for info, _device in listed],
                os.environ.get("CUDA_VISIBLE_DEVICES"),
                os.environ.get("CUDA_DEVICE_ORDER"),
            )
            chosen = {info.uuid for info in infos}
            self._known.update({info.uuid: device for info, device in listed if info.uuid in chosen})
            self._watch()
            return infos

    def sample(self) -> dict[str, Sample | DeviceFault]:
        """The memory of every device that ``devices`` has named. Raises NodeFault."""
        with self._driver():
            self._hear_events()
            samples = {uuid: self._sample(uuid, device) for uuid, device in self._known.items()}
            if not any(isinstance(sample, DeviceFault) for sample in samples.values()):
                self._restart_at = None
            elif self._restart_at is None:
                self._restart_at = time.monotonic() + _RESTART_S
            return samples

    def close(self) -> None:
        """Shuts NVML down, if this process has started it."""
        if self._pid == os.getpid():
            self._shut_down()
        self._pid = None

    # --- the driver --------------------------------------------------------------------------------------------

    @contextmanager
    def _driver(self) -> Iterator[None]:
        """NVML started in this very process; what fails beyond a device is a NodeFault, and starts it anew."""
        nvml = self._nvml
        try:
            self._start()
            yield
        except nvml.NVMLError as error:
            self.close()
            raise NodeFault(self._node_reason(error)) from error

    def _start(self) -> None:
        """NVML's state belongs to one process: after a fork it is started again and handles are found anew."""
        started = self._pid == os.getpid()
        if started and self._restart_at is not None and time.monotonic() >= self._restart_at:
            self._shut_down()
            started, self._restart_at = False, None
        if started:
            return
        self._nvml.nvmlInitWithFlags(_NO_GPUS_IS_FINE)
        self._pid = os.getpid()
        self._events, self._watched = None, set()
        for device in self._known.values():
            device.handle = None
        self._watch()

    def _shut_down(self) -> None:
        with suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    def _node_reason(self, error: Any) -> Reason:
        nvml = self._nvml
        return {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: Reason(
                "nvml_library_missing",
                "libnvidia-ml.so.1 is not found: no NVIDIA driver is installed, or this is a container started "
                "without its GPUs. For simulated devices set BRIM_DEVICES=sim:4x24GiB",
            ),
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: Reason(
                "nvml_driver_not_loaded", "the NVIDIA driver is installed but its kernel module is not loaded"
            ),
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Reason(
                "nvml_driver_mismatch",
                "the NVIDIA kernel module and libnvidia-ml.so.1 are of different versions: after an upgrade of the "
                "driver, reload its kernel module or reboot",
            ),
        }.get(error.value, Reason("nvml_unavailable", f"NVML fails: {error}"))

    def _raise_if_node(self, error: Any) -> None:
        nvml = self._nvml
        if error.value in {
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        }:
            raise error

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any | None:
        """The call's answer; None where it is not supported, not permitted or not there."""
        nvml = self._nvml
        try:
            return call(*arguments)
        except nvml.NVMLError as error:
            absent = {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION}
            if error.value in absent | {nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NOT_FOUND}:
                return None
            raise

    # --- which devices there are -------------------------------------------------------------------------------

    def _list(self) -> Iterator[tuple[DeviceInfo, _Device]]:
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = _text(nvml.nvmlDeviceGetUUID(handle))
                parts = self._instances(handle)
                if parts is None:
                    yield self._describe(handle, index), _Device(gpu, handle)
                    continue
                for number, part in parts:
                    yield self._describe(part, 100 * (index + 1) + number), _Device(gpu, part)
            except nvml.NVMLError as error:
                self._raise_if_node(error)
                logger.warning("GPU %d is left out, it cannot be read: %s", index, error)

    def _instances(self, handle: Any) -> list[tuple[int, Any]] | None:
        """The MIG devices of a GPU, None when it is a device itself. A container may be refused the GPU's mode."""
        nvml = self._nvml
        mode = self._ask(nvml.nvmlDeviceGetMigMode, handle)
        if mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_DISABLE:
            return None
        most = self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        parts = [
            (number, part)
            for number in range(most)
            if (part := self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)) is not None
        ]
        return parts if parts or mode is not None else None

    def _describe(self, handle: Any, index: int) -> DeviceInfo:
        nvml = self._nvml
        uuid, model = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
        total, reserved, _free = self._memory(handle)
        return DeviceInfo(uuid, index, model, (total - reserved) // _MIB)

    # --- memory ------------------------------------------------------------------------------------------------

    def _sample(self, uuid: str, device: _Device) -> Sample | DeviceFault:
        nvml = self._nvml
        if device.gpu in self._quarantined:
            return DeviceFault(uuid, self._quarantined[device.gpu][1])
        codes = {
            nvml.NVML_ERROR_GPU_IS_LOST: "device_lost",
            nvml.NVML_ERROR_RESET_REQUIRED: "device_needs_reset",
            nvml.NVML_ERROR_NOT_FOUND: "device_gone",
        }
        try:
            return self._read(uuid, device)
        except nvml.NVMLError as error:
            self._raise_if_node(error)
            first = error
        device.handle = None  # handles go stale when MIG devices change or a GPU comes back
        try:
            return self._read(uuid, device)
        except nvml.NVMLError as error:
            self._raise_if_node(error)
            cause = first if first.value in codes else error
        code = codes.get(cause.value, "device_unreadable")
        return DeviceFault(uuid, Reason(code, f"NVML cannot read {uuid}: {cause}"))

    def _read(self, uuid: str, device: _Device) -> Sample:
        if device.handle is None:
            device.handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        total, reserved, free = self._memory(device.handle)
        total_mib, free_mib = (total - reserved) // _MIB, free // _MIB
        processes = self._processes(device.handle, total) if process.pids_are_the_hosts() else None
        return Sample(total_mib, total_mib - free_mib, free_mib, processes or {}, processes is not None)

    def _memory(self, handle: Any) -> tuple[int, int, int]:
        """(total, reserved by the driver, free) in bytes; version 1 of the call does not tell what is reserved."""
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            return memory.total, memory.reserved, memory.free
        except nvml.NVMLError:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return memory.total, 0, memory.free

    def _processes(self, handle: Any, total: int) -> dict[int, int | None] | None:
        """Memory by pid in MiB, rounded up; None when computing processes cannot be listed."""
        computing = self._running("Compute", handle, total)
        if computing is None:
            return None
        used: dict[int, int | None] = {}
        for running in (computing, self._running("Graphics", handle, total) or []):
            for pid, memory in running:
                mib = None if memory is None else -(-memory // _MIB)
                # A process that computes and draws is in both lists, with the same figure.
                used[pid] = mib if used.get(pid) is None else max(used[pid] or 0, mib or 0)
        return used

    def _running(self, kind: str, handle: Any, total: int) -> list[tuple[int, int | None]] | None:
        """(pid, bytes or None) of the processes that compute or draw; None when that is not known.

        The newest version of the call is missing in some drivers and fills another structure in others: then
        the version before it serves.
        """
        nvml = self._nvml
        try:
            answer = self._ask(getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses{self._version}"), handle)
        except nvml.NVMLLibraryMismatchError:
            wrong = True
        else:
            if answer is None:
                return None
            running = [(entry.pid, entry.usedGpuMemory) for entry in answer]
            wrong = any(not 0 < pid <= _PID_MAX or (memory or 0) > total for pid, memory in running)
            if not wrong:
                return running
        if self._version:
            return None
        self._version = "_v2"
        return self._running(kind, handle, total)

    # --- events ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Asks for the Xid events of all GPUs; where there are none to be had, they are just not heard."""
        nvml = self._nvml
        unwatched = {device.gpu for device in self._known.values()} - self._watched if self._xids else set()
        if unwatched and self._events is None:
            self._events = self._ask(nvml.nvmlEventSetCreate)
        self._watched |= unwatched
        for gpu in unwatched if self._events is not None else ():
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
            except nvml.NVMLError as error:
                self._raise_if_node(error)
                logger.info("no Xid events of %s: %s", gpu, error)

    def _hear_events(self) -> None:
        nvml, now = self._nvml, time.monotonic()
        self._quarantined = {gpu: entry for gpu, entry in self._quarantined.items() if entry[0] > now}
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait(self._events, 0)
                gpu = _text(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError as error:
                self._raise_if_node(error)
                return  # nothing more to hear; a lost GPU shows when it is read
            if event.eventData in self._xids:
                message = f"{gpu} reported Xid {event.eventData}; it is in quarantine for {self._quarantine_s:g} s"
                self._quarantined[gpu] = (now + self._quarantine_s, Reason("device_xid", message))


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
