"""What intake seals and placement signs where a key is set, so that workers run nothing else."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kombu.utils.json import dumps

from .headers import ASKED, HEADER

if TYPE_CHECKING:
    from kombu.transport.virtual import Message

SEAL, SIGNATURE = "seal", "signature"
"""Fields of the brim header, where a key is set: intake's word for the message, placement's for the attempt."""

SEALED = (ASKED, "nesting", "retries")
"""What intake writes into the header, and seals; placement signs whatever else is in it."""


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
    expected = seal(rest, headers, header, properties, key)
    return _same(header.get(SEAL), expected) and is_signed(header, headers["id"], key)


def seal(
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


def is_signed(header: Mapping[str, Any], task_id: str, key: bytes) -> bool:
    """Whether placement has signed the attempt in this header, for this task."""
    return _same(header.get(SIGNATURE), _signature(header, task_id, key))


def _mac(key: bytes, values: Sequence[Any]) -> str:
    # A worker reads messages by kombu's JSON, which has types of its own (dates); it writes them as they came.
    return hmac.new(key, dumps(values, sort_keys=True).encode(), "sha256").hexdigest()


def _same(given: Any, expected: str) -> bool:
    return hmac.compare_digest(str(given).encode(), expected.encode())
