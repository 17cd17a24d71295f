"""What the cluster looks like in a terminal: memory bars, queue depths, tasks by state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from brim.core.model import TERMINAL, Device, Reason, State
from brim.store import Store
from brim.store.types import ExecutorView, Record

BAR_WIDTH = 40
LONGEST_STORY_FIELD = 200
STYLES = {State.FAILED: "red", State.DEAD: "red", State.SUCCEEDED: "green", State.WAITING: "yellow"}
LEGEND = Text.assemble(
    ("▓", "magenta"),
    " external  ",
    ("█", "green"),
    " measured  ",
    ("▒", "yellow"),
    " reserved  ",
    ("░", "dim"),
    " headroom",
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at one moment. ``figures`` are reserved, measured and external MiB by device."""

    devices: Sequence[Device]
    figures: Mapping[str, Mapping[str, int]]
    depths: Mapping[str, int]
    counts: Mapping[State, int]

    @classmethod
    def of(cls, store: Store) -> Snapshot:
        """Read in a few round trips, so figures of one moment may differ by a transition."""
        devices = store.devices()
        figures = store.measured_mib([device.uuid for device in devices])
        return cls(devices, figures, store.lane_depths(), store.counts())

    @property
    def waiting(self) -> int:
        """How many tasks wait in overflow."""
        return sum(self.depths.values())


def memory_bar(device: Device, measured_mib: int, width: int = BAR_WIDTH) -> Text:
    """A device's memory: external, measured, reserved beyond that, then what is free, and the headroom."""
    measured = min(measured_mib, device.committed_mib)
    bounds = [
        device.external_mib,
        device.external_mib + measured,
        device.external_mib + device.committed_mib,
        max(device.external_mib + device.committed_mib, device.total_mib - device.headroom_mib),
        device.total_mib,
    ]
    cells = [min(width, round(width * bound / device.total_mib)) for bound in bounds]
    bar = Text()
    for mark, style, start, end in zip(
        "▓█▒ ░", ("magenta", "green", "yellow", "", "dim"), [0, *cells], cells, strict=False
    ):
        bar.append(mark * (end - start), style)
    return bar


def device_table(snapshot: Snapshot) -> Table:
    """The availability table, one row a device."""
    table = Table(box=None, pad_edge=False)
    table.add_column("device")
    table.add_column("memory", min_width=BAR_WIDTH)
    for column in ("reserved", "measured", "external", "available", "capacity", "tasks"):
        table.add_column(column, justify="right")
    table.add_column("state")
    for device in snapshot.devices:
        figures = snapshot.figures.get(device.uuid, {})
        measured, reserved = figures.get("measured", 0), figures.get("reserved", 0)
        table.add_row(
            f"{device.node}.{device.index}",
            memory_bar(device, measured),
            *(
                f"{mib:,}"
                for mib in (
                    reserved,
                    measured,
                    device.external_mib,
                    device.available_mib,
                    device.total_mib,
                )
            ),
            f"{device.busy}/{device.executors}",
            Text(device.state, "" if device.state == "up" else "red"),
        )
    return table


def counts_line(counts: Mapping[State, int]) -> Text:
    """Tasks by state, those still on their way first."""
    line = Text("tasks  ")
    for state in sorted(State, key=lambda state: state in TERMINAL):
        if counts.get(state):
            line.append(f"{state} {counts[state]}  ", STYLES.get(state, ""))
    return line


def render(snapshot: Snapshot, title: str) -> RenderableType:
    """All of it, for a live display. MiB."""
    deepest = sorted(snapshot.depths.items(), key=lambda lane: -lane[1])[:3]
    lanes = ", ".join(f"{lane} ×{depth}" for lane, depth in deepest)
    overflow = Text(f"overflow  {snapshot.waiting} waiting" + (f": {lanes}" if lanes else ""))
    return Group(Text(title, "bold"), device_table(snapshot), LEGEND, overflow, counts_line(snapshot.counts))


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%H:%M:%S.%f")[:-3]


def _between(start: float | None, end: float | None) -> str:
    return "" if start is None or end is None else f"{end - start:.2f}"


def task_table(records: Sequence[Record]) -> Table:
    """Tasks, one a row."""
    table = Table(box=None, pad_edge=False)
    for column in ("id", "task", "state", "MiB", "device", "admitted", "waited s", "ran s", "reason"):
        table.add_column(column)
    for record in records:
        table.add_row(*_row(record))
    return table


def executor_table(views: Sequence[ExecutorView], now_s: float) -> Table:
    """Model executors, one a row."""
    table = Table(box=None, pad_edge=False)
    for column in ("executor", "model", "phase", "state", "MiB", "items", "for s", "reason"):
        table.add_column(column, justify="right" if column in ("MiB", "items", "for s") else "left")
    for view in views:
        model = f"{view.model}@{view.version}" if view.version else view.model
        figures = (str(view.vram_mib), str(len(view.items)), f"{now_s - view.since_s:.0f}")
        table.add_row(view.name, model, view.phase, view.state, *figures, str(view.reason or ""))
    return table


def _row(record: Record) -> list[str]:
    return [
        record.task_id,
        record.task,
        record.state,
        str(record.demand.vram_mib),
        ", ".join(record.devices),
        _clock(record.admitted_s),
        _between(record.admitted_s, record.placed_s),
        _between(record.started_s, record.finished_s),
        str(record.reason or ""),
    ]


def story_lines(story: list[dict[str, Any]]) -> list[str]:
    """One line an event: clock, seconds since the event before, name, and what belongs to it."""
    lines = []
    before_s = story[0]["t"] / 1000 if story else 0.0
    for event in story:
        at_s = event["t"] / 1000
        details = {name: value for name, value in event.items() if name not in ("t", "event")}
        if isinstance(reason := details.get("reason"), dict):
            details["reason"] = Reason(**reason)
        if isinstance(estimate := details.get("estimate"), dict):
            details["estimate"] = estimate.get("sum", "none yet")
        told = "  ".join(f"{name}={str(value)[:LONGEST_STORY_FIELD]}" for name, value in details.items())
        lines.append(f"{_clock(at_s)} {at_s - before_s:+8.3f} s  {event['event']:12} {told}".rstrip())
        before_s = at_s
    return lines
