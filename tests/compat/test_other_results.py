"""A part of the cases again with results elsewhere than in Redis, another serializer, and settings of another style."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.apps.compat import Variant
from support.compat_cases import CASES
from support.twins import Twins, twins

pytestmark = [pytest.mark.large, pytest.mark.timeout(300)]

FOR_ANY_BACKEND = (
    "a bound task sees its request: arguments, retries, root and parent",
    "a failure: exception, traceback, state; get(propagate=False)",
    "expires in the past: revoked",
    "autoretry_for: success at the third try",
    "link_error of the old style, with the id alone",
    "group with a failing member",
)
NOT_FOR_RPC = (
    "chain",
    "chord",
    "link: each callback gets the result",
    "replace inside a chain and inside a chord: what follows gets the replacement's result",
)
"""Where results are messages to who published the task, Celery has no chords, and each is read once."""


@pytest.fixture(scope="module")
def other(request: pytest.FixtureRequest, valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """One variant of the app after the other; `Variant` says what they are."""
    with twins(valkey_url, tmp_path_factory.mktemp("twins"), request.param) as found:
        yield found


@pytest.mark.parametrize("sentence", FOR_ANY_BACKEND)
@pytest.mark.parametrize("other", [Variant.DJANGO, Variant.DATABASE, Variant.RPC], indirect=True)
def test_the_producer_sees_the_same(other: Twins, sentence: str) -> None:
    other.compare(CASES[sentence])


@pytest.mark.parametrize("sentence", NOT_FOR_RPC)
@pytest.mark.parametrize("other", [Variant.DJANGO, Variant.DATABASE], indirect=True)
def test_the_producer_sees_the_same_where_results_are_kept(other: Twins, sentence: str) -> None:
    other.compare(CASES[sentence])
