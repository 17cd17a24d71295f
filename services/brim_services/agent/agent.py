"""The agent's loop: one thread, which sleeps until a process ends, a worker has something to say, or it is time.

Each look renews the lease, compares the books with the processes that live, does what `brim.core.oversight`
decides, and reports memory. While Redis is away the agent goes on watching; what it could not do is found again at
the next look.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from celery import Celery

from brim.celery.agent_link import HEARD_AT_ONCE, HEARD_EVERY_S, Event, Listener
from brim.celery.attempts import place_again_with_more
from brim.celery.plugin import registration
from brim.core.model import AttemptView, Reason, gpu_queue
from brim.core.oversight import Action, Forget, Lose, Remembered, Replace, Restart, Retire, Sight, Start, decide
from brim.core.posts import Post, Worker
from brim.gpu.guard import Excess, excesses
from brim.gpu.probe import DeviceInfo, Probe, open_probe
from brim.gpu.sampling import Peaks, next_interval_s
from brim.settings import ConfigurationError, Problem, Settings
from brim.store import Store
from brim.store.connection import address, is_outage
from brim.store.types import OutOfMemoryAnswer
from brim_services import metrics
from brim_services.logs import about
from brim_services.loop import Pulse, open_store, patiently, stop_on_signals
from brim_services.metrics import AgentMetrics
from brim_services.results import Results
from brim_services.supervise import Supervisor

from .app import check_app, load_app
from .presence import Presence, Refused
from .residents import Residents, posts
from .takeover import Boot, take_over
from .watch import Watch
from .workers import Workers

log = logging.getLogger("brim.agent")

LOOK_S = 0.25
"""Longest time between two looks."""
HURRY_S, REST = 0.1, 20
"""Shortest time between two looks, however much happens; also, in times of what the look before took."""
AWAY_S = 1.0
"""Between two tries while Redis is away."""
REMEMBERED = 4096
"""So many of the latest ends are remembered, should a server that dies, or its replica, have lost some of them."""

CUT_SHORT = Reason("node_draining", "the node shut down before the task was over")


class StopBell:
    """SIGTERM and SIGINT as something to wait for; `rings` counts them."""

    def __init__(self) -> None:
        self.event = stop_on_signals()
        self.rings = 0
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._read.fileno()

    def listen(self) -> None:
        """Take note of the signals since last time."""
        with contextlib.suppress(BlockingIOError):
            self.rings += len(self._read.recv(64))


class Agent:
    """One node's agent, from taking the node over to leaving it."""

    def __init__(
        self,
        settings: Settings,
        app_name: str,
        app: Celery,
        store: Store,
        devices: Sequence[DeviceInfo],
        probe: Probe,
        bell: StopBell,
    ) -> None:
        self.settings = settings
        self.app = app
        self.store = store
        self.devices = devices
        self.bell = bell
        node = settings.agent.node or socket.gethostname()
        self.presence = Presence(store, settings.agent, node, str(Boot.mine()), self.devices, probe)
        self.results = Results(app, store, settings.placement.max_attempts)
        self.listener = Listener()
        self.pulse = Pulse(settings.health.file)
        self.watch = Watch()
        self.watch.also(self.listener)
        self.watch.also(bell)
        self.supervisor = Supervisor(settings.agent.log_folder)
        self.workers = Workers(self.supervisor, settings, app_name, node, self.listener.address, self.watch)
        self.residents = Residents(
            store, settings, lambda view, why, counts: self._settle(view, why, counts=counts), self.watch.kill
        )
        self.metrics = AgentMetrics()
        self._registered = False
        self._remembered = Remembered()
        self._consuming: set[str] = set()
        self._over: deque[str] = deque(maxlen=REMEMBERED)
        self._running: set[str] = set()
        self._peaks = Peaks()
        self._outgrown: set[str] = set()
        self._draining_since: float | None = None
        self._in_use = True
        self._changed = False
        self._hurry_s = HURRY_S
        self._nap_s, self._heard_at = HEARD_EVERY_S, -math.inf
        self._looked_at = self._renewed_at = self._reported_at = -1e9
        self._report_every_s = settings.agent.report_interval_s
        self._away = False

    def run(self) -> None:
        """Serve until a signal; then let running tasks end, hand the others back, and leave.

        Raises `ConfigurationError` if another agent serves this node or a device of it.
        """
        with self.supervisor:
            self._begin()
            while not self._drained():
                self._rest()
                self._hear()
                due = self._until_look_s() <= 0
                if due or not self._looks_soon:
                    self.workers.poll()
                if due:
                    self._step()
            self._end()

    # -- beginning and ending --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Settle what was before, and start the workers."""
        self._registered = False

        def settle_the_past() -> None:
            lease_s = self.settings.placement.lease_timeout_s
            take_over(
                self.store,
                self.presence.name,
                self.presence.uuids,
                lease_s,
                self._settle_predecessors,
                self.residents.bury,
            )

        patiently(settle_the_past, self.settings.redis.url, self.bell.event)
        if not self.bell.event.is_set():
            self.workers.start_all(self._standing())

    def _standing(self) -> list[Post]:
        """The posts of this node that do not depend on demand: one for each device."""
        executors = self.settings.agent.executors_per_gpu
        node = self.presence.name
        return [
            Post(f"gpu{d.index}", gpu_queue(node, [d.index]), (d.uuid,), executors, standing=True) for d in self.devices
        ]

    def _start_over(self) -> None:
        """The store has given this node's attempts to others: end them here before anything new begins."""
        log.warning("node %s was declared lost or taken over: its workers are ended and start anew", self.presence.name)
        self.workers.kill_all()
        self._begin()

    def _drained(self) -> bool:
        """Whether it is time to go: told to, and nothing runs any more, or it may not run any longer."""
        if not self.bell.rings:
            return False
        if self._draining_since is None:
            self._draining_since = time.monotonic()
            self._in_use = True
            log.info("draining: running tasks have %g s to end", self.settings.agent.drain_grace_s)
        late = time.monotonic() - self._draining_since >= self.settings.agent.drain_grace_s
        return late or self.bell.rings > 1 or not self._registered or not self._in_use

    def _end(self) -> None:
        """Stop the workers and leave the table; what still runs is cut short and handed back."""
        if not self._in_use:
            self.workers.stop()
        self.workers.kill_all()
        if not self._registered:
            return
        try:
            for attempt in self.store.books(self.presence.uuids)[0]:
                self._settle(attempt, CUT_SHORT, counts=False)
            for executor in self.store.executors_on(self.presence.uuids):
                self.residents.bury(executor, CUT_SHORT, counts=False)
            left = self.presence.leave()
        except Exception as error:
            if not is_outage(error):
                raise
            log.warning("Redis is away: node %s could not leave, its lease will run out", self.presence.name)
        else:
            log.info("node %s %s", self.presence.name, "has left" if left else "is another agent's by now")

    # -- one round -------------------------------------------------------------------------------------------

    @property
    def _looks_soon(self) -> bool:
        """Whether something has happened that the next look, soon, will be about."""
        return self._changed and self._registered and not self._away

    def _rest(self) -> None:
        """Sleep until something happens. With a look to come soon anyway, what happens meanwhile is heard together."""
        if self._looks_soon:
            time.sleep(max(0.0, min(self._nap_s, self._until_look_s())))
            self.watch.wait(0.0)
        else:
            self._changed |= self.watch.wait(self._pause_s())

    def _pause_s(self) -> float:
        """How long to sleep if nothing happens."""
        restart_s = self.workers.next_restart_s()
        return self._until_look_s() if restart_s is None else min(self._until_look_s(), restart_s)

    def _until_look_s(self) -> float:
        pause_s = AWAY_S if self._away else self._hurry_s if self._changed else min(LOOK_S, self._report_every_s)
        return self._looked_at + pause_s - time.monotonic()

    def _hear(self) -> None:
        """What the workers, and whoever wants this process to end, have said."""
        self.bell.listen()
        now = time.monotonic()
        notices, since_s = self.listener.receive(), now - self._heard_at
        self._nap_s = min(HEARD_EVERY_S, since_s * HEARD_AT_ONCE / max(1, len(notices)))
        self._heard_at = now
        for notice in notices:
            worker = self.workers.of_boot(notice.boot)
            if worker is None:
                continue
            if notice.event is Event.READY:
                worker.said_ready = True
                log.info("%s: worker is ready", worker.identity.hostname)
            elif notice.event is Event.EXECUTOR:
                self.watch.add(worker.post.name, notice.proc)
            else:
                self._consuming.add(worker.post.queue)
                if notice.over:
                    self._over.append(notice.over)

    def _step(self) -> None:
        """Register, or look; through an outage of Redis."""
        self._looked_at = time.monotonic()
        try:
            if self._registered:
                self._look()
                self._hurry_s = min(LOOK_S, max(HURRY_S, REST * (time.monotonic() - self._looked_at)))
                self.pulse.beat()
            elif self.workers.settled:
                self._register()
            if self._away:
                log.warning("Redis at %s is back", address(self.settings.redis.url))
            self._away = False
        except Refused:
            self._start_over()
        except Exception as error:
            if not is_outage(error):
                raise
            if not self._away:
                log.warning("Redis at %s is away: %s; trying again", address(self.settings.redis.url), error)
            self._away = True

    def _register(self) -> None:
        tasks, signatures = registration(self.app)
        self.presence.register(tasks, {name: found.model_dump_json() for name, found in signatures.items()})
        self._registered = True
        self._remembered = Remembered()
        self._renewed_at = time.monotonic()
        self._report([], self.store.server_ms(), begun=False)
        log.info("node %s: %d devices, %d tasks", self.presence.name, len(self.devices), len(tasks))

    def _look(self) -> None:
        """Say that this node lives, and set right whatever the books and the processes disagree about."""
        draining = self._draining_since is not None
        if time.monotonic() - self._renewed_at >= self.settings.agent.report_interval_s:
            self.presence.renew(draining=draining)
            self._renewed_at = time.monotonic()
        changed, self._changed = self._changed, False
        self.presence.show({worker.post.devices[0]: self._state(worker) for worker in self._standing_workers()})
        found = self.store.look_at(self.presence.uuids)
        attempts, now_s = [self._as_celery_says(view) for view in found.attempts], found.now_ms / 1000
        for attempt in attempts:
            owner = self.workers.of_boot(attempt.boot)
            if attempt.proc and owner is not None:
                self.watch.add(owner.post.name, attempt.proc)
        executors = self.residents.look(found.executors, now_s, self.workers.seen(), draining=draining)
        sight = Sight(
            now_s,
            self.workers.seen(),
            attempts,
            found.processes,
            {**self.workers.endings, **self.watch.endings},
            frozenset(self._consuming),
            frozenset(self._over),
            draining,
            posts(executors),
        )
        self._consuming.clear()
        timeout_s, idle_s = self.settings.placement.start_timeout_s, self.settings.agent.set_idle_s
        actions, self._remembered = decide(sight, self._remembered, timeout_s, idle_s)
        for action in actions:
            self._carry_out(action)
        self._forget_endings(sight)
        self._in_use = bool(attempts) or any(executor.items for executor in executors)
        before, self._running = self._running, {attempt.attempt for attempt in attempts if attempt.proc}
        begun = bool(self._running - before)
        if changed or actions or begun or time.monotonic() - self._reported_at >= self._report_every_s:
            self._report(attempts, found.now_ms, begun=begun)
            self._guard(attempts)

    def _report(self, attempts: Sequence[AttemptView], now_ms: int, *, begun: bool) -> None:
        """Report memory, and these attempts' peaks; again soon if it moves, or is about to (``begun``).

        ``now_ms``: a time by the server's clock that has passed.
        """
        seen = self.workers.seen().values()
        executors = {
            uuid: frozenset[str]().union(*(worker.executors for worker in seen if uuid in worker.post.devices))
            for uuid in self.presence.uuids
        }
        with self.metrics.report_seconds.time():
            moving = self.presence.report(executors, now_ms) or begun
        raised = self._peaks.observe(attempts, self.presence.samples)
        self.store.sampled([(view.task_id, view.attempt, mib) for view, mib in raised])
        longest_s = self.settings.agent.report_interval_s
        self._report_every_s = min(next_interval_s(self._report_every_s, moving=moving), longest_s)
        self._reported_at = time.monotonic()

    def _guard(self, attempts: Sequence[AttemptView]) -> None:
        """Warn of attempts that have outgrown their reservation, and end those that endanger others."""
        found = excesses(attempts, self.presence.samples, self.settings.agent.guard_tolerance)
        for excess in found:
            attempt = excess.attempt
            if excess.ends:
                self._end_outgrown(excess)
            elif attempt.attempt not in self._outgrown:
                log.warning("task %s, attempt %s: %s", attempt.task_id, attempt.attempt, excess.reason)
                self.store.outgrown(attempt.task_id, attempt.attempt, excess.reason)
        self._outgrown = {excess.attempt.attempt for excess in found}

    def _end_outgrown(self, excess: Excess) -> None:
        """Have the task placed again with what it is known to need, or as it was; its process ends in any case."""
        attempt, most = excess.attempt, self.settings.placement.max_attempts
        answer = place_again_with_more(self.store, attempt, excess.reason, excess.used_mib, None, most)
        if answer is not OutOfMemoryAnswer.WAITING:
            self._settle(attempt, excess.reason, counts=True)
        self.watch.kill(attempt.proc)

    def _as_celery_says(self, view: AttemptView) -> AttemptView:
        """An attempt that names its queue as Celery does, without the key prefix."""
        return replace(view, queue=view.queue.removeprefix(self.settings.broker.global_keyprefix))

    def _standing_workers(self) -> list[Worker]:
        return [worker for worker in self.workers.seen().values() if worker.post.standing]

    def _state(self, worker: Worker) -> str:
        if self._draining_since is not None:
            return "draining"
        if worker.post.devices[0] in self.presence.faults:
            return "quarantined"
        return "up" if worker.ready else "starting"

    # -- setting things right --------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case Lose(attempt, reason):
                self._settle(attempt, reason, counts=action.counts, over=action.over)
            case Forget(device, proc):
                self.store.process_gone(device, proc)
            case Replace(device, proc):
                log.info("device %s: executor %s is replaced to get its leftover memory back", device, proc)
                self.watch.kill(proc)
            case Restart(worker, reason):
                log.warning("worker %s is started anew: %s", worker, reason)
                self.metrics.restarts.inc()
                self.workers.kill(worker)
            case Start(post):
                self.workers.start(post)
            case Retire(worker):
                self.workers.retire(worker)

    def _settle_predecessors(self, attempt: AttemptView, reason: Reason) -> None:
        self._settle(attempt, reason, counts=bool(attempt.proc))

    def _settle(self, attempt: AttemptView, reason: Reason, *, counts: bool, over: bool = False) -> None:
        answer = self.results.settle(attempt, reason, counts=counts, over=over)
        self.metrics.settled.labels(reason.code).inc()
        ids = about(attempt.task_id, attempt.attempt, ",".join(attempt.devices))
        log.info("%s: %s", reason, answer, extra=ids)

    def _forget_endings(self, sight: Sight) -> None:
        """How processes ended matters only while the books still name them."""
        named = {name for attempt in sight.attempts for name in (attempt.boot, attempt.proc)}
        named.update(proc for book in sight.processes.values() for proc in book)
        self.watch.forget(*self.watch.endings.keys() - named)
        for boot in self.workers.endings.keys() - named:
            del self.workers.endings[boot]


def run(settings: Settings, app_name: str) -> None:
    """Run the agent of this node for the Celery app ``app_name`` until SIGTERM or SIGINT.

    BRIM_DEVICES chooses the devices. Raises `ConfigurationError` with everything that is wrong, ``NodeFault`` where the
    devices cannot be read, ``ServerRefused`` where Redis cannot be brim's.
    """
    bell = StopBell()
    app = load_app(app_name)
    agent = settings.agent
    probe = open_probe(
        os.environ.get("BRIM_DEVICES"), quarantine_xids=agent.quarantine_xids, quarantine_s=agent.quarantine_s
    )
    with contextlib.closing(probe):
        devices = probe.devices()
        if not devices:
            reason = "no GPU of this node can be read; sim:4x24GiB would be simulated ones"
            raise ConfigurationError(Problem("environment", "BRIM_DEVICES", reason))
        store = open_store(settings, bell.event)
        if bell.event.is_set():
            return
        check_app(app, settings, store)
        service = Agent(settings, app_name, app, store, devices, probe, bell)
        metrics.serve(service.metrics.registry, settings.metrics.host, settings.metrics.agent_port)
        service.run()
