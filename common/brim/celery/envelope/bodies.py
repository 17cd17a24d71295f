"""A message's body: undoing the transport's coding and the producer's compression and serializer, within limits."""

from __future__ import annotations

import base64
import binascii
import bz2
import json
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kombu.exceptions import DecodeError, SerializerNotInstalled
from kombu.serialization import loads
from kombu.utils.json import object_hook

from brim.core.model import Reason

from .headers import MalformedMessage

MAX_BODY_BYTES = 64 * 1024 * 1024
"""A body may not unpack to more than this, so that a small compressed message cannot exhaust intake."""

MEDIA_TYPES = {"application/json": "JSON", "application/x-msgpack": "msgpack"}
"""What a body may be written in. Never pickle: intake must not run what a message says."""

_JSON = json.JSONDecoder(object_hook=object_hook)


@dataclass(frozen=True, slots=True)
class Body:
    """A decoded body: the task's arguments and what Celery embeds beside them.

    ``embed`` holds ``callbacks``, ``errbacks``, ``chain`` and ``chord``, each None where not used.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    embed: dict[str, Any]


def decode(
    encoded: str, body_encoding: object, compression: object, content_type: str | None, content_encoding: str | None
) -> Body:
    """The body of a message that says so of it; raises `MalformedMessage`, see `Envelope.body`."""
    if content_type not in MEDIA_TYPES:
        raise MalformedMessage(
            Reason(
                "serializer",
                f"content-type: brim reads JSON and msgpack, got {content_type!r}; "
                f"publish with serializer='json' (setting task_serializer)",
            )
        )
    data = _unpack(_transport_bytes(encoded, body_encoding), compression)
    try:
        body = _loads(data, content_type, content_encoding)
    except (DecodeError, LookupError) as error:
        raise MalformedMessage(Reason("malformed", f"body: not {MEDIA_TYPES[content_type]}: {error}")) from error
    except SerializerNotInstalled as error:
        raise MalformedMessage(Reason("serializer", f"body: {error}")) from error
    match body:
        case [list() as args, dict() as kwargs, dict() | None as embed]:
            return Body(args, kwargs, embed or {})
    raise MalformedMessage(Reason("malformed", "body: expected [args, kwargs, embed]"))


def _loads(data: bytes, content_type: str, content_encoding: str | None) -> Any:
    """As kombu, which makes a decoder for each message."""
    if content_type != "application/json" or not data:
        return loads(data, content_type, content_encoding or "utf-8", accept=set(MEDIA_TYPES))
    try:
        return _JSON.decode(data.decode())
    except Exception as error:  # whatever the types that JSON is told of have to say
        raise DecodeError(error) from error


def _transport_bytes(encoded: str, encoding: object) -> bytes:
    """Undo the transport's own coding of a body (base64, unless the option ``body_encoding`` says so)."""
    if encoding is None or str(encoding).lower() == "utf-8":
        return encoded.encode()
    if encoding != "base64":
        raise MalformedMessage(Reason("malformed", f"body_encoding: expected 'base64', got {encoding!r}"))
    try:
        return base64.b64decode(encoded)
    except (binascii.Error, ValueError) as error:
        raise MalformedMessage(Reason("malformed", f"body: not base64: {error}")) from error


COMPRESSIONS: dict[str, Callable[[bytes, int], bytes]] = {
    "application/x-gzip": lambda data, limit: zlib.decompressobj().decompress(data, limit),
    "application/x-bz2": lambda data, limit: bz2.BZ2Decompressor().decompress(data, limit),
    "application/x-lzma": lambda data, limit: lzma.LZMADecompressor().decompress(data, limit),
}


def _unpack(data: bytes, compression: object) -> bytes:
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
