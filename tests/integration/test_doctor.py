"""`brim doctor`: a good app passes, and each planted fault is named."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery

from brim.core.attributes import TaskSignature
from brim.core.model import Reason
from brim.core.profiles import Profile, ResourceTable
from brim.gpu.probe import DeviceFault, DeviceInfo, Sample
from brim_services import cli
from brim_services.doctor import (
    Finding,
    Level,
    check_clock,
    check_devices,
    check_info,
    check_tasks,
    missing_attributes,
)
from support.valkey import own_server, url_of

APP = """
from celery import Celery
import brim
app = Celery("shop", broker={url!r}, backend={url!r})
app.conf.broker_transport_options = {{"global_keyprefix": {namespace!r}}}
{install}
{conf}

@app.task(name="shop.cut", shared=False{options})
def cut(url, *, width=1, height=1):
    pass
"""
TABLE = """
profiles:
  shop.cut: {vram: "100 + 0.001 * width * height"}
"""
Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def doctor(
    valkey_url: str,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Doctor]:
    """Runs the doctor on an app with faults of the test's choice; its exit code and words."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BRIM_BROKER__GLOBAL_KEYPREFIX", namespace)
    monkeypatch.setenv("BRIM_DEVICES", "sim:1x8GiB")
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path / "devices"))
    monkeypatch.setenv("BRIM_PLACEMENT__POLICY_FILE", str(Path(__file__).parents[2] / "configs" / "placement.yaml"))
    modules: list[str] = []

    def run(
        *,
        url: str = valkey_url,
        install: str = "brim.install(app)",
        conf: str = "",
        options: str = "",
        table: str = TABLE,
        prefix: str = namespace,
    ) -> tuple[int, str]:
        modules.append(f"shop_{uuid.uuid4().hex[:8]}")
        text = APP.format(url=url, namespace=prefix, install=install, conf=conf, options=options)
        (tmp_path / f"{modules[-1]}.py").write_text(text)
        (tmp_path / "table.yaml").write_text(table)
        monkeypatch.setenv("BRIM_REDIS__URL", url)
        monkeypatch.setenv("BRIM_RESOURCES__TABLE", str(tmp_path / "table.yaml"))
        monkeypatch.setattr(sys, "argv", ["brim", "doctor", "-A", modules[-1]])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert not isinstance(exit_.value.code, str), exit_.value.code
        return int(exit_.value.code or 0), capsys.readouterr().out

    yield run
    for module in modules:
        sys.modules.pop(module, None)


def faults(words: str) -> list[str]:
    return [line.removeprefix("fault").strip() for line in words.splitlines() if line.startswith("fault")]


def test_a_good_app_has_no_fault(doctor: Doctor) -> None:
    code, words = doctor()
    assert (code, faults(words)) == (0, []), words
    for subject in ("gpu", "table", "redis", "clock", "app", "tasks"):
        assert any(line.split()[:2] == ["good", subject] for line in words.splitlines()), words


def test_a_server_that_evicts_is_named(doctor: Doctor) -> None:
    with own_server(**{"maxmemory-policy": "allkeys-lru"}) as server:
        code, words = doctor(url=url_of(server))
    assert code == 1
    assert "maxmemory-policy is allkeys-lru" in " ".join(faults(words))


def test_a_server_that_is_away_is_named_and_hides_nothing_else(doctor: Doctor) -> None:
    code, words = doctor(url="redis://:secret@127.0.0.1:1/0", options=", serializer='pickle'")
    assert code == 1
    assert "secret" not in words
    assert any(fault.startswith("redis  redis://127.0.0.1:1/0") for fault in faults(words))
    assert any("serializer is 'pickle'" in fault for fault in faults(words))


def test_an_app_without_brim_is_named(doctor: Doctor) -> None:
    code, words = doctor(install="")
    assert (code, len(faults(words))) == (1, 1)
    assert "brim.install(app) is missing" in words


def test_another_key_prefix_is_named(doctor: Doctor) -> None:
    code, words = doctor(prefix="other:")
    assert (code, len(faults(words))) == (1, 1)
    assert "global_keyprefix is 'other:', but broker.global_keyprefix in brim's settings is" in words


def test_a_setting_that_cannot_be_sent_to_pool_processes_is_named(doctor: Doctor) -> None:
    code, words = doctor(conf="app.conf.task_routes = [*app.conf.task_routes, lambda *a, **k: None]")
    assert (code, len(faults(words))) == (1, 1)
    assert "task_routes: it cannot be pickled" in words


def test_a_serializer_that_brim_does_not_read_is_named(doctor: Doctor) -> None:
    code, words = doctor(options=", serializer='yaml'")
    assert code == 1
    assert "shop.cut: serializer is 'yaml', but brim reads JSON and msgpack" in words


def test_an_attribute_that_no_call_gives_is_named(doctor: Doctor) -> None:
    code, words = doctor(table='profiles: {shop.cut: {vram: "100 * batch"}}')
    assert (code, len(faults(words))) == (1, 1)
    assert "shop.cut: the formula's batch are no arguments of it" in words


def test_a_table_without_any_task_of_the_app_is_named(doctor: Doctor) -> None:
    code, words = doctor(table="profiles: {shop.sew: {vram: 100}}")
    assert code == 1
    assert "profile 'shop.sew' is the name of no task of this app: it has " in words
    assert "no task of this app has a profile" in words


BATCHED = "profiles: {shop.cut: {model: m, batch: {max_items: 8}}}"


def test_a_batched_task_without_the_base_is_named(doctor: Doctor) -> None:
    code, words = doctor(table=BATCHED)
    assert (code, len(faults(words))) == (1, 1)
    assert "shop.cut: profile 'shop.cut' batches it, but it has not the base brim.BatchTask" in words
    code, words = doctor(table=BATCHED, options=", base=brim.BatchTask")
    assert (code, faults(words)) == (0, []), words
    code, words = doctor(options=", base=brim.BatchTask")
    assert "shop.cut: it is a brim.BatchTask, but profile 'shop.cut' has no batch" in words


def test_whole_gpus_of_executors_that_are_never_replaced_are_a_fault(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIM_EXECUTOR__RECYCLE", "never")
    code, words = doctor(table="profiles: {shop.cut: {vram: all}}")
    assert (code, len(faults(words))) == (1, 1)
    assert "profile 'shop.cut' asks for whole GPUs, and executor.recycle: never lets idle executors keep" in words
    monkeypatch.setattr(sys, "argv", ["brim", "check-config"])
    with pytest.raises(SystemExit, match="1"):
        cli.main()


def test_a_profile_without_a_task_is_told_with_the_tasks_that_there_are() -> None:
    table = ResourceTable.parse("profiles: {sew: {vram: 100}}", "table")
    names = ["celery.chain", *(f"shop.t{number:02}" for number in range(25))]
    found = next(check_tasks(Celery("shop", set_as_current=False), table, names, {}))
    assert found.message.startswith("profile 'sew' is the name of no task of this app: it has shop.t00, shop.t01, ")
    assert found.message.endswith("shop.t19 and 5 more")


def test_gpus_that_were_asked_for_and_are_not_there_are_named(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_DEVICES", "sim:1x8")
    code, words = doctor()
    assert (code, len(faults(words))) == (1, 1)
    assert "'1x8' is not COUNTxSIZE" in words


def test_an_app_that_cannot_be_loaded_is_named(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, words = doctor(install="import no_such_module")
    assert code == 1
    assert "the app cannot be loaded: No module named 'no_such_module'" in words


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")
def test_a_task_that_names_its_queue_is_noted(doctor: Doctor) -> None:
    code, words = doctor(options=", queue='mine'")
    assert code == 0
    assert "shop.cut: names the queue 'mine' itself, which wins over its profile" in words


def test_an_eager_app_and_one_without_results_are_noted(doctor: Doctor) -> None:
    code, words = doctor(conf="app.conf.update(task_always_eager=True, result_backend=None)")
    assert code == 0
    assert "task_always_eager" in words
    assert "result_backend: none" in words


@pytest.mark.parametrize(
    ("skew_s", "level"), [(0.0, Level.GOOD), (1.9, Level.GOOD), (2.5, Level.FAULT), (-9, Level.FAULT)]
)
def test_the_clock_is_judged_by_what_is_sure(skew_s: float, level: Level) -> None:
    assert check_clock(100.0, 100.01 + skew_s, 100.02).level is level


def test_a_slow_answer_proves_no_skew() -> None:
    assert check_clock(100.0, 103.0, 106.0).level is Level.GOOD


def test_the_server_that_is_ahead_is_said_so() -> None:
    assert "9.0 s behind the server's" in check_clock(100.0, 109.0, 100.0).message
    assert "9.0 s ahead of the server's" in check_clock(109.0, 100.0, 109.0).message


def test_a_device_that_cannot_be_read_is_a_fault_and_an_untold_memory_a_note() -> None:
    devices = [DeviceInfo("GPU-a", 0, "A", 1000), DeviceInfo("GPU-b", 1, "A", 1000)]
    samples = {
        "GPU-a": DeviceFault("GPU-a", Reason("lost", "fell off the bus")),
        "GPU-b": Sample(1000, 0, 1000, {7: None}),
    }
    found = list(check_devices(devices, samples))
    assert [finding.level for finding in found] == [Level.FAULT, Level.GOOD, Level.NOTE]
    assert "fell off the bus" in found[0].message


def test_a_server_without_a_file_or_almost_full_is_noted() -> None:
    info = {"redis_version": "7.0.15", "aof_enabled": 0, "maxmemory": 100, "used_memory": 95}
    found = list(check_info(info, "here"))
    assert [finding.level for finding in found] == [Level.GOOD, Level.NOTE, Level.NOTE]
    assert found[0] == Finding(Level.GOOD, "redis", "Redis 7.0.15 at here, noeviction, runs brim's scripts")


def test_any_keyword_may_be_an_attribute() -> None:
    profile = next(iter(ResourceTable.parse('profiles: {t: {vram: "a * b", defaults: {b: 1}}}', "t")))
    assert isinstance(profile, Profile)
    assert missing_attributes(profile, TaskSignature.from_callable(lambda x: x)) == ["a"]
    assert missing_attributes(profile, TaskSignature.from_callable(lambda **more: more)) == []
