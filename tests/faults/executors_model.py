"""What the scripts of model executors have to do, said once more in plain Python: no Redis, no clock.

Every method is one script and returns what the store must answer. Tasks have one run each: what newer runs of an id do
is the other model's part (`scripts_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from brim.core.model import LIVE, TERMINAL, State

TOTAL_MIB, HEADROOM_MIB = 10_000, 500


class Fenced(Exception):
    """The caller's epoch is not the active placement's."""


@dataclass
class Item:
    """What the record of a batched task must say; ``lapsed``: its ``expires`` has passed."""

    state: State = State.WAITING
    attempt: str | None = None
    executor: str = ""
    boot: str = ""
    proc: str = ""
    finisher: str | None = None
    losses: int = 0
    attempts: int = 0
    cancelling: bool = False
    owed: bool = False
    lapsed: bool = False


@dataclass
class Resident:
    """What a model executor's book must say; ``items`` is attempt → whether it is sealed."""

    device: str
    vram_mib: int
    state: str = "starting"
    boot: str = ""
    proc: str = ""
    ceiling: float | None = None
    batch: int = 0
    ahead: int = 0
    items: dict[str, bool] = field(default_factory=dict)


@dataclass
class Book:
    """What a device's book must say."""

    state: str = "up"
    processes: dict[str, int | None] = field(default_factory=dict)
    """Measured MiB of each."""


class Model:
    """Level 1, model executors and the devices that they are on."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.epoch = 0
        self.books = {uuid: Book() for uuid in devices}
        self.executors: dict[str, Resident] = {}
        self.items: dict[str, Item] = {}
        self.pushed: dict[str, int] = {}
        """Messages in each executor's queue."""

    def committed(self, device: str) -> int:
        """MiB of a device that are given away: reserved, or measured where that is more."""
        book = self.books[device]
        held = [executor for executor in self.executors.values() if executor.device == device]
        reserved = {proc: sum(e.vram_mib for e in held if e.proc == proc) for proc in book.processes}
        unbound = sum(e.vram_mib for e in held if not e.proc)
        return unbound + sum(max(reserved[proc], measured or 0) for proc, measured in book.processes.items())

    def admit(self, task_id: str) -> None:
        self.items[task_id] = Item()

    # -- placement -------------------------------------------------------------------------------------------

    def want(self, epoch: int, name: str, device: str, vram_mib: int) -> str:
        if epoch != self.epoch:
            return "fenced"
        if name in self.executors:
            return "exists"
        if self.books[device].state != "up":
            return "refused state"
        if TOTAL_MIB - HEADROOM_MIB - self.committed(device) < vram_mib:
            return "refused memory"
        self.executors[name] = Resident(device, vram_mib)
        return "wanted"

    def drain(self, name: str, epoch: int | None) -> bool:
        if epoch is not None:
            self._fence(epoch)
        executor = self.executors.get(name)
        if executor is None or executor.state == "draining":
            return False
        executor.state = "draining"
        return True

    def commit(self, epoch: int, task_id: str, attempt: str, name: str, source: tuple[str, str] | None) -> str:
        if epoch != self.epoch:
            return "fenced"
        item = self.items[task_id]
        if item.attempt == attempt:
            return "committed"
        executor = self.executors.get(name)
        if executor is None or executor.state != "up":
            return "refused"
        if source is None:
            if item.state is not State.WAITING:
                return "stale"
        else:
            sibling, before = source
            held = self.executors[sibling].items.get(before) if sibling in self.executors else None
            if item.state is not State.PLACED or item.attempt != before or held is not False:
                return "stale"
            del self.executors[sibling].items[before]
        executor.items[attempt] = False
        item.state, item.attempt, item.executor = State.PLACED, attempt, name
        item.boot, item.proc, item.finisher = "", "", None
        item.attempts += 1
        self.pushed[name] = self.pushed.get(name, 0) + 1
        return "committed"

    # -- the executor ----------------------------------------------------------------------------------------

    def begin(self, name: str, boot: str, proc: str) -> bool:
        executor = self.executors.get(name)
        if executor is None or executor.state != "starting" or executor.boot not in ("", boot):
            return False
        executor.boot, executor.proc = boot, proc
        self.books[executor.device].processes.setdefault(proc, None)
        return True

    def up(self, name: str, boot: str) -> bool:
        executor = self.executors.get(name)
        if executor is None or executor.state != "starting" or executor.boot != boot:
            return False
        executor.state = "up"
        return True

    def note(self, name: str, ceiling: float | None) -> None:
        if name in self.executors:
            self.executors[name].ceiling = ceiling

    def note_start(self, name: str) -> None:
        if name in self.executors:
            executor = self.executors[name]
            executor.batch, executor.ahead = executor.ahead or executor.batch, 0

    def claim(self, name: str, boot: str, proc: str, items: Sequence[tuple[str, str]], ahead: bool | None) -> list[str]:
        executor = self.executors.get(name)
        answers = [self._claim(executor, boot, proc, *pair) for pair in items]
        if executor is not None and ahead is not None:
            executor.ahead = answers.count("granted") if ahead else 0
            executor.batch = executor.batch if ahead else answers.count("granted")
        return answers

    def _claim(self, executor: Resident | None, boot: str, proc: str, task_id: str, attempt: str) -> str:
        item = self.items.get(task_id)
        if item is None:
            return "unknown"
        if item.state is State.CANCELLED:
            return "cancelled"
        if executor is None or attempt not in executor.items or item.attempt != attempt:
            return "stale"
        if item.state is State.RUNNING and item.boot == boot:
            return "granted"
        if item.state is not State.PLACED or item.lapsed:
            return "stale"
        executor.items[attempt] = True
        item.state, item.boot, item.proc = State.RUNNING, boot, proc
        return "granted"

    def finish(self, task_id: str, attempt: str, proc: str) -> str:
        item = self.items.get(task_id)
        if item is None:
            return "unknown"
        if item.state is State.CANCELLED:
            return "cancelled"
        if item.attempt != attempt or proc not in ("", item.proc):
            return "stale"
        if item.state is State.FINISHING:
            return "granted" if item.finisher == proc else "stale"
        if item.state is not State.RUNNING:
            return "stale"
        item.state, item.finisher = State.FINISHING, proc
        return "granted"

    def end(self, name: str, task_id: str, attempt: str, state: State) -> str:
        item = self.items.get(task_id)
        if item is None:
            return "unknown"
        if item.attempt != attempt or item.state not in LIVE:
            return "stale"
        self._leave(item)
        item.state = state
        return "ended"

    # -- agents and users ------------------------------------------------------------------------------------

    def lose(self, task_id: str, attempt: str, seen: State, *, counts: bool, most: int, epoch: int | None) -> str:
        if epoch is not None:
            self._fence(epoch)
        item = self.items.get(task_id)
        if item is None:
            return "unknown"
        if item.attempt != attempt or item.state not in LIVE or item.state is not seen:
            return "stale"
        self._leave(item)
        item.attempt, item.executor, item.boot, item.proc = None, "", "", ""
        item.losses += counts
        if item.cancelling:
            self._owe(item, State.CANCELLED)
        elif item.losses >= most:
            self._owe(item, State.DEAD)
        else:
            item.state = State.WAITING
        return str(item.state)

    def close(self, task_id: str, state: State, allowed: Sequence[State]) -> str:
        item = self.items.get(task_id)
        if item is None or item.state not in allowed:
            return "unknown" if item is None else "refused"
        if item.state in (State.RUNNING, State.FINISHING):
            item.cancelling = True
            return "marked"
        if item.state in LIVE:
            self._leave(item)
        self._owe(item, state)
        return "closed"

    def gone(self, name: str) -> bool:
        executor = self.executors.get(name)
        if executor is None or executor.items:
            return False
        del self.executors[name]
        self.pushed.pop(name, None)
        return True

    def process_gone(self, device: str, proc: str) -> bool:
        if any(e.device == device and e.proc == proc for e in self.executors.values()):
            return False
        self.books[device].processes.pop(proc, None)
        return True

    def purge(self, task_id: str) -> bool:
        item = self.items.get(task_id)
        if item is not None and (item.state not in TERMINAL or item.owed):
            return False
        self.items.pop(task_id, None)
        return True

    # -- parts of them ---------------------------------------------------------------------------------------

    def _fence(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced

    def _leave(self, item: Item) -> None:
        """An item leaves its executor's book; that one may be gone only if it holds none."""
        assert item.attempt is not None
        del self.executors[item.executor].items[item.attempt]

    def _owe(self, item: Item, state: State) -> None:
        item.state, item.owed = state, True
