"""What an agent asks of an app before it starts workers, and how claims wait for Redis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import redis
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, chain, chord, group

from brim.celery import attempts as attempts_module
from brim.celery.agent_link import WorkerIdentity
from brim.celery.attempts import Attempts
from brim.celery.envelope import INTAKE_QUEUE, AttemptHeader
from brim.celery.executor import _carrier, goes_to_intake, plain
from brim.celery.install import install
from brim.celery.plugin import registration, unpicklable_settings
from brim.settings import Settings
from brim.store.types import ClaimAnswer

HEADER = AttemptHeader("1-1", ("GPU-a",), "n1", 1000, 300, nesting=0, retries=0)


@pytest.fixture
def app() -> Celery:
    return Celery("plugin", broker="redis://127.0.0.1:1/0", set_as_current=False)


class TestRegistration:
    def test_every_task_is_named_and_its_signature_read(self, app: Celery) -> None:
        @app.task(name="plain", shared=False)
        def plain_task(url: str, *, width: int = 512) -> None: ...

        @app.task(name="bound", bind=True, autoretry_for=(ValueError,), shared=False)
        def bound_task(self: Any, url: str) -> None: ...

        names, signatures = registration(app)

        assert {"plain", "bound"} <= set(names)
        assert signatures["plain"].bind("plain", ["u"], {"width": 64}) == {"url": "u", "width": 64}
        assert signatures["bound"].bind("bound", ["u"], {}) == {"url": "u"}


class TestUnpicklableSettings:
    def test_an_ordinary_app_has_none(self, app: Celery) -> None:
        install(app)
        app.conf.task_routes = {"vision.*": {"queue": "images"}}

        assert unpicklable_settings(app) == []

    def test_each_is_named_with_the_reason(self, app: Celery) -> None:
        app.conf.task_routes = [lambda name, *_, **__: None]
        app.conf.beat_schedule = {"tick": {"task": "t", "schedule": math}}

        found = dict(unpicklable_settings(app))

        assert found.keys() == {"task_routes", "beat_schedule"}
        assert "lambda" in found["task_routes"]
        assert "cannot pickle 'module' object" in found["beat_schedule"]

    def test_a_module_given_as_the_configuration_is_named(self, app: Celery) -> None:
        app.config_from_object(math)

        assert dict(unpicklable_settings(app)).keys() == {"config_from_object(...)"}


class TestPatience:
    @pytest.fixture
    def ask(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        """Make the finish claim with a store that raises the given errors, one a call, before it grants."""

        def ask(*errors: BaseException, patience_s: float = 60.0) -> ClaimAnswer:
            pauses: list[float] = []
            monkeypatch.setattr(attempts_module.time, "sleep", pauses.append)
            waiting = list(errors)
            side = Attempts(
                WorkerIdentity("n1", "gpu0", "gpu.n1.0", ("GPU-a",), "b00t", "nobody"), Settings(), patience_s
            )

            def finish(*_: Any, **__: Any) -> ClaimAnswer:
                if waiting:
                    raise waiting.pop(0)
                return ClaimAnswer.GRANTED

            monkeypatch.setattr(side.store, "finish", finish)
            answer = side.finish("t-1", HEADER, "1.1")
            assert max(pauses, default=0.0) <= attempts_module.LONGEST_PAUSE_S
            return answer

        return ask

    @pytest.mark.parametrize(
        "error",
        [
            redis.ConnectionError("gone"),
            redis.TimeoutError("slow"),
            redis.ReadOnlyError("replica"),
            redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'"),
            SoftTimeLimitExceeded(),
        ],
    )
    def test_an_outage_is_waited_for(self, ask: Callable[..., Any], error: BaseException) -> None:
        assert ask(*[error] * 30) is ClaimAnswer.GRANTED

    def test_what_waiting_cannot_mend_is_raised(self, ask: Callable[..., Any]) -> None:
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            ask(redis.ResponseError("WRONGTYPE Operation against a key"))

    def test_the_main_process_gives_up_in_time(self, ask: Callable[..., Any]) -> None:
        with pytest.raises(redis.ConnectionError):
            ask(redis.ConnectionError("gone"), patience_s=-1.0)


class TestReplacements:
    def test_the_last_task_of_a_workflow_carries_its_id(self, app: Celery) -> None:
        one, two, three = (app.signature(name) for name in ("one", "two", "three"))

        assert _carrier(one).task == "one"
        assert _carrier(chain(one, two, app=app)).task == "two"
        assert _carrier(chord(group(one, two, app=app), three, app=app)).task == "three"
        assert _carrier(chain(one, chord(group(one, two, app=app), three, app=app), app=app)).task == "three"

    def test_a_queue_of_its_own_leads_out_of_brim(self, app: Celery) -> None:
        assert not goes_to_intake(app, app.signature("one"))
        assert not goes_to_intake(app, app.signature("one", queue="elsewhere"))
        assert goes_to_intake(app, app.signature("one", queue=INTAKE_QUEUE))


def test_an_error_of_the_memory_family_is_replaced_without_its_frames() -> None:
    def allocate() -> None:
        kept = bytearray(8)
        raise MemoryError(f"no room for {len(kept)} bytes more")

    try:
        allocate()
    except MemoryError as error:
        replacement = plain(error)

    assert str(replacement) == "MemoryError: no room for 8 bytes more"
    assert "in allocate" in replacement.__notes__[0]
    assert replacement.__traceback__ is replacement.__cause__ is replacement.__context__ is None
