"""Scripts are loaded with the shared functions that they use, and no others."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from brim.store.runner import sources

COMMON = (resources.files("brim.store") / "scripts" / "common.lua").read_text()
SHARED = set(re.findall(r"^local (?:function )?(\w+)", COMMON, re.MULTILINE))


@pytest.mark.parametrize("script", sorted(sources()))
def test_a_script_has_what_it_names_before_it_is_named(script: str) -> None:
    text = re.sub(r"--.*", "", sources()[script])
    for name in SHARED:
        uses = [found.start() for found in re.finditer(rf"(?<![\w.'\"]){name}(?=\()", text)]
        defined = text.find(f"local function {name}(")
        assert not uses or -1 < defined < min(uses), name


def test_a_script_without_books_is_loaded_without_them() -> None:
    assert "local function tell" in sources()["claim"]
    assert "open_book" not in sources()["claim"]
    assert "open_book" in sources()["bind"]
