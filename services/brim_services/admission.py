"""From a message to an admission: the one way into brim, for the broker's messages and the HTTP API alike.

Pure: what it decides depends on its arguments alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from brim.celery.envelope import Envelope, MalformedMessage, Prepared, parse, split
from brim.core.attributes import BrimHeader, EstimateError, TaskSignature
from brim.core.model import Demand, Device, Identity, Reason
from brim.core.profiles import Estimate, Learned, Profile, ResourceTable, estimate, lane_of, stand_in
from brim.store.types import Admission, Peeked

UNESTIMATED = "?"
"""Lanes that begin with this hold tasks whose signature no worker has published yet."""

NO_SIGNATURE = Reason("no_worker", "no worker has registered this task yet, so its arguments cannot be named")


PLAIN = frozenset({int, float, bool, type(None)})
"""Of the values that formulas read, those that are small enough to be remembered."""
MOST_KNOWN = 1024

Known = dict[tuple[object, ...], tuple[Profile, Learned | None, Estimate]]
"""Estimates by what they follow from, with the profile and what was learned then: most tasks are like others."""


@dataclass(frozen=True, slots=True)
class Admitter:
    """What admission knows: the resource table, the published signatures, the largest message allowed.

    ``learned``: what measured peaks have taught, by profile. ``unknown``: what becomes of tasks without a profile.
    ``gpu_mib``: what the largest GPU can give away, 0 while none is known. ``key`` seals what is admitted, if set.
    ``known`` is what it has worked out, for whoever comes after it.
    """

    table: ResourceTable
    signatures: Mapping[str, TaskSignature]
    max_message_bytes: int
    learned: Mapping[str, Learned] = field(default_factory=dict)
    unknown: Literal["reject", "exclusive", "learn"] = "reject"
    gpu_mib: int = 0
    key: bytes = field(default=b"", repr=False)
    known: Known = field(default_factory=dict, repr=False)

    def assess(self, source: Peeked) -> Admission:
        """The admission of a message; one that cannot be understood is refused with the reason (requirement A1)."""
        try:
            return self._assess(source)
        except Exception as error:  # whatever is wrong, with it or with brim, one message must not stop intake
            text = f"the message could not be read: {type(error).__name__}: {error}"
            return _malformed(source, MalformedMessage(Reason("unreadable", text), *_names(source.raw)))

    def _assess(self, source: Peeked) -> Admission:
        try:
            if len(source.raw) > self.max_message_bytes:
                message = f"the message has {len(source.raw)} bytes, more than intake.max_message_bytes allows"
                raise MalformedMessage(
                    Reason("message_too_large", f"{message} ({self.max_message_bytes})"), *_names(source.raw)
                )
            envelope = parse(source.raw, key=self.key)
            prepared = split(envelope, self.key)
        except MalformedMessage as error:
            return _malformed(source, error)
        try:
            found = self.estimate(envelope)
        except (EstimateError, MalformedMessage) as error:
            return _admission(source, envelope, prepared, refusal=error.reason)
        if found is None:
            return _admission(source, envelope, prepared, waits_for=NO_SIGNATURE)
        return _admission(source, envelope, prepared, found)

    def estimate(self, envelope: Envelope) -> Estimate | None:
        """A task's demand (requirement A2); None while its arguments cannot be named for want of a signature.

        Raises `EstimateError` or `MalformedMessage`.
        """
        header = BrimHeader.parse(envelope.brim)
        task, calls = work_of(envelope)  # also where no formula reads them: a worker would stumble over broken ones
        profile = self.table.profile(task)
        if profile is None and task == CHORD_UNLOCK and header.vram_mib is None:
            header = header.model_copy(update={"vram_mib": 1})
        if profile is None and header.vram_mib is None and self.unknown != "reject":
            if not self.gpu_mib:
                return None
            profile = self.stand_in(task)
        if profile is None or header.vram_mib is not None:
            return estimate(profile, header, {})
        if profile.batch is not None and envelope.task in REPEATED:
            message = f"{envelope.task} runs its calls one after the other: publish a group of {task}, which is batched"
            raise EstimateError(Reason("not_batchable", message))
        signature = self.signatures.get(task)
        if signature is None:
            return None
        bound = [signature.bind(task, args, kwargs) for args, kwargs in calls]
        estimates = [self._estimate(profile, header, call) for call in bound]
        return max(estimates, key=lambda found: found.demand.vram_mib) if estimates else _idle(profile, header)

    def _estimate(self, profile: Profile, header: BrimHeader, call: Mapping[str, Any]) -> Estimate:
        """As `estimate`; worked out once for calls that differ in nothing that the profile's formula reads."""
        learned = self.learned.get(profile.name)
        read = [call.get(name) for name in profile.vram.uses]
        kinds = [type(value) for value in read]
        if profile.batch is not None or not header.is_silent or not PLAIN.issuperset(kinds):
            return estimate(profile, header, call, learned)
        key = (profile.name, *kinds, *read)
        known = self.known.get(key)
        if known is not None and known[0] is profile and known[1] is learned:
            return known[2]
        found = estimate(profile, header, call, learned)
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        self.known[key] = profile, learned, found
        return found

    def stand_in(self, task: str) -> Profile:
        """The profile that a task without one gets."""
        return stand_in(task, self.gpu_mib, learns=self.unknown == "learn")


def whole_gpu_mib(devices: Iterable[Device]) -> int:
    """What the largest GPU can give away; 0 if there is none."""
    return max((device.total_mib - device.headroom_mib for device in devices), default=0)


CHORD_UNLOCK = "celery.chord_unlock"
"""Where the result backend cannot count, this task of Celery's looks every second whether a chord's members are done.
Celery sends it to the queue of the chord's body; it uses no GPU, so it needs an executor and next to no memory."""

Call = tuple[list[Any], dict[str, Any]]

REPEATED: dict[str, Callable[[Any], Call]] = {
    "celery.map": lambda item: ([item], {}),
    "celery.starmap": lambda item: (list(item), {}),
}
"""Celery's tasks that call another one for each item, one after the other (``chunks`` are such starmaps); they are
published by that task's route, and need as much memory as the largest of their calls."""


def work_of(envelope: Envelope) -> tuple[str, list[Call]]:
    """The task whose profile speaks for a message, and its calls: one, but for `REPEATED` tasks.

    Raises `MalformedMessage`.
    """
    body = envelope.body()
    as_call = REPEATED.get(envelope.task)
    if as_call is None:
        return envelope.task, [(body.args, body.kwargs)]
    try:
        return str(body.kwargs["task"]["task"]), [as_call(item) for item in body.kwargs["it"]]
    except (KeyError, TypeError) as error:
        reason = Reason("malformed", f"body: not the arguments of {envelope.task}: {error!r}")
        raise MalformedMessage(reason, envelope.identity.task_id, envelope.task) from error


def task_of(envelope: Envelope) -> str:
    """The task whose profile speaks for a message; its own name where the body cannot be read."""
    if envelope.task not in REPEATED:
        return envelope.task
    try:
        return work_of(envelope)[0]
    except MalformedMessage:
        return envelope.task


def _idle(profile: Profile, header: BrimHeader) -> Estimate:
    """What a task needs that calls nothing."""
    vram_mib = max(1, profile.context_mib + profile.weights_mib)
    return estimate(profile, header.model_copy(update={"vram_mib": vram_mib}), {})


def priority_of(envelope: Envelope, found: Estimate) -> int:
    """0 first: the brim header's priority, else the message's own, else the profile's."""
    if BrimHeader.parse(envelope.brim).priority is None and envelope.priority:
        return envelope.priority
    return found.priority or 0


def explain(found: Estimate) -> dict[str, object]:
    """An estimate for a task's story; calibration learns from its ``summands``."""
    return {
        "vram_mib": found.demand.vram_mib,
        "suggested_mib": found.suggested_mib,
        "profile": found.profile,
        "sum": str(found),
        "attributes": dict(found.attributes),
        "summands": list(found.summands),
        "formula_id": found.formula_id,
        "guard": found.guard,
    }


def _admission(
    source: Peeked,
    envelope: Envelope,
    prepared: Prepared,
    found: Estimate | None = None,
    *,
    refusal: Reason | None = None,
    waits_for: Reason | None = None,
) -> Admission:
    context_mib = found.context_mib if found else 0
    task = task_of(envelope)
    batched = found.batched if found else None
    return Admission(
        source=source,
        identity=envelope.identity,
        task=task,
        lane=(batched.lane(task) if batched else lane_of(task, found.demand)) if found else UNESTIMATED + task,
        demand=found.demand if found else Demand(0),
        context_mib=context_mib,
        priority=priority_of(envelope, found) if found else envelope.priority,
        head=prepared.head,
        tail=prepared.tail,
        eta_s=envelope.eta_s,
        expires_s=envelope.expires_s,
        own_attempt=envelope.is_redelivery,
        refusal=refusal,
        waits_for=waits_for,
        explanation=explain(found) if found else {},
        batched=batched,
    )


def _malformed(source: Peeked, error: MalformedMessage) -> Admission:
    """A dead letter under the message's own id where it has one, else under its digest."""
    task_id = error.task_id or f"malformed-{hashlib.sha256(source.raw).hexdigest()[:16]}"
    return Admission(
        source=source,
        identity=Identity(task_id, 0, 0),
        task=error.task or "?",
        lane=UNESTIMATED,
        demand=Demand(0),
        context_mib=0,
        priority=9,
        head=b"",
        tail=b"",
        refusal=error.reason,
    )


def _names(raw: bytes) -> tuple[str | None, str | None]:
    """Id and task of a message that is not looked into further."""
    try:
        envelope = parse(raw)
    except MalformedMessage as error:
        return error.task_id, error.task
    except Exception:  # whatever it is, it is told already
        return None, None
    return envelope.identity.task_id, envelope.task
