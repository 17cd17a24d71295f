"""From a task's arguments and brim header to the named values that a formula may use (requirement A1).

Nothing here needs more than pydantic: producers validate headers and workers publish signatures with it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)

from brim.core.model import Reason

SHOWN_CHARACTERS = 60
"""How much of a hostile value or name an error message repeats."""


def _scalar(value: object) -> bool | int | float | str:
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"must be a number, a text or a flag, not a {type(value).__name__}")
    return value


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)]
"""An attribute's name: an identifier, because formulas spell it."""
Scalar = Annotated[bool | int | float | str, PlainValidator(_scalar)]
"""What a header or a table may give as the value of an attribute."""
Priority = Annotated[int, Field(strict=True, ge=0, le=9)]
"""0 (first) to 9 (last), as on Celery's Redis transport."""


ALL = "all"
"""As an amount of GPU memory: all that the GPU can give away, and nobody else beside."""
MAX_AMOUNT = 2**40
MAX_GPUS = 1024
"""Of one node: beyond this a number is a mistake, whatever the hardware."""
Gpus = Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)]
Cpus = Annotated[float, Field(strict=True, ge=0, le=4096, allow_inf_nan=False)]


def _vram(value: object) -> int | str | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_AMOUNT
    if value is None or value == ALL or whole:
        return value  # type: ignore[return-value]
    raise ValueError(f"must be a number of MiB from 1 to {MAX_AMOUNT}, or '{ALL}'")


class EstimateError(Exception):
    """A task's demand cannot be worked out; ``reason`` says which attribute, argument or field and why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason

    def __reduce__(self) -> tuple[type[EstimateError], tuple[Reason]]:
        return (type(self), (self.reason,))


_MISSING: Any = object()


class Parameter(BaseModel):
    """One parameter of a task function. A default that JSON cannot carry is published as None."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Literal["positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword"]
    has_default: bool = False
    default: JsonValue = None


class TaskSignature(BaseModel):
    """The parameters of one task, as its workers publish them for intake to bind arguments by."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parameters: tuple[Parameter, ...] = ()

    @classmethod
    def from_callable(cls, function: Callable[..., Any], *, bound: bool = False) -> Self:
        """Read a task function's signature; ``bound`` drops the first parameter, which Celery fills itself.

        Celery's ``task.run`` of a bound task is a bound method already and needs no ``bound``.
        """
        parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
        return cls.model_validate(
            {
                "parameters": [
                    {
                        "name": parameter.name,
                        "kind": parameter.kind.name.lower(),
                        "has_default": parameter.default is not parameter.empty,
                        "default": _json_default(parameter.default),
                    }
                    for parameter in parameters
                ]
            }
        )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        """Refuse what no function can have, such as two parameters of one name."""
        assert self.inspected
        return self

    @cached_property
    def inspected(self) -> inspect.Signature:
        """The same signature as the standard library's value, which knows Python's binding rules."""
        return inspect.Signature(
            [
                inspect.Parameter(
                    parameter.name,
                    getattr(inspect.Parameter, parameter.kind.upper()),
                    default=parameter.default if parameter.has_default else inspect.Parameter.empty,
                )
                for parameter in self.parameters
            ]
        )

    @cached_property
    def _defaults(self) -> dict[str, Any] | None:
        """The default of each parameter, `_MISSING` where it has none, if all may be given by place or name."""
        if any(parameter.kind != "positional_or_keyword" for parameter in self.parameters):
            return None
        return {p.name: p.default if p.has_default else _MISSING for p in self.parameters}

    def bind(self, task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Name every argument as the call would, defaults included; ``**kwargs`` keep their own names.

        Raises ``EstimateError`` (``unbindable_arguments``) if the call itself would raise ``TypeError``.
        """
        if (defaults := self._defaults) is not None and len(args) <= len(defaults):
            first = dict(zip(defaults, args, strict=False))
            named: dict[str, Any] = {**defaults, **first, **kwargs}
            if len(named) == len(defaults) and _MISSING not in named.values() and first.keys().isdisjoint(kwargs):
                return named
        try:
            call = self.inspected.bind(*args, **kwargs)
        except TypeError as error:
            message = f"the arguments do not fit {task}{self.inspected}: {shorten(str(error))}"
            raise EstimateError(Reason("unbindable_arguments", message)) from None
        call.apply_defaults()
        named = dict(call.arguments)
        for parameter in self.parameters:
            if parameter.kind == "var_keyword":
                named = named.pop(parameter.name) | named
        return named


class BrimHeader(BaseModel):
    """What a producer may say about one task: ``headers={"brim": {...}}``.

    ``vram_mib`` is the whole demand per GPU and takes the place of the formula; "all" is a GPU to itself. ``gpus``,
    ``cpus``, ``ram_mib`` and ``gpu_model`` take the place of what the profile says, ``labels`` add to the profile's
    (the header wins on the same key).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    attributes: Annotated[dict[Name, Scalar], Field(max_length=64)] = {}
    vram_mib: Annotated[int | str | None, PlainValidator(_vram)] = None
    gpus: Gpus | None = None
    cpus: Cpus | None = None
    ram_mib: Annotated[int, Field(strict=True, ge=0, le=MAX_AMOUNT)] | None = None
    gpu_model: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    labels: Annotated[dict[str, str], Field(max_length=64)] = {}
    priority: Priority | None = None

    @classmethod
    @cache
    def _silent(cls) -> Self:
        """The header of a producer that wishes nothing, which is nearly every one."""
        return cls()

    @property
    def is_silent(self) -> bool:
        """Whether it was parsed from nothing."""
        return self is self._silent()

    @classmethod
    def parse(cls, raw: object) -> Self:
        """Validate a header's value; raises ``EstimateError`` (``bad_header``) that names each bad field."""
        if raw is None or raw == {}:
            return cls._silent()
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            problems = "; ".join(f"{place(item['loc'])}: {reason_of(item)}" for item in error.errors())
            raise EstimateError(Reason("bad_header", f"header 'brim': {problems}")) from None


def merge_attributes(
    bound: Mapping[str, Any], explicit: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The attributes of one task: header over bound arguments over the profile's defaults.

    Bound arguments already hold the function's own defaults. An argument that is None counts as not
    given, so that a profile's default can say what the function makes of it.
    """
    given = {name: value for name, value in bound.items() if value is not None}
    return {**defaults, **given, **explicit}


def shorten(text: str) -> str:
    """The text, cut to what a message can bear."""
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def place(location: tuple[int | str, ...]) -> str:
    """A pydantic error's location as a person writes it: ``field 'labels.zone'``."""
    return f"field '{shorten('.'.join(map(str, location)))}'" if location else "the whole value"


def reason_of(error: Mapping[str, Any]) -> str:
    """A pydantic error's reason in plain words, without its ``Value error,`` prefix."""
    if error["type"] == "extra_forbidden":
        return "unknown field"
    cause = error.get("ctx", {}).get("error")
    return str(cause) if isinstance(cause, ValueError) else str(error["msg"])


def _json_default(default: Any) -> Any:
    try:
        return json.loads(json.dumps(default, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None
