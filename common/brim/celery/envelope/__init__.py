"""Celery's wire format on a Redis broker: the only package of brim that knows what a message says.

A message in a broker list is one JSON object: ``body`` (base64 of ``[args, kwargs, embed]``), ``headers``
(task, id, retries, eta, ...) and ``properties`` (delivery tag, priority, reply_to, ...). brim keeps that
object as the task record's raw envelope, split in two so that a script can put a new attempt into it
without reading JSON: ``head + slot + tail`` is the message for a device's queue.

Nothing here asks a server, and only `forward` publishes. ``tests/contract/test_envelope.py`` holds it
against the installed kombu.
"""

from .bodies import COMPRESSIONS, MEDIA_TYPES, Body
from .headers import ASKED, HEADER, AttemptHeader, ItemHeader, MalformedMessage, attempt_fields
from .layout import INTAKE_QUEUE, BrokerLayout
from .reading import Envelope, context, parse, received
from .sealing import is_genuine, sign
from .writing import Prepared, compose, forward, join, request_context, slot, split

__all__ = [
    "ASKED",
    "COMPRESSIONS",
    "HEADER",
    "INTAKE_QUEUE",
    "MEDIA_TYPES",
    "AttemptHeader",
    "Body",
    "BrokerLayout",
    "Envelope",
    "ItemHeader",
    "MalformedMessage",
    "Prepared",
    "attempt_fields",
    "compose",
    "context",
    "forward",
    "is_genuine",
    "join",
    "parse",
    "received",
    "request_context",
    "sign",
    "slot",
    "split",
]
