"""Tasks from HTTP: each becomes an ordinary Celery message that intake's own admission takes from the broker's list.

The message is pushed first and admitted by the script that intake uses, so there is one way in: if this process
dies in between, or intake is quicker, intake admits it.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from celery import Celery

from brim.celery.envelope import BrokerLayout, MalformedMessage, compose, parse
from brim.core.attributes import EstimateError
from brim.core.model import Reason, State
from brim.core.profiles import Estimate
from brim.settings import Settings
from brim.store import Store
from brim.store.types import Admission, Peeked
from brim_services.admission import Admitter
from brim_services.logs import about

from .problems import FieldProblem, Problem, Refused, problem
from .schemas import Accepted, Submission, Work, why_waiting

log = logging.getLogger("brim.monitor")

NAMESPACE = uuid.UUID("6e0d1a52-7d0f-4f0e-8a53-6b2a0d6f9f52")
"""Task ids of idempotency keys are derived within it."""

FIELDS = {
    "no_profile": "body.name",
    "missing_attribute": "body.kwargs",
    "bad_attribute": "body.kwargs",
    "unbindable_arguments": "body.args",
    "bad_header": "body.attributes",
    "above_bound": "body.kwargs",
    "bad_estimate": "body.kwargs",
    "message_too_large": "body.args",
}
"""Which field of a request a refusal of admission is about."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A submission that admission would take; ``repeated``: its idempotency key had been used for it before."""

    admission: Admission
    repeated: bool


class Desk:
    """Takes submissions. ``admitter`` gives what admission knows at the moment."""

    def __init__(self, store: Store, settings: Settings, app: Celery, admitter: Callable[[], Admitter]) -> None:
        self.store = store
        self.settings = settings
        self.app = app
        self.admitter = admitter
        self._layout = BrokerLayout.of(settings.broker.model_dump())

    def submit(self, tasks: Sequence[Submission]) -> list[Accepted | Problem]:
        """Admits tasks, each by itself, in a few round trips for all of them.

        Raises `Refused` (429) when level 1 is full.
        """
        self._check_room(len(tasks))
        admitter = self.admitter()
        answers: list[Accepted | Problem | Prepared] = []
        for number, task in enumerate(tasks):
            where = f"body.tasks.{number}" if len(tasks) > 1 else "body"
            try:
                answers.append(self._prepare(task, admitter))
            except Refused as refusal:
                answers.append(_under(where, refusal.problem))
        admissions = [answer.admission for answer in answers if isinstance(answer, Prepared)]
        for list_key in {admission.source.list_key for admission in admissions}:
            self.store.push(list_key, [a.source.raw for a in admissions if a.source.list_key == list_key])
        for admission, answer in zip(admissions, self.store.admit(admissions), strict=True):
            log.info("%s %s over HTTP", admission.task, answer, extra=about(admission.identity.task_id))
        prepared = [answer for answer in answers if isinstance(answer, Prepared)]
        accepted = dict(zip(map(id, prepared), self._accepted(prepared), strict=True))
        return [accepted[id(answer)] if isinstance(answer, Prepared) else answer for answer in answers]

    def estimate(self, work: Work) -> Estimate:
        """What a task would reserve. Raises `Refused`."""
        admitter = self.admitter()
        try:
            found = admitter.estimate(parse(self._message(Submission(**work.model_dump()), "estimate")))
        except (EstimateError, MalformedMessage) as error:
            raise _refused(error.reason) from None
        if found is None:
            message = "no worker has registered this task yet, so its arguments cannot be named; give attributes"
            raise _refused(Reason("no_worker", message))
        return found

    def _prepare(self, task: Submission, admitter: Admitter) -> Prepared:
        """The admission of one submission. Raises `Refused`."""
        key = task.idempotency_key
        task_id = str(uuid.uuid4() if key is None else uuid.uuid5(NAMESPACE, key))
        raw = self._message(task, task_id)
        source = Peeked(self._layout.list_for(task.priority or 0), raw)
        admission = admitter.assess(source)
        if admission.refusal is not None:
            raise _refused(admission.refusal)
        return Prepared(admission, key is not None and self._is_repeated(task, task_id))

    def _message(self, task: Submission, task_id: str) -> bytes:
        header = task.header()
        if task.priority is not None:
            header["priority"] = task.priority
        return compose(
            self.app,
            task.name,
            task_id,
            task.args,
            task.kwargs,
            header,
            priority=task.priority or 0,
            eta=task.eta,
            expires=task.expires,
        )

    def _is_repeated(self, task: Submission, task_id: str) -> bool:
        """Whether its key was used before. Raises `Refused` if that was for another task."""
        digest = hashlib.sha256(task.model_dump_json().encode()).hexdigest()
        first = self.store.claim_submission(task_id, digest, self.settings.placement.retention_s)
        if first != digest:
            message = "this key was used for another task"
            field = FieldProblem(field="body.idempotency_key", reason=message)
            raise Refused(409, Reason("key_reused", f"idempotency_key: {message}"), [field])
        return self.store.record(task_id) is not None

    def _check_room(self, wanted: int) -> None:
        """Level 1 is bounded: what it cannot hold is refused, not queued elsewhere."""
        limit = self.settings.intake.level1_limit
        waiting = self.store.counts().get(State.WAITING, 0)
        if waiting + wanted > limit:
            message = f"{waiting} tasks wait; intake.level1_limit is {limit}. Send it again later"
            raise Refused(429, Reason("level1_full", message), headers={"Retry-After": "5"})

    def _accepted(self, prepared: Sequence[Prepared]) -> list[Accepted]:
        ids = [p.admission.identity.task_id for p in prepared]
        records = {record.task_id: record for record in self.store.records(ids)}
        heads = {head.lane: head for head in self.store.lane_heads()}
        places = self.store.positions([(p.admission.lane, i) for p, i in zip(prepared, ids, strict=True)])
        answers = []
        for p, task_id, position in zip(prepared, ids, places, strict=True):
            record = records.get(task_id)
            # Without a record yet: intake was quicker to take the message, and is about to write it.
            state = record.state if record else State.WAITING
            answers.append(
                Accepted(
                    id=task_id,
                    state=state,
                    vram_mib=record.demand.vram_mib if record else p.admission.demand.vram_mib,
                    reason=why_waiting(state, record.reason if record else None, heads.get(p.admission.lane)),
                    position=position,
                    repeated=p.repeated,
                )
            )
        return answers


def _refused(reason: Reason) -> Refused:
    field = FIELDS.get(reason.code, "body")
    return Refused(422, reason, [FieldProblem(field=field, reason=reason.message)])


def _under(where: str, found: Problem) -> Problem:
    """The problem with its fields named as in the batch."""
    fields = [FieldProblem(field=f.field.replace("body", where, 1), reason=f.reason) for f in found.errors]
    return problem(found.status, Reason(found.code, found.detail), fields)
