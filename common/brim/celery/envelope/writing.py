"""Messages as brim writes them: a producer's, one split in two for placement, and the one in a device's queue."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kombu.serialization import dumps

from .headers import ASKED, HEADER
from .layout import INTAKE_QUEUE
from .reading import Envelope, context, parse
from .sealing import SEAL, seal

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context
    from kombu.transport.virtual import Message


@dataclass(frozen=True, slots=True)
class Prepared:
    """An envelope split for placement: ``head + slot(...) + tail`` is the message for a device's queue."""

    head: bytes
    tail: bytes


def compose(
    app: Celery,
    task: str,
    task_id: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    brim: Mapping[str, Any],
    *,
    priority: int = 0,
    eta: datetime | None = None,
    expires: datetime | None = None,
) -> bytes:
    """The message that ``app.send_task`` would publish to intake, for producers that do not use Celery.

    ``args`` and ``kwargs`` are what JSON can say; ``brim`` is the header of that name.
    """
    made = app.amqp.as_task_v2(task_id, task, list(args), dict(kwargs), eta=eta, expires=expires)
    content_type, content_encoding, body = dumps(made.body, "json")
    properties = {
        **made.properties,
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": INTAKE_QUEUE},
        "priority": priority,
        "body_encoding": "base64",
        "delivery_tag": str(uuid.uuid4()),
    }
    message = {
        "body": base64.b64encode(body.encode()).decode(),
        "content-encoding": content_encoding,
        "content-type": content_type,
        "headers": {**made.headers, HEADER: dict(brim)} if brim else made.headers,
        "properties": properties,
    }
    return json.dumps(message).encode()


def split(envelope: Envelope, key: bytes = b"") -> Prepared:
    """Split a message into what stands before and after the place where an attempt is written.

    Kept: everything, expiry included. Dropped: the eta (it lies behind us when a task is placed), the mark
    of a redelivery (an attempt is a fresh one), and an earlier attempt's header, but not what the
    producer asked for. The message's rank is repeated in the header, where nothing that Celery does to a
    retry changes it. The delivery info is set to the intake queue, wherever the message came through,
    so that whatever Celery re-queues comes back to intake. With a ``key`` all of it is sealed.
    """
    headers = {name: value for name, value in envelope.headers.items() if name not in (HEADER, "redelivered")}
    headers["eta"] = None
    properties = {name: value for name, value in envelope.properties.items() if name != "delivery_tag"}
    properties["delivery_info"] = {"exchange": "", "routing_key": INTAKE_QUEUE}
    header = {ASKED: envelope.brim, "nesting": envelope.identity.nesting, "retries": envelope.identity.retries}
    if key:
        header[SEAL] = seal(envelope.rest, headers, header, properties, key)
    whole = json.dumps({**envelope.rest, "headers": {**headers, HEADER: header}})
    return Prepared(whole.removesuffix("}}}").encode(), f", {json.dumps(properties)[1:]}}}".encode())


def slot(delivery_tag: str, brim_header: Mapping[str, Any]) -> bytes:
    """The middle of a message: an attempt's header (`AttemptHeader.fields`) and a fresh delivery tag."""
    fields = f", {json.dumps(dict(brim_header))[1:-1]}" if brim_header else ""
    return f'{fields}}}}}, "properties": {{"delivery_tag": {json.dumps(delivery_tag)}'.encode()


def join(prepared: Prepared, delivery_tag: str, brim_header: Mapping[str, Any]) -> bytes:
    """The whole message for a device's queue; placement's script concatenates the same three parts."""
    return prepared.head + slot(delivery_tag, brim_header) + prepared.tail


def request_context(head: bytes, tail: bytes) -> Context:
    """The request that a worker would have had, for answers that brim gives itself; see `context`."""
    return context(parse(head + slot("", {}) + tail))


def forward(message: Message) -> None:
    """Put a message that a worker has received, as it is, into the intake queue."""
    message.channel._put(INTAKE_QUEUE, message._raw)
