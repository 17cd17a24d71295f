"""brim's settings: `configs/brim.toml`, overridden by environment variables such as ``BRIM_REDIS__URL``.

Every field says its unit and its default; `configs/brim.toml` repeats them all and a test keeps the two in
step. Durations end in ``_s`` (seconds), memory in ``_mib``. Errors name the file or the variable, the field
and the reason, and never repeat a value, since a URL may hold a password.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

DEFAULT_FILE = Path("configs/brim.toml")
"""Read if it exists and ``BRIM_CONFIG`` names no other file."""

DEFAULT_TABLE, DEFAULT_POLICY = Path("configs/resources.yaml"), Path("configs/placement.yaml")
"""Where the resource table and the placement policy are looked for unless settings name other files."""

MIN_KEY = 32
"""A signing key has at least so many characters."""

REDIS_SCHEMES = ("redis", "rediss", "unix", "sentinel")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in the settings: where it was written, which field, and why."""

    source: str
    field: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.field, self.reason) if part)


class ConfigurationError(ValueError):
    """The settings cannot be used; ``problems`` lists everything that is wrong with them."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class Section(BaseModel):
    """A table of the settings file; unknown fields are refused, so that a typing error is not ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _redis_url(url: str) -> str:
    scheme = urlsplit(url).scheme
    if scheme not in REDIS_SCHEMES:
        known = ", ".join(f"{name}://" for name in REDIS_SCHEMES)
        raise ValueError(f"{scheme or 'no'} scheme is not supported: brim needs Redis or Valkey by {known}")
    return url


class Redis(Section):
    """The database that Celery's broker and brim share: one script must be able to reserve and push."""

    url: str = Field("redis://127.0.0.1:6379/0", description="address of the broker's own database")
    sentinel_master: str = Field("", description="the master's name, if url names sentinels")
    prefix: str = Field("brim:", min_length=1, description="begins every key of brim's")
    socket_timeout_s: float = Field(10.0, gt=0, description="longest wait for an answer, in seconds")
    socket_connect_timeout_s: float = Field(3.0, gt=0, description="longest wait for a connection, in seconds")

    _check_url = field_validator("url")(_redis_url)

    @model_validator(mode="after")
    def _sentinels_know_a_master(self) -> Self:
        if self.url.startswith("sentinel:") and not self.sentinel_master:
            raise ValueError("sentinel_master must name the master that the sentinels of url watch")
        return self


class Broker(Section):
    """Celery's ``broker_transport_options`` where they shape keys; they must equal the producers' app's."""

    global_keyprefix: str = Field("", description="prefix of all of Celery's keys, and so of brim's")
    sep: str = Field("\x06\x16", min_length=1, description="stands between a queue's name and its priority step")
    priority_steps: tuple[int, ...] = Field(
        (0, 3, 6, 9),
        min_length=1,
        description="priorities that have a list of their own, 0 is the most urgent",
    )

    @field_validator("priority_steps")
    @classmethod
    def _ascending(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if list(steps) != sorted(set(steps)) or steps[0] < 0:
            raise ValueError("priorities must be 0 or more, ascending and different")
        return steps


class Results(Section):
    """Where brim writes the answers that it gives itself: the producers' own result backend."""

    backend: str = Field("", description="Celery result backend; empty: the database of redis.url")
    app_options: dict[str, Any] = Field(
        default_factory=dict, description="Celery settings of the app that shape results, e.g. result_expires"
    )


class Resources(Section):
    """How much memory tasks need."""

    table: Path = Field(DEFAULT_TABLE, description="the task resource usage table")


class Intake(Section):
    """Admission of tasks from the broker."""

    batch: int = Field(200, gt=0, description="most messages looked at in one round")
    level1_limit: int = Field(
        100_000, gt=0, description="most tasks waiting in overflow; beyond it messages stay in the broker"
    )
    max_message_bytes: int = Field(4_194_304, gt=0, description="larger messages are dead-lettered, in bytes")
    unknown: Literal["reject", "exclusive", "learn"] = Field(
        "reject",
        description="tasks without a profile: refused, or given a whole GPU, or that until their peaks are known",
    )
    unfit_grace_s: float = Field(
        300.0,
        ge=0,
        description="how long a task too large for every device waits for a larger one, in seconds",
    )


class Placement(Section):
    """The choice of a device, leases, and what is kept of finished tasks."""

    policy_file: Path = Field(
        DEFAULT_POLICY, description="policy and weights of the choice; balanced where this default is not there"
    )
    ahead: int = Field(1, ge=0, description="most tasks placed behind the busy executors of one device")
    promises: int = Field(
        -1, ge=-1, description="most waiting tasks that devices are kept for; -1: one, or about 6 % of the nodes"
    )
    promise_after_s: float = Field(
        0.0, ge=0, description="how long a task waits before devices may be kept for it, in seconds"
    )
    lease_timeout_s: float = Field(15.0, gt=0, description="a node silent for this long is lost, in seconds")
    start_timeout_s: float = Field(
        10.0,
        gt=0,
        description="a placed task that has not begun on an idle executor is placed again, in seconds",
    )
    leader_ttl_s: float = Field(4.0, gt=0, description="a standby takes over after this silence, in seconds")
    max_attempts: int = Field(3, gt=0, description="attempts that may be lost before a task is dead-lettered")
    retention_s: float = Field(86_400.0, gt=0, description="how long finished records are kept, in seconds")
    visibility_timeout_s: float = Field(
        3_600.0,
        gt=0,
        description="the broker's visibility timeout, equal to the producers' app's, in seconds",
    )

    @model_validator(mode="after")
    def _records_outlive_redelivery(self) -> Self:
        if self.retention_s <= self.visibility_timeout_s:
            raise ValueError(
                "retention_s must be larger than visibility_timeout_s: "
                "the broker may deliver a message again until then, and only its record tells"
            )
        return self


class Agent(Section):
    """The node agent and the workers that it starts: one per GPU, and on demand one per set of GPUs."""

    node: str = Field("", description="name of this node; empty: the host's name")
    labels: dict[str, str] = Field(default_factory=dict, description="labels that tasks may ask for")
    executors_per_gpu: int = Field(4, gt=0, description="pool processes of each GPU's worker")
    set_idle_s: float = Field(
        60.0, ge=0, description="how long a worker that sees several GPUs stays without a task, in seconds"
    )
    headroom_mib: int = Field(512, ge=0, description="memory of a device that is never given away, in MiB")
    guard_tolerance: float = Field(
        0.1, ge=0, description="share of its reservation by which a guarded attempt may outgrow it"
    )
    report_interval_s: float = Field(1.0, gt=0, le=1.0, description="between two memory reports, in seconds")
    quarantine_xids: tuple[int, ...] = Field(
        (48, 74, 79, 95, 119, 120, 140),
        description="a GPU that reports one of these NVIDIA Xid events takes no work for a while",
    )
    quarantine_s: float = Field(60.0, ge=0, description="that while, from the latest such event, in seconds")
    drain_grace_s: float = Field(60.0, ge=0, description="running tasks may finish this long on SIGTERM, in seconds")
    log_folder: Path = Field(Path(".brim/logs"), description="where the workers' logs go")
    restart_backoff_s: float = Field(
        0.5, gt=0, description="pause before a dead worker is started again, doubled each time, in seconds"
    )
    restart_backoff_max_s: float = Field(30.0, gt=0, description="longest such pause, in seconds")


class Executor(Section):
    """The pool processes that run tasks."""

    recycle: Literal["never", "after_task", "when_needed"] = Field(
        "when_needed",
        description="replace an executor to get its leftover back: never, after_task, when_needed",
    )


class Token(Section):
    """A bearer token of the HTTP API; `brim token` makes one. The settings know its hash only."""

    name: str = Field(min_length=1, description="whose it is, for the log")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the token, in hexadecimal digits")
    scope: Literal["read", "submit"] = Field("read", description="submit may also submit, cancel and retry tasks")


class Monitor(Section):
    """The page, the HTTP API and its limits."""

    host: str = Field("127.0.0.1", description="address to listen on; without tokens it is 127.0.0.1 in any case")
    port: int = Field(8765, gt=0, lt=65536, description="port to listen on")
    tokens: tuple[Token, ...] = Field((), description="who may use the API; empty: everyone on this machine")
    max_body_bytes: int = Field(16_777_216, gt=0, description="larger requests are refused, in bytes")
    request_rate: float = Field(50.0, gt=0, description="requests that one client may send, per second")
    burst: int = Field(200, gt=0, description="requests that one client may send at once")


class Flower(Section):
    """The Flower that `brim up` and `brim demo` start."""

    basic_auth: SecretStr = Field(
        SecretStr(""), description="user:password that it asks for, several with commas; empty: open, without its API"
    )


class Security(Section):
    """What tells brim's own messages from others'."""

    header_key: SecretStr = Field(
        SecretStr(""), description="intake and placement sign by it, workers refuse what is not signed; empty: off"
    )

    @field_validator("header_key")
    @classmethod
    def _not_to_be_guessed(cls, key: SecretStr) -> SecretStr:
        if 0 < len(key) < MIN_KEY:
            raise ValueError(f"must have at least {MIN_KEY} characters, such as those of `openssl rand -hex 32`")
        return key

    @property
    def key(self) -> bytes:
        """As the functions that sign and verify take it."""
        return self.header_key.get_secret_value().encode()


class Metrics(Section):
    """Where services show Prometheus their metrics, under /metrics; the monitor shows its own on its own port."""

    host: str = Field("127.0.0.1", description="address to listen on")
    intake_port: int = Field(0, ge=0, lt=65536, description="port of intake's metrics; 0: none")
    placement_port: int = Field(0, ge=0, lt=65536, description="port of placement's metrics; 0: none")
    agent_port: int = Field(0, ge=0, lt=65536, description="port of the node agent's metrics; 0: none")


class Health(Section):
    """What a health check of a service may look at."""

    file: str = Field("", description="touched about once a second while the service goes on; empty: none")


class Settings(BaseSettings):
    """All settings. ``Settings()`` reads the environment only, :meth:`load` a file as well."""

    model_config = SettingsConfigDict(env_prefix="BRIM_", env_nested_delimiter="__", extra="forbid", frozen=True)

    redis: Redis = Redis()
    broker: Broker = Broker()
    results: Results = Results()
    resources: Resources = Resources()
    intake: Intake = Intake()
    placement: Placement = Placement()
    agent: Agent = Agent()
    executor: Executor = Executor()
    monitor: Monitor = Monitor()
    flower: Flower = Flower()
    security: Security = Security()
    metrics: Metrics = Metrics()
    health: Health = Health()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments first, then the environment; no other source."""
        return init_settings, env_settings

    @classmethod
    def load(cls, path: Path | None = None) -> Self:
        """Settings from ``path``, else from ``BRIM_CONFIG``, else from `DEFAULT_FILE` if that exists.

        The environment overrides the file. Raises `ConfigurationError`.
        """
        file = path or (Path(os.environ["BRIM_CONFIG"]) if os.environ.get("BRIM_CONFIG") else None)
        if file is None and DEFAULT_FILE.exists():
            file = DEFAULT_FILE
        written = _read_toml(file) if file else {}
        try:
            environment = EnvSettingsSource(cls)()
        except SettingsError as error:
            cause = error.__cause__ or error
            raise ConfigurationError(Problem("environment", "", f"{error}: {cause}")) from error
        try:
            return cls(**_merged(written, environment))
        except ValidationError as error:
            raise ConfigurationError(*_problems(error, str(file or ""))) from error

    @property
    def key_prefix(self) -> str:
        """What begins every key of brim's: the broker's prefix, then brim's own."""
        return self.broker.global_keyprefix + self.redis.prefix

    @property
    def results_backend(self) -> str:
        """Address of the result backend that brim answers through."""
        return self.results.backend or self.redis.url

    def environment(self) -> dict[str, str]:
        """Variables that give a child process these very settings, whatever its working directory."""
        variables: dict[str, str] = {}
        for section_name in type(self).model_fields:
            section: Section = getattr(self, section_name)
            plain = section.model_dump(mode="json")
            for name, value in section:
                if isinstance(value, Path):
                    text = str(value.absolute())
                elif isinstance(value, str):
                    text = value
                elif isinstance(value, SecretStr):
                    text = value.get_secret_value()
                else:
                    text = json.dumps(plain[name])
                variables[f"BRIM_{section_name}__{name}".upper()] = text
        return variables


class BalancedWeights(Section):
    """How much each preset principle counts (requirement A7); only their ratios matter."""

    server_load: float = Field(1.0, ge=0, description="balance of task load among worker servers")
    memory_balance: float = Field(1.0, ge=0, description="balance of memory occupancy among one server's GPUs")
    satisfaction: float = Field(1.0, ge=0, description="how well the memory left satisfies likely tasks")


class PackedWeights(Section):
    """How much each score of `packed` counts; only their ratios matter."""

    fill: float = Field(1.0, ge=0, description="how full the chosen GPUs will get in the end")
    usable: float = Field(0.03, ge=0, description="how much memory stays usable for likely tasks, by scarcity")
    unstranded: float = Field(0.06, ge=0, description="how little GPU memory is left without CPU to feed it")
    cheapness: float = Field(1.0, ge=0, description="how little the server is what others must have")


class Weights(Section):
    """The weights of the policies that have several scores."""

    balanced: BalancedWeights = BalancedWeights()
    packed: PackedWeights = PackedWeights()


class PolicyChoice(Section):
    """`configs/placement.yaml`: the policy and its weights."""

    policy: Literal["balanced", "packed", "spread", "best-fit", "first-fit", "fgd"] = Field(
        "balanced", description="how placement chooses among the places that fit"
    )
    weights: Weights = Weights()

    @property
    def chosen_weights(self) -> dict[str, float]:
        """The weights of the chosen policy's scores."""
        return dict(getattr(self.weights, self.policy, ()))

    @classmethod
    def load(cls, path: Path) -> Self:
        """The policy written in the YAML file at ``path``; the built-in one where `DEFAULT_POLICY` is not there.

        Raises `ConfigurationError`.
        """
        if not path.exists() and path.absolute() == DEFAULT_POLICY.absolute():
            return cls()
        try:
            written = yaml.safe_load(path.read_text())
        except FileNotFoundError as error:
            reason = f"{_one_line(error)}; placement.policy_file (BRIM_PLACEMENT__POLICY_FILE) names it"
            raise ConfigurationError(Problem(str(path), "", reason)) from error
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigurationError(Problem(str(path), "", _one_line(error))) from error
        try:
            return cls.model_validate({} if written is None else written)
        except ValidationError as error:
            raise ConfigurationError(*_problems(error, str(path))) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(Problem(str(path), "", _one_line(error))) from error


def _one_line(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        both_tables = isinstance(under, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(under, value) if both_tables else value  # type: ignore[arg-type]
    return merged


def _problems(error: ValidationError, file: str) -> list[Problem]:
    environment = {name.upper() for name in os.environ}
    problems = []
    for detail in error.errors(include_url=False, include_input=False):
        field = [str(part) for part in detail["loc"]]
        variable = "BRIM_" + "__".join(field[:2]).upper()
        reason = detail["msg"].removeprefix("Value error, ")
        if variable in environment:
            problems.append(Problem("environment", variable, reason))
        else:
            problems.append(Problem(file, ".".join(field), reason))
    return problems
