"""Intake: admits messages from the broker's lists into overflow, with what each task needs (requirements A1, A2).

Any number of replicas may run; each message is admitted by one script that removes it from its list.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from brim.celery.envelope import BrokerLayout, slot
from brim.celery.revokes import Revokes
from brim.core.attributes import TaskSignature
from brim.core.model import State
from brim.core.profiles import ResourceTable
from brim.settings import Settings
from brim.store import Store
from brim.store.types import Admission, AdmitAnswer, Look, Peeked

from . import metrics
from .admission import UNESTIMATED, Admitter, Known, whole_gpu_mib
from .events import Events
from .learning import Learned
from .logs import about
from .loop import open_store, serve, stop_on_signals
from .metrics import IntakeMetrics
from .resources import conflicts, load_table

log = logging.getLogger("brim.intake")

IDLE_S = 0.5
"""Longest time between two looks at what no bell rings for: signatures and etas."""
HURRY_S, GATHER_S = 0.001, 0.02
"""Least time from one look to the next for each task that waits in overflow, and for all: behind many, another one is
not in a hurry, and a look costs as much as a message."""
ALONE_S = 0.001
"""A message that is heard sooner than this is one of many, of which a look finds the others."""
FULL_S = 0.1
"""Time between two looks for room in overflow when it is full."""


class Intake:
    """Peek, assess, admit; and let scheduled and unestimated tasks go on when their time has come."""

    def __init__(self, store: Store, settings: Settings, table: ResourceTable, stop: threading.Event) -> None:
        self.store = store
        self.settings = settings
        self.table = table
        layout = BrokerLayout.of(settings.broker.model_dump())
        self.lists = layout.lists()
        self.bells = store.bells(self.lists)
        self.metrics = IntakeMetrics()
        self.signatures: dict[str, TaskSignature] = {}
        self._signed: dict[str, str] = {}
        self.learned = Learned(store)
        self._gpu_mib = 0
        self._estimates: Known = {}
        self._stand_ins: dict[str, str] = {}
        self._stop = stop
        self._published = False
        self._full = False
        self._learnt_s = self._unhurried_s = -math.inf

    def lost_touch(self) -> None:
        """The table is published again, on connections made anew: the server may have lost it, or be another one."""
        self._published = False
        self.store.drop_connection()
        self.bells.close()

    def step(self) -> None:
        """Admits one batch, or waits for a message."""
        if not self._published:
            self.store.publish_profiles({profile.name: profile.model_dump_json() for profile in self.table})
            self._published = True
        if time.monotonic() - self._learnt_s >= IDLE_S:
            self.learn_signatures()
            self.learned.refresh(self.table.profiles)
            self._gpu_mib = whole_gpu_mib(self.store.devices()) or self._gpu_mib
            self._learnt_s = time.monotonic()
        time.sleep(max(0.0, self._unhurried_s - time.monotonic()))
        batch = self.settings.intake.batch
        seen = self.store.look(self.lists, 1 if self._full else batch)
        if due := seen.next_eta_s is not None and seen.next_eta_s <= seen.now_s:
            self.store.release_due(batch)
        room = self.settings.intake.level1_limit - seen.waiting
        self._full = room <= 0
        self._unhurried_s = time.monotonic() + min(seen.waiting * HURRY_S, GATHER_S)
        if self._full:
            self._stop.wait(FULL_S)
        elif not self.admit(seen.messages[:room]) and not due:
            self._listen(seen, room)

    def _listen(self, seen: Look, room: int) -> None:
        """Admits what is heard until it is time for another look: that costs as much as the message that is heard.

        At rest (nothing waits, and a message comes alone) a look would find nothing that is not known.
        """
        idle_s = IDLE_S if seen.next_eta_s is None else min(IDLE_S, seen.next_eta_s - seen.now_s)
        until_s = time.monotonic() + idle_s
        at_rest = True
        while at_rest:
            asked_s = time.monotonic()
            heard = self.bells.wait(until_s - asked_s)[:room]
            alone = len(heard) == 1 and time.monotonic() - asked_s >= ALONE_S
            at_rest = self.admit(heard) == [AdmitAnswer.ADMITTED] and alone and not seen.waiting
            room -= len(heard)

    def admit(self, messages: Sequence[Peeked]) -> list[AdmitAnswer]:
        """Admits these messages, in order."""
        if not messages:
            return []
        began_s = time.perf_counter()
        admitter = self._admitter()
        admissions = [admitter.assess(message) for message in messages]
        self._publish_stand_ins(admitter, admissions)
        answers = self.store.admit(admissions)
        self.metrics.batch_seconds.observe(time.perf_counter() - began_s)
        for answer, number in Counter(answers).items():
            self.metrics.messages.labels(answer).inc(number)
        for admission, answer in zip(admissions, answers, strict=True):
            why = admission.refusal or admission.waits_for
            told = f"{answer}: {why}" if why else answer
            log.info("%s %s", admission.task, told, extra=about(admission.identity.task_id))
        return answers

    def learn_signatures(self) -> None:
        """Takes over newly published signatures, and estimates tasks that waited for them or are tried again."""
        published = self.store.signatures()
        if published != self._signed:
            self.signatures = {name: TaskSignature.model_validate_json(text) for name, text in published.items()}
            self._signed = published
        for lane in self.store.lane_depths():
            task = lane.removeprefix(UNESTIMATED)
            if lane.startswith(UNESTIMATED) and (task in self.signatures or self.table.profile(task) is None):
                self._estimate_lane(lane)

    def _estimate_lane(self, lane: str) -> None:
        admitter = self._admitter()
        ids = self.store.lane_ids(lane, self.settings.intake.batch)
        for task_id, envelope in zip(ids, self.store.envelopes(ids), strict=True):
            if envelope is None:
                continue
            _, head, tail = envelope
            found = admitter.assess(Peeked("", head + slot("", {}) + tail))
            if found.refusal is not None:
                self.store.close(task_id, State.DEAD, found.refusal, [State.WAITING])
            elif found.waits_for is None:
                self._publish_stand_ins(admitter, [found])
                self.store.relane(task_id, lane, found)

    def _admitter(self) -> Admitter:
        settings = self.settings.intake
        return Admitter(
            self.table,
            self.signatures,
            settings.max_message_bytes,
            self.learned.by_profile,
            settings.unknown,
            self._gpu_mib,
            self.settings.security.key,
            self._estimates,
        )

    def _publish_stand_ins(self, admitter: Admitter, admissions: Iterable[Admission]) -> None:
        """Has the learner know the profiles that these tasks got for want of one in the table."""
        known = self.table.profiles
        names = {str(name) for a in admissions if (name := a.explanation.get("profile")) and name not in known}
        texts = {name: admitter.stand_in(name).model_dump_json() for name in names}
        fresh = dict(texts.items() - self._stand_ins.items())
        if fresh:
            self.store.publish_stand_ins(fresh)
            self._stand_ins |= fresh


def run(settings: Settings) -> None:
    """Runs intake until SIGTERM or SIGINT; what was peeked but not admitted stays in the broker."""
    stop = stop_on_signals()
    table = load_table(settings)
    store = open_store(settings, stop, single=True)
    log.info("intake: %d profiles from %s", len(table), settings.resources.table)
    for conflict in conflicts(settings, table):
        log.warning("%s", conflict)
    service = Intake(store, settings, table, stop)
    metrics.serve(service.metrics.registry, settings.metrics.host, settings.metrics.intake_port)
    threading.Thread(target=Events("intake", settings, stop).run, daemon=True).start()
    Revokes(settings, stop).start()
    serve(service, settings, stop)
