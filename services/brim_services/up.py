"""`brim up`: the whole stack on this machine until Ctrl-C."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from brim.gpu.probe import NodeFault, open_probe
from brim.settings import Metrics, Settings
from brim_services.embedded import preferred_port
from brim_services.stack import EXAMPLE_APP, Ports, Stack, with_files
from brim_services.supervise import Backoff, ChildDied, Supervisor, termination_requested

SIMULATED = "sim:4x24GiB"


def devices_setting() -> str:
    """BRIM_DEVICES where it is set, else NVML's devices where there are any, else simulated ones."""
    chosen = os.environ.get("BRIM_DEVICES")
    if chosen:
        return chosen
    try:
        probe = open_probe(None)
        try:
            return "nvml" if probe.devices() else SIMULATED
        finally:
            probe.close()
    except NodeFault:
        return SIMULATED


def _metrics(chosen: Metrics) -> Metrics:
    """The chosen ports, and for those that are 0 the ones that deploy/prometheus looks at, if they are free."""
    usual = {"intake_port": 9301, "placement_port": 9302, "agent_port": 9303}
    ports = {name: getattr(chosen, name) or preferred_port(port) for name, port in usual.items()}
    return chosen.model_copy(update=ports)


def up(settings: Settings, folder: Path, ports: Ports, *, app: str = EXAMPLE_APP, as_json: bool) -> int:
    """Start the stack with a Celery app's workers, print its addresses, keep it running; the exit code."""
    settings = with_files(settings, app)
    console = Console(stderr=as_json)
    backoff = Backoff(settings.agent.restart_backoff_s, settings.agent.restart_backoff_max_s)
    settings = settings.model_copy(update={"metrics": _metrics(settings.metrics)})
    with termination_requested() as stop, Supervisor(folder / "logs") as supervisor:
        stack = Stack(supervisor, folder.absolute(), settings, devices_setting(), ports, backoff, app=app)
        try:
            stack.start(lambda what: console.print(f"[dim]starting:[/] {what}", highlight=False), stop)
        except (ChildDied, TimeoutError) as error:
            console.print(
                f"[red]brim up failed:[/] {escape(str(error))}\nlogs are in {folder / 'logs'}", highlight=False
            )
            return 1
        addresses = {
            "page": stack.monitor_url,
            "redis": stack.url,
            "flower": stack.flower_url,
            "devices": stack.devices,
            "logs": str(folder / "logs"),
        }
        if as_json:
            print(json.dumps(addresses), flush=True)
        for name, value in addresses.items():
            console.print(f"{name:8} {value}", highlight=False)
        console.print("Ctrl-C stops it all.")
        while not stop():
            for death in supervisor.poll():
                console.print(f"[yellow]{escape(str(death))}[/]", highlight=False)
            time.sleep(0.2)
        console.print("stopping")
    return 0
