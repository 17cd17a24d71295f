"""Which devices an outer ``CUDA_VISIBLE_DEVICES`` (set by a batch system, say) grants to brim."""

from __future__ import annotations

from collections.abc import Sequence

from brim.core.model import Reason
from brim.gpu.probe import DeviceInfo, NodeFault


def granted(devices: Sequence[DeviceInfo], mask: str | None, order: str | None) -> list[DeviceInfo]:
    """Those of the node's devices that the mask names; all of them when it is None (not set).

    Entries are UUIDs, unambiguous beginnings of UUIDs, or CUDA's numbers; ``-1`` and what follows it grant
    nothing. A number means the device of that index only where CUDA counts as NVML does: with ``order``
    (``CUDA_DEVICE_ORDER``) ``PCI_BUS_ID``, or among GPUs of one model, and never beside MIG devices. Raises
    NodeFault where an entry could mean several devices.
    """
    if mask is None:
        return list(devices)
    found: dict[str, DeviceInfo] = {}
    for entry in (part.strip() for part in mask.split(",")):
        if entry in {"", "-1"}:
            break
        matches = _numbered(devices, entry, order) if entry.isdecimal() else _named(devices, entry)
        found.update({device.uuid: device for device in matches})
    return sorted(found.values(), key=lambda device: device.index)


def _named(devices: Sequence[DeviceInfo], entry: str) -> list[DeviceInfo]:
    matches = [device for device in devices if device.uuid.startswith(entry)]
    if len(matches) > 1:
        raise _ambiguous(entry, f"{len(matches)} UUIDs begin like that: write one in full")
    return matches


def _numbered(devices: Sequence[DeviceInfo], entry: str, order: str | None) -> list[DeviceInfo]:
    if any(device.uuid.startswith("MIG-") for device in devices):
        raise _ambiguous(entry, "numbers do not name MIG devices: write their UUIDs (nvidia-smi -L)")
    if order != "PCI_BUS_ID" and len({device.model for device in devices}) > 1:
        raise _ambiguous(
            entry, "CUDA numbers GPUs of several models by speed: write UUIDs, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return [device for device in devices if device.index == int(entry)]


def _ambiguous(entry: str, why: str) -> NodeFault:
    return NodeFault(Reason("devices_ambiguous", f"CUDA_VISIBLE_DEVICES holds {entry!r}: {why}"))
