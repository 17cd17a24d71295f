"""The command line: what it prints for people and as JSON, and how it refuses."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from brim.core.calibration import Calibration, Sample
from brim.core.model import Demand, Identity, Node, Reason, State
from brim.core.profiles import ResourceTable
from brim.store import Store
from brim.store.types import Admission, Commit, DeviceRegistration, NodeRegistration, Peeked
from brim_services import cli, logs

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def brim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; exit code, standard output, standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["brim", *argv])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return (1, out, f"{err}{code}") if isinstance(code, str) else (code or 0, out, err)

    return run


def admit(store: Store, task_id: str, vram_mib: int) -> None:
    raw, source = f'{{"id":"{task_id}"}}'.encode(), store.keys.prefix.removesuffix("brim:") + "brim.intake"
    store.client.lpush(source, raw)
    admission = Admission(
        source=Peeked(source, raw),
        identity=Identity(task_id, 0, 0),
        task="t",
        lane=f"t|{vram_mib}MiB",
        demand=Demand(vram_mib),
        context_mib=300,
        priority=5,
        head=b"<",
        tail=b">",
    )
    assert store.admit([admission]) == ["admitted"]


@pytest.fixture
def store(valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store with one device, a task that is placed on it, and one that waits; the settings point to it."""
    monkeypatch.setenv("BRIM_REDIS__URL", valkey_url)
    monkeypatch.setenv("BRIM_BROKER__GLOBAL_KEYPREFIX", namespace)
    client = redis.Redis.from_url(valkey_url)
    store = Store(client, f"{namespace}brim:")
    epoch, _ = store.elect("test", 60)
    device = DeviceRegistration("GPU-a", 0, "SIM", 10_000, 500)
    assert store.register_node(NodeRegistration(Node("n1"), "boot", 2, ["t"], {"t": "{}"}, [device]))
    admit(store, "placed", 8_000)
    admit(store, "waits", 3_000)
    queue = f"{namespace}gpu.n1.0"
    commit = Commit("placed", "t|8000MiB", f"{epoch}-1", ["GPU-a"], "n1", queue, 8_000, b"slot")
    assert [answer.status for answer in store.commit(epoch, [commit], 0)] == ["committed"]
    store.note_waits(epoch, {"waits": Reason("memory", "1500 MiB are short on every device")})
    yield store
    assert store.audit() == []
    client.close()


def test_status_shows_devices_overflow_and_queues(brim: Run, store: Store) -> None:
    code, out, _ = brim("status")

    assert code == 0
    for told in ("n1.0", "8,000", "1 waiting", "1500 MiB are short", "waiting 1", "placed 1", "gpu.n1.0 1"):
        assert told in out


def test_status_as_json(brim: Run, store: Store) -> None:
    code, out, _ = brim("status", "--json")

    told = json.loads(out)
    assert code == 0
    assert told["devices"][0]["available_mib"] == 1_500
    assert told["devices"][0]["reserved"] == 8_000
    assert told["overflow"] == [
        {"lane": "t|3000MiB", "depth": 1, "reason": "1500 MiB are short on every device [memory]"}
    ]
    assert told["queues"] == {"brim.intake": 0, "gpu.n1.0": 1}
    assert told["tasks"] == {"waiting": 1, "placed": 1}


def test_top_without_a_terminal_is_printed_once_and_without_escape_codes(brim: Run, store: Store) -> None:
    code, out, _ = brim("top")

    assert code == 0
    assert "\x1b" not in out
    for told in ("placed 1", "n1.0", "7.8/9.8", "1/2", "1500 MiB are short"):
        assert told in out


def test_tasks_lists_the_newest_first_and_by_state(brim: Run, store: Store) -> None:
    assert [row["task_id"] for row in json.loads(brim("tasks", "--json")[1])] == ["waits", "placed"]
    assert [row["task_id"] for row in json.loads(brim("tasks", "--state", "placed", "--json")[1])] == ["placed"]

    _, out, _ = brim("tasks", "--limit", "1")
    assert "1500 MiB are short" in out
    assert "8000" not in out


def test_show_tells_the_story(brim: Run, store: Store) -> None:
    code, out, _ = brim("show", "placed")

    assert code == 0
    for told in ("t  placed", "8000 MiB", "admitted", "placed", "node=n1", "GPU-a"):
        assert told in out
    assert "[memory]" in brim("show", "waits")[1]
    told = json.loads(brim("show", "placed", "--json")[1])
    assert told["record"]["state"] == "placed"
    assert [event["event"] for event in told["story"]] == ["admitted", "placed"]


def test_whoever_waits_behind_the_first_of_a_lane_waits_for_the_same_reason(brim: Run, store: Store) -> None:
    admit(store, "later", 3_000)

    told = {row["task_id"]: row["reason"] for row in json.loads(brim("tasks", "--json")[1])}

    assert told["later"] == {
        "code": "memory",
        "message": "behind waits in its lane: 1500 MiB are short on every device",
    }
    admit(store, "alone", 2_000)
    assert "placement has not tried it yet [not_tried]" in brim("show", "alone")[1]


def test_explain_names_what_is_short_on_each_node(brim: Run, store: Store) -> None:
    code, out, _ = brim("explain", "waits")

    assert code == 0
    for told in ("t  waits  waiting", "1500 MiB are short", "3000 MiB", "policy    balanced"):
        assert told in out
    assert "no place can take it now" in out
    assert "out       n1: memory short by 1500 MiB on gpu0@n1 [memory]" in out
    assert "starts    nobody knows when: it is not known yet how long t runs [run_times]" in out
    told = json.loads(brim("explain", "waits", "--json")[1])
    assert (told["expected_start"], told["expected_note"]["code"]) == (None, "run_times")


def test_explain_rates_candidates_part_by_part(brim: Run, store: Store) -> None:
    admit(store, "small", 1_000)

    code, out, _ = brim("explain", "small", "--json")

    told = json.loads(out)
    assert code == 0
    assert (told["policy"], told["state"], told["out"]) == ("balanced", "waiting", [])
    [candidate] = told["candidates"]
    assert (candidate["node"], candidate["devices"]) == ("n1", ["GPU-a"])
    assert set(candidate["parts"]) == {"server_load", "memory_balance", "satisfaction"}
    assert sum(candidate["parts"].values()) == pytest.approx(candidate["score"])
    assert told["expected_start"] == [0.0, 0.0]
    assert "satisfaction" in brim("explain", "small")[1]
    assert "is on     GPU-a of n1" in brim("explain", "placed")[1]
    assert "is not known" in brim("explain", "nobody")[2]


def test_show_refuses_an_unknown_task(brim: Run, store: Store) -> None:
    code, out, err = brim("show", "nobody", "--json")

    assert (code, out) == (1, "")
    assert "brim: task nobody is not known" in err


def test_cancel_tells_what_became_of_each(brim: Run, store: Store) -> None:
    code, out, _ = brim("cancel", "waits", "nobody")

    assert code == 1
    assert "waits: cancelled\n" in out
    assert "nobody: not cancelled: brim does not know it" in out
    record = store.record("waits")
    assert record
    assert (record.state, record.reason and record.reason.code) == (State.CANCELLED, "cancelled")
    assert json.loads(brim("cancel", "waits", "--json")[1]) == {"waits": "refused"}


def test_audit_finds_what_differs(brim: Run, store: Store) -> None:
    assert brim("audit")[:2] == (0, "no difference\n")

    store.client.hincrby(store.keys.counts, "waiting", 1)
    code, out, _ = brim("audit", "--json")
    store.client.hincrby(store.keys.counts, "waiting", -1)

    assert code == 1
    assert json.loads(out) == {"differences": ["counts: waiting says 2, there are 1"]}


def test_redis_away_names_its_address_but_no_password(brim: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_REDIS__URL", "redis://user:secret@127.0.0.1:1/0")

    code, out, err = brim("status")

    assert (code, out) == (1, "")
    assert "brim: Redis at redis://127.0.0.1:1/0: " in err
    assert "secret" not in err


@pytest.fixture
def dead(store: Store) -> str:
    """A dead letter whose producer has been answered."""
    reason = Reason("lost", "it was lost too often")
    assert store.close("waits", State.DEAD, reason, [State.WAITING]) == "closed"
    for owed in store.owed(10):
        store.answered(owed)
    return "waits"


def test_dead_letters_are_listed_and_shown(brim: Run, dead: str) -> None:
    assert "it was lost too often" in brim("dead", "list")[1]
    assert [record["task_id"] for record in json.loads(brim("dead", "list", "--json")[1])] == [dead]
    assert "it was lost too often" in brim("dead", "show", dead)[1]
    code, _, err = brim("dead", "show", "placed")
    assert (code, "is no dead letter: it is placed" in err) == (1, True)


def test_a_dead_letter_is_tried_again(brim: Run, store: Store, dead: str) -> None:
    assert brim("dead", "retry", dead) == (0, f"{dead}: tried again\n", "")

    record = store.record(dead)
    assert record is not None
    assert (record.state, record.run) == (State.WAITING, 2)
    code, out, _ = brim("dead", "retry", dead)
    assert (code, out) == (1, f"{dead}: not tried again: it is no dead letter: it is waiting\n")


def test_dead_letters_are_purged(brim: Run, store: Store, dead: str) -> None:
    code, out, _ = brim("dead", "purge", dead, "nobody", "--json")

    assert (code, json.loads(out)) == (1, {dead: "removed", "nobody": "brim does not know it"})
    assert store.record(dead) is None
    assert brim("dead", "purge", "--all") == (0, "", "")


@pytest.mark.parametrize("argv", [["retry"], ["purge", "x", "--all"]])
def test_dead_letters_must_be_chosen(brim: Run, store: Store, argv: list[str]) -> None:
    code, _, err = brim("dead", *argv)

    assert (code, err) == (1, "brim: name task ids, or --all")


def test_estimate_shows_the_sum(brim: Run) -> None:
    code, out, _ = brim("estimate", "vision.segment", "--attr", "width=4096", "--attr", "height=4096")

    assert code == 0
    assert "400 (context) + 900 (weights)" in out
    told = json.loads(brim("estimate", "vision.embed", "--attr", "text=hello", "--json")[1])
    assert told["demand"]["vram_mib"] >= 400 + 1200 + 200
    assert told["priority"] == 3


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["vision.nothing"], "no profile for vision.nothing"),
        (["vision.segment"], "attribute 'width' is missing"),
        (["vision.segment", "--attr", "width"], "NAME=VALUE"),
        (["vision.segment", "--attr", "width=x", "--attr", "height=1"], "width"),
    ],
)
def test_estimate_refuses_with_the_reason(brim: Run, argv: list[str], reason: str) -> None:
    code, out, err = brim("estimate", *argv)

    assert (code, out) == (1, "")
    assert reason in err


def test_the_demo_takes_no_settings_file(brim: Run, tmp_path: Path) -> None:
    code, _, err = brim("--config", str(tmp_path / "brim.toml"), "demo")
    assert code == 2
    assert "--config" in err


def test_check_config_names_every_problem(brim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert brim("check-config")[0] == 0
    monkeypatch.setenv("BRIM_RESOURCES__TABLE", str(tmp_path / "none.yaml"))
    policy = tmp_path / "placement.yaml"
    policy.write_text("policy: fastest\n")
    monkeypatch.setenv("BRIM_PLACEMENT__POLICY_FILE", str(policy))

    code, _, err = brim("check-config")

    assert code == 1
    assert f"{tmp_path}/none.yaml: No such file" in err
    assert f"{policy}: policy: Input should be 'balanced'" in err
    code, out, _ = brim("check-config", "--json")
    assert (code, len(json.loads(out)["problems"])) == (1, 2)


def test_a_table_that_asks_for_batches_is_taken(brim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table.yaml"
    table.write_text("profiles: {t.alone: {vram: 500}, t.many: {model: m, batch: {max_items: 8, per_unit_mib: 10}}}")
    monkeypatch.setenv("BRIM_RESOURCES__TABLE", str(table))
    assert brim("check-config")[0] == 0
    assert "reserved 528 MiB" in brim("estimate", "t.many")[1]  # 512 of context and 1.3 x 10 for one item, a size class


def test_a_table_that_cannot_be_read_is_one_message(brim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"profiles: {} # \xe4")

    for path, reason in ((tmp_path, "Is a directory"), (latin, "'utf-8' codec can't decode byte 0xe4")):
        monkeypatch.setenv("BRIM_RESOURCES__TABLE", str(path))
        code, _, err = brim("estimate", "t")
        assert (code, err.startswith(f"brim: {path}: {reason}")) == (1, True), err


def test_a_wrong_setting_is_one_message(brim: Run, tmp_path: Path) -> None:
    path = tmp_path / "brim.toml"
    path.write_text("[intake]\nbatch = 0\n")

    code, out, err = brim("--config", str(path), "status")

    assert (code, out) == (1, "")
    assert err == f"brim: {path}: intake.batch: Input should be greater than 0"


def test_log_lines_as_json() -> None:
    formatter = logs.JsonLines()
    record = logging.LogRecord("brim.intake", logging.WARNING, __file__, 1, "away: %s", ("x",), None)

    line = json.loads(formatter.format(record))

    assert (line["level"], line["logger"], line["message"]) == ("warning", "brim.intake", "away: x")


LEARNED_TABLE = """\
# ours
profiles:
  t:            # a comment that stays
    vram: 500 + n
    context_mib: 300
  u: {vram: 100}
"""


@pytest.fixture
def learned(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table, and 40 peaks of tasks of ``t`` that needed 400 MiB more than it says; the table's path."""
    path = tmp_path / "resources.yaml"
    path.write_text(LEARNED_TABLE)
    monkeypatch.setenv("BRIM_RESOURCES__TABLE", str(path))
    calibration = Calibration(ResourceTable.parse(LEARNED_TABLE, "table").profiles["t"])
    for number in range(40):
        size = 100.0 * (1 + number % 10)
        calibration.learn(Sample(f"{number}", "SIM", (800.0, size), 1200.0 + size))
    store.keep_learned(1, 0, {"t": calibration.to_json()})
    return path


def test_profiles_tells_what_was_declared_and_what_peaks_suggest(brim: Run, learned: Path) -> None:
    [t, u] = json.loads(brim("profiles", "--json")[1])

    assert (t["profile"], t["declared"], t["effective"]) == ("t", {"vram": "500 + n", "margin": 1.3}, "declared")
    assert t["typical_mib"]["learned"] > t["typical_mib"]["declared"] - 400
    [model] = t["gpu_models"]
    assert (model["gpu_model"], model["samples"], model["out_of_memory"]) == ("SIM", 40, 0)
    assert 1.2 < model["error_p50"] < model["error_p99"] < 1.5
    assert (u["suggested"], u["gpu_models"]) == (None, [])
    code, out, _ = brim("profiles")
    assert code == 0
    for told in ("1.3 × (500 + n)", "SIM", "40", t["suggested"]["vram"][:8]):
        assert told in out


def test_profiles_apply_writes_the_suggestion_and_keeps_comments(brim: Run, learned: Path) -> None:
    [suggested] = [row["suggested"] for row in json.loads(brim("profiles", "--json")[1]) if row["suggested"]]

    code, out, _ = brim("profiles", "apply")

    assert code == 0
    assert "t: " in out
    text = learned.read_text()
    assert [text.count(part) for part in ("# ours", "# a comment that stays", "u: {vram: 100}")] == [1, 1, 1]
    profile = ResourceTable.parse(text, "table").profiles["t"]
    assert (str(profile.vram), profile.margin) == (suggested["vram"], suggested["margin"])
    assert "unchanged" in brim("profiles", "apply")[1]  # nothing is known yet about the new formula


def test_profiles_apply_refuses_what_it_has_no_suggestion_for(brim: Run, learned: Path) -> None:
    for name, why in (("u", "too few peaks"), ("gone", "the table has none")):
        code, _, err = brim("profiles", "apply", name)
        assert (code, why in err) == (1, True)
    assert learned.read_text() == LEARNED_TABLE


def test_log_lines_carry_the_ids_that_they_are_about() -> None:
    record = logging.makeLogRecord({"msg": "placed", "levelname": "INFO", "name": "brim", **logs.about("t1", "1-2")})

    assert logs.Lines().format(record).endswith("INFO brim: placed  task_id=t1  attempt=1-2")
    line = json.loads(logs.JsonLines().format(record))
    assert (line["task_id"], line["attempt"], "device" in line) == ("t1", "1-2", False)


def test_profile_measures_a_task_at_several_sizes_and_prints_its_row(
    brim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(root / part) for part in ("common", "services", "tests")))
    monkeypatch.setenv("BRIM_DEVICES", "sim:1x24GiB")
    monkeypatch.setenv("BRIM_SIM_DIR", str(tmp_path))

    code, out, err = brim("profile", "keep", "-A", "support.apps.gpu", "--vary", "mib=500,2000")

    assert (code, err) == (0, "")
    row = out[out.index("  keep:") :]
    profile = ResourceTable.parse(f"profiles:\n{row}", "row").profiles["keep"]
    assert (profile.context_mib, str(profile.vram)) == (300, "1 * mib")
    assert "{'mib': 2000}: 2300 MiB, 300 of them its context" in out

    for arguments, why in (
        (["keep", "-A", "support.apps.gpu", "--", "30000"], "out of memory"),
        (["fail", "-A", "support.apps.gpu"], "ValueError: on purpose"),
        (["add", "-A", "support.apps.gpu", "--", "1", "2"], "used no device memory"),
        (["gone", "-A", "support.apps.gpu"], "has no task gone"),
    ):
        code, _, err = brim("profile", *arguments)
        assert (code, why in err) == (1, True), err
