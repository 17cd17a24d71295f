"""DESIGN's invariants, checked on what Redis shows: the demo, and every integration and fault test, end with this."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from brim.core.model import TERMINAL, Device, State
from brim.gpu.simulated import Witness
from brim.store import Store
from brim.store.types import Record

from .summary import Interval, peak

Story = Sequence[Mapping[str, Any]]

BEGINS_RUN = frozenset({"admitted", "refused", "revived"})
RELEASES = frozenset({"lost", State.HANDED_OVER, *TERMINAL})
STORY_IS_WHOLE = 200
"""A story as long as this may have lost its beginning (see scripts/common.lua)."""


def check_invariants(store: Store, *, settled: bool, witness: Mapping[str, Witness] | None = None) -> list[str]:
    """What breaks an invariant; empty if nothing does.

    ``settled``: everything that was published has come to its end, so every task must be in a terminal state with
    its reason, answered, and holding nothing. ``witness``: what the simulated devices saw, by uuid; no task may have
    been refused memory by a device.
    """
    # The audit reads names before what belongs to them: what differs only once was under way.
    found = store.audit()
    if found:
        again = set(store.audit())
        found = [f"books: {difference}" for difference in found if difference in again]
    ids, devices = store.task_ids(), store.devices()
    stories = store.stories(ids)
    for task_id, story in stories.items():
        found += [f"task {task_id}: {breach}" for breach in story_breaches(story)]
    found += overcommitted(stories.values(), devices, store.residency())
    if settled:
        found += _unsettled(store.records(ids), devices, store.queue_lengths([store.keys.outbox])[store.keys.outbox])
    for uuid, seen in (witness or {}).items():
        if seen.refused:
            found.append(f"no over-commit: device {uuid} refused {seen.refused} allocations")
        if seen.peak_mib > seen.total_mib:
            found.append(f"no over-commit: device {uuid} held {seen.peak_mib} MiB of {seen.total_mib}")
    return found


def story_breaches(story: Story) -> Iterator[str]:
    """What one task's story tells against: one end per run, one live attempt, each released once."""
    if len(story) >= STORY_IS_WHOLE:
        return
    ended, live = True, None
    for line in story:
        event, attempt = line["event"], line.get("attempt")
        if event in BEGINS_RUN:
            if live is not None:
                yield f"one live attempt: a new run began while attempt {live} lived"
            ended = False
        elif event == "placed":
            if live is not None:
                yield f"one live attempt: {attempt} was placed while {live} lived"
            live = attempt
        elif event in RELEASES:
            if attempt not in (None, live):
                yield f"released once: {event} by attempt {attempt} while the live one was {live}"
            live = None
        if event in TERMINAL or event == "refused":
            if ended:
                yield f"no loss: ended twice, the second time {event}"
            ended = True


def overcommitted(stories: Iterable[Story], devices: Sequence[Device], residency: Story = ()) -> Iterator[str]:
    """Devices on which more was reserved at one moment than they can give away (invariant 1).

    ``residency``: what happened to model executors, which hold memory from when they are wanted until they are gone.
    """
    held: defaultdict[str, list[Interval]] = defaultdict(list)
    rooms = {device.uuid: device.total_mib - device.headroom_mib for device in devices}
    wanted: dict[str, Mapping[str, Any]] = {}
    for line in residency:
        if line["event"] == "wanted":
            wanted[line["executor"]] = line
        elif line["event"] == "gone" and (first := wanted.pop(line["executor"], None)) is not None:
            held[first["device"]].append((first["t"], line["t"], first["vram_mib"]))
    for first in wanted.values():
        held[first["device"]].append((first["t"], math.inf, first["vram_mib"]))

    def hold(placed: Mapping[str, Any], until: float) -> None:
        for uuid in placed["devices"].split(","):
            mib = rooms.get(uuid, 0) if placed.get("whole") else placed["vram_mib"]
            held[uuid].append((placed["t"], until, mib))

    for story in stories:
        placed: Mapping[str, Any] | None = None
        for line in story:
            if line["event"] == "placed":
                placed = line
            elif line["event"] in RELEASES and placed is not None:
                hold(placed, line["t"])
                placed = None
        if placed is not None:
            hold(placed, math.inf)
    for device in devices:
        room, reserved = rooms[device.uuid], peak(held[device.uuid])
        if reserved > room:
            name = f"{device.node}.{device.index}"
            yield f"no over-commit: {reserved} MiB were reserved at once on {name}, which has {room}"


def _unsettled(records: Sequence[Record], devices: Sequence[Device], owed: int) -> Iterator[str]:
    unended = defaultdict(list)
    for record in records:
        if record.state not in TERMINAL:
            unended[record.state].append(record.task_id)
        elif record.state is not State.SUCCEEDED and record.reason is None:
            yield f"no loss: task {record.task_id} is {record.state} without a reason"
    for state, ids in unended.items():
        yield f"no loss: {len(ids)} tasks are still {state}, for example {ids[0]}"
    if owed:
        yield f"no loss: {owed} producers have not been answered"
    for device in devices:
        if device.busy:
            yield f"released once: {device.busy} attempts still hold executors of {device.node}.{device.index}"
