"""What an agent demands of the user's Celery app, against a real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

import brim
from brim.settings import ConfigurationError, Settings
from brim.store import Store
from brim_services.agent.app import check_app, load_app
from support.celery_app import configure


@pytest.fixture
def settings(valkey_url: str, namespace: str) -> Settings:
    return Settings.model_validate(
        {
            "redis": {"url": valkey_url},
            "broker": {"global_keyprefix": namespace},
            "results": {"app_options": {"result_backend_transport_options": {"global_keyprefix": namespace}}},
        }
    )


@pytest.fixture
def app(valkey_url: str, namespace: str) -> Celery:
    """An app that goes with the settings."""
    app = configure(Celery("user", set_as_current=False), valkey_url, namespace)
    brim.install(app)
    return app


Problems = Callable[..., str]


@pytest.fixture
def problems(app: Celery, settings: Settings) -> Problems:
    """Change a setting of the app, and tell what is wrong with it then."""

    def check(checked: Celery = app, **changes: Any) -> str:
        checked.conf.update(changes)
        client = redis.Redis.from_url(settings.redis.url)
        try:
            check_app(checked, settings, Store(client, settings.broker.global_keyprefix + settings.redis.prefix))
        except ConfigurationError as error:
            return str(error)
        finally:
            client.close()
        return ""

    return check


def test_an_app_that_goes_with_the_settings_is_accepted(problems: Problems, valkey_url: str) -> None:
    assert problems() == ""
    assert problems(result_backend=valkey_url.replace("127.0.0.1", "localhost")) == ""
    assert problems(result_backend=None) == ""


def test_a_broker_other_than_redis_is_refused(problems: Problems) -> None:
    assert "broker_url: brim needs Redis or Valkey" in problems(broker_url="memory://")


def test_another_database_than_brims_is_refused_whatever_its_address(problems: Problems, valkey_url: str) -> None:
    found = problems(broker_url=valkey_url.removesuffix("/0") + "/1")
    assert found.startswith("the Celery app: broker_url: ")
    assert "another database than redis.url" in found


def test_a_broker_that_does_not_answer_is_refused(problems: Problems) -> None:
    assert "broker_url: redis://:**@127.0.0.1:1/0 does not answer" in problems(broker_url="redis://127.0.0.1:1/0")


def test_an_app_without_brim_is_refused(problems: Problems, valkey_url: str, namespace: str) -> None:
    plain = configure(Celery("plain", set_as_current=False), valkey_url, namespace)
    assert problems(plain) == ("the Celery app: brim.install(app) is missing: without it the workers do not know brim")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"global_keyprefix": "x:"}, "global_keyprefix is 'x:', but broker.global_keyprefix in brim's settings is 't"),
        ({"sep": ":"}, "sep is ':', but broker.sep"),
        ({"priority_steps": [0, 5]}, "priority_steps is (0, 5), but broker.priority_steps"),
        ({"visibility_timeout": 9999}, "visibility_timeout is 9999 s, longer than placement.visibility_timeout_s"),
    ],
)
def test_a_broker_with_other_options_is_refused(
    problems: Problems, namespace: str, change: dict[str, Any], part: str
) -> None:
    options = {"global_keyprefix": namespace, **change}
    found = problems(broker_transport_options=options)
    assert found.startswith("the Celery app: broker_transport_options: ")
    assert part in found


def test_results_that_brims_answers_would_not_reach_are_refused(problems: Problems) -> None:
    found = problems(
        result_backend="redis://:secret@elsewhere:7/3",
        result_backend_transport_options={"global_keyprefix": "y:"},
    )
    assert "the Celery app: result_backend: it is redis://:**@elsewhere:7/3, but brim would answer in redis:" in found
    assert "set results.backend\n" in found
    assert "result_backend_transport_options: global_keyprefix is 'y:'" in found
    assert "secret" not in found


def test_a_setting_that_cannot_be_pickled_is_named(problems: Problems) -> None:
    found = problems(task_annotations={"*": {"on_failure": lambda *_: None}})
    assert "the Celery app: task_annotations: it cannot be pickled" in found


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "the app cannot be loaded: No module named 'userapp'"),
        ("x = 1", "the app cannot be loaded: "),
        ("import missing_library", "No module named 'missing_library'"),
        ("app = 3", "this is no Celery app, but int"),
    ],
)
def test_an_app_that_cannot_be_loaded_is_refused(
    source: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "userapp", raising=False)
    if source is not None:
        (tmp_path / "userapp.py").write_text(source)
    with pytest.raises(ConfigurationError, match="-A userapp: ") as caught:
        load_app("userapp")
    assert reason in str(caught.value)
