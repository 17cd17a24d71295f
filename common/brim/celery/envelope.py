"""Celery's wire format on a Redis broker: the only module of brim that touches it.

A message in a broker list is one JSON object: ``body`` (base64 of ``[args, kwargs, embed]``), ``headers``
(task, id, retries, eta, ...) and ``properties`` (delivery tag, priority, reply_to, ...). brim keeps that
object as the task record's raw envelope, split in two so that a script can put a new attempt into it
without reading JSON: ``head + slot + tail`` is the message for a device's queue.

Everything here is a pure function on bytes. ``tests/contract/test_envelope.py`` holds it against the
installed kombu.
"""

from __future__ import annotations

import base64
import binascii
import bz2
import hmac
import json
import lzma
import uuid
import zlib
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any

from kombu.exceptions import DecodeError, SerializerNotInstalled
from kombu.serialization import dumps as dumps_body
from kombu.serialization import loads as loads_body
from kombu.utils.json import dumps as dumps_any

from brim.core.model import Identity, Reason

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context
    from kombu.transport.virtual import Message

INTAKE_QUEUE = "brim.intake"
"""The queue that brim's tasks are published to, and that everything Celery re-queues comes back to."""

HEADER = "brim"
"""The message header that carries a producer's wishes, and in a device's queue the attempt as well."""

ASKED = "asked"
"""Where a header that brim has written keeps the producer's own: a retry inherits the header."""

SEAL, SIGNATURE = "seal", "signature"
"""Fields of the brim header, where a key is set: intake's word for the message, placement's for the attempt."""

MAX_BODY_BYTES = 64 * 1024 * 1024
"""A body may not unpack to more than this, so that a small compressed message cannot exhaust intake."""

SEALED = (ASKED, "nesting", "retries")
"""What intake writes into the header, and seals; placement signs whatever else is in it."""

MEDIA_TYPES = {"application/json": "JSON", "application/x-msgpack": "msgpack"}
"""What a body may be written in. Never pickle: intake must not run what a message says."""


class MalformedMessage(ValueError):
    """A message that brim cannot understand; ``task_id`` and ``task`` are None where not even they stand."""

    def __init__(self, reason: Reason, task_id: str | None = None, task: str | None = None) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.task_id = task_id
        self.task = task


@dataclass(frozen=True, slots=True)
class Body:
    """A decoded body: the task's arguments and what Celery embeds beside them.

    ``embed`` holds ``callbacks``, ``errbacks``, ``chain`` and ``chord``, each None where not used.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    embed: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ItemHeader:
    """What an item's model executor has to know of it besides: see `brim.core.batching.Item`.

    Items that placement committed together carry the same ``group`` and how many they are.
    """

    executor: str
    shape: str
    order: float
    size: float
    group: str
    together: int

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> ItemHeader:
        """From a header; raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        return cls(
            executor=str(fields["executor"]),
            shape=str(fields["shape"]),
            order=float(fields["order"]),
            size=float(fields["size"]),
            group=str(fields["group"]),
            together=int(fields["together"]),
        )


@dataclass(frozen=True, slots=True)
class AttemptHeader:
    """What placement writes into the header of a message that it puts into a device's queue.

    ``nesting`` and ``retries`` are those of the placed message: an envelope that still carries them and
    has no record is a late redelivery. ``vram_mib`` is reserved per device, ``context_mib`` is what an
    executor of the profile is taken to keep when nobody can measure it.
    """

    attempt: str
    devices: tuple[str, ...]
    node: str
    vram_mib: int
    context_mib: int
    nesting: int
    retries: int
    item: ItemHeader | None = None
    """Of an item of a batch."""

    @property
    def executor(self) -> str:
        """The model executor that it is an item of; empty for a task that holds memory of its own."""
        return self.item.executor if self.item is not None else ""

    def fields(self) -> dict[str, Any]:
        """The header's fields without the rank, which stands in the head already (see `split`)."""
        return attempt_fields(self.attempt, self.devices, self.node, self.vram_mib, self.context_mib, self.item)

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> AttemptHeader | None:
        """The attempt in a ``brim`` header, or None where it holds only a producer's wishes."""
        if "attempt" not in header:
            return None
        try:
            return cls(
                attempt=str(header["attempt"]),
                devices=tuple(header["devices"]),
                node=str(header["node"]),
                vram_mib=int(header["vram_mib"]),
                context_mib=int(header["context_mib"]),
                nesting=int(header["nesting"]),
                retries=int(header["retries"]),
                item=ItemHeader.read(header["item"]) if "item" in header else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedMessage(
                Reason("malformed", f"header {HEADER!r}: not an attempt of brim's own making: {error!r}")
            ) from error


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
    encoded_body: str = field(repr=False)

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
            return _decode_body(self)
        except MalformedMessage as error:
            raise MalformedMessage(error.reason, self.identity.task_id, self.task) from error.__cause__


@dataclass(frozen=True, slots=True)
class Prepared:
    """An envelope split for placement: ``head + slot(...) + tail`` is the message for a device's queue."""

    head: bytes
    tail: bytes


@dataclass(frozen=True, slots=True)
class BrokerLayout:
    """How the app's Redis broker names its keys: kombu's options of the same names."""

    global_keyprefix: str = ""
    sep: str = "\x06\x16"
    priority_steps: tuple[int, ...] = (0, 3, 6, 9)

    @classmethod
    def of(cls, transport_options: Mapping[str, Any]) -> BrokerLayout:
        """The layout that an app's ``broker_transport_options`` give."""
        return cls(
            global_keyprefix=str(transport_options.get("global_keyprefix", cls().global_keyprefix)),
            sep=str(transport_options.get("sep", cls().sep)),
            priority_steps=tuple(sorted(transport_options.get("priority_steps", cls().priority_steps))),
        )

    def lists(self, queue: str = INTAKE_QUEUE) -> list[str]:
        """Names of a queue's priority lists with the key prefix, the most urgent first."""
        return [self.list_for(step, queue) for step in self.priority_steps]

    def list_for(self, priority: int, queue: str = INTAKE_QUEUE) -> str:
        """Name of the list, with the key prefix, that kombu puts a message of this priority into."""
        step = self.priority_steps[max(bisect(self.priority_steps, priority) - 1, 0)]
        return f"{self.global_keyprefix}{queue}{self.sep}{step}" if step else self.global_keyprefix + queue


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
    content_type, content_encoding, body = dumps_body(made.body, "json")
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


def parse(raw: bytes, *, timezone: tzinfo = UTC, key: bytes = b"") -> Envelope:
    """Read one message of a broker list; the body stays encoded until `Envelope.body` is called.

    ``timezone`` is the app's, for the rare eta or expiry that a producer gave without an offset. With a ``key``
    an attempt in the header counts only if placement has signed it.
    Raises `MalformedMessage`, with the id and name where they can be read.
    """
    message = _load(raw)
    headers, properties = message["headers"], message["properties"]
    task_id, task = headers.get("id"), headers.get("task")
    if not _is_text(task_id) or not _is_text(task):
        raise _without_identity(message)
    try:
        header = headers.get(HEADER) or {}
        if not isinstance(header, Mapping):
            raise MalformedMessage(Reason("malformed", f"header {HEADER!r}: expected an object, got {header!r}"))
        attempt = AttemptHeader.read(header) if not key or _is_signed(header, task_id, key) else None
        return Envelope(
            task=task,
            identity=Identity(task_id, _whole(headers, "replaced_task_nesting"), _whole(headers, "retries")),
            headers=headers,
            properties=properties,
            priority=min(max(_whole(properties, "priority"), 0), 9),
            eta_s=_time_s(headers, "eta", timezone),
            expires_s=_time_s(headers, "expires", timezone),
            brim=_asked(header),
            attempt=attempt,
            content_type=message.get("content-type"),
            content_encoding=_text_or_none(message, "content-encoding"),
            encoded_body=str(message.get("body") or ""),
        )
    except MalformedMessage as error:
        raise MalformedMessage(error.reason, task_id, task) from error.__cause__


def split(raw: bytes, key: bytes = b"") -> Prepared:
    """Split a message into what stands before and after the place where an attempt is written.

    Kept: everything, expiry included. Dropped: the eta (it lies behind us when a task is placed), the mark
    of a redelivery (an attempt is a fresh one), and an earlier attempt's header, but not what the
    producer asked for. The message's rank is repeated in the header, where nothing that Celery does to a
    retry changes it. The delivery info is set to the intake queue, wherever the message came through,
    so that whatever Celery re-queues comes back to intake. With a ``key`` all of it is sealed.
    """
    message = _load(raw)
    headers = {name: value for name, value in message["headers"].items() if name not in (HEADER, "redelivered")}
    headers["eta"] = None
    asked = _asked(message["headers"].get(HEADER) or {})
    properties = {name: value for name, value in message["properties"].items() if name != "delivery_tag"}
    properties["delivery_info"] = {"exchange": "", "routing_key": INTAKE_QUEUE}
    rest = {name: value for name, value in message.items() if name not in ("headers", "properties")}
    header = {ASKED: asked, "nesting": _whole(headers, "replaced_task_nesting"), "retries": _whole(headers, "retries")}
    if key:
        header[SEAL] = _seal(rest, headers, header, properties, key)
    head = (
        f'{json.dumps(rest)[:-1]}, "headers": {json.dumps(headers)[:-1]}, '
        f"{json.dumps(HEADER)}: {json.dumps(header)[:-1]}"
    )
    return Prepared(head.encode(), f", {json.dumps(properties)[1:]}}}".encode())


def slot(delivery_tag: str, brim_header: Mapping[str, Any]) -> bytes:
    """The middle of a message: an attempt's header (`AttemptHeader.fields`) and a fresh delivery tag."""
    fields = f", {json.dumps(dict(brim_header))[1:-1]}" if brim_header else ""
    return f'{fields}}}}}, "properties": {{"delivery_tag": {json.dumps(delivery_tag)}'.encode()


def attempt_fields(
    attempt: str, devices: Sequence[str], node: str, vram_mib: int, context_mib: int, item: ItemHeader | None = None
) -> dict[str, Any]:
    """What placement writes into a message's brim header, ready for `slot`; see `AttemptHeader`."""
    return {
        **({"item": asdict(item)} if item is not None else {}),
        "attempt": attempt,
        "devices": list(devices),
        "node": node,
        "vram_mib": vram_mib,
        "context_mib": context_mib,
    }


def sign(fields: Mapping[str, Any], task_id: str, key: bytes) -> dict[str, Any]:
    """An attempt's fields with placement's signature: they are of this task's attempt. Without a key as they are."""
    return {**fields, SIGNATURE: _signature(fields, task_id, key)} if key else dict(fields)


def is_genuine(message: Message, key: bytes) -> bool:
    """Whether a message that a worker has received is what intake sealed and placement signed; true without a key.

    The attempt alone would not do: its id stands in logs and on the page, and the start claim knows no body.
    """
    if not key:
        return True
    raw = message._raw
    headers, properties = dict(raw["headers"]), dict(raw["properties"])
    header = headers.pop(HEADER)
    properties.pop("delivery_tag", None)
    rest = {name: value for name, value in raw.items() if name not in ("headers", "properties")}
    seal = _seal(rest, headers, header, properties, key)
    return _same(header.get(SEAL), seal) and _is_signed(header, headers["id"], key)


def join(prepared: Prepared, delivery_tag: str, brim_header: Mapping[str, Any]) -> bytes:
    """The whole message for a device's queue; placement's script concatenates the same three parts."""
    return prepared.head + slot(delivery_tag, brim_header) + prepared.tail


def request_context(head: bytes, tail: bytes) -> Context:
    """The request that a worker would have had, for answers that brim gives itself; see `context`."""
    return context(parse(head + slot("", {}) + tail))


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


def received(message: Message) -> Envelope:
    """The envelope of a message that a worker has taken from its queue. Raises `MalformedMessage`."""
    return parse(json.dumps(message._raw).encode())


def forward(message: Message) -> None:
    """Put a message that a worker has received, as it is, into the intake queue."""
    message.channel._put(INTAKE_QUEUE, message._raw)


def _seal(
    rest: Mapping[str, Any],
    headers: Mapping[str, Any],
    header: Mapping[str, Any],
    properties: Mapping[str, Any],
    key: bytes,
) -> str:
    """Over the whole message but for what each attempt brings: its own fields and the delivery tag."""
    kept = {name: header.get(name) for name in SEALED}
    return _mac(key, [rest, headers, kept, properties])


def _signature(header: Mapping[str, Any], task_id: str, key: bytes) -> str:
    own = {name: value for name, value in header.items() if name not in (*SEALED, SEAL, SIGNATURE)}
    return _mac(key, [task_id, own])


def _is_signed(header: Mapping[str, Any], task_id: str, key: bytes) -> bool:
    return _same(header.get(SIGNATURE), _signature(header, task_id, key))


def _mac(key: bytes, values: Sequence[Any]) -> str:
    # A worker reads messages by kombu's JSON, which has types of its own (dates); it writes them as they came.
    return hmac.new(key, dumps_any(values, sort_keys=True).encode(), "sha256").hexdigest()


def _same(given: Any, expected: str) -> bool:
    return hmac.compare_digest(str(given).encode(), expected.encode())


def _asked(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the producer put into the header, whether or not brim has wrapped it since."""
    asked: Mapping[str, Any] = header.get(ASKED, header)
    return asked


def _load(raw: bytes) -> dict[str, Any]:
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(Reason("malformed", f"message: not JSON: {error}")) from error
    if not isinstance(message, dict):
        raise MalformedMessage(Reason("malformed", f"message: expected an object, got {type(message).__name__}"))
    for part in ("headers", "properties"):
        if not isinstance(message.get(part), dict):
            raise MalformedMessage(Reason("malformed", f"message: {part!r} is missing or not an object"))
    return message


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


def _decode_body(envelope: Envelope) -> Body:
    if envelope.content_type not in MEDIA_TYPES:
        raise MalformedMessage(
            Reason(
                "serializer",
                f"content-type: brim reads JSON and msgpack, got {envelope.content_type!r}; "
                f"publish with serializer='json' (setting task_serializer)",
            )
        )
    data = _unpack(_transport_bytes(envelope), envelope.headers.get("compression"))
    try:
        body = loads_body(data, envelope.content_type, envelope.content_encoding or "utf-8", accept=set(MEDIA_TYPES))
    except (DecodeError, LookupError) as error:
        raise MalformedMessage(
            Reason("malformed", f"body: not {MEDIA_TYPES[envelope.content_type]}: {error}")
        ) from error
    except SerializerNotInstalled as error:
        raise MalformedMessage(Reason("serializer", f"body: {error}")) from error
    match body:
        case [list() as args, dict() as kwargs, dict() | None as embed]:
            return Body(args, kwargs, embed or {})
    raise MalformedMessage(Reason("malformed", "body: expected [args, kwargs, embed]"))


def _transport_bytes(envelope: Envelope) -> bytes:
    """Undo the transport's own coding of a body (base64, unless the option ``body_encoding`` says so)."""
    encoding = envelope.properties.get("body_encoding")
    if encoding is None or str(encoding).lower() == "utf-8":
        return envelope.encoded_body.encode()
    if encoding != "base64":
        raise MalformedMessage(Reason("malformed", f"body_encoding: expected 'base64', got {encoding!r}"))
    try:
        return base64.b64decode(envelope.encoded_body)
    except (binascii.Error, ValueError) as error:
        raise MalformedMessage(Reason("malformed", f"body: not base64: {error}")) from error


COMPRESSIONS: dict[str, Callable[[bytes, int], bytes]] = {
    "application/x-gzip": lambda data, limit: zlib.decompressobj().decompress(data, limit),
    "application/x-bz2": lambda data, limit: bz2.BZ2Decompressor().decompress(data, limit),
    "application/x-lzma": lambda data, limit: lzma.LZMADecompressor().decompress(data, limit),
}


def _unpack(data: bytes, compression: str | None) -> bytes:
    if compression is None:
        return data
    decompress = COMPRESSIONS.get(str(compression))
    if decompress is None:
        raise MalformedMessage(
            Reason(
                "compression",
                f"compression: {compression!r} is not supported, only gzip, bzip2 and lzma are",
            )
        )
    try:
        plain = decompress(data, MAX_BODY_BYTES + 1)
    except (zlib.error, OSError, EOFError, lzma.LZMAError) as error:
        raise MalformedMessage(Reason("compression", f"body: not {compression}: {error}")) from error
    if len(plain) > MAX_BODY_BYTES:
        raise MalformedMessage(Reason("message_too_large", f"body: unpacks to more than {MAX_BODY_BYTES // 2**20} MiB"))
    return plain
