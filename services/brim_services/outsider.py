"""A process that brim did not start and that takes memory on one of its simulated devices for a while.

It is polite in the way that the demo promises: it takes a step of at most the device's headroom, and only
while the latest report shows that much available. A process that grabs more than that at once can make
tasks run out of memory, whoever schedules them.

Run as `python -m brim_services.outsider UUID`, with the stack's environment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from brim.core.model import Device
from brim.gpu import simulated
from brim.settings import Settings
from brim.store import Store
from brim.store.types import MemoryReport
from brim_services.supervise import termination_requested

STEPS = 6
HOLD_S = 5.0
"""How long it keeps everything before it begins to free it."""


def reports(store: Store, uuid: str) -> Iterator[MemoryReport | None]:
    """Memory reports that tell of the device, as they come; None when none came for a quarter of a second."""
    with store.client.pubsub(ignore_subscribe_messages=True) as subscription:
        subscription.subscribe(store.keys.reports)
        while True:
            message = subscription.get_message(timeout=0.25)
            report = MemoryReport.model_validate_json(message["data"]) if message else None
            yield report if report and uuid in report.devices else None


def device(store: Store, uuid: str) -> Device | None:
    """The device's entry in the availability table."""
    return next((entry for entry in store.devices() if entry.uuid == uuid), None)


def main() -> None:
    """Take memory step by step, keep it, free it step by step, and end."""
    uuid = sys.argv[1]
    settings = Settings.load()
    store = Store.of(settings)
    step_mib = settings.agent.headroom_mib
    held: list[simulated.Allocation] = []
    changed_ms = store.server_ms()
    with termination_requested() as stop:
        for report in reports(store, uuid):
            if stop() or len(held) == STEPS:
                break
            if report is None or report.sampled_ms <= changed_ms:
                continue
            entry = device(store, uuid)
            if entry is not None and entry.available_mib >= step_mib:
                held.append(simulated.hold(uuid, step_mib))
                changed_ms = store.server_ms()
                print(f"holds {len(held) * step_mib} MiB", flush=True)
        until = time.monotonic() + HOLD_S
        while not stop() and time.monotonic() < until:
            time.sleep(0.1)
    for block in held:
        block.free()
    print("freed all of it", flush=True)


if __name__ == "__main__":
    main()
