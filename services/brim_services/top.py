"""`brim top`: the cluster at a glance in a terminal, sorted and filtered by key.

Made for 80 columns and for slow lines: only what has changed is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import redis
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import DataTable, Footer, Input, Static

from brim.core.model import TERMINAL, State
from brim_services.picture import Gpu, Painter, Picture

REFRESH_S = 1.0
BAR_WIDTH = 20
GPU_COLUMNS = ("GPU", "memory", "GiB", "busy", "tasks")
LANE_COLUMNS = ("waiting task", "GiB", "depth", "first", "because")


@dataclass(frozen=True, slots=True)
class Order:
    """One way to sort GPUs."""

    name: str
    key: Callable[[Gpu], Any]


ORDERS = (
    Order("name", lambda gpu: (gpu.node, gpu.index)),
    Order("free", lambda gpu: -gpu.available_mib),
    Order("taken", lambda gpu: gpu.available_mib),
    Order("tasks", lambda gpu: -gpu.busy),
)


def gib(mib: int) -> str:
    """An amount, short."""
    return f"{mib / 1024:.1f}"


def bar(gpu: Gpu, width: int = BAR_WIDTH) -> Text:
    """External, measured, reserved beyond that, free, headroom."""
    counted = gpu.external_mib + gpu.counted_mib
    bounds = [
        ("▓", "magenta", gpu.external_mib),
        ("█", "green", gpu.external_mib + min(gpu.measured_mib, gpu.counted_mib)),
        ("▒", "yellow", counted),
        (" ", "", max(counted, gpu.total_mib - gpu.headroom_mib)),
        ("░", "dim", gpu.total_mib),
    ]
    drawn, found = 0, Text()
    for mark, style, bound in bounds:
        cells = min(width, round(width * bound / max(1, gpu.total_mib)))
        found.append(mark * max(0, cells - drawn), style)
        drawn = max(drawn, cells)
    return found


def headline(picture: Picture) -> Text:
    """Health, and tasks by state."""
    problems = picture.problems
    line = Text("healthy" if not problems else problems[0], "bold green" if not problems else "bold red")
    if len(problems) > 1:
        line.append(f"  (and {len(problems) - 1} more)", "red")
    line.append("\n")
    for state in sorted(State, key=lambda state: state in TERMINAL):
        if picture.counts.get(state):
            line.append(f"{state} ", "dim").append(f"{picture.counts[state]:,}  ")
    if picture.intake_backlog:
        line.append("at intake ", "dim").append(f"{picture.intake_backlog:,}")
    return line


def chosen(picture: Picture, order: Order, find: str) -> list[Gpu]:
    """The GPUs to show: those whose name, state or tasks contain the text, in order."""
    wanted = find.lower()

    def has(gpu: Gpu) -> bool:
        return (
            wanted
            in " ".join(
                [gpu.name, gpu.state, gpu.model, *(task.task for task in gpu.tasks), *(m.label for m in gpu.models)]
            ).lower()
        )

    return sorted(filter(has, picture.gpus.values()), key=lambda gpu: (order.key(gpu), gpu.node, gpu.index))


def gpu_row(gpu: Gpu) -> list[Text | str]:
    """A line of the table of GPUs."""
    names = [f"[{model.label} {model.state} {model.items}]" for model in gpu.models]
    names += [task.task.rpartition(".")[2] for task in gpu.tasks]
    tasks = Text(", ".join(names), overflow="ellipsis", no_wrap=True)
    used = gpu.external_mib + gpu.counted_mib
    state = tasks if gpu.state == "up" else Text(gpu.state, "red")
    return [
        gpu.name,
        bar(gpu),
        Text(f"{gib(used)}/{gib(gpu.total_mib)}", justify="right"),
        Text(f"{gpu.busy}/{gpu.executors}", justify="right"),
        state,
    ]


def waiting_rows(picture: Picture, find: str) -> list[list[Text | str]]:
    """Lines of the table of overflow, the deepest lane first."""
    return [
        [
            lane.task,
            Text(f"{gib(lane.vram_mib)}", justify="right"),
            Text(f"{lane.depth:,}", justify="right"),
            Text(f"{max(0.0, picture.at_s - lane.head_since_s):.0f} s", justify="right"),
            lane.reason.message,
        ]
        for lane in sorted(picture.lanes.values(), key=lambda lane: -lane.depth)
        if find.lower() in f"{lane.task} {lane.reason.message}".lower()
    ]


def snapshot(picture: Picture) -> RenderableType:
    """All of a picture at once, for where there is no screen to draw on."""
    tables = []
    for columns, rows in (
        (GPU_COLUMNS, [gpu_row(gpu) for gpu in chosen(picture, ORDERS[0], "")]),
        (LANE_COLUMNS, waiting_rows(picture, "")),
    ):
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return Group(headline(picture), *tables)


class Top(App[None]):
    """The application; ``where`` names the Redis server."""

    TITLE = "brim top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #head { height: 3; padding: 0 1; }
    #gpus { height: 2fr; }
    #lanes { height: 1fr; }
    #find { display: none; height: 1; border: none; padding: 0 1; }
    #find.open { display: block; }
    DataTable { scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort"),
        Binding("slash", "find", "Filter"),
        Binding("escape", "clear", "Clear"),
    ]

    def __init__(self, painter: Painter, where: str) -> None:
        super().__init__()
        self.painter = painter
        self.where = where
        self.order = ORDERS[0]
        self.picture: Picture | None = None

    def compose(self) -> ComposeResult:
        """A headline, the GPUs, overflow, and the keys."""
        yield Static("reading…", id="head")
        with Vertical():
            yield DataTable(id="gpus", cursor_type="row", zebra_stripes=False)
            yield DataTable(id="lanes", cursor_type="row", show_cursor=False)
        yield Input(placeholder="name, task, state", id="find")
        yield Footer()

    def on_mount(self) -> None:
        """Begins to look, once a second."""
        self.gpus.add_columns(*GPU_COLUMNS)
        self.lanes.add_columns(*LANE_COLUMNS)
        self.gpus.focus()
        self.look()
        self.set_interval(REFRESH_S, self.look)

    @property
    def gpus(self) -> DataTable[Text | str]:
        """The table of GPUs."""
        return self.query_one("#gpus", DataTable)

    @property
    def lanes(self) -> DataTable[Text | str]:
        """The table of overflow."""
        return self.query_one("#lanes", DataTable)

    @property
    def find(self) -> Input:
        """Where the filter is typed."""
        return self.query_one("#find", Input)

    @work(thread=True, exclusive=True)
    def look(self) -> None:
        """Reads a picture beside the screen, so that keys are always heard."""
        try:
            picture = self.painter.paint()
        except redis.RedisError as error:
            message = Text(f"Redis at {self.where} does not answer: {error}", "bold red")
            self.call_from_thread(self.query_one("#head", Static).update, message)
            return
        self.call_from_thread(self.show, picture)

    def show(self, picture: Picture) -> None:
        """Draws a picture."""
        self.picture = picture
        head = headline(picture)
        find = self.find.value
        head.append(f"\nsorted by {self.order.name}", "dim")
        if find:
            head.append(f", only {find!r}", "yellow")
        self.query_one("#head", Static).update(head)
        fill(self.gpus, [gpu_row(gpu) for gpu in chosen(picture, self.order, find)])
        fill(self.lanes, waiting_rows(picture, find))

    def action_sort(self) -> None:
        """The next order."""
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        self._redraw()

    def action_find(self) -> None:
        """Opens the filter."""
        self.find.add_class("open")
        self.find.focus()

    def action_clear(self) -> None:
        """Closes and empties the filter."""
        self.find.value = ""
        self._close_filter()

    def on_input_changed(self) -> None:
        """Filters while it is typed."""
        self._redraw()

    def on_input_submitted(self) -> None:
        """Keeps the filter and goes back to the table."""
        self._close_filter()

    def _close_filter(self) -> None:
        self.find.remove_class("open")
        self.gpus.focus()
        self._redraw()

    def _redraw(self) -> None:
        if self.picture is not None:
            self.show(self.picture)


def fill(table: DataTable[Text | str], rows: Sequence[Sequence[Text | str]]) -> None:
    """Brings a table to these rows, cell by cell, so that cursor and scroll position stay."""
    while table.row_count > len(rows):
        table.remove_row(table.coordinate_to_cell_key((table.row_count - 1, 0)).row_key)  # type: ignore[arg-type]
    for i, row in enumerate(rows):
        if i >= table.row_count:
            table.add_row(*row)
            continue
        for j, cell in enumerate(row):
            if table.get_cell_at((i, j)) != cell:  # type: ignore[arg-type]
                table.update_cell_at((i, j), cell, update_width=True)  # type: ignore[arg-type]
