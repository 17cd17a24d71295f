"""Which models are resident where: when model executors start, stop and make room for others.

Pure: a snapshot and ``now`` in, decisions out, deterministic. Models compete by the order of their oldest
waiting item (age, with priority as a head start), and one that has no executor goes before another that wants
one more: a busy model cannot starve a rare one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from brim.core.batching.dispatch import Executor, Phase
from brim.core.batching.executor import ExecutorState
from brim.core.batching.items import ModelKey
from brim.core.model import Device, Reason


@dataclass(frozen=True, slots=True)
class Want:
    """Work that waits for memory: a model with items in level 1, or (``model`` None) ordinary overflow.

    ``order`` and ``since_s`` are those of its oldest waiting item. ``alone_mib`` is the memory that its
    largest waiting item needs by itself, ``least_mib`` what it can do with (a model: context, weights and one
    useful batch), ``full_mib`` what it can use (a full batch); none is less than the one before.
    ``devices`` are those it may run on.
    """

    model: ModelKey | None
    order: float
    since_s: float
    alone_mib: int
    least_mib: int
    full_mib: int
    devices: frozenset[str]
    max_executors: int = 1


@dataclass(frozen=True, slots=True)
class Rules:
    """The owner's settings.

    ``hold_s`` is how long a model that still has work keeps its memory before another may ask for it: long
    enough that loading does not eat the time. ``scale_out_s`` is how long level 1 must have been waiting
    before a model is given one more executor.
    """

    hold_s: float = 10.0
    scale_out_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Launch:
    """Start an executor of the model on the device, with this reservation."""

    model: ModelKey
    device: str
    vram_mib: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Mark the executor draining: it finishes its batch, gives the rest back and stops."""

    executor: str
    reason: Reason


Move = Launch | Retire


def settle(
    wants: Iterable[Want], executors: Sequence[Executor], devices: Iterable[Device], now: float, rules: Rules
) -> list[Move]:
    """Decide which executors to start and which to stop."""
    wants = list(wants)
    table = _Table(executors, devices, {want.model: want.order for want in wants if want.model is not None}, now, rules)
    moves: list[Move] = []
    for want in sorted(wants, key=lambda want: (bool(table.serving(want)), want.order, str(want.model))):
        if table.due(want):
            moves += table.serve(want)
    return moves + table.cool_down()


class _Table:
    """The snapshot, and what the decisions so far leave of it."""

    def __init__(
        self,
        executors: Sequence[Executor],
        devices: Iterable[Device],
        waiting: dict[ModelKey, float],
        now: float,
        rules: Rules,
    ) -> None:
        self.executors = executors
        self.waiting = waiting
        """The order of each model's oldest item in level 1."""
        self.now = now
        self.rules = rules
        self.free = {device.uuid: device.available_mib for device in devices if device.state == "up"}
        self.coming = dict.fromkeys([*self.free, *(executor.device for executor in executors)], 0)
        """Memory of executors that drain: soon free, if it is not promised yet."""
        self.retired: set[str] = set()
        for executor in executors:
            if executor.phase is Phase.DRAINING:
                self.coming[executor.device] += executor.vram_mib

    def alive(self, model: ModelKey | None) -> list[Executor]:
        """The model's executors that are starting or up, less those retired by this decision."""
        return [
            executor
            for executor in self.executors
            if executor.model == model and executor.phase is not Phase.DRAINING and executor.id not in self.retired
        ]

    def serving(self, want: Want) -> list[Executor]:
        """The model's executors that are large enough for everything that waits."""
        return [executor for executor in self.alive(want.model) if executor.vram_mib >= want.alone_mib]

    def due(self, want: Want) -> bool:
        """Whether the want may have memory now: ordinary work and a first executor always."""
        serving = self.serving(want)
        return not serving or (
            len(self.alive(want.model)) < want.max_executors
            and all(executor.phase is Phase.UP for executor in serving)
            and self.now - want.since_s >= self.rules.scale_out_s
        )

    def serve(self, want: Want) -> list[Move]:
        """Use free memory, else wait for memory that is coming, else (not for one more) make room."""
        if want.model is not None and len(self.alive(want.model)) >= want.max_executors:
            return self._outgrow(want)
        usable = sorted(want.devices & self.free.keys())
        if fitting := [uuid for uuid in usable if self.free[uuid] >= want.least_mib]:
            uuid = min(fitting, key=lambda uuid: (self.free[uuid] < want.full_mib, self.free[uuid], uuid))
            vram_mib = min(want.full_mib, self.free[uuid])
            self.free[uuid] -= vram_mib
            return [] if want.model is None else [Launch(want.model, uuid, vram_mib)]
        if self.serving(want):
            return []
        if fitting := [uuid for uuid in usable if self._soon(uuid) >= want.least_mib]:
            self._promise(fitting[0], want.least_mib)
            return []
        options = [(victims, uuid) for uuid in usable if (victims := self._victims(want, uuid))]
        if not options:
            return []
        victims, uuid = min(options, key=lambda option: ([*map(self._cost, option[0])], option[1]))
        who = f"model {want.model}" if want.model else "waiting tasks"
        reason = Reason("memory_wanted", f"{who} waits for {want.least_mib} MiB on {uuid}")
        moves: list[Move] = [self._retire(victim, reason) for victim in victims]
        self._promise(uuid, want.least_mib)
        return moves

    def cool_down(self) -> list[Move]:
        """Stop what nobody has used for its ``keep_warm_s``."""
        moves: list[Move] = []
        for executor in self.executors:
            idle_s = self.now - max(executor.used_s, executor.since_s)
            unused = self._unused(executor) and executor.id not in self.retired
            if unused and idle_s >= executor.keep_warm_s:
                message = f"idle for {idle_s:.0f} s, and the profile keeps it warm for {executor.keep_warm_s:g} s"
                moves.append(self._retire(executor, Reason("idle", message)))
        return moves

    def _outgrow(self, want: Want) -> list[Move]:
        """The model has all the executors it may have, too small for what waits: replace one if it helps."""
        for executor in sorted(self.alive(want.model), key=self._cost):
            settled = executor.phase is Phase.UP and (
                executor.state is ExecutorState.IDLE or self.now - executor.since_s >= self.rules.hold_s
            )
            usable = executor.device in self.free and executor.device in want.devices
            if settled and usable and self._soon(executor.device) + executor.vram_mib >= want.least_mib:
                message = f"{want.model} has an item that needs {want.alone_mib} MiB, more than its reservation"
                moves: list[Move] = [self._retire(executor, Reason("too_small", message))]
                self._promise(executor.device, want.least_mib)
                return moves
        return []

    def _retire(self, executor: Executor, reason: Reason) -> Retire:
        self.retired.add(executor.id)
        self.coming[executor.device] += executor.vram_mib
        return Retire(executor.id, reason)

    def _soon(self, uuid: str) -> int:
        """What the device will have free when all that drains has stopped."""
        return self.free[uuid] + self.coming[uuid]

    def _promise(self, uuid: str, mib: int) -> None:
        """Keep this much of the device's free and coming memory from less urgent wants."""
        free = min(self.free[uuid], mib)
        self.free[uuid] -= free
        self.coming[uuid] -= mib - free

    def _victims(self, want: Want, uuid: str) -> list[Executor]:
        """The executors whose memory would make room on the device, cheapest first; empty if it would not."""
        missing_mib = want.least_mib - self._soon(uuid)
        victims = []
        for executor in sorted(self.executors, key=self._cost):
            if missing_mib <= 0:
                break
            if executor.device == uuid and self._yields(executor, want):
                victims.append(executor)
                missing_mib -= executor.vram_mib
        if missing_mib > 0:
            return []
        for executor in victims[-2::-1]:
            if missing_mib + executor.vram_mib <= 0:
                victims.remove(executor)
                missing_mib += executor.vram_mib
        return victims

    def _unused(self, executor: Executor) -> bool:
        """Whether it is up, holds nothing, and nothing of its model waits."""
        return (
            executor.phase is Phase.UP and executor.state is ExecutorState.IDLE and executor.model not in self.waiting
        )

    def _yields(self, executor: Executor, want: Want) -> bool:
        """Whether the executor makes room: unused, or after its time if its own work came later."""
        if executor.phase is not Phase.UP or executor.id in self.retired or executor.model == want.model:
            return False
        if self._unused(executor):
            return True
        unsealed = [items[0].order for _, items in executor.unsealed]
        own = min([self.waiting.get(executor.model, inf), *unsealed])
        return self.now - executor.since_s >= self.rules.hold_s and want.order < own

    def _cost(self, executor: Executor) -> tuple[bool, float, str]:
        """What it costs to stop it: unused ones least, the least recently used first (LRU)."""
        return (not self._unused(executor), executor.used_s, executor.id)
