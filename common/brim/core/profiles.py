"""The task resource usage table and what follows from it: a task's demand (requirement A2).

One profile per task name or glob says how much memory of a GPU a task needs::

    vram_mib = size_class(context_mib + weights_mib + margin x vram)

``vram`` is a formula over the task's attributes, or an amount. ``margin`` covers what makes that part
uncertain (allocator cache, fragmentation, padding); context and weights are declared, not estimated, and
take no margin. ``docs/estimating.md`` explains every field.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    model_validator,
)

from brim.core.attributes import (
    ALL,
    BrimHeader,
    Cpus,
    EstimateError,
    Gpus,
    Name,
    Priority,
    Scalar,
    merge_attributes,
    place,
    reason_of,
    shorten,
)
from brim.core.batching.items import Batched
from brim.core.formula import MAX_VALUE, Formula
from brim.core.model import Demand, Reason, canonical
from brim.core.patterns import best_match

MAX_MIB = 1 << 24
"""16 TiB: beyond this an amount is a mistake, whatever the hardware."""
MAX_MARGIN = 10.0
MIN_CLASS_STEP_MIB = 16
CLASSES_PER_OCTAVE = 32

_UNITS = {"MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_mib(value: object) -> int:
    """MiB of an amount given as a number of MiB or as a text with its unit, such as "6GiB"; rounded up.

    Raises ``ValueError``.
    """
    match value:
        case bool():
            amount = None
        case int() | float():
            amount = float(value) if abs(value) <= MAX_MIB else math.inf
        case str() if (found := _AMOUNT.fullmatch(value)) and found[2] in _UNITS:
            amount = float(found[1]) * _UNITS[found[2]]
        case _:
            amount = None
    if amount is None:
        shown = shorten(repr(value)) if isinstance(value, str | bool) else f"a {type(value).__name__}"
        raise ValueError(f"an amount is a number of MiB or a text like '512MiB' or '6GiB', not {shown}")
    if not 0 <= amount <= MAX_MIB:
        raise ValueError(f"an amount lies between 0 and {MAX_MIB} MiB")
    return math.ceil(amount)


def size_class(mib: float) -> int:
    """The amount rounded up to a size class, so that overflow needs few lanes.

    Classes divide each octave into 32 equal steps but are at least 16 MiB apart: the result is at most
    3.2 % or less than 16 MiB above the amount. Monotone, and a class is its own class.
    """
    whole = max(1, math.ceil(mib))
    step = max(MIN_CLASS_STEP_MIB, (1 << (whole.bit_length() - 1)) // CLASSES_PER_OCTAVE)
    return -(-whole // step) * step


@lru_cache(maxsize=1024)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _formula(value: object) -> Formula:
    if isinstance(value, Formula):
        return value
    amount_text = isinstance(value, str) and (found := _AMOUNT.fullmatch(value)) and found[2] in _UNITS
    if isinstance(value, str) and not amount_text:
        return Formula.parse(value)
    return Formula.parse(str(parse_mib(value)))


def _unquoted_switch(value: object) -> object:
    """YAML reads a bare ``off`` or ``on`` as a flag."""
    return {False: "off", True: "on"}[value] if isinstance(value, bool) else value


def _alone(batch: Any) -> str:
    """The memory of one item computed alone, as a formula; a wrong batch is told about by its own fields."""
    if isinstance(batch, BatchProfile):
        return f"{batch.per_unit_mib:.9g} * ({batch.volume})"
    if not isinstance(batch, dict):
        return "0"
    try:
        return f"{float(batch.get('per_unit_mib', 0)):.9g} * ({_formula(batch.get('volume', 1))})"
    except (TypeError, ValueError):
        return "0"


Mib = Annotated[int, BeforeValidator(parse_mib)]
Expression = Annotated[Formula, BeforeValidator(_formula), PlainSerializer(str)]
Model = TypeVar("Model", bound=BaseModel)
Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class ProfileDefaults(BaseModel):
    """The fields that the table's ``defaults:`` section may set for all profiles."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    context_mib: Mib = 512
    """The CUDA context of the task's process: about 160 to 600 MiB."""
    weights_mib: Mib = 0
    """What the process keeps resident besides the context: a model's weights."""
    margin: Annotated[float, Field(strict=True, ge=1, le=MAX_MARGIN)] = 1.3
    """Factor on ``vram``; 1.3 is where to start while nothing has been measured."""
    gpus: Gpus = 1
    """GPUs of one node, with this much memory on each."""
    cpus: Cpus = 0.0
    """Host CPUs that the task keeps busy, on all GPUs together; 0 is not accounted."""
    ram_mib: Mib = 0
    """Host memory, likewise; 0 is not accounted."""
    gpu_models: tuple[Text, ...] = ()
    """Models that the task may run on; empty means any."""
    labels: dict[Text, Text] = {}
    """Labels that the node must have, with their values."""
    priority: Priority | None = None
    """For messages that set none themselves."""
    defaults: dict[Name, Scalar] = {}
    """Attributes for tasks that do not give them."""
    max_mib: Annotated[Mib, Field(gt=0)] | None = None
    """A demand above this is refused: the guard against absurd attributes."""
    calibration: Annotated[Literal["off", "suggest", "on"], BeforeValidator(_unquoted_switch)] = "suggest"
    """Whether measured peaks are learned from (``suggest``) and what they teach is reserved (``on``)."""
    guard: Annotated[Literal["off", "soft", "hard"], BeforeValidator(_unquoted_switch)] = "off"
    """Whether frameworks hold a task to its reservation (``soft``) and the agent ends one that endangers others."""


class BatchProfile(BaseModel):
    """How tasks are batched in a model executor (requirements B10, B11); the ``batch:`` of a profile.

    A batch's volume is padded: items x the largest item's volume. Its memory is ``margin`` x
    ``per_unit_mib`` x that, besides context and weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    max_items: Annotated[int, Field(strict=True, ge=1, le=1 << 16)]
    """Most items of one batch."""
    max_volume: Annotated[float, Field(strict=True, gt=0, le=MAX_VALUE)] | None = None
    """Largest padded volume of one batch, in units of ``volume``; None does not bound it."""
    volume: Expression = Formula.parse("1")
    """One item's volume; 1 makes every item count the same."""
    shape_bucket: Expression | None = None
    """Items with different values are never batched together."""
    per_unit_mib: Annotated[float, Field(strict=True, ge=0, le=MAX_MIB)] = 0.0
    """Memory that one unit of padded volume takes."""
    level1_limit: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Most items that wait in one lane of level 1; the newest beyond it are refused. None does not bound it."""
    keep_warm_s: Annotated[float, Field(strict=True, ge=0)] = 300.0
    """How long an executor that nobody uses stays."""
    max_executors: Annotated[int, Field(strict=True, ge=1)] = 1
    """Most executors of the model at a time."""

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if self.per_unit_mib and self.volume.uses and self.max_volume is None:
            raise ValueError("max_volume is missing: with volume and per_unit_mib it bounds a full batch's memory")
        return self

    @property
    def full_volume(self) -> float:
        """The padded volume of a full batch; infinite where nothing bounds it (and it takes no memory)."""
        if self.volume.uses:
            return self.max_volume or math.inf
        return min(self.max_volume or math.inf, self.max_items * self.volume.constant)

    def size(self, attributes: Mapping[str, Any]) -> float:
        """One item's volume; raises ``EstimateError`` as formulas do."""
        return self.volume.evaluate(attributes)

    def shape(self, attributes: Mapping[str, Any]) -> str:
        """The item's shape bucket, empty without one; raises ``EstimateError`` as formulas do."""
        if self.shape_bucket is None:
            return ""
        value = self.shape_bucket.evaluate(attributes)
        return str(int(value)) if value.is_integer() else repr(value)


class Profile(ProfileDefaults):
    """One row of the table. ``name`` is the task's name or a glob."""

    name: Text
    model: Text | None = None
    """The model that batched tasks share an executor of."""
    version: Annotated[str, StringConstraints(max_length=200)] = ""
    """Its version: versions are kept apart like models."""
    batch: BatchProfile | None = None
    """How to batch; None runs every task by itself."""
    vram: Expression
    """Memory per GPU in MiB besides context and weights: a formula, or an amount.

    With ``batch`` it follows from that: what one item takes alone. "all" is short for 0 and ``whole``.
    """
    whole: bool = False
    """It has its GPUs to itself, whatever they can give away, if that is at least the amount reckoned otherwise.

    With ``calibration: on``, until its peaks are known: then what they teach is reserved.
    """

    @model_validator(mode="before")
    @classmethod
    def _all_is_whole(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("vram") == ALL:
            return fields | {"vram": 0, "whole": True, "calibration": "off"}  # there is no need to learn from
        return fields

    @model_validator(mode="before")
    @classmethod
    def _follows_from_batch(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("batch") is not None and "vram" not in fields:
            return fields | {"vram": _alone(fields["batch"])}
        return fields

    @model_validator(mode="after")
    def _batches_a_model(self) -> Self:
        if self.batch is None and (self.model is not None or self.version):
            raise ValueError("model and version say what 'batch' batches, which is missing")
        if self.batch is not None and self.model is None:
            raise ValueError("batch needs 'model': executors are shared by model and version")
        if self.batch is not None and self.vram.text != _alone(self.batch):
            raise ValueError("batch and vram exclude each other: with batch, memory follows from per_unit_mib")
        if self.batch is not None and (self.whole or self.gpus > 1):
            raise ValueError("batch needs 'gpus: 1' and no 'whole': a model executor has a share of one GPU")
        return self

    def beyond_batches(self, size: float) -> Reason | None:
        """Why no batch can ever hold an item of this volume; None if one can."""
        most = self.batch.max_volume if self.batch is not None else None
        if most is None or size <= most:
            return None
        bound = f"no batch of {self.name} holds more than batch.max_volume, {most:g}"
        return Reason("above_bound", f"its volume is {size:g}, and {bound}")

    @property
    def formula_id(self) -> str:
        """A digest of what an estimate's ``summands`` mean: peaks under one say nothing about another."""
        return _digest(f"{self.context_mib} + {self.weights_mib} + {self.vram}")

    @model_validator(mode="after")
    def _leaves_room(self) -> Self:
        if self.max_mib is not None and self.max_mib < self.context_mib + self.weights_mib:
            raise ValueError(f"max_mib ({self.max_mib}) is less than context_mib + weights_mib")
        return self


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a table. ``section`` is ``profile 'name'``, ``defaults`` or empty."""

    source: str
    section: str
    field: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.section, self.field, self.reason) if part)


class TableError(ValueError):
    """A table that cannot be used, with all its problems."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True)
class ResourceTable:
    """All profiles by name, in the order in which the table has them."""

    profiles: Mapping[str, Profile] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Read a table from YAML; raises ``TableError`` with every problem, naming ``source``."""
        document = _load_yaml(text, source)
        if not isinstance(document, dict):
            raise TableError((Problem(source, "", "", "a table is a mapping with the key 'profiles'"),))
        check = _Check(source)
        for key in document:
            if key not in ("defaults", "profiles"):
                check.add("", place((key,)), "unknown field; a table has 'defaults' and 'profiles'")
        shared = check.section(document, "defaults", {})
        if check.model(ProfileDefaults, shared, "defaults") is None:
            shared = {}
        profiles: dict[str, Profile] = {}
        for name, row in check.section(document, "profiles").items():
            section = f"profile {shorten(repr(name))}"
            if not isinstance(row, dict):
                check.add(section, "", "must be a mapping of fields, with 'vram'")
            elif "name" in row:
                check.add(section, "field 'name'", "unknown field")
            elif profile := check.model(Profile, {**_over(shared, row), "name": name}, section):
                profiles[name] = profile
        check.models(profiles.values())
        if check.problems:
            raise TableError(tuple(check.problems))
        return cls(profiles)

    def profile(self, task: str) -> Profile | None:
        """The profile that speaks for a task: exact name first, then the most specific glob."""
        if task in self.profiles:
            return self.profiles[task]
        name = best_match(task, self.profiles)
        return self.profiles[name] if name else None

    def __iter__(self) -> Iterator[Profile]:
        return iter(self.profiles.values())

    def __len__(self) -> int:
        return len(self.profiles)


@dataclass(frozen=True, slots=True)
class Part:
    """One summand of an estimate, for people."""

    label: str
    mib: float


class Learned(Protocol):
    """What measured peaks have taught about a profile; `brim.core.calibration` learns it."""

    def reserve_mib(self, summands: Sequence[float], declared_mib: float, gpu_models: Sequence[str]) -> float | None:
        """The amount to reserve instead of the declared one; None while too little is known.

        ``summands`` are those of `Estimate`. Empty ``gpu_models`` mean that any model may be chosen.
        """


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one task asks for, and why.

    The demand's ``vram_mib`` is the sum of ``parts``, rounded up to its size class. ``context_mib`` is
    what the task's process is taken to keep when its memory stays unknown after the end. ``priority`` is
    None when neither header nor profile sets one. ``summands`` (MiB) are what calibration learns from:
    the declared need without margin, as its fixed part (context, weights, the formula's constant) and the
    formula's terms; empty when the header gave the amount. ``formula_id`` is
    the profile's. ``suggested_mib`` is what calibration would
    reserve, None while it knows too little. ``attributes`` are those that the formula read, for people.
    """

    demand: Demand
    context_mib: int
    priority: int | None
    profile: str | None
    parts: tuple[Part, ...]
    summands: tuple[float, ...]
    formula_id: str
    guard: str
    suggested_mib: int | None
    attributes: Mapping[str, float | str]
    batched: Batched | None = None

    def __str__(self) -> str:
        sums = " + ".join(f"{part.mib:.0f} ({part.label})" for part in self.parts)
        least = "at least " * self.demand.whole
        return f"{sums} = {least}{sum(part.mib for part in self.parts):.0f}, reserved {self.demand}"


NO_PROFILE = ProfileDefaults()
"""What holds for a task that has no profile and brings its demand in the header."""


WHOLE_GPU = 0.9
"""Of what the largest GPU can give away, what a task without a profile must find on its own at least."""


def stand_in(task: str, gpu_mib: int, *, learns: bool) -> Profile:
    """A profile for a task that has none: it takes one of the largest GPUs to itself, which can give away ``gpu_mib``.

    ``learns``: once enough of its peaks are known, what they teach, but not less than calibration's lower bound.
    """
    context_mib = NO_PROFILE.context_mib
    return Profile(
        name=task,
        vram=max(0, math.floor(WHOLE_GPU * gpu_mib) - context_mib),
        whole=True,
        margin=1.0,
        calibration="on" if learns else "suggest",
    )


def estimate(
    profile: Profile | None, header: BrimHeader, bound: Mapping[str, Any], learned: Learned | None = None
) -> Estimate:
    """Work out a task's demand from its profile, its brim header and its bound arguments.

    Raises ``EstimateError``: ``no_profile`` (nor ``vram_mib`` in the header), ``missing_attribute``,
    ``bad_attribute``, ``bad_estimate``, ``bad_header`` (``vram_mib`` or ``gpus`` for a batched task), ``above_bound``
    (the profile's ``max_mib``, or ``batch.max_volume``). What was learned never refuses a task: it is kept within
    ``max_mib``.
    """
    row = profile or NO_PROFILE
    models = (header.gpu_model,) if header.gpu_model else tuple(sorted(set(row.gpu_models)))
    summands: tuple[float, ...] = ()
    suggested_mib = None
    attributes: Mapping[str, float | str] = {}
    whole = profile is not None and profile.whole
    batched = None
    if profile is not None and profile.batch is not None:
        _only_its_executors(profile, header)
    if header.vram_mib is not None:
        whole = header.vram_mib == ALL
        asked_mib = row.context_mib if isinstance(header.vram_mib, str) else header.vram_mib
        parts: tuple[Part, ...] = (Part("context" if whole else "asked for in the header", asked_mib),)
        _check_bounds(max(1, asked_mib) if whole else asked_mib, row.max_mib)
    elif profile is None:
        message = "the table has no profile for this task, and its header gives no vram_mib"
        raise EstimateError(Reason("no_profile", message))
    else:
        merged = merge_attributes(bound, header.attributes, profile.defaults)
        parts, summands = _declared(profile, merged)
        attributes = profile.vram.inputs(merged)
        declared_mib = sum(part.mib for part in parts)
        _check_bounds(max(1.0, declared_mib) if whole else declared_mib, profile.max_mib)
        if (batch := profile.batch) is not None:
            batched = Batched(profile.model or "", profile.version, batch.shape(merged), batch.size(merged))
            if (refusal := profile.beyond_batches(batched.size)) is not None:
                raise EstimateError(refusal)
        if learned is not None and profile.calibration != "off" and profile.batch is None:
            suggested = learned.reserve_mib(summands, declared_mib, models)
            if suggested is not None:
                suggested_mib = math.ceil(min(suggested, profile.max_mib or MAX_MIB))
        if profile.calibration == "on" and suggested_mib is not None:
            whole = False
            parts = (Part(f"learned from measured peaks; {declared_mib:.0f} declared", suggested_mib),)
    demand = Demand(
        vram_mib=size_class(sum(part.mib for part in parts)),
        gpus=row.gpus if header.gpus is None else header.gpus,
        cpus=row.cpus if header.cpus is None else header.cpus,
        ram_mib=row.ram_mib if header.ram_mib is None else header.ram_mib,
        gpu_models=models,
        labels=tuple(sorted((row.labels | header.labels).items())),
        whole=whole,
    )
    return Estimate(
        demand=demand,
        context_mib=min(row.context_mib, demand.vram_mib),
        priority=row.priority if header.priority is None else header.priority,
        profile=profile.name if profile else None,
        parts=parts,
        summands=summands,
        formula_id=profile.formula_id if profile else "",
        guard=row.guard,
        suggested_mib=suggested_mib,
        attributes=attributes,
        batched=batched,
    )


def _only_its_executors(profile: Profile, header: BrimHeader) -> None:
    """Refuse what only the profile can say of a batched task: where its model executors run, and in what."""
    chosen = {
        "vram_mib": header.vram_mib,
        "gpus": header.gpus if header.gpus != 1 else None,
        "gpu_model": header.gpu_model,
        "labels": header.labels or None,
    }
    for field_name, value in chosen.items():
        if value is not None:
            what = f"header 'brim': field '{field_name}': {profile.name} is batched, so that is its executor's"
            raise EstimateError(Reason("bad_header", what))


def _declared(profile: Profile, attributes: Mapping[str, Any]) -> tuple[tuple[Part, ...], tuple[float, ...]]:
    """The parts of the declared demand, and the summands of the need without margin."""
    constant, *terms = profile.vram.summands(attributes)
    vram_mib = sum(terms, constant)
    parts = (
        Part("context", profile.context_mib),
        Part("weights", profile.weights_mib),
        Part(f"{profile.margin:g} × {vram_mib:.0f} from {profile.vram}", profile.margin * vram_mib),
    )
    fixed_mib = profile.context_mib + profile.weights_mib + constant
    return tuple(part for part in parts if part.mib), (fixed_mib, *terms)


@lru_cache(maxsize=1024)
def lane_of(task: str, demand: Demand) -> str:
    """The overflow lane of a demand class: equal for equal demands of a task, different otherwise.

    Readable as far as people care (``vision.segment|5408MiB``, ``train|2x8192MiB``, ``train|all``); what else is
    demanded is a digest.
    """
    each = "all" if demand.whole else f"{demand.vram_mib}MiB"
    lane = f"{task}|{each}" if demand.gpus == 1 else f"{task}|{demand.gpus}x{each}"
    if demand == Demand(demand.vram_mib, demand.gpus):
        return lane
    text = json.dumps(canonical(demand), sort_keys=True)
    return f"{lane}|{_digest(text)}"


def _check_bounds(total_mib: float, max_mib: int | None) -> None:
    if max_mib is not None and total_mib > max_mib:
        message = f"the task would need {total_mib:.0f} MiB, more than its profile's max_mib of {max_mib}"
        raise EstimateError(Reason("above_bound", message))
    if not 0 < total_mib <= MAX_MIB:
        message = f"the estimate of {total_mib:g} MiB is not between 0 and {MAX_MIB} MiB"
        raise EstimateError(Reason("bad_estimate", message))


class _Check:
    """Collects the problems of one table, so that all of them are told at once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []

    def add(self, section: str, where: str, reason: str) -> None:
        self.problems.append(Problem(self.source, section, where, reason))

    def models(self, profiles: Iterable[Profile]) -> None:
        """A model in one version has one profile: its executors serve all its tasks within one set of limits."""
        owners: dict[tuple[str, str], str] = {}
        for profile in profiles:
            if profile.model is not None:
                owner = owners.setdefault((profile.model, profile.version), profile.name)
                if owner != profile.name:
                    section = f"profile {shorten(repr(profile.name))}"
                    reason = f"profile {owner!r} has this model and version already; a glob can name several tasks"
                    self.add(section, place(("model",)), reason)

    def section(self, document: Mapping[Any, Any], key: str, absent: dict[Any, Any] | None = None) -> dict[Any, Any]:
        """A top-level mapping of the table; ``absent`` is its value when left out, None: must be there."""
        found = document.get(key, absent)
        if isinstance(found, dict):
            return found
        self.add(key, "", "must be a mapping" if key in document else "is missing")
        return {}

    def model(self, model: type[Model], fields: Mapping[Any, Any], section: str) -> Model | None:
        """The validated model, or None with its problems noted."""
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            for item in error.errors():
                self.add(section, place(item["loc"]) if item["loc"] else "", reason_of(item))
        return None


def _over(shared: Mapping[Any, Any], row: Mapping[Any, Any]) -> dict[Any, Any]:
    """The row's fields over the shared ones: mappings are merged by key, everything else is replaced."""
    merged = {**shared, **row}
    for key, value in row.items():
        if isinstance(value, dict) and isinstance(shared.get(key), dict):
            merged[key] = {**shared[key], **value}
    return merged


class _TableLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice instead of silently keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; raises ``ConstructorError`` at the second of two equal keys."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


def _load_yaml(text: str, source: str) -> object:
    try:
        return yaml.load(text, _TableLoader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise TableError((Problem(source, where, "", error.problem or "not readable as YAML"),)) from None
    except yaml.YAMLError as error:
        raise TableError((Problem(source, "", "", f"not readable as YAML: {error}"),)) from None
