"""This node's place in the cluster's table: registration, lease, device states and memory reports."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from brim.core.model import Node, Reason
from brim.gpu.probe import DeviceFault, DeviceInfo, NodeFault, Probe
from brim.gpu.sampling import Samples, moved
from brim.settings import Agent as AgentSettings
from brim.store import Store
from brim.store.types import DeviceFigures, DeviceRegistration, MemoryReport, NodeRegistration

log = logging.getLogger("brim.agent")

_MIB = 1 << 20


class Refused(Exception):
    """The store does not take this boot's word any more: its node was declared lost, or another took it over."""


class Presence:
    """What one boot of an agent says about its node. Every method but `leave` raises `Refused`."""

    def __init__(
        self, store: Store, settings: AgentSettings, name: str, boot: str, devices: Sequence[DeviceInfo], probe: Probe
    ) -> None:
        self.name = name
        self.uuids = [device.uuid for device in devices]
        self.faults: dict[str, Reason] = {}
        """Devices that could not be read at the last report."""
        self._store = store
        self._settings = settings
        self._boot = boot
        self._devices = devices
        self._probe = probe
        self._states: dict[str, str] = {}
        self.samples: Samples = {}
        """The latest ones."""

    def register(self, tasks: Sequence[str], signatures: Mapping[str, str]) -> None:
        """Put the node into the table; its devices take nothing until `show` says so."""
        settings = self._settings
        cpus = len(os.sched_getaffinity(0))
        ram_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MIB
        registration = NodeRegistration(
            Node(self.name, settings.labels, cpus, ram_mib),
            self._boot,
            settings.executors_per_gpu,
            tasks,
            signatures,
            [
                DeviceRegistration(device.uuid, device.index, device.model, device.total_mib, settings.headroom_mib)
                for device in self._devices
            ],
            state="starting",
        )
        _unless_refused(self._store.register_node(registration))
        self._states = dict.fromkeys(self.uuids, "starting")

    def renew(self, *, draining: bool) -> None:
        """Renew the lease of everything that runs on this node."""
        _unless_refused(self._store.renew(self.name, self._boot, draining=draining))

    def show(self, states: Mapping[str, str]) -> None:
        """Bring the devices' states in the table up to date."""
        for state in sorted(set(states.values())):
            changed = [uuid for uuid in self.uuids if states[uuid] == state != self._states[uuid]]
            if changed:
                _unless_refused(self._store.set_device_state(self.name, self._boot, changed, state))
                self._states.update(dict.fromkeys(changed, state))

    def report(self, executors: Mapping[str, frozenset[str]], sampled_ms: int) -> bool:
        """Sample the devices' memory and that of their executors, and publish it; notes `faults`.

        ``sampled_ms`` is a time by the server's clock that has passed: what ended later is not reported of.
        True if memory has moved since the report before.
        """
        before, self.samples = self.samples, self._sample()
        figures = {}
        for uuid, found in self.samples.items():
            if isinstance(found, DeviceFault):
                self._note_fault(uuid, found.reason)
                continue
            self._note_fault(uuid, None)
            processes = {proc: found.of(int(proc.partition(".")[0])) for proc in executors[uuid]}
            figures[uuid] = DeviceFigures(
                total_mib=found.total_mib, used_mib=found.used_mib, free_mib=found.free_mib, processes=processes
            )
        report = MemoryReport(node=self.name, boot=self._boot, sampled_ms=sampled_ms, devices=figures)
        _unless_refused(self._store.report(report))
        return moved(before, self.samples)

    def leave(self) -> bool:
        """Take the node out of the table; False if attempts are left there, or another boot has taken over."""
        return self._store.leave(self.name, self._boot)

    def _sample(self) -> Samples:
        try:
            return {uuid: found for uuid, found in self._probe.sample().items() if uuid in self.uuids}
        except NodeFault as fault:
            return {uuid: DeviceFault(uuid, fault.reason) for uuid in self.uuids}

    def _note_fault(self, uuid: str, reason: Reason | None) -> None:
        known = self.faults.get(uuid)
        if reason is not None:
            self.faults[uuid] = reason
            if known != reason:
                log.error("device %s takes no tasks: %s", uuid, reason)
        elif known is not None:
            del self.faults[uuid]
            log.warning("device %s can be read again", uuid)


def _unless_refused(accepted: bool) -> None:
    if not accepted:
        raise Refused
