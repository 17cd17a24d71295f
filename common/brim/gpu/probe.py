"""What brim asks of a node's devices, whatever stands behind them: NVML or simulated devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from brim.core.model import Reason


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A GPU or MIG instance. The UUID identifies it; the index only names it for people and queues."""

    uuid: str
    index: int
    model: str
    total_mib: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One device's memory at one moment, in MiB; used + free = total, and the driver's own reserve is in neither
    where the driver tells it.

    ``processes`` maps each pid that uses the device to its memory, None where that is unknown (never 0 for
    unknown). Unless ``complete``, the list does not name all of this node's processes: the driver refuses it, or
    its pids are the host's and this is a container.
    """

    total_mib: int
    used_mib: int
    free_mib: int
    processes: Mapping[int, int | None]
    complete: bool = True

    def of(self, pid: int) -> int | None:
        """What that process of this node uses, None if unknown; 0 only where the list is known to be complete."""
        return self.processes.get(pid, 0 if self.complete else None)


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """A device that cannot be read now: quarantine it until a later sample is good again."""

    uuid: str
    reason: Reason


class NodeFault(RuntimeError):
    """No device of this node can be read (no driver, mismatched driver, a wrong setting)."""

    def __init__(self, reason: Reason):
        super().__init__(str(reason))
        self.reason = reason


class Probe(Protocol):
    """The devices of this node. Not safe for concurrent use by threads; survives a fork."""

    def devices(self) -> list[DeviceInfo]:
        """The devices that can be identified now, by index; may be empty. Raises NodeFault."""

    def sample(self) -> dict[str, Sample | DeviceFault]:
        """The memory of every device that ``devices`` has named so far, by UUID. Raises NodeFault."""

    def close(self) -> None:
        """Lets go of the driver; the probe is not used after that."""


def open_probe(spec: str | None, *, quarantine_xids: Collection[int] = (), quarantine_s: float = 60.0) -> Probe:
    """The probe for the setting ``BRIM_DEVICES``.

    ``sim:4x24GiB`` or ``sim:2x24GiB:SIM-24,1x80GiB`` are simulated devices (see ``brim.gpu.simulated``);
    ``nvml``, empty or None are the node's real ones. A real GPU that reports an Xid event of ``quarantine_xids``
    is a DeviceFault for the next ``quarantine_s`` seconds. Raises NodeFault with what is wrong.
    """
    kind = (spec or "nvml").strip()
    if kind.startswith("sim:"):
        from brim.gpu.simulated import SimulatedProbe

        return SimulatedProbe(kind)
    if kind == "nvml":
        from brim.gpu.nvml import NvmlProbe

        return NvmlProbe(quarantine_xids, quarantine_s)
    raise NodeFault(
        Reason(
            "devices_setting",
            f"BRIM_DEVICES={kind!r} is not understood: use 'nvml' or simulated devices such as 'sim:4x24GiB'",
        )
    )
