"""The fit rule: what a device or a worker server lacks for a demand (requirements A3, A5, A8).

This is the one rule in Python (house rule 2): ranking, planning and simulation ask it, and the script
that commits a placement mirrors it line by line, so a stale plan is refused, not believed.
"""

from __future__ import annotations

from brim.core.model import Demand, Device, Node, Reason

UP = "up"
PART = " MIG "
"""In the name of a model that is a part of a GPU: CUDA shows a process one such part at most."""


def place_name(device: Device) -> str:
    """How messages name a device: ``gpu0@node-a``."""
    return f"gpu{device.index}@{device.node}"


def shortage(device: Device, demand: Demand, ahead: int = 0, *, memory: bool = True) -> Reason | None:
    """Why one GPU of the demand cannot go to this device now; None if it can.

    Checked in this order: the device takes work, its model is allowed, ``vram_mib`` is available (and nothing is
    held on it, if a whole GPU is wished for), and fewer than executors + ``ahead`` attempts hold an executor
    (``ahead`` > 0 places behind a busy one). ``memory=False`` leaves memory out: that is the placement which the
    demo shows to fail.
    """
    if device.state != UP:
        return Reason("state", f"{place_name(device)} is {device.state}")
    if not suits(device.model, demand):
        wanted = " or ".join(demand.gpu_models) or "a GPU that can be combined with others"
        return Reason("model", f"{place_name(device)} is a {device.model}, not {wanted}")
    short_mib = missing_mib(device, demand)
    if memory and short_mib > 0:
        return Reason("memory", f"memory short by {short_mib} MiB on {place_name(device)}")
    if device.busy >= device.executors + ahead:
        return Reason("executors", f"all {device.executors} executors busy on {place_name(device)}")
    return None


def node_shortage(node: Node, demand: Demand) -> Reason | None:
    """Why the worker server as a whole cannot take the demand now; None if it can.

    Host CPUs and RAM count only where the node has declared them (more than 0); CPUs are compared in thousandths.
    """
    for label, value in demand.labels:
        if node.labels.get(label) != value:
            return Reason("labels", f"node {node.name} has no label {label}={value}")
    short_milli = milli(demand.cpus) - milli(node.cpus) + milli(node.cpus_used)
    if node.cpus > 0 and short_milli > 0:
        return Reason("cpus", f"host CPUs short by {short_milli / 1000:g} on node {node.name}")
    short_mib = demand.ram_mib - node.ram_mib + node.ram_used_mib
    if node.ram_mib > 0 and short_mib > 0:
        return Reason("ram", f"host RAM short by {short_mib} MiB on node {node.name}")
    return None


def suits(model: str, demand: Demand) -> bool:
    """Whether devices of this model may take the demand at all."""
    allowed = not demand.gpu_models or model in demand.gpu_models
    return allowed and (demand.gpus <= 1 or PART not in model)


def missing_mib(device: Device, demand: Demand) -> int:
    """Memory that must come free on the device before the demand fits; 0 or less if none."""
    short_mib = demand.vram_mib - device.available_mib
    return max(short_mib, device.committed_mib) if demand.whole else short_mib


def claim_mib(device: Device, demand: Demand) -> int:
    """What the demand holds of this device once it is placed there."""
    return max(demand.vram_mib, device.available_mib) if demand.whole else demand.vram_mib


def capacity_mib(device: Device) -> int:
    """What the device can give away when nothing of brim's is on it."""
    return device.total_mib - device.headroom_mib


def milli(cpus: float) -> int:
    """CPUs in whole thousandths, so that sums of fractions compare exactly."""
    return round(cpus * 1000)
