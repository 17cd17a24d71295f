"""What placement does about batched tasks: gives waiting items to model executors, and wants or retires these.

The decisions are `brim.core.batching`'s; here the snapshot is made, and what they say is committed.
"""

from __future__ import annotations

import itertools
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from brim.celery.envelope import ItemHeader, attempt_fields, sign, slot
from brim.core.batching import (
    EMPTY,
    BatchKey,
    Commit,
    Executor,
    ExecutorState,
    Item,
    Lane,
    Launch,
    ModelKey,
    Phase,
    Retire,
    Rules,
    Want,
    assign,
    settle,
)
from brim.core.batching.items import PRIORITY_STEP_S
from brim.core.batching.sizing import footprint, limits_of
from brim.core.model import AttemptView, Demand, Device, Reason, State
from brim.core.placement import Cluster
from brim.core.placement.cluster import Site
from brim.core.placement.fit import capacity_mib, node_shortage, place_name, shortage
from brim.core.profiles import MAX_MIB, Profile, ResourceTable
from brim.settings import Settings
from brim.store import Store
from brim.store.codec import EPOCH_S, PRIORITY_STEP
from brim.store.types import Changes, CommitItem, ExecutorView, HeldItem, LaneWindow, WantedExecutor

from .logs import about

log = logging.getLogger("brim.placement")

WINDOW = 64
"""How many items of a lane are looked at, at least; enough for two full task sets in any case."""
TICKS_PER_S = 100_000
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""After an executor that could not load its model, or died: before the next of its model is started."""
SETTLE_S = 0.1
"""How often is asked whether models want more executors, or none any more."""
STAGING = 6
"""How many times as long as another task an item may take to begin: it may have to be staged first."""
PLANNED = frozenset({"idle", "memory_wanted", "too_small", "node_draining", "profile_changed"})
"""Reasons for which executors drain that say nothing against their model."""


@dataclass(slots=True)
class Trouble:
    """A model whose executors fail: how often in a row, until when it is let alone, and why."""

    failures: int
    until_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Unfit:
    """An item that no executor could compute even alone, on any device: since when that is known, and why."""

    since_s: float
    reason: Reason


class Batches:
    """Level 1 and the model executors as the active placement sees them."""

    def __init__(self, store: Store, settings: Settings, next_attempt: Callable[[], str]) -> None:
        self.store = store
        self.settings = settings
        self.executors: dict[str, ExecutorView] = {}
        self.told: Callable[[str, str, str, float], None] = lambda *_: None
        """Hears of every committed item: task id, task, queue, and when."""
        self._next_attempt = next_attempt
        self._settled_s = 0.0
        self._groups = itertools.count(1)
        self._table = ResourceTable()
        self._published: Mapping[str, str] = {}
        self._current: dict[ModelKey, Profile] = {}
        """What the table says of each model."""
        self._profiles: dict[str, Profile] = {}
        self._troubles: dict[ModelKey, Trouble] = {}
        self._unfit: dict[str, Unfit] = {}
        """By task id."""

    # -- mirroring -------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The mirror may miss changes: it is read anew."""
        self.executors.clear()

    def apply(self, changes: Changes) -> None:
        """Take over what has changed of model executors."""
        for view in changes.executors:
            self.executors[view.name] = view
            if view.phase is Phase.UP and view.items:
                self._troubles.pop(_model(view), None)
        for name in changes.gone_executors:
            gone = self.executors.pop(name, None)
            if gone is not None:
                self._note_end(gone, changes.now_s)

    def refresh_table(self) -> None:
        """Read the published profiles, if they have changed."""
        published = self.store.published_profiles()
        if published != self._published:
            found = {name: Profile.model_validate_json(text) for name, text in published.items()}
            self._published, self._table = published, ResourceTable(found)
            batched = (profile for profile in self._table if profile.batch is not None)
            self._current = {ModelKey(profile.model or "", profile.version): profile for profile in batched}

    def _note_end(self, gone: ExecutorView, now_s: float) -> None:
        """An executor that ended otherwise than by plan lets its model pause, longer each time."""
        if gone.phase is Phase.DRAINING and gone.reason is not None and gone.reason.code in PLANNED:
            return
        model = _model(gone)
        before = self._troubles.get(model)
        failures = before.failures + 1 if before else 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S)
        why = gone.reason or Reason("executor_died", f"model executor {gone.name} has ended")
        reason = Reason(why.code, f"{why.message}; the next try is in {pause_s:g} s at the latest")
        self._troubles[model] = Trouble(failures, now_s + pause_s, reason)
        log.warning("model executor %s is gone: %s", gone.name, why)

    # -- deciding --------------------------------------------------------------------------------------------

    def place(self, epoch: int, windows: Iterable[LaneWindow], cluster: Cluster, now_s: float) -> dict[str, list[str]]:
        """Give items to executors as `assign` says; the committed ids, and those that wait no more, by lane."""
        lanes = {window.key: (window, lane) for window in windows if (lane := self._lane(window)) is not None}
        executors = [self.executor_of(view) for view in self.executors.values() if _takes(view, cluster)]
        plan = assign([lane for _, lane in lanes.values()], executors)
        gone: dict[str, list[str]] = {}
        commits = list(self._commits(plan.commits, lanes))
        for commit, answer in zip(commits, self.store.commit_items(epoch, commits), strict=True):
            if answer == "committed":
                self._committed(commit, now_s)
            if commit.source is None and answer != "refused":
                gone.setdefault(commit.item.lane, []).append(commit.item.task_id)
        for refusal in plan.refusals:
            window, _ = lanes[refusal.key]
            self.store.close(refusal.item.id, State.DEAD, refusal.reason, [State.WAITING], epoch=epoch)
            gone.setdefault(window.lane, []).append(refusal.item.id)
        return gone

    def refuse(self, epoch: int, windows: Sequence[LaneWindow], cluster: Cluster, now_s: float) -> dict[str, list[str]]:
        """Dead-letters items that no batch can hold any more, as intake would now, and those that no device has had
        the memory for in ``intake.unfit_grace_s``; their ids, by lane.
        """
        self.look_for_unfit(windows, cluster, now_s)
        grace_s = self.settings.intake.unfit_grace_s
        gone: dict[str, list[str]] = {}
        for window in windows:
            profile = self.profile_of(window.task)
            if window.key is None or profile is None:
                continue
            for task_id, _, _ in window.waiting:
                reason = profile.beyond_batches(window.sizes.get(task_id, 1.0))
                unfit = self._unfit.get(task_id)
                if reason is None and unfit is not None and now_s - unfit.since_s >= grace_s:
                    reason = unfit.reason
                if reason is not None:
                    self.store.close(task_id, State.DEAD, reason, [State.WAITING], epoch=epoch)
                    gone.setdefault(window.lane, []).append(task_id)
        return gone

    def look_for_unfit(self, windows: Iterable[LaneWindow], cluster: Cluster, now_s: float) -> None:
        """Notes which items no device has the memory for: others must not wait for what these would need."""
        found: dict[str, Unfit] = {}
        largest_mib: dict[str, int] = {}
        for window in windows:
            profile = self.profile_of(window.task)
            if window.key is None or profile is None or not window.waiting:
                continue
            if window.task not in largest_mib:
                able = (capacity_mib(device) for _, device in _able(cluster, profile, window.task))
                largest_mib[window.task] = max(able, default=MAX_MIB)
            most_mib = largest_mib[window.task]
            items = list(_items(window))
            if footprint(profile, [max(item.size for item in items)]).alone_mib <= most_mib:
                continue
            for item in items:
                if (need_mib := footprint(profile, [item.size]).alone_mib) > most_mib:
                    known = self._unfit.get(item.id)
                    reason = _too_large(window.key.model, need_mib, most_mib)
                    found[item.id] = Unfit(known.since_s if known else now_s, reason)
        self._unfit = found

    def settle(
        self, epoch: int, windows: Sequence[LaneWindow], short: Iterable[Want], cluster: Cluster, now_s: float
    ) -> None:
        """Want and retire executors as `settle` says, for what waits in level 1 and ordinary tasks in ``short``."""
        draining = [view for view in self.executors.values() if view.phase is Phase.DRAINING]
        views = [*draining, *(v for v in self.executors.values() if v not in draining and _takes(v, cluster))]
        if not windows and not views:
            return
        short = list(short)
        served = {_model(view) for view in views}
        calm = not short and not draining and all(w.key is None or w.key.model in served for w in windows)
        if calm and now_s - self._settled_s < SETTLE_S:
            return
        self._settled_s = now_s
        wants = [*short, *(want for want, trouble in self._wants(windows, cluster, now_s) if trouble is None)]
        devices = [device for site in cluster for device in site.devices]
        for move in settle(wants, [self.executor_of(view) for view in views], devices, now_s, Rules()):
            if isinstance(move, Launch):
                self._launch(epoch, move, windows, cluster)
            elif isinstance(move, Retire):
                log.info("model executor %s is stopped: %s", move.executor, move.reason)
                self._drain(epoch, move.executor, move.reason)
        self._replace_outdated(epoch)
        for view in self.executors.values():
            if view.phase is Phase.DRAINING:
                self._take_back(epoch, view, view.reason or Reason("draining", "its model executor is draining"))
            elif self._is_stuck(view, now_s):
                message = f"model executor {view.name} has not begun with it for {now_s - view.used_s:.0f} s"
                self._take_back(epoch, view, Reason("not_started", message))

    def _replace_outdated(self, epoch: int) -> None:
        """Drain an executor whose profile has changed since it was wanted; of each model one at a time."""
        for model in {_model(view) for view in self.executors.values()}:
            views = [view for view in self.executors.values() if _model(view) == model]
            if any(view.phase is not Phase.UP for view in views):
                continue
            outdated = next((view for view in views if self._is_outdated(view)), None)
            if outdated is not None:
                reason = Reason("profile_changed", f"the profile of {model} has changed since it was started")
                log.info("model executor %s is replaced: %s", outdated.name, reason)
                self._drain(epoch, outdated.name, reason)

    def _is_outdated(self, view: ExecutorView) -> bool:
        """Whether the table has its model with other memory or other limits; one that it has no more may go on."""
        now = self._current.get(_model(view))
        return now is not None and _fields(now) != _fields(self._profile_when_wanted(view))

    def _drain(self, epoch: int, name: str, reason: Reason) -> None:
        self.store.drain_executor(name, reason, epoch)
        self.executors[name] = replace(self.executors[name], phase=Phase.DRAINING, reason=reason)

    def keeps(
        self, windows: Sequence[LaneWindow], before: float, cluster: Cluster, now_s: float
    ) -> tuple[Device, int] | None:
        """Memory that other tasks must leave alone: for the model that has waited longest, and has no executor.

        None if a task that has waited longer, ``before`` in order, is there: it goes first.
        """
        alive = {_model(view) for view in self.executors.values()}
        windows = [window for window in windows if window.key is not None and window.key.model not in alive]
        wants = [want for want, trouble in self._wants(windows, cluster, now_s) if trouble is None]
        first = min(wants, key=lambda want: want.order, default=None)
        if first is None or first.order >= before:
            return None
        able = [device for site in cluster for device in site.devices if device.uuid in first.devices]
        able = [device for device in able if device.state == "up" and capacity_mib(device) >= first.least_mib]
        if not able:
            return None
        fitting = [device for device in able if device.available_mib >= first.least_mib]
        if fitting:
            return min(fitting, key=lambda device: device.available_mib), first.least_mib
        nearest = max(able, key=lambda device: device.available_mib)
        return nearest, max(0, nearest.available_mib)

    @property
    def is_patient(self) -> bool:
        """Whether every model executor is working: what comes for them now can wait a little for more of its kind."""
        return bool(self.executors) and all(view.is_working for view in self.executors.values())

    def waits(self, windows: Sequence[LaneWindow], cluster: Cluster, now_s: float) -> dict[str, Reason]:
        """Why the first item of each lane waits."""
        found: dict[str, Reason] = {}
        unserved: list[LaneWindow] = []
        for window in windows:
            if window.key is None or not window.waiting:
                continue
            if self.profile_of(window.task) is None:
                message = f"the table's profile of {window.task} does not batch it (any more)"
                found[window.lane] = Reason("not_batched", message)
            elif (unfit := self._unfit.get(window.waiting[0][0])) is not None:
                found[window.lane] = unfit.reason
            elif (served := self._served(window.key.model)) is not None:
                found[window.lane] = served
            else:
                unserved.append(window)
        for want, trouble in self._wants(unserved, cluster, now_s):
            reason = trouble or _unserved(want, cluster)
            lanes = (w.lane for w in unserved if w.key is not None and w.key.model == want.model)
            found.update(dict.fromkeys(lanes, reason))
        return found

    # -- explaining ------------------------------------------------------------------------------------------

    def profile_of(self, task: str) -> Profile | None:
        """The published profile that batches a task, None if none does."""
        profile = self._table.profile(task)
        return profile if profile is not None and profile.batch is not None else None

    def need(self, key: BatchKey, size: float, windows: Sequence[LaneWindow], cluster: Cluster) -> Want:
        """What a new executor of a model would want for what waits, or for one item of this size if nothing does."""
        profile = self.profile_of(key.task)
        assert profile is not None
        assert profile.batch is not None
        own = footprint(profile, [size])
        same = [window for window in windows if window.key is not None and window.key.model == key.model]
        for want, _ in self._wants(same, cluster, 0.0):
            if want.alone_mib >= own.alone_mib:
                return want
        able = frozenset(device.uuid for _, device in _able(cluster, profile, key.task))
        sizes = (own.alone_mib, own.least_mib, own.full_mib)
        return Want(key.model, 0.0, 0.0, *sizes, able, profile.batch.max_executors)

    # -- snapshot --------------------------------------------------------------------------------------------

    def window_of(self, window: LaneWindow) -> int:
        """How many items of this lane have to be looked at."""
        profile = self.profile_of(window.task)
        if profile is None or profile.batch is None:
            return WINDOW
        limit = profile.batch.level1_limit
        beyond = window.depth if limit is not None and window.depth > limit else 0
        return max(WINDOW, 2 * profile.batch.max_items, beyond)

    def _lane(self, window: LaneWindow) -> Lane | None:
        profile = self.profile_of(window.task)
        if window.key is None or profile is None or profile.batch is None or not window.waiting:
            return None
        return Lane(window.key, tuple(_items(window)), profile.batch.level1_limit)

    def _profile_when_wanted(self, view: ExecutorView) -> Profile:
        """An executor's profile as it was when the executor was wanted."""
        profile = self._profiles.get(view.profile)
        if profile is None:
            profile = self._profiles[view.profile] = Profile.model_validate_json(view.profile)
        return profile

    def executor_of(self, view: ExecutorView) -> Executor:
        """A model executor as decisions see it."""
        profile = self._profile_when_wanted(view)
        batch = self._current.get(_model(view), profile).batch
        assert batch is not None
        unsealed: dict[BatchKey, list[Item]] = {}
        for item in view.items:
            if not item.sealed:
                unsealed.setdefault(item.key, []).append(Item(item.attempt, item.size, item.order))
        ceiling = view.ceiling if view.ceiling is not None else float("inf")
        return Executor(
            view.name,
            _model(view),
            view.device,
            view.vram_mib,
            limits_of(profile, view.vram_mib, ceiling),
            view.phase,
            view.since_s,
            view.used_s,
            batch.keep_warm_s,
            working=view.is_working,
            ahead=view.ahead,
            unsealed=tuple((key, tuple(items)) for key, items in unsealed.items()),
        )

    def _wants(
        self, windows: Sequence[LaneWindow], cluster: Cluster, now_s: float
    ) -> Iterator[tuple[Want, Reason | None]]:
        """What each model with waiting items wants, and why it must be let alone for now, if so."""
        waiting: dict[ModelKey, list[LaneWindow]] = {}
        for window in windows:
            if window.key is not None and window.waiting and self.profile_of(window.task) is not None:
                waiting.setdefault(window.key.model, []).append(window)
        for model, lanes in waiting.items():
            profile = self.profile_of(lanes[0].task)
            assert profile is not None
            assert profile.batch is not None
            items = sorted((item for lane in lanes for item in _items(lane)), key=lambda item: item.order)
            items = [item for item in items if item.id not in self._unfit] or items
            need = footprint(profile, [item.size for item in items])
            oldest_s = min(lane.waiting[0][2] for lane in lanes)
            able = frozenset(device.uuid for site, device in _able(cluster, profile, lanes[0].task))
            trouble = self._troubles.get(model)
            yield (
                Want(
                    model,
                    items[0].order,
                    oldest_s,
                    need.alone_mib,
                    need.least_mib,
                    need.full_mib,
                    able,
                    profile.batch.max_executors,
                ),
                trouble.reason if trouble is not None and now_s < trouble.until_s else None,
            )

    def _served(self, model: ModelKey) -> Reason | None:
        """What is said of items whose model has executors; None if it has none."""
        phases = [view.phase for view in self.executors.values() if _model(view) == model]
        if Phase.UP in phases:
            message = f"its {phases.count(Phase.UP)} model executors of {model} are working and hold all that they can"
            return Reason("executors_working", message)
        if phases:
            return Reason("executor_starting", f"a model executor of {model} is starting or stopping")
        return None

    # -- committing ------------------------------------------------------------------------------------------

    def _commits(
        self, commits: Sequence[Commit], lanes: Mapping[BatchKey | None, tuple[LaneWindow, Lane]]
    ) -> Iterator[CommitItem]:
        """What to commit: a task set's worth of items with one header, so that their executor awaits them together."""
        for (name, key, _), run in itertools.groupby(commits, lambda c: (c.executor, c.key, c.source)):
            view = self.executors[name]
            for group in _sets(list(run), self.executor_of(view)):
                label = f"{next(self._groups)}"
                for commit in group:
                    yield self._commit(
                        commit,
                        view,
                        key,
                        lanes,
                        ItemHeader(name, key.shape, commit.item.order, commit.item.size, label, len(group)),
                    )

    def _commit(
        self,
        commit: Commit,
        view: ExecutorView,
        key: BatchKey,
        lanes: Mapping[BatchKey | None, tuple[LaneWindow, Lane]],
        header: ItemHeader,
    ) -> CommitItem:
        attempt = self._next_attempt()
        if commit.source is None:
            task_id, lane, source = commit.item.id, lanes[key][0].lane, None
        else:
            held = next(item for item in self.executors[commit.source].items if item.attempt == commit.item.id)
            task_id, lane, source = held.task_id, held.lane, (commit.source, held.attempt)
        item = HeldItem(attempt, task_id, key, commit.item.order, commit.item.size, lane, sealed=False)
        fields = attempt_fields(attempt, [view.device], view.node, 0, 0, header)
        fields = sign(fields, task_id, self.settings.security.key)
        queue = self.settings.broker.global_keyprefix + view.queue
        return CommitItem(item, slot(uuid.uuid4().hex, fields), view.name, queue, view.node, view.device, source)

    def _committed(self, commit: CommitItem, now_s: float) -> None:
        """Take a commit over into the mirror, until the books' own word arrives."""
        view = self.executors[commit.executor]
        self.executors[view.name] = replace(view, items=[*view.items, commit.item], used_s=now_s)
        if commit.source is not None:
            name, before = commit.source
            sibling = self.executors[name]
            kept = [item for item in sibling.items if item.attempt != before]
            self.executors[name] = replace(sibling, items=kept)
        ids = about(commit.item.task_id, commit.item.attempt, commit.device, commit.node)
        log.debug("%s placed on %s", commit.item.key.task, commit.executor, extra=ids)
        self.told(commit.item.task_id, commit.item.key.task, view.queue, now_s)

    def _launch(self, epoch: int, move: Launch, windows: Sequence[LaneWindow], cluster: Cluster) -> None:
        window = next(window for window in windows if window.key is not None and window.key.model == move.model)
        profile, device = self.profile_of(window.task), cluster.device(move.device)
        assert profile is not None
        assert device is not None
        name = self._free_name(device, move.model)
        wanted = WantedExecutor(
            name,
            device.node,
            device.uuid,
            device.index,
            f"gpu.{name}",
            move.model.model,
            move.model.version,
            move.vram_mib,
            profile.model_dump_json(),
        )
        answer = self.store.want_executor(epoch, wanted)
        if answer.status == "wanted":
            log.info("model executor %s is wanted, with %d MiB", name, move.vram_mib)
            cluster.update(replace(device, committed_mib=device.committed_mib + move.vram_mib))

    def _free_name(self, device: Device, model: ModelKey) -> str:
        """``<node>.<index>.<model>``, and a number from the second on."""
        first = f"{device.node}.{device.index}.{re.sub(r'[^A-Za-z0-9_-]+', '-', str(model))}"
        names = (first if number == 1 else f"{first}.{number}" for number in itertools.count(1))
        return next(name for name in names if name not in self.executors)

    def _is_stuck(self, view: ExecutorView, now_s: float) -> bool:
        """Whether an executor computes nothing, though it was given items long ago: their messages were lost."""
        patience_s = STAGING * self.settings.placement.start_timeout_s
        return view.state is ExecutorState.WAITING and now_s - view.used_s > patience_s

    def _take_back(self, epoch: int, view: ExecutorView, reason: Reason) -> None:
        """Items that an executor has not sealed wait in level 1 again."""
        most = self.settings.placement.max_attempts
        for item in view.items:
            if not item.sealed:
                self.store.lose(view.attempt(item), reason, counts=False, max_attempts=most, epoch=epoch)

    def attempts_on(self, uuids: Iterable[str]) -> list[AttemptView]:
        """The items of all model executors on these devices, as live attempts."""
        devices = set(uuids)
        return self.store.item_attempts([view for view in self.store.executors() if view.device in devices])


def order_of(window: LaneWindow) -> float:
    """How long the first task of an ordinary lane has waited, as batched ones are ordered: priority is a head start."""
    _, order, admitted_s = window.waiting[0]
    return admitted_s + PRIORITY_STEP_S * (order // PRIORITY_STEP)


def short_of_memory(windows: Iterable[LaneWindow], waits: Mapping[str, Reason], cluster: Cluster) -> Iterator[Want]:
    """What ordinary tasks want that wait for memory: it may be an idle model executor's."""
    for window in windows:
        reason = waits.get(window.lane)
        if window.key is None and window.waiting and reason is not None and reason.code in ("memory", "leftover"):
            need = window.demand.vram_mib
            able = {d.uuid for site in cluster for d in site.devices if cluster.runs(d, window.task)}
            yield Want(None, order_of(window), window.waiting[0][2], need, need, need, frozenset(able))


def _able(cluster: Cluster, profile: Profile, task: str) -> Iterator[tuple[Site, Device]]:
    """The devices that a profile's executors may run on."""
    demand = Demand(0, labels=tuple(sorted(profile.labels.items())))
    for site in cluster:
        if node_shortage(site.node, demand) is None:
            for device in site.devices:
                if cluster.runs(device, task) and (not profile.gpu_models or device.model in profile.gpu_models):
                    yield site, device


def obstacle(want: Want, profile: Profile, task: str, site: Site, device: Device, cluster: Cluster) -> Reason | None:
    """Why a device cannot take one more executor of the task's model now; None if it can."""
    if not cluster.runs(device, task):
        return Reason("no_worker", f"no worker there has registered {task}")
    if want.alone_mib > capacity_mib(device):
        short_mib = want.alone_mib - capacity_mib(device)
        return Reason("too_large", f"too large for {place_name(device)} by {short_mib} MiB")
    labels = tuple(sorted(profile.labels.items()))
    demand = Demand(want.least_mib, gpu_models=profile.gpu_models, labels=labels)
    return node_shortage(site.node, demand) or shortage(replace(device, busy=0), demand)


def _unserved(want: Want, cluster: Cluster) -> Reason:
    """Why a model has no executor."""
    if not want.devices:
        return Reason("no_worker", f"no device may run {want.model}: its task is not registered there")
    able = [device for site in cluster for device in site.devices if device.uuid in want.devices]
    largest_mib = max(capacity_mib(device) for device in able)
    if want.model is not None and want.alone_mib > largest_mib:
        return _too_large(want.model, want.alone_mib, largest_mib)
    needs = f"a model executor of {want.model} needs {want.alone_mib} MiB"
    free_mib = max(device.available_mib for device in able)
    return Reason("memory", f"{needs}, {want.least_mib} to be useful, and at most {free_mib} are free")


def _too_large(model: ModelKey, need_mib: int, largest_mib: int) -> Reason:
    """Why no device can ever take an executor of the model that computes an item alone."""
    needs = f"a model executor of {model} needs {need_mib} MiB"
    return Reason("too_large", f"{needs}, and the largest device has {largest_mib}")


def _takes(view: ExecutorView, cluster: Cluster) -> bool:
    """Whether the executor's device takes work."""
    device = cluster.device(view.device)
    return device is not None and device.state == "up"


def _model(view: ExecutorView) -> ModelKey:
    return ModelKey(view.model, view.version)


def _fields(profile: Profile) -> tuple[object, ...]:
    """What an executor's reservation and its limits follow from."""
    batch = profile.batch
    assert batch is not None
    memory = (profile.context_mib, profile.weights_mib, profile.margin, batch.per_unit_mib)
    return (*memory, batch.max_items, batch.max_volume)


def _items(window: LaneWindow) -> Iterator[Item]:
    """A lane's items; their order by age is what the lane is sorted by, in ticks."""
    for task_id, order, _ in window.waiting:
        yield Item(task_id, window.sizes.get(task_id, 1.0), order / TICKS_PER_S + EPOCH_S)


def _sets(commits: Sequence[Commit], executor: Executor) -> Iterator[list[Commit]]:
    """Commits of one key to one executor, cut where a batch is full."""
    group: list[Commit] = []
    load = EMPTY
    for commit in commits:
        if group and executor.limits.shortage(load + commit.item.size) is not None:
            yield group
            group, load = [], EMPTY
        group.append(commit)
        load += commit.item.size
    if group:
        yield group
