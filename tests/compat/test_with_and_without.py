"""The same app with and without ``brim.install``: a producer sees the same; docs/compatibility.md lists the cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import group

from support.compat_cases import CASES
from support.twins import Side, Twins, twins

pytestmark = pytest.mark.timeout(300)

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


@pytest.fixture(scope="module")
def both(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    with twins(valkey_url, tmp_path_factory.mktemp("twins")) as found:
        yield found


@pytest.mark.parametrize("sentence", CASES)
def test_the_producer_sees_the_same(both: Twins, sentence: str) -> None:
    both.compare(CASES[sentence])


@pytest.mark.large
@pytest.mark.timeout(900)
def test_a_group_of_ten_thousand(both: Twins) -> None:
    def large_group(side: Side) -> bool:
        result = group(side.s("add", i, 1) for i in range(10_000))()
        return bool(result.get(timeout=800) == list(range(1, 10_001)))

    assert both.compare(large_group) is True


def test_the_document_lists_every_case() -> None:
    listed = {line.removeprefix("- ") for line in DOCUMENT.read_text().splitlines() if line.startswith("- ")}
    assert set(CASES) <= listed, set(CASES) - listed
