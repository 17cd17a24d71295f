"""Documents that repeat what the code says must say the same."""

import re
from pathlib import Path

from brim.store.keys import Keys

ROOT = Path(__file__).parents[2]


def test_every_key_is_documented_and_no_other() -> None:
    keys = Keys("")
    methods = {"task": "<id>", "story": "<id>", "lane": "<lane>", "book": "<uuid>", "node": "<name>"}
    methods |= {"taskset": "<digest>", "submission": "<id>", "executor": "<name>"}
    members = [name for name in vars(Keys) if not name.startswith("_") and name != "prefix"]
    names = {getattr(keys, name)(methods[name]) if name in methods else getattr(keys, name) for name in members}

    rows = (ROOT / "docs" / "redis-keys.md").read_text().splitlines()
    documented = {
        m[1] for row in rows if (m := re.match(r"\| `([^`]+)` \| (?:hash|list|set|sorted|integer|string|channel)", row))
    }

    assert documented == names
