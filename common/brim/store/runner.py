"""Runs brim's Lua scripts: one file per transition, alone or many in one round trip."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError

Arg = str | bytes | int


@cache
def sources() -> dict[str, str]:
    """Every script by name, each with the shared functions in front."""
    folder = resources.files("brim.store") / "scripts"
    common = (folder / "common.lua").read_text()
    return {
        file.name.removesuffix(".lua"): common + file.read_text()
        for file in folder.iterdir()
        if file.name.endswith(".lua") and file.name != "common.lua"
    }


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script."""

    script: str
    keys: Sequence[str]
    args: Sequence[Arg] = ()


class Runner:
    """Calls scripts by their digest, and loads them when the server does not have them (any more)."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client
        self._digests = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in sources().items()}

    def load(self) -> None:
        """Loads every script; raises ``redis.ResponseError`` for one that the server cannot compile."""
        for text in sources().values():
            self._client.script_load(text)

    def run(self, script: str, keys: Sequence[str], args: Sequence[Arg] = ()) -> Any:
        """The answer of one script."""
        return self.run_many([Call(script, keys, args)])[0]

    def run_many(self, calls: Sequence[Call]) -> list[Any]:
        """The answers of several scripts in one round trip, in order; the first error is raised at the end."""
        answers = self._send(calls)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            self.load()
            for i, answer in zip(unknown, self._send([calls[i] for i in unknown]), strict=True):
                answers[i] = answer
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _send(self, calls: Sequence[Call]) -> list[Any]:
        if not calls:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for call in calls:
            pipeline.evalsha(self._digests[call.script], len(call.keys), *call.keys, *call.args)
        return list(pipeline.execute(raise_on_error=False))
