"""Connecting to Redis: timeouts, what a server must offer, and which errors mean that it is away."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import unquote, urlsplit, urlunsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from brim.settings import Redis

OLDEST_VERSION = (6, 2)
"""LMOVE and ZADD GT; see https://redis.io/docs/latest/commands/lmove/."""

SENTINEL_PORT = 26379

_TEMPORARY = ("LOADING", "READONLY", "BUSY", "OOM", "MISCONF", "MASTERDOWN", "NOREPLICAS", "TRYAGAIN", "UNBLOCKED")

_TEMPORARY_ERRORS = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.NoScriptError,  # it has forgotten its scripts once more since they were loaded anew
)


class ServerRefused(Exception):
    """This server cannot be brim's: the message names the setting and what it must be."""


def connect(settings: Redis, *, single: bool = False) -> redis.Redis:
    """A client of the broker's database. It raises errors at once: services retry whole steps, not commands.

    ``single``: for who calls from one thread. It connects now and keeps that connection, which makes a call a third
    cheaper; not through Sentinels.
    """
    timeouts = {
        "socket_timeout": settings.socket_timeout_s,
        "socket_connect_timeout": settings.socket_connect_timeout_s,
    }
    retry = Retry(NoBackoff(), 0)
    if not settings.url.startswith("sentinel:"):
        return redis.Redis.from_url(settings.url, retry=retry, single_connection_client=single, **timeouts)
    sentinels = [urlsplit(part) for part in settings.url.split(";")]
    first = sentinels[0]
    places = [(part.hostname, part.port or SENTINEL_PORT) for part in sentinels]
    watched: Any = Sentinel(places, retry=retry, **timeouts)  # type: ignore[no-untyped-call]
    return cast(
        redis.Redis,
        watched.master_for(
            settings.sentinel_master,
            db=int(first.path.strip("/") or 0),
            username=first.username and unquote(first.username),
            password=first.password and unquote(first.password),
            retry=retry,
            **timeouts,
        ),
    )


def address(url: str) -> str:
    """The address without its password, for messages."""
    if ";" in url:
        return ";".join(map(address, url.split(";")))
    parts = urlsplit(url)
    host = parts.hostname or ""
    where = f"{host}:{parts.port}" if parts.port else host
    return urlunsplit((parts.scheme, where, parts.path, "", ""))


def is_outage(error: BaseException) -> bool:
    """Whether the server is away or cannot take writes for now, so that asking again later makes sense."""
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return False
    if isinstance(error, _TEMPORARY_ERRORS):
        return True
    if isinstance(error, exceptions.ResponseError):
        # Of a pipeline: "Command # 1 (HGETALL ...) of pipeline caused error: BUSY ...". A script's error repeats the
        # server's words behind its own: "... -OOM command not allowed ...".
        words = str(error).rpartition("caused error: ")[2]
        return any(word in _TEMPORARY for word in words.replace("-", " ").split()[:12])
    return isinstance(error, OSError)


def check_server(client: redis.Redis) -> None:
    """Raises `ServerRefused` unless the server is new enough, never evicts keys, and is no cluster."""
    info: Any = client.info()
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < OLDEST_VERSION:
        wanted = ".".join(map(str, OLDEST_VERSION))
        raise ServerRefused(f"Redis {info['redis_version']} is too old: brim needs {wanted} or newer")
    if info.get("redis_mode") == "cluster":
        raise ServerRefused("Redis Cluster is not supported: one script must reach all of brim's keys")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ServerRefused(
            f"maxmemory-policy is {policy}: an eviction would lose tasks; set it to noeviction on the server"
        )
