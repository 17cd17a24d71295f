"""The message header ``brim``: what a producer asks for, and the attempt that placement writes into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from brim.core.model import Reason

HEADER = "brim"
"""The message header that carries a producer's wishes, and in a device's queue the attempt as well."""

ASKED = "asked"
"""Where a header that brim has written keeps the producer's own: a retry inherits the header."""


class MalformedMessage(ValueError):
    """A message that brim cannot understand; ``task_id`` and ``task`` are None where not even they stand."""

    def __init__(self, reason: Reason, task_id: str | None = None, task: str | None = None) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.task_id = task_id
        self.task = task


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


def asked(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the producer put into the header, whether or not brim has wrapped it since."""
    found: Mapping[str, Any] = header.get(ASKED, header)
    return found
