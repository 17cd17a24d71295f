"""What brim's scripts have to do, said once more in plain Python: no Redis, no clock, one call after the other.

Every method is one script and returns what the store must answer. Times are the numbers of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from brim.core.model import LIVE, TERMINAL, State

TOTAL_MIB, HEADROOM_MIB, EXECUTORS = 10_000, 500, 1
CONTEXT_MIB = 300
HOST_CPUS, HOST_RAM_MIB = 0.6, 15
"""What every node has registered."""
WHOLE_MIB = 3_000
"""Demands of this size wish for whole devices, with at least so much."""
ANSWERED = frozenset({State.CANCELLED, State.EXPIRED, State.DEAD})
RUNNING = (State.RUNNING, State.FINISHING)


class Fenced(Exception):
    """The caller's epoch is not the active placement's."""


@dataclass(frozen=True)
class Message:
    """One message; ``wish`` is plain, later (an eta far ahead), expires, refused, revoked, or orphan."""

    raw: bytes
    task_id: str
    retries: int
    vram_mib: int
    wish: str

    @property
    def lane(self) -> str:
        return lane_of(self.vram_mib)


@dataclass
class Task:
    """What the record of a task must say."""

    state: State
    retries: int
    vram_mib: int
    lane: str
    run: int = 0
    attempt: str | None = None
    devices: tuple[str, ...] = ()
    boot: str = ""
    proc: str = ""
    finisher: str | None = None
    next: Message | None = None
    cancelling: bool = False
    losses: int = 0
    owed: bool = False
    answered: bool = False
    has_envelope: bool = True
    expires: bool = False


@dataclass
class Process:
    """An executor process in a device's book."""

    measured: int | None = None
    floor: int = 0
    context: int = 0
    ended: int = 0
    doomed: bool = False

    @property
    def held(self) -> int:
        return self.floor if self.measured is None else self.measured


@dataclass
class Held:
    """What an attempt holds on a device."""

    vram_mib: int
    proc: str = ""
    cpus: float = 0.0
    ram_mib: int = 0


@dataclass
class Book:
    """What the book of a device must say."""

    node: str
    state: str = "up"
    external: int = 0
    sampled: int = 0
    attempts: dict[str, Held] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    whole: str | None = None
    """The attempt that has it to itself."""

    def reserved(self, proc: str) -> int:
        return sum(held.vram_mib for held in self.attempts.values() if held.proc == proc)

    @property
    def committed(self) -> int:
        committed = self.reserved("") + sum(max(self.reserved(name), p.held) for name, p in self.processes.items())
        return committed if self.whole is None else max(committed, TOTAL_MIB - HEADROOM_MIB - self.external)

    @property
    def reclaimable(self) -> int:
        return sum(p.held for name, p in self.processes.items() if not p.doomed and not self.reserved(name))

    @property
    def available(self) -> int:
        return TOTAL_MIB - HEADROOM_MIB - self.external - self.committed


@dataclass
class Node:
    """A node's lease; ``silent``: it has not renewed since time passed."""

    boot: str
    devices: tuple[str, ...]
    lost: bool = False
    silent: bool = False


@dataclass(frozen=True)
class Sample:
    """A memory report as its agent took it, sent now or later."""

    step: int
    sampled_ms: int
    node: str
    boot: str
    figures: Mapping[str, tuple[int, Mapping[str, int | None]]]
    """Device -> used MiB, and MiB of each process."""


def lane_of(vram_mib: int) -> str:
    return f"t|{vram_mib}"


class Model:
    """All of brim's state. ``queue`` is the broker's list in the order of consumption."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.holder, self.resigned = "", True
        self.queue: list[Message] = []
        self.tasks: dict[str, Task] = {}
        self.books: dict[str, Book] = {}
        self.nodes: dict[str, Node] = {}
        self.outbox: list[str] = []
        self.expiring: set[str] = set()
        self.pushed = 0

    # -- intake ----------------------------------------------------------------------------------------------

    def admit(self, message: Message) -> str:
        if message not in self.queue:
            return "gone"
        self.queue.remove(message)
        task = self.tasks.get(message.task_id)
        if task is None:
            if message.wish == "orphan":
                return "orphan"
            task = self.tasks[message.task_id] = Task(State.WAITING, 0, 0, "")
        elif message.retries <= task.retries:
            return "redelivery"
        elif task.state in LIVE:
            if task.next is not None and message.retries <= task.next.retries:
                return "redelivery"
            task.next = message
            return "held"
        elif task.state in ANSWERED or task.cancelling:
            return "closed"
        self.expiring.discard(message.task_id)
        fresh = Task(State.WAITING, message.retries, message.vram_mib, message.lane, run=task.run + 1)
        self.tasks[message.task_id] = fresh
        if message.wish == "refused":
            self._owe(message.task_id, State.DEAD)
            return "refused"
        if message.wish == "revoked":
            self._owe(message.task_id, State.CANCELLED)
            return "revoked"
        if message.wish == "expires":
            fresh.expires = True
            self.expiring.add(message.task_id)
        if message.wish == "later":
            fresh.state = State.SCHEDULED
            return "scheduled"
        return "admitted"

    def due(self, task_id: str) -> int:
        if self.tasks[task_id].state is not State.SCHEDULED:
            return 0
        self.tasks[task_id].state = State.WAITING
        return 1

    def relane(self, task_id: str, old: str, vram_mib: int) -> bool:
        task = self.tasks.get(task_id)
        if task is None or task.state is not State.WAITING or task.lane != old:
            return False
        task.lane, task.vram_mib = lane_of(vram_mib), vram_mib
        return True

    # -- placement -------------------------------------------------------------------------------------------

    def elect(self, holder: str) -> int:
        if holder != self.holder:
            if not self.resigned:
                return 0
            self.holder, self.epoch = holder, self.epoch + 1
        self.resigned = False
        return self.epoch

    def resign(self, holder: str) -> None:
        self.resigned |= self.holder == holder

    def commit(
        self,
        epoch: int,
        task_id: str,
        lane: str,
        attempt: str,
        devices: Sequence[str],
        vram_mib: int,
        ahead: int,
        cpus: float,
        ram_mib: int,
    ) -> str:
        if epoch != self.epoch:
            return "fenced"
        task = self.tasks.get(task_id)
        if task is not None and task.attempt == attempt:
            return "committed"
        if task is None or task.state is not State.WAITING or task.lane != lane:
            return "stale"
        for uuid in devices:
            book = self.books.get(uuid)
            if book is None:
                return "refused unknown"
            if book.state != "up":
                return "refused state"
            if self.missing(uuid, vram_mib) > 0:
                return "refused memory"
            if len(book.attempts) >= EXECUTORS + ahead:
                return "refused executors"
        held = [h for b in self.books.values() if b.node == book.node for h in b.attempts.values()]
        if cpus and sum(h.cpus for h in held) + cpus > HOST_CPUS:
            return "refused cpus"
        if ram_mib and sum(h.ram_mib for h in held) + ram_mib > HOST_RAM_MIB:
            return "refused ram"
        for uuid in devices:
            book, whole = self.books[uuid], vram_mib == WHOLE_MIB
            book.attempts[attempt] = Held(max(vram_mib, book.available) if whole else vram_mib)
            book.whole = attempt if whole else None
        first = self.books[devices[0]].attempts[attempt]
        first.cpus, first.ram_mib = cpus, ram_mib
        task.state, task.attempt, task.devices = State.PLACED, attempt, tuple(devices)
        task.boot, task.proc, task.finisher = "", "", None
        self.pushed += 1
        return "committed"

    def missing(self, uuid: str, vram_mib: int) -> int:
        """What must come free on a device before a demand of this size fits."""
        book = self.books[uuid]
        lacking = vram_mib - book.available
        return max(lacking, book.committed) if vram_mib == WHOLE_MIB else lacking

    def doom(self, epoch: int, uuid: str, wanted_mib: int) -> int:
        self._fence(epoch)
        book, marked = self.books.get(uuid), 0
        if book is None:
            return 0
        idle = {name: p for name, p in book.processes.items() if not book.reserved(name) and p.held}
        wanted_mib -= sum(p.held for p in idle.values() if p.doomed)
        for _, process in sorted(idle.items(), key=lambda item: (-item[1].held, item[0])):
            if wanted_mib > 0 and not process.doomed:
                process.doomed = True
                wanted_mib, marked = wanted_mib - process.held, marked + 1
        return marked

    def lose_node(self, epoch: int, name: str) -> bool:
        self._fence(epoch)
        node = self.nodes.get(name)
        if node is None or node.lost or not node.silent:
            return False
        node.lost = True
        for uuid in node.devices:
            self.books[uuid].state = "lost"
        return True

    def lives(self, task_id: str, attempt: str) -> bool:
        task = self.tasks.get(task_id)
        return task is not None and task.attempt == attempt and task.state in LIVE

    # -- attempts --------------------------------------------------------------------------------------------

    def claim(self, task_id: str, attempt: str, boot: str) -> str:
        task = self.tasks.get(task_id)
        if task is None:
            return "unknown"
        if task.state is State.CANCELLED:
            return "cancelled"
        if task.attempt != attempt:
            return "stale"
        if task.boot == boot:
            return "granted"
        if task.state is not State.PLACED:
            return "stale"
        task.state, task.boot = State.CLAIMED, boot
        return "granted"

    def bind(self, task_id: str, attempt: str, proc: str, boot: str) -> str:
        task = self.tasks.get(task_id)
        if task is None:
            return "unknown"
        if task.state is State.CANCELLED:
            return "cancelled"
        if task.attempt != attempt or task.state not in LIVE:
            return "stale"
        books = [self.books[uuid] for uuid in task.devices]
        doomed = any(proc in book.processes and book.processes[proc].doomed for book in books)
        answer = "doomed" if doomed else "granted"
        if task.state is State.RUNNING and task.proc == proc:
            return answer
        claims = task.state is State.PLACED and boot != ""
        if task.state is not State.CLAIMED and not claims:
            return "stale"
        if claims:
            task.boot = boot
        task.state, task.proc = State.RUNNING, proc
        for book in books:
            book.attempts[attempt].proc = proc
            book.processes.setdefault(proc, Process())
        return answer

    def finish(self, task_id: str, attempt: str, proc: str, left_to_main: bool) -> str:
        task = self.tasks.get(task_id)
        if task is None:
            return "unknown"
        if task.state is State.CANCELLED:
            return "cancelled"
        if task.attempt != attempt or proc not in ("", task.proc):
            return "stale"
        if task.state is State.FINISHING:
            if task.finisher != proc and not (left_to_main and proc == ""):
                return "stale"
        elif task.state is not State.RUNNING and not (task.state is State.CLAIMED and proc == ""):
            return "stale"
        task.state, task.finisher = State.FINISHING, proc
        return "granted"

    def end(self, task_id: str, attempt: str, state: State, leftover_mib: Sequence[int] | None) -> str:
        task = self.tasks.get(task_id)
        if task is None:
            return "unknown"
        if task.attempt != attempt or task.state not in LIVE:
            return "stale"
        self._release(task, leftover_mib)
        if task.cancelling and state is State.HANDED_OVER:
            self._owe(task_id, State.CANCELLED)
            return "ended"
        promoted = task.next is not None and not task.cancelling and state not in ANSWERED
        if promoted or state is State.HANDED_OVER:
            self._hand_over(task_id)
        else:
            task.state, task.next, task.has_envelope = state, None, False
            self.expiring.discard(task_id)
        return "promoted" if promoted else "ended"

    def complete(
        self, task_id: str, attempt: str, proc: str, state: State, leftover_mib: Sequence[int] | None, is_occupied: bool
    ) -> str:
        task = self.tasks.get(task_id)
        if task is None:
            return "unknown"
        if task.attempt == attempt and task.state not in LIVE and task.finisher == proc:
            return "ended"
        if task.attempt != attempt or task.state is not State.RUNNING or task.proc != proc:
            return "stale"
        if is_occupied:
            return "occupied"
        task.finisher = proc
        return self.end(task_id, attempt, state, leftover_mib)

    def out_of_memory(self, task_id: str, attempt: str, proc: str, vram_mib: int, most: int) -> str:
        task = self.tasks.get(task_id)
        if task is None:
            return "unknown"
        if task.attempt != attempt or task.proc != proc or task.state is not State.RUNNING:
            return "stale"
        if task.next is not None or task.cancelling or task.losses + 1 >= most:
            return "final"
        self._give_up(task)
        task.losses += 1
        task.lane, task.vram_mib = lane_of(vram_mib), vram_mib
        self._wait(task_id)
        return "waiting"

    def lose(
        self, task_id: str, attempt: str, seen: State, *, counts: bool, most: int, epoch: int | None = None
    ) -> str:
        if epoch is not None:
            self._fence(epoch)
        task = self.tasks.get(task_id)
        if task is None:
            return "unknown"
        if task.attempt != attempt or task.state not in LIVE or task.state is not seen:
            return "stale"
        self._give_up(task)
        if task.next is not None and not task.cancelling:
            self._hand_over(task_id)
            return "promoted"
        task.losses += counts
        if task.cancelling:
            self._owe(task_id, State.CANCELLED)
        elif task.losses >= most:
            self._owe(task_id, State.DEAD)
        else:
            self._wait(task_id)
        return str(task.state)

    # -- ends that brim gives --------------------------------------------------------------------------------

    def close(self, task_id: str, state: State, allowed: Sequence[State], epoch: int | None = None) -> str:
        if epoch is not None:
            self._fence(epoch)
        task = self.tasks.get(task_id)
        if task is None or task.state not in allowed:
            if state is State.EXPIRED:
                self.expiring.discard(task_id)
            return "unknown" if task is None else "refused"
        if task.state in RUNNING:
            task.cancelling = True
            return "marked"
        if task.state in LIVE:
            self._release(task, None)
        self._owe(task_id, state)
        return "closed"

    def revive(self, task_id: str, lane: str) -> bool:
        task = self.tasks.get(task_id)
        if task is None or task.state is not State.DEAD or not task.has_envelope or not task.answered:
            return False
        fresh = Task(State.WAITING, task.retries, 0, lane, run=task.run + 1)
        self.tasks[task_id] = fresh
        return True

    def purge(self, task_id: str) -> bool:
        task = self.tasks.get(task_id)
        if task is not None and (task.state not in TERMINAL or task.owed):
            return False
        self.tasks.pop(task_id, None)
        return True

    def answered(self, task_id: str) -> None:
        self.outbox.remove(task_id)
        task = self.tasks[task_id]
        task.owed, task.answered = False, True
        task.has_envelope = task.state is State.DEAD

    # -- nodes -----------------------------------------------------------------------------------------------

    def register(self, name: str, boot: str, devices: Sequence[str]) -> bool:
        earlier = self.nodes[name].devices if name in self.nodes else ()
        concerned = {*devices, *earlier} & self.books.keys()
        if any(self.books[uuid].attempts for uuid in concerned):
            return False
        for uuid in concerned:
            del self.books[uuid]
        self.books |= {uuid: Book(name) for uuid in devices}
        self.nodes[name] = Node(boot, tuple(devices))
        return True

    def renew(self, name: str, boot: str) -> bool:
        if not self._speaks_for(name, boot):
            return False
        self.nodes[name].silent = False
        return True

    def set_device_state(self, name: str, boot: str, uuids: Sequence[str], state: str) -> bool:
        if not self._speaks_for(name, boot):
            return False
        for uuid in uuids:
            self.books[uuid].state = state
        return True

    def leave(self, name: str, boot: str) -> bool:
        node = self.nodes.get(name)
        if node is None or node.boot != boot or any(self.books[uuid].attempts for uuid in node.devices):
            return False
        for uuid in node.devices:
            del self.books[uuid]
        del self.nodes[name]
        return True

    def report(self, sample: Sample) -> bool:
        node = self.nodes.get(sample.node)
        if node is None or node.boot != sample.boot:
            return False
        for uuid, (used, processes) in sample.figures.items():
            book = self.books.get(uuid)
            if book is not None and sample.step >= book.sampled:
                self._measure(book, sample.step, used, processes)
        return True

    def process_gone(self, uuid: str, proc: str) -> bool:
        book = self.books.get(uuid)
        if book is None:
            return True
        if any(held.proc == proc for held in book.attempts.values()):
            return False
        book.processes.pop(proc, None)
        return True

    # -- parts of them ---------------------------------------------------------------------------------------

    def _measure(self, book: Book, step: int, used: int, processes: Mapping[str, int | None]) -> None:
        least = most = used
        for name, mib in processes.items():
            process = book.processes.get(name, Process())
            current = process.ended < step
            if mib is None:
                if current and process.floor:
                    process.floor = min(process.floor, process.context)
                least -= max(book.reserved(name), process.held) if current else used
                most -= process.held
            else:
                least, most = least - mib, most - mib
                if current:
                    process.measured, process.floor = mib, 0
            if current:
                book.processes[name] = process
        book.external = max(0, least, min(book.external, most))
        book.sampled = step

    def _speaks_for(self, name: str, boot: str) -> bool:
        node = self.nodes.get(name)
        return node is not None and node.boot == boot and not node.lost

    def _fence(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced

    def _release(self, task: Task, leftover_mib: Sequence[int] | None) -> None:
        assert task.attempt is not None
        for position, uuid in enumerate(task.devices):
            book = self.books[uuid]
            proc = book.attempts[task.attempt].proc
            counted = max(book.reserved(proc), book.processes[proc].held) if proc else 0
            if book.whole == task.attempt:
                book.whole = None
            del book.attempts[task.attempt]  # a KeyError here is a reservation released twice
            if proc:
                process = book.processes[proc]
                process.measured = None if leftover_mib is None else leftover_mib[position]
                process.floor = counted if leftover_mib is None else 0
                process.context, process.ended = CONTEXT_MIB, self.step

    def _give_up(self, task: Task) -> None:
        self._release(task, None)
        task.attempt, task.devices, task.boot, task.proc = None, (), "", ""

    def _wait(self, task_id: str) -> None:
        task = self.tasks[task_id]
        task.state = State.WAITING
        if task.expires:
            self.expiring.add(task_id)

    def _hand_over(self, task_id: str) -> None:
        task = self.tasks[task_id]
        if task.next is not None:
            self.queue.insert(0, task.next)
        task.state, task.next = State.HANDED_OVER, None
        self.expiring.discard(task_id)

    def _owe(self, task_id: str, state: State) -> None:
        task = self.tasks[task_id]
        task.state, task.next, task.owed, task.answered = state, None, True, False
        self.outbox.append(task_id)
        self.expiring.discard(task_id)
