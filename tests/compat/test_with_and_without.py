"""The same app with and without ``brim.install``: a producer sees the same; docs/compatibility.md lists the cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import group

from support.apps.compat import Variant
from support.compat_cases import CASES
from support.twins import Side, Twins, twins

pytestmark = pytest.mark.timeout(300)

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
FOR_ANY_BACKEND = (
    "a bound task sees its request: arguments, retries, root and parent",
    "a failure: exception, traceback, state; get(propagate=False)",
    "expires in the past: revoked",
    "chain",
    "chord",
    "group with a failing member",
    "link_error of the old style, with the id alone",
    "replace inside a chain and inside a chord: what follows gets the replacement's result",
)


@pytest.fixture(scope="module")
def both(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    with twins(valkey_url, tmp_path_factory.mktemp("twins")) as found:
        yield found


@pytest.fixture(scope="module")
def by_files(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """Settings in Django's style, msgpack by default, results in files, Celery's own names for priority lists."""
    with twins(valkey_url, tmp_path_factory.mktemp("twins"), Variant.DJANGO) as found:
        yield found


@pytest.mark.parametrize("sentence", CASES)
def test_the_producer_sees_the_same(both: Twins, sentence: str) -> None:
    both.compare(CASES[sentence])


@pytest.mark.parametrize("sentence", FOR_ANY_BACKEND)
def test_the_producer_sees_the_same_with_other_results_serializer_and_settings(by_files: Twins, sentence: str) -> None:
    by_files.compare(CASES[sentence])


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
