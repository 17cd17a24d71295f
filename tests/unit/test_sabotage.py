"""Storms that must fail switch guards off by the scripts' text: here it is seen at once that the text has changed."""

from __future__ import annotations

import pytest

from brim.store.runner import sources
from faults.sabotage import GUARDS


@pytest.mark.parametrize("what", sorted(GUARDS))
def test_every_guard_is_where_it_is_switched_off(what: str) -> None:
    texts = sources()
    # What the shared functions say stands in front of every script that uses it, as `commit` uses the fence.
    missing = [(script, guard) for script, guard, _ in GUARDS[what] if guard not in texts.get(script, texts["commit"])]
    assert missing == []
