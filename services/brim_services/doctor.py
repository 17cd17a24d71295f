"""`brim doctor`: looks at an app, the Redis server, this node's GPUs and its clock, and says what will not work.

The looks collect what there is; what follows from it is decided by pure functions, and each finding says why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import redis
from celery import Celery

from brim.celery.batch_task import BatchTask
from brim.celery.errors import PublishRefused
from brim.celery.plugin import registration
from brim.celery.routing import check_form
from brim.core.attributes import TaskSignature
from brim.core.patterns import is_glob
from brim.core.profiles import Profile, ResourceTable, TableError
from brim.gpu.probe import DeviceFault, DeviceInfo, NodeFault, Sample, open_probe
from brim.settings import ConfigurationError, PolicyChoice, Settings
from brim.store import Store
from brim.store.connection import ServerRefused, address, check_server

from .agent.app import check_app, load_app
from .resources import conflicts, load_table

MOST_NAMED = 20
"""Tasks in one finding."""
MOST_SKEW_S = 2.0
"""A producer's ``expires`` and ``eta`` are meant by its own clock and judged by the server's."""


class Level(StrEnum):
    """How bad a finding is."""

    GOOD = "good"
    NOTE = "note"
    """It works, but perhaps not as somebody expects."""
    FAULT = "fault"
    """It will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: where, and what about it."""

    level: Level
    subject: str
    message: str


def examine(settings: Settings, app_name: str, devices: str | None) -> list[Finding]:
    """Everything that can be looked at from here; what cannot be reached hides nothing else.

    ``devices`` is the setting BRIM_DEVICES, None where it is not set.
    """
    findings = [*_look_at_gpus(devices)]
    table = _table(settings, findings)
    store = Store.of(settings)
    reachable = _look_at_redis(store, settings, findings)
    try:
        app = load_app(app_name)
    except ConfigurationError as error:
        return [*findings, *(Finding(Level.FAULT, "app", str(problem)) for problem in error.problems)]
    if reachable:
        findings += _compare_app(app, settings, store)
    names, signatures = registration(app)
    findings += check_conf(app)
    findings += check_tasks(app, table, names, signatures)
    return findings


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level among them."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.GOOD)


# -- the app -------------------------------------------------------------------------------------------------------


def _compare_app(app: Celery, settings: Settings, store: Store) -> Iterator[Finding]:
    try:
        check_app(app, settings, store)
    except ConfigurationError as error:
        for problem in error.problems:
            yield Finding(Level.FAULT, "app", ": ".join(part for part in (problem.field, problem.reason) if part))
    else:
        yield Finding(Level.GOOD, "app", f"{app.main}: brim is installed, and its broker and results are brim's")


def check_conf(app: Celery) -> Iterator[Finding]:
    """What of an app's own settings changes what brim does for it."""
    if app.conf.task_always_eager:
        yield Finding(
            Level.NOTE, "app", "task_always_eager: every task runs inside its producer, and nothing reaches brim"
        )
    if not app.conf.result_backend:
        yield Finding(
            Level.NOTE, "app", "result_backend: none, so nobody can wait for a result or learn why a task was given up"
        )


def check_tasks(
    app: Celery, table: ResourceTable, names: Sequence[str], signatures: Mapping[str, TaskSignature]
) -> Iterator[Finding]:
    """Whether the app's tasks and the table's profiles go together."""
    ours = {name: profile for name in names if (profile := table.profile(name)) is not None}
    for name, profile in ours.items():
        yield from _check_task(app, name, profile, signatures.get(name))
    named = {profile.name for profile in ours.values()}
    own = sorted(name for name in names if not name.startswith("celery."))
    for profile in table:
        if profile.name not in named:
            what = "matches" if is_glob(profile.name) else "is the name of"
            has = f"it has {_listed(own)}" if own else "it has none"
            yield Finding(Level.NOTE, "table", f"profile {profile.name!r} {what} no task of this app: {has}")
    if ours:
        yield Finding(Level.GOOD, "tasks", f"{len(ours)} of the app's tasks have a profile: {', '.join(ours)}")
    else:
        yield Finding(Level.FAULT, "tasks", "no task of this app has a profile, so nothing of it goes through brim")


def _check_task(app: Celery, name: str, profile: Profile, signature: TaskSignature | None) -> Iterator[Finding]:
    task = app.tasks[name]
    options: dict[str, Any] = {
        option: value
        for option in ("serializer", "compression", "queue", "exchange")
        if (value := getattr(task, option, None))
    }
    try:
        check_form(app, name, options.get("serializer"), options.get("compression"))
    except PublishRefused as error:
        yield Finding(Level.FAULT, "tasks", str(error))
    if "queue" in options or "exchange" in options:
        where = options.get("queue") or options["exchange"]
        yield Finding(Level.NOTE, "tasks", f"{name}: names the queue {where!r} itself, which wins over its profile")
    if profile.batch is not None and not isinstance(task, BatchTask):
        batched = sorted(other for other, each in app.tasks.items() if isinstance(each, BatchTask))
        have = f"; those that do are {_listed(batched)}" if batched else ""
        reason = f"profile {profile.name!r} batches it, but it has not the base brim.BatchTask{have}"
        yield Finding(Level.FAULT, "tasks", f"{name}: {reason}")
    elif profile.batch is None and isinstance(task, BatchTask):
        reason = f"it is a brim.BatchTask, but profile {profile.name!r} has no batch: each item is computed by itself"
        yield Finding(Level.NOTE, "tasks", f"{name}: {reason}")
    unknown = missing_attributes(profile, signature)
    if unknown:
        reason = "are no arguments of it and have no default in the profile, so each call must give them in its header"
        yield Finding(Level.FAULT, "tasks", f"{name}: the formula's {', '.join(unknown)} {reason}")


def missing_attributes(profile: Profile, signature: TaskSignature | None) -> list[str]:
    """What a profile's formula needs and no call of the task gives by itself."""
    if signature is None or any(parameter.kind == "var_keyword" for parameter in signature.parameters):
        return []
    given = {parameter.name for parameter in signature.parameters} | profile.defaults.keys()
    shape = profile.batch.shape_bucket if profile.batch is not None else None
    return sorted((profile.vram.uses.keys() | (shape.uses.keys() if shape else set())) - given)


def _listed(names: Sequence[str]) -> str:
    """Some names, the first of many."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _table(settings: Settings, findings: list[Finding]) -> ResourceTable:
    """The resource table, and what is wrong with it and the placement policy; an empty one where it is broken."""
    table = ResourceTable()
    path = settings.resources.table
    try:
        PolicyChoice.load(settings.placement.policy_file)
        table = load_table(settings)
    except (ConfigurationError, TableError) as error:
        findings += [Finding(Level.FAULT, "table", str(problem)) for problem in error.problems]
    else:
        findings.append(Finding(Level.GOOD, "table", f"{path}: {len(table)} profiles"))
        findings += [Finding(Level.FAULT, "table", conflict) for conflict in conflicts(settings, table)]
    return table


# -- the server ----------------------------------------------------------------------------------------------------


def _look_at_redis(store: Store, settings: Settings, findings: list[Finding]) -> bool:
    where = address(settings.redis.url)
    try:
        check_server(store.client)
        info = store.client.info()
        store.runner.load()
        before_s = time.time()
        server_s = store.server_ms() / 1000
        after_s = time.time()
    except ServerRefused as error:
        findings.append(Finding(Level.FAULT, "redis", f"{where}: {error}"))
        return True
    except (redis.RedisError, OSError) as error:
        findings.append(Finding(Level.FAULT, "redis", f"{where}: {error}"))
        return False
    findings += check_info(info, where)
    findings.append(check_clock(before_s, server_s, after_s))
    return True


def check_info(info: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """What a server that can be brim's says of itself that somebody should know."""
    name = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    version = info.get("valkey_version", info["redis_version"])
    yield Finding(Level.GOOD, "redis", f"{name} {version} at {where}, noeviction, runs brim's scripts")
    if not info.get("aof_enabled"):
        yield Finding(
            Level.NOTE, "redis", "appendonly is off: a restart of the server loses the tasks since its last snapshot"
        )
    most, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if most and used > 0.9 * most:
        yield Finding(
            Level.NOTE, "redis", f"{used / most:.0%} of maxmemory is used: publishing fails when it is all used"
        )


def check_clock(before_s: float, server_s: float, after_s: float) -> Finding:
    """Whether this machine's clock, read before and after the server's, agrees with it."""
    skew_s = server_s - (before_s + after_s) / 2
    unsure_s = (after_s - before_s) / 2
    if abs(skew_s) - unsure_s > MOST_SKEW_S:
        side = "behind" if skew_s > 0 else "ahead of"
        reason = "expires and eta of tasks that are published here are judged by the server's"
        return Finding(
            Level.FAULT, "clock", f"this machine's clock is {abs(skew_s):.1f} s {side} the server's: {reason}"
        )
    return Finding(Level.GOOD, "clock", f"within {abs(skew_s) + unsure_s:.2f} s of the server's")


# -- the GPUs ------------------------------------------------------------------------------------------------------


def _look_at_gpus(setting: str | None) -> Iterator[Finding]:
    try:
        probe = open_probe(setting)
        try:
            found = probe.devices()
            yield from check_devices(found, probe.sample())
        finally:
            probe.close()
    except NodeFault as fault:
        # Producers, intake and placement need no GPU; whoever has said which devices to use, does.
        level = Level.FAULT if setting else Level.NOTE
        hint = "" if setting else " (only nodes that run `brim worker` need one)"
        yield Finding(level, "gpu", f"{fault.reason}{hint}")


def check_devices(devices: Sequence[DeviceInfo], samples: Mapping[str, Sample | DeviceFault]) -> Iterator[Finding]:
    """Whether the devices can be read, down to the memory of processes."""
    if not devices:
        yield Finding(Level.FAULT, "gpu", "no GPU of this node can be read")
    for device in devices:
        sample = samples.get(device.uuid)
        if sample is None or isinstance(sample, DeviceFault):
            reason = sample.reason if sample else "it was not sampled"
            yield Finding(Level.FAULT, "gpu", f"{device.uuid}: {reason}")
            continue
        yield Finding(
            Level.GOOD, "gpu", f"{device.model} {device.uuid}: {sample.free_mib} of {sample.total_mib} MiB free"
        )
        if not sample.complete or None in sample.processes.values():
            reason = "the memory of processes is not told completely, so those unknown count as their reservation"
            yield Finding(Level.NOTE, "gpu", f"{device.uuid}: {reason}")
