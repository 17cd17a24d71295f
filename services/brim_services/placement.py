"""Placement: keeps the availability mirror, decides, commits, and looks after what nobody else does.

One placement is active; others stand by. Every change carries the active one's fencing epoch.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex

from brim.celery.envelope import BrokerLayout, attempt_fields, sign, slot
from brim.core.model import Device, Reason, State, gpu_queue
from brim.core.placement import (
    Lane,
    Placement,
    Plan,
    Planner,
    PlannerSettings,
    Promise,
    Waiting,
    make_policy,
)
from brim.core.placement.fit import claim_mib, missing_mib
from brim.settings import PolicyChoice, Settings
from brim.store import FencedError, Store
from brim.store.types import Changes, Commit, LaneWindow

from . import metrics
from .answerer import Answerer
from .batches import Batches, order_of, short_of_memory
from .events import Events
from .learning import Learning
from .logs import about
from .loop import open_store, serve, stop_on_signals
from .metrics import PlacementMetrics
from .mirror import WINDOW, Mirror

log = logging.getLogger("brim.placement")

HOUSEKEEPING_S = 1.0
GATHER_S = 0.02
"""Longest time for which changes gather while executors lack nothing: see `PlacementService._gather`."""
PACE_WEIGHT = 0.2
"""Of the latest plan in the mean of how many tasks are placed a second."""
ENDS, LEARNED_S, SETTLE_MS = 500, 900, 200
"""Run times are learned from the latest ends of each second, at first of so many seconds; an end is read so much later,
since a script's time is not seen by others before it has ended."""
NOTE_S = 0.5
"""A new head of a lane that waits for what the one before it waited for is told so no more often than this."""
REFUSING = 10
"""Windows of a lane that are looked through at a time for items that are too large for the table as it is now."""
CHECK_S = 30.0
"""Between two looks at the books of all devices."""
NOT_RUNNING = (State.SCHEDULED, State.WAITING, State.PLACED, State.CLAIMED)
EXPIRED = Reason("expired", "its expires time passed before it was started")
CALLED_BACK = Reason("called_back", "it waited behind a busy executor, and another one became idle")
BEGUN = (State.RUNNING, State.FINISHING)


@dataclass(frozen=True, slots=True)
class Behind:
    """An attempt that was placed behind the busy executors of its device; ``lane``: as if it were alone in it."""

    attempt: str
    lane: Lane


@dataclass(frozen=True, slots=True)
class Noted:
    """What a lane's ``head`` was last told to wait for, and when."""

    head: str
    reason: Reason
    at_s: float


class PlacementService:
    """Elect, mirror, plan, commit; once a second the housekeeping."""

    def __init__(self, store: Store, settings: Settings, planner: Planner, answerer: Answerer) -> None:
        self.store = store
        self.settings = settings
        self.planner = planner
        self.answerer = answerer
        self.metrics = PlacementMetrics()
        self._token = uuid.uuid4().hex[:8]
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{self._token}"
        layout = BrokerLayout.of(settings.broker.model_dump())
        self._intake_lists = layout.lists()
        self.told: Callable[[str, str, str, float], None] = lambda *_: None
        """Hears of every committed placement: task id, task, queue, and when."""
        self.epoch = 0
        self.mirror = Mirror()
        self.promises: dict[str, Promise] = {}
        self._numbers = itertools.count(1)
        self.batches = Batches(store, settings, self._next_attempt)
        self._noted: dict[str, Noted] = {}
        self._unfit_since: dict[str, float] = {}
        self._behind: dict[str, list[Behind]] = {}
        """What was placed behind the busy executors of a device, in that order."""
        self._idled = False
        """Whether a device with an idle executor is among what has changed since `_call_back`."""
        self._server_ahead_s = 0.0
        self._elected_s = self._placed_s = 0.0
        self._pace = 0.0
        """Ordinary tasks placed a second, lately."""
        self._hearing_since_s = time.monotonic()
        self._housekeeping_s = 0.0
        self._listened_s = 0.0
        self._checked_s = 0.0
        self._differences: set[str] = set()
        self._ends_until_ms = 0
        self._stale = True

    def lost_touch(self) -> None:
        """The mirror may miss changes, and nobody could renew: start hearing anew, on a connection made anew."""
        self.store.drop_connection()
        self._stale = True
        self._hearing_since_s = time.monotonic()

    def step(self) -> None:
        """One round as the active placement, or a wait for the lease as a standby."""
        if not self._lead():
            return
        try:
            if self._stale:
                self._resync()
            else:
                self._gather()
                self._hear(self.store.take_changes(self.epoch, WINDOW, wait_s=self._pause_s()))
            self._keep_pace(self._place())
            if time.monotonic() - self._housekeeping_s >= HOUSEKEEPING_S:
                self._housekeeping_s = time.monotonic()
                self._keep_house()
        except FencedError:
            self._step_down()

    def _gather(self) -> None:
        """Lets changes gather for a moment while none of them could start anything now.

        So it is when every busy executor has its next task already, and every model executor is computing. What is
        waiting beside them then is their items, or may wait for a departure.
        """
        fed = not self.mirror.hungry
        if self.batches.executors:
            ordinary = any(window.key is None and window.waiting for window in self.mirror.lanes.values())
            fed = self.batches.is_patient and (fed or not ordinary)
        if fed:
            # Where devices are hungry all the same, nothing waits for them: only items gather.
            longest_s = GATHER_S if self.mirror.hungry else gather_s(self.mirror.behind.total(), self._pace)
            time.sleep(max(0.0, self._placed_s + longest_s - time.monotonic()))

    def _keep_pace(self, placed: int) -> None:
        """Notes how many have been placed since the latest plan."""
        before_s, self._placed_s = self._placed_s, time.monotonic()
        self._pace += PACE_WEIGHT * (placed / max(1e-3, self._placed_s - before_s) - self._pace)

    def resign(self) -> None:
        """Hands the lease over so that a standby need not wait for it to run out."""
        if self.epoch:
            self.store.resign(self.holder)

    # -- leading ---------------------------------------------------------------------------------------------

    def _lead(self) -> bool:
        ttl_s = self.settings.placement.leader_ttl_s
        if self.epoch and time.monotonic() - self._elected_s < ttl_s / 3:
            return True
        asked_s = time.monotonic()
        epoch, left_s = self.store.elect(self.holder, ttl_s)
        if epoch == 0:
            self._step_down()
            self.answerer.stop.wait(min(left_s, ttl_s / 4))
            return False
        if epoch != self.epoch:
            log.info("placement is active, epoch %d", epoch)
            self.metrics.active.set(1)
            self.epoch = epoch
            self.promises.clear()
            self.lost_touch()
            self.answerer.active.set()
        self._elected_s = asked_s
        return True

    def _step_down(self) -> None:
        if self.epoch:
            log.warning("another placement has taken over from epoch %d: standing by", self.epoch)
        self.epoch = 0
        self.metrics.active.set(0)
        self.answerer.active.clear()

    def _pause_s(self) -> float:
        until_housekeeping = self._housekeeping_s + HOUSEKEEPING_S - time.monotonic()
        return max(0.01, min(until_housekeeping, self.settings.placement.leader_ttl_s / 4))

    # -- mirroring -------------------------------------------------------------------------------------------

    def _resync(self) -> None:
        self.store.take_changes(self.epoch, WINDOW)
        self.mirror = Mirror()
        self.batches.forget()
        self.batches.refresh_table()
        self._noted.clear()
        self._hear(self.store.snapshot(WINDOW))
        self._find_behind()
        self._stale = False

    def _find_behind(self) -> None:
        """Learns which attempts wait behind busy executors: another may have put them there.

        Attempts on several devices do not wait for executors of theirs: each gets a worker of its own.
        """
        full = [d.uuid for site in self.mirror.cluster for d in site.devices if d.busy > d.executors]
        found = (v for v in self.store.books(full)[0] if len(v.devices) == 1)
        views = {v.task_id: v for v in found if v.state in (State.PLACED, State.CLAIMED)}
        self._behind = {}
        for record in self.store.records(sorted(views, key=lambda task_id: views[task_id].placed_s)):
            view = views[record.task_id]
            waiting = Waiting(record.task_id, record.priority, record.admitted_s)
            self._note_behind(view.devices[0], view.attempt, Lane(view.lane, record.task, record.demand, [waiting]))

    def _hear(self, changes: Changes) -> None:
        """Takes over changes that have just been read, and the server's clock with them."""
        self._server_ahead_s = changes.now_s - time.monotonic()
        self._idled |= any(device.busy < device.executors for device in changes.devices)
        self._apply(changes)

    def _now_s(self) -> float:
        """The server's time, by how far its clock was ahead at the latest changes."""
        return self._server_ahead_s + time.monotonic()

    def _apply(self, changes: Changes) -> None:
        for window in changes.lanes:
            known = self.mirror.lanes.get(window.lane)
            if window.key is not None:
                continue
            for _ in range(window.depth - (known.depth if known else 0)):
                self.planner.mix.observe(window.demand)
        self.mirror.apply(changes)
        self.batches.apply(changes)
        known_sets = self.mirror.cluster.tasksets
        wanted = {device.tasks for device in changes.devices if device.tasks not in known_sets}
        if wanted:
            known_sets.update(self.store.tasksets(wanted))

    # -- placing ---------------------------------------------------------------------------------------------

    def _place(self) -> int:
        """Plans and commits until a plan places nothing more, or a commit is refused and the mirror is stale.

        Returns how many ordinary tasks it has placed, or tried to.
        """
        self._place_batches()
        placed = 0
        while True:
            now_s = self._now_s()
            began_s = time.perf_counter()
            plan = self._plan(now_s)
            took_s = time.perf_counter() - began_s
            statuses = self._commit(plan, now_s)
            self.metrics.decision_seconds.observe(took_s)  # nothing that can come later stands before a commit
            placed += len(plan.placements)
            refused = "refused" in statuses
            if not refused:
                self.promises = plan.promises
            exhausted = self.mirror.exhausted()
            if exhausted:
                self._apply(Changes(now_s, lanes=self.store.lane_windows(exhausted, WINDOW)))
            if refused or not (plan.placements and (exhausted or "stale" in statuses)):
                break
        self._call_back(now_s)
        self._recycle(plan)
        windows = self.mirror.batch_windows()
        if windows or self.batches.executors:
            short = short_of_memory(self.mirror.lanes.values(), plan.waits, self.mirror.cluster)
            self.batches.settle(self.epoch, windows, short, self.mirror.cluster, now_s)
        self._note_waits({**plan.waits, **self.batches.waits(windows, self.mirror.cluster, now_s)}, now_s)
        return placed

    def _plan(self, now_s: float) -> Plan:
        """A plan that leaves alone what is kept for a model that has waited longest."""
        cluster, batched, kept = self.mirror.cluster, self.mirror.batch_windows(), None
        if batched:
            lanes = self.mirror.lanes.values()
            ordinary = (order_of(window) for window in lanes if window.key is None and window.waiting)
            kept = self.batches.keeps(batched, min(ordinary, default=math.inf), cluster, now_s)
        if kept is not None:
            device, mib = kept
            cluster.update(replace(device, committed_mib=device.committed_mib + mib))
        try:
            return self.planner.plan(cluster, self.mirror.waiting_lanes(), now_s, self.promises)
        finally:
            if kept is not None:
                cluster.update(kept[0])

    def _place_batches(self) -> None:
        """Gives items to model executors until nothing more can be given, or the mirror is stale."""
        while self.batches.executors:
            self._look_further(self.mirror.batch_windows())
            now_s = self._now_s()
            gone = self.batches.place(self.epoch, self.mirror.batch_windows(), self.mirror.cluster, now_s)
            self._drop(gone)
            exhausted = self.mirror.exhausted()
            if exhausted:
                self._apply(Changes(now_s, lanes=self.store.lane_windows(exhausted, WINDOW)))
            if not (gone and exhausted):
                break

    def _drop(self, gone: Mapping[str, Sequence[str]]) -> None:
        """Takes items out of the mirror that wait no more, by lane."""
        for lane, ids in gone.items():
            for task_id in ids:
                self.mirror.drop(lane, task_id)

    def _look_further(self, windows: Sequence[LaneWindow]) -> None:
        """Reads more of lanes whose batches, or limit, ask for more than is mirrored."""
        for window in windows:
            wanted = self.batches.window_of(window)
            if len(window.waiting) < min(wanted, window.depth):
                self._apply(Changes(0.0, lanes=self.store.lane_windows([window.lane], wanted)))

    def _commit(self, plan: Plan, now_s: float) -> set[str]:
        """Commits a plan's placements in one round trip; the statuses of the answers."""
        batch = [self._prepared(placement) for placement in plan.placements]
        answers = self.store.commit(
            self.epoch,
            batch,
            self.settings.placement.ahead,
            ignore_memory=self.planner.settings.ignore_memory,
        )
        for placement, commit, answer in zip(plan.placements, batch, answers, strict=True):
            if answer.status == "fenced":
                raise FencedError
            if answer.status == "committed":
                window = self.mirror.lanes[placement.lane]
                task = next(task for task in window.waiting if task[0] == placement.task_id)
                self.metrics.wait_seconds.labels(window.task).observe(max(0.0, now_s - task[2]))
                ids = about(placement.task_id, commit.attempt, ",".join(placement.devices), commit.node)
                log.info("%s placed on %s", window.task, commit.queue, extra=ids)
                self.mirror.placed(placement, now_s)
                if placement.behind and len(placement.devices) == 1:
                    lane = Lane(window.lane, window.task, window.demand, [Waiting(*task)])
                    self._note_behind(placement.devices[0], commit.attempt, lane)
                queue = commit.queue.removeprefix(self.settings.broker.global_keyprefix)
                self.told(placement.task_id, window.task, queue, now_s)
            elif answer.status == "stale":
                self.mirror.drop(placement.lane, placement.task_id)
            else:
                log.debug("%s: refused, %s short on %s", placement.task_id, answer.short, answer.uuid)
        statuses = Counter([answer.status for answer in answers])
        for status, number in statuses.items():
            self.metrics.commits.labels(status).inc(number)
        return {*statuses}

    def _prepared(self, placement: Placement) -> Commit:
        window = self.mirror.lanes[placement.lane]
        devices = self._devices(placement)
        node, uuids = devices[0].node, [device.uuid for device in devices]
        attempt = self._next_attempt()
        claimed_mib = min(claim_mib(device, placement.demand) for device in devices)
        fields = attempt_fields(attempt, uuids, node, claimed_mib, window.context_mib)
        return Commit(
            placement.task_id,
            placement.lane,
            attempt,
            uuids,
            node,
            self.settings.broker.global_keyprefix + gpu_queue(node, [device.index for device in devices]),
            placement.demand.vram_mib,
            slot(token_hex(16), sign(fields, placement.task_id, self.settings.security.key)),
            placement.demand.cpus,
            placement.demand.ram_mib,
            placement.demand.whole,
        )

    def _devices(self, placement: Placement) -> list[Device]:
        """The devices of a placement, in the order in which its task counts them."""
        found = [self.mirror.cluster.device(uuid_) for uuid_ in placement.devices]
        return sorted((device for device in found if device is not None), key=lambda device: device.index)

    def _next_attempt(self) -> str:
        # The server may forget an epoch when it dies; the service's own name still keeps attempts apart.
        return f"{self.epoch}-{self._token}-{next(self._numbers)}"

    def _call_back(self, now_s: float) -> None:
        """Takes back a task that waits behind busy executors where another device could start it now.

        One of each lane at a time, as its tasks are alike: the next plan places it.
        """
        idled, self._idled = self._idled, False
        if not idled:
            return
        tried = set()
        for uuid_ in list(self._behind):
            self._behind[uuid_] = self._still_behind(uuid_)
            for behind in reversed(self._behind[uuid_]):
                if behind.lane.key in tried:
                    continue
                tried.add(behind.lane.key)
                plan = self.planner.plan(self.mirror.cluster, [behind.lane], now_s, self.promises)
                if any(not start.behind for start in plan.placements):
                    self._behind[uuid_].remove(behind)
                    self._take_back(behind.attempt, [uuid_])
            if not self._behind[uuid_]:
                del self._behind[uuid_]

    def _note_behind(self, uuid_: str, attempt: str, lane: Lane) -> None:
        self._behind.setdefault(uuid_, []).append(Behind(attempt, lane))
        self._behind[uuid_] = self._still_behind(uuid_)

    def _still_behind(self, uuid_: str) -> list[Behind]:
        """Those that have no executor yet: as many of the last placed ones as there are more than executors."""
        device = self.mirror.cluster.device(uuid_)
        more = max(0, device.busy - device.executors) if device is not None else 0
        return self._behind[uuid_][-more:] if more else []

    def _take_back(self, attempt: str, devices: Sequence[str]) -> None:
        views, _ = self.store.books(devices)
        for view in views:
            if view.attempt == attempt and view.state in (State.PLACED, State.CLAIMED):
                most = self.settings.placement.max_attempts
                self.store.lose(view, CALLED_BACK, counts=False, max_attempts=most, epoch=self.epoch)

    def _recycle(self, plan: Plan) -> None:
        """Has idle executors replaced whose leftover alone keeps a lane's head from starting."""
        if self.settings.executor.recycle != "when_needed":
            return
        for uuid_ in plan.recycle:
            device = self.mirror.cluster.device(uuid_)
            assert device is not None
            short = [missing_mib(device, lane.demand) for lane in self.mirror.waiting_lanes()]
            wanted = [mib for mib in short if 0 < mib <= device.reclaimable_mib]
            if wanted:
                self.store.doom(self.epoch, uuid_, min(wanted))

    def _note_waits(self, waits: Mapping[str, Reason], now_s: float) -> None:
        """Writes a head's reason into its record when the reason has changed, or, some time later, the head."""
        fresh: dict[str, Reason] = {}
        for lane, reason in waits.items():
            window = self.mirror.lanes.get(lane)
            if window is None or not window.waiting:
                continue
            head, noted = window.waiting[0][0], self._noted.get(lane)
            if noted is None or reason != noted.reason or (head != noted.head and now_s - noted.at_s >= NOTE_S):
                self._noted[lane] = Noted(head, reason, now_s)
                fresh[head] = reason
        self.store.note_waits(self.epoch, fresh)
        for lane in self._noted.keys() - waits.keys():
            del self._noted[lane]

    # -- housekeeping ----------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        self.batches.refresh_table()
        self._refuse_items()
        self._expire()
        self._bury_unfit()
        self._bury_unfollowed()
        self._lose_nodes()
        self.store.forget_finished(self.settings.placement.retention_s, 1000)
        self._learn_run_times()
        if time.monotonic() - self._checked_s >= CHECK_S:
            self._checked_s = time.monotonic()
            self._check_books()
            self._follow_attempts()

    def _refuse_items(self) -> None:
        """Ends items that no batch or no device can hold; of very many, the rest the next time."""
        for _ in range(REFUSING):
            gone = self.batches.refuse(self.epoch, self.mirror.batch_windows(), self.mirror.cluster, self._now_s())
            self._drop(gone)
            if not gone:
                break
            self._apply(Changes(self._now_s(), lanes=self.store.lane_windows(list(gone), WINDOW)))

    def _learn_run_times(self) -> None:
        """Tells the mix how long tasks have run that have ended since the last look."""
        until_ms = self.store.server_ms() - SETTLE_MS
        after_ms = self._ends_until_ms or until_ms - LEARNED_S * 1000
        for ending in self.store.ends_between(after_ms, until_ms, ENDS):
            if ending.ran_s is not None:
                self.planner.mix.ran(ending.demand, ending.ran_s)
        self._ends_until_ms = max(until_ms, after_ms)

    def _check_books(self) -> None:
        """Says what is wrong in the devices' books, should anything be; what differs only once was under way."""
        before, self._differences = self._differences, set(self.store.audit_devices())
        for difference in sorted(self._differences & before):
            log.error("the books are wrong: %s (brim audit tells more)", difference)

    def _follow_attempts(self) -> None:
        """Finds out how old the attempts on devices are, which promises go by, and which beside promises have ended."""
        cluster = self.mirror.cluster
        busy = [device.uuid for site in cluster for device in site.devices if device.busy]
        live = self.store.books(busy)[0] if busy else []
        placed_s: dict[str, list[float]] = {uuid_: [] for uuid_ in busy}
        for view in live:
            for uuid_ in view.devices:
                placed_s.setdefault(uuid_, []).append(view.placed_s)
        for uuid_, times in placed_s.items():
            cluster.began(uuid_, sorted(times))
        tasks = {view.task_id for view in live}
        for owner, promise in self.promises.items():
            for other in promise.beside:
                if other.task_id not in tasks:
                    self.promises[owner] = self.promises[owner].relieved(other.task_id)

    def _expire(self) -> None:
        for task_id in self.store.expired_ids(1000):
            self.store.close(task_id, State.EXPIRED, EXPIRED, NOT_RUNNING, epoch=self.epoch)

    def _bury_unfit(self) -> None:
        """Dead-letters tasks that no device could ever take, once they have had their grace; items one by one.

        The grace also runs from when the last device that was large enough went away: it may only be restarting.
        """
        now_s, grace_s = self.store.server_ms() / 1000, self.settings.intake.unfit_grace_s
        unfit = {lane: noted.reason for lane, noted in self._noted.items() if noted.reason.code == "too_large"}
        self._unfit_since = {lane: self._unfit_since.get(lane, now_s) for lane in unfit}
        for lane, since_s in self._unfit_since.items():
            window = self.mirror.lanes.get(lane)
            for task_id, _, admitted_s in window.waiting if window and window.key is None else ():
                if now_s - max(since_s, admitted_s) >= grace_s:
                    self.store.close(task_id, State.DEAD, unfit[lane], [State.WAITING], epoch=self.epoch)

    def _bury_unfollowed(self) -> None:
        """Dead-letters tasks whose retry or replacement never came: the broker has lost it, or it went elsewhere."""
        longest_s = self.settings.placement.visibility_timeout_s
        ids = self.store.awaited_ids(longest_s, 1000)
        if not ids or any(self.store.queue_lengths(self._intake_lists).values()):
            return
        reason = Reason("next_lost", f"the message of its retry or replacement has not come within {longest_s:g} s")
        for task_id in ids:
            self.store.close(task_id, State.DEAD, reason, [State.HANDED_OVER], epoch=self.epoch)

    def _lose_nodes(self) -> None:
        """Declares silent nodes lost and places their attempts again (DESIGN, "Deaths")."""
        timeout_s = self.settings.placement.lease_timeout_s
        now, before = time.monotonic(), self._listened_s
        self._listened_s = now
        if now - before > max(timeout_s / 2, 2 * HOUSEKEEPING_S):  # it has waited for Redis, as the agents have
            self._hearing_since_s = now
        if now - self._hearing_since_s <= timeout_s:
            return
        for view in self.mirror.nodes.values():
            if self.store.lose_node(self.epoch, view, timeout_s):
                log.warning("node %s is lost: it has not renewed for %g s", view.node.name, timeout_s)
        lost = {site.name: site for site in self.mirror.cluster if any(d.state == "lost" for d in site.devices)}
        for name, site in lost.items():
            reason = Reason("node_lost", f"node {name} has not renewed its lease for {timeout_s:g} s")
            self._place_elsewhere([device.uuid for device in site.devices], reason)

    def _place_elsewhere(self, uuids: Sequence[str], reason: Reason) -> None:
        """Gives up the attempts on lost devices. Only those that had begun can have been the cause, and count."""
        attempts, _ = self.store.books(uuids)
        for attempt in (*attempts, *self.batches.attempts_on(uuids)):
            if attempt.state is State.FINISHING:
                self.answerer.settle_later(attempt, reason, self.epoch)
            else:
                self.store.lose(
                    attempt,
                    reason,
                    counts=attempt.state in BEGUN,
                    max_attempts=self.settings.placement.max_attempts,
                    epoch=self.epoch,
                )


def gather_s(behind: int, pace: float) -> float:
    """How long changes may gather: until half of what lies ``behind`` executors is taken, ``pace`` tasks a second."""
    return min(GATHER_S, behind / (2 * pace)) if pace else GATHER_S


def make_planner(settings: Settings, *, ignore_memory: bool = False) -> Planner:
    """The planner that the settings and their policy file ask for. Raises ``ConfigurationError``."""
    choice = PolicyChoice.load(settings.placement.policy_file)
    chosen = settings.placement
    return Planner(
        make_policy(choice.policy, choice.chosen_weights),
        PlannerSettings(
            ahead=chosen.ahead,
            promises=None if chosen.promises < 0 else chosen.promises,
            promise_after_s=chosen.promise_after_s,
            ignore_memory=ignore_memory,
            keeps_leftover=settings.executor.recycle == "never",
        ),
    )


def run(settings: Settings, *, ignore_memory: bool = False) -> None:
    """Runs placement until SIGTERM or SIGINT, then hands over."""
    stop = stop_on_signals()
    planner = make_planner(settings, ignore_memory=ignore_memory)
    store = open_store(settings, stop, single=True)
    events = Events("placement", settings, stop)
    answerer = Answerer(settings, stop, events.answered)
    service = PlacementService(store, settings, planner, answerer)
    service.told = service.batches.told = events.placed
    metrics.serve(service.metrics.registry, settings.metrics.host, settings.metrics.placement_port)
    for beside in (answerer, events, Learning(settings, stop, lambda: service.epoch)):
        threading.Thread(target=beside.run, daemon=True).start()
    serve(service, settings, stop)
    service.resign()
