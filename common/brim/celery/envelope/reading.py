"""Messages as intake and the workers read them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any

from brim.core.model import Identity, Reason

from .bodies import Body, decode
from .headers import HEADER, AttemptHeader, MalformedMessage, asked
from .sealing import is_signed

if TYPE_CHECKING:
    from celery.app.task import Context
    from kombu.transport.virtual import Message


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message as intake sees it. Times are seconds since the epoch; ``priority`` 0 is most urgent.

    ``brim`` is what the producer put into the header of that name, also after a retry, which inherits
    the header of the attempt that it retries; ``attempt`` is that attempt, None in a first publication.
    """

    task: str
    identity: Identity
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    priority: int
    eta_s: float | None
    expires_s: float | None
    brim: Mapping[str, Any]
    attempt: AttemptHeader | None
    content_type: str | None
    content_encoding: str | None
    rest: Mapping[str, Any] = field(repr=False)
    """What stands in the message beside headers and properties: the encoded body and what it is written in."""

    @property
    def reply_to(self) -> str:
        """Where an RPC result backend expects the answer; Celery sets it for every backend."""
        return str(self.properties.get("reply_to") or "")

    @property
    def root_id(self) -> str:
        """Id of the task that the workflow began with."""
        return str(self.headers.get("root_id") or self.identity.task_id)

    @property
    def parent_id(self) -> str | None:
        """Id of the task that published this one."""
        return self.headers.get("parent_id")

    @property
    def argsrepr(self) -> str:
        """The arguments as the producer chose to show them (shortened, or hidden by ``argsrepr=``)."""
        return str(self.headers.get("argsrepr") or "")

    @property
    def kwargsrepr(self) -> str:
        """The keyword arguments as the producer chose to show them."""
        return str(self.headers.get("kwargsrepr") or "")

    @property
    def is_redelivery(self) -> bool:
        """Whether it is the very message that an attempt was placed with, back in the intake queue."""
        return self.attempt is not None and self.identity.rank == (
            self.attempt.nesting,
            self.attempt.retries,
        )

    def body(self) -> Body:
        """Decode arguments and embedded signatures.

        Raises `MalformedMessage` for another serializer than JSON and msgpack (code ``serializer``), an unknown or
        broken compression (``compression``), a body that unpacks to more than `MAX_BODY_BYTES`
        (``message_too_large``), and anything that is not ``[args, kwargs, embed]`` (``malformed``).
        """
        try:
            return decode(
                str(self.rest.get("body") or ""),
                self.properties.get("body_encoding"),
                self.headers.get("compression"),
                self.content_type,
                self.content_encoding,
            )
        except MalformedMessage as error:
            raise MalformedMessage(error.reason, self.identity.task_id, self.task) from error.__cause__


def parse(raw: bytes, *, timezone: tzinfo = UTC, key: bytes = b"") -> Envelope:
    """Read one message of a broker list; the body stays encoded until `Envelope.body` is called.

    ``timezone`` is the app's, for the rare eta or expiry that a producer gave without an offset. With a ``key``
    an attempt in the header counts only if placement has signed it.
    Raises `MalformedMessage`, with the id and name where they can be read.
    """
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(Reason("malformed", f"message: not JSON: {error}")) from error
    return _envelope(message, timezone, key)


def received(message: Message) -> Envelope:
    """The envelope of a message that a worker has taken from its queue. Raises `MalformedMessage`."""
    return _envelope(message._raw, UTC, b"")


def _envelope(message: Any, timezone: tzinfo, key: bytes) -> Envelope:
    if not isinstance(message, dict):
        raise MalformedMessage(Reason("malformed", f"message: expected an object, got {type(message).__name__}"))
    for part in ("headers", "properties"):
        if not isinstance(message.get(part), dict):
            raise MalformedMessage(Reason("malformed", f"message: {part!r} is missing or not an object"))
    headers, properties = message["headers"], message["properties"]
    task_id, task = headers.get("id"), headers.get("task")
    if not _is_text(task_id) or not _is_text(task):
        raise _without_identity(message)
    try:
        header = headers.get(HEADER) or {}
        if not isinstance(header, Mapping):
            raise MalformedMessage(Reason("malformed", f"header {HEADER!r}: expected an object, got {header!r}"))
        attempt = AttemptHeader.read(header) if not key or is_signed(header, task_id, key) else None
        return Envelope(
            task=task,
            identity=Identity(task_id, _whole(headers, "replaced_task_nesting"), _whole(headers, "retries")),
            headers=headers,
            properties=properties,
            priority=min(max(_whole(properties, "priority"), 0), 9),
            eta_s=_time_s(headers, "eta", timezone),
            expires_s=_time_s(headers, "expires", timezone),
            brim=asked(header),
            attempt=attempt,
            content_type=message.get("content-type"),
            content_encoding=_text_or_none(message, "content-encoding"),
            rest={name: value for name, value in message.items() if name not in ("headers", "properties")},
        )
    except MalformedMessage as error:
        raise MalformedMessage(error.reason, task_id, task) from error.__cause__


def context(envelope: Envelope) -> Context:
    """A message's request with callbacks, errbacks, chain, chord, group and the reply address.

    A body that cannot be decoded leaves arguments and embedded signatures empty: `get` is answered all the same.
    """
    from celery.app.task import Context

    try:
        body = envelope.body()
    except MalformedMessage:
        body = Body([], {}, {})
    delivery = envelope.properties.get("delivery_info") or {}
    return Context(
        {
            **envelope.headers,
            "properties": envelope.properties,
            "reply_to": envelope.reply_to,
            "correlation_id": envelope.properties.get("correlation_id") or envelope.identity.task_id,
            "delivery_info": {**delivery, "priority": envelope.priority, "redelivered": False},
            "args": body.args,
            "kwargs": body.kwargs,
            "called_directly": False,
            **body.embed,
        }
    )


def _without_identity(message: Mapping[str, Any]) -> MalformedMessage:
    """Tell a message of Celery's old protocol, whose id and name stand in the body, from mere noise."""
    try:
        body = json.loads(base64.b64decode(message.get("body") or ""))
        task_id, task = body["id"], body["task"]
    except (ValueError, TypeError, KeyError):
        return MalformedMessage(
            Reason("malformed", "headers: 'id' and 'task' are missing; is this a Celery task message?")
        )
    return MalformedMessage(
        Reason("protocol", "task message protocol 1 is not supported: set the producer's task_protocol to 2"),
        str(task_id),
        str(task),
    )


def _is_text(value: Any) -> bool:
    """Whether it is a text that can be written down: JSON may escape halves of characters."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _text_or_none(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is None or isinstance(value, str):
        return value
    raise MalformedMessage(Reason("malformed", f"{name}: expected a text, got {value!r}"))


def _whole(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise MalformedMessage(Reason("malformed", f"{name}: expected a whole number, got {value!r}"))
    return value


def _time_s(headers: Mapping[str, Any], name: str, timezone: tzinfo) -> float | None:
    value = headers.get(name)
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone)).timestamp()
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessage(
            Reason("malformed", f"{name}: expected an ISO 8601 time, got {value!r}: {error}")
        ) from error
