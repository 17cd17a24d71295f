"""Switches one of brim's guards off, to show that a storm would notice: a change to the scripts' text, in tests only.

Processes of a storm read the variable `SABOTAGE_ENV`; nothing in brim knows about it.
"""

from __future__ import annotations

import os
from functools import cache

from brim.store import runner

SABOTAGE_ENV = "BRIM_TEST_SABOTAGE"

# what is switched off -> (script, the guard in its text, what stands there instead); common: in all that use it
GUARDS: dict[str, list[tuple[str, str, str]]] = {
    "fencing": [
        ("common", "return redis.call('HGET', leader, 'epoch') ~= epoch", "return false"),
        ("claim", "if known[2] ~= ARGV[1] then return 'stale' end", ""),
        ("claim", "if state ~= 'placed' then return 'stale' end", ""),
        ("bind", "if known[2] ~= ARGV[1] then return { 'stale', '' } end", ""),
        ("finish", "known[2] ~= ARGV[1] or not (main or known[3] == ARGV[2])", "false"),
        ("finish", "elseif state ~= 'running' and not (main and state == 'claimed') then", "elseif false then"),
        ("end", "if state ~= 'running' or proc ~= claimer then return 'stale' end", ""),
        ("end", "if known[2] ~= attempt or not LIVE[state] then return 'stale' end", ""),
    ],
    "admission": [
        (
            "admit",
            "if redis.call('LREM', list, -1, raw) == 0 then return 'gone' end",
            "redis.call('LREM', list, -1, raw)",
        ),
        ("admit", "if not newer then return 'redelivery' end", ""),
        ("admit", "if LIVE[state] then", "if false then"),
    ],
    "reclaim": [
        ("lose", "local record, id, attempt = KEYS[1], ARGV[1], ARGV[2]", "if true then return 'stale' end\n"),
    ],
}


@cache
def apply_sabotage() -> None:
    """Do to this process's scripts what the environment says, once."""
    what = os.environ.get(SABOTAGE_ENV)
    if not what:
        return
    texts = dict(runner.sources())
    for script, guard, instead in GUARDS[what]:
        names = [name for name in texts if guard in texts[name] and script in ("common", name)]
        assert names, f"the guard is not in {script}.lua any more: {guard}"
        for name in names:
            texts[name] = texts[name].replace(guard, instead)
    runner.sources = lambda: texts
