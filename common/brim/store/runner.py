"""Runs brim's Lua scripts: one file per transition, alone or many in one round trip."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError, ResponseError

Arg = str | bytes | int

_DEFINED = re.compile(r"^local (?:function )?(\w+)", re.MULTILINE)


@cache
def sources() -> dict[str, str]:
    """Every script by name, each with those of the shared functions in front that it uses.

    A function is made anew each time that a script runs, which costs as much as a small command.
    """
    folder = resources.files("brim.store") / "scripts"
    blocks = [block for block in (folder / "common.lua").read_text().split("\n\n") if _DEFINED.search(block)]
    return {
        file.name.removesuffix(".lua"): _linked(file.read_text(), blocks)
        for file in folder.iterdir()
        if file.name.endswith(".lua") and file.name != "common.lua"
    }


def _linked(script: str, blocks: Sequence[str]) -> str:
    """The script behind the blocks that define what it names, and what these name; a block names only earlier ones."""
    needed = script
    for block in reversed(blocks):
        if any(re.search(rf"\b{name}\b", needed) for name in _DEFINED.findall(block)):
            needed = block + "\n\n" + needed
    return needed


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script."""

    script: str
    keys: Sequence[str] | Sequence[Arg]
    args: Sequence[Arg] = ()


class Runner:
    """Calls scripts by their digest, and loads them when the server does not have them (any more)."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client
        self._digests = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in sources().items()}

    def load(self) -> None:
        """Loads every script; raises ``redis.ResponseError`` for one that the server cannot compile."""
        pipeline = self._client.pipeline(transaction=False)
        for text in sources().values():
            pipeline.script_load(text)
        pipeline.execute()

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

    def ask(self, call: Call) -> Callable[[], Any]:
        """Sends a call on the client's one connection; what is returned waits for the answer, once.

        Until then nothing else may be asked there. Every error is raised, also that of a script that is not known.
        """
        connection = self._client.connection
        connection.send_command(*self._words(call))
        read: Callable[[], Any] = connection.read_response
        return read

    def run_behind(self, words: Sequence[Arg | float], call: Call) -> tuple[Any, Any]:
        """A command, which may block, and a script behind it in the same round trip: the answers of both."""
        first, answer = self._exchange([words, self._words(call)])
        if isinstance(answer, NoScriptError):
            answer = self.run_many([call])[0]
        for found in (first, answer):
            if isinstance(found, Exception):
                raise found
        return first, answer

    def _send(self, calls: Sequence[Call]) -> list[Any]:
        return self._exchange([self._words(call) for call in calls]) if calls else []

    def _exchange(self, commands: Sequence[Sequence[Arg | float]]) -> list[Any]:
        """The answers to commands in one round trip, in order; where one is an error, the error.

        On a connection itself: what the client does around a command costs more than the command.
        """
        client = self._client
        connection = client.connection or client.connection_pool.get_connection()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            return [_read(connection) for _ in commands]
        except BaseException:
            connection.disconnect()  # what is still to come is no answer to the next command
            raise
        finally:
            if client.connection is None:
                client.connection_pool.release(connection)

    def _words(self, call: Call) -> Sequence[Arg]:
        return ("EVALSHA", self._digests[call.script], len(call.keys), *call.keys, *call.args)


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error
