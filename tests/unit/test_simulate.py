"""``brim simulate``: files in, table and JSON out, and refusals that name what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim_services import cli, traces
from brim_services.cli import trying

Run = Callable[..., tuple[int, str, str]]

NODES = "name,count,gpus,model,vram_mib,cpus\nbig,2,4,A100,24GiB,32\nsmall,1,2,T4,16GiB,8\n"
TASKS = (
    "name,count,vram_mib,gpus,cpus,gpu_models,arrival_s,run_s\n"
    "resize,20,4GiB,1,1,,0,60\n"
    "segment,8,10GiB,1,2,,10,300\n"
    "train,2,20GiB,2,4,A100,20,900\n"
    "prepare,3,,0,2,,30,30\n"
)


@pytest.fixture
def brim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs ``brim simulate`` on files with these contents; exit code, standard output, standard error."""

    def run(*argv: str, nodes: str = NODES, tasks: str = TASKS) -> tuple[int, str, str]:
        (tmp_path / "nodes.csv").write_text(nodes)
        (tmp_path / "tasks.csv").write_text(tasks)
        files = ["--nodes", str(tmp_path / "nodes.csv"), "--tasks", str(tmp_path / "tasks.csv")]
        monkeypatch.setattr(sys, "argv", ["brim", "simulate", *files, *argv])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return (1, out, f"{err}{code}") if isinstance(code, str) else (code or 0, out, err)

    return run


def last(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


def test_the_last_line_is_one_object(brim):
    code, out, _ = brim("--seeds", "1", "--load", "1.3", "--json")
    found = last(out)
    assert code == 0
    assert set(found) == {"policy", "allocated_pct", "allocated_sd", "fragmentation_pct", "decisions_per_s"}
    assert found["policy"] == "packed"
    assert set(found["allocated_pct"]) == set(found["fragmentation_pct"]) == set(found["allocated_sd"])
    assert set(found["allocated_pct"]) <= {"80", "90", "100", "110", "130"}
    assert 0 < found["allocated_pct"]["80"] <= 81
    assert found["decisions_per_s"] > 0


def test_policies_are_compared_by_name_and_the_learnt_mix_stands_beside(brim):
    code, out, _ = brim("--seeds", "2", "--policy", "fgd", "--policy", "first-fit", "--mix", "online", "--json")
    found = last(out)
    assert code == 0
    assert list(found) == ["fgd", "first-fit"]
    assert found["fgd"]["online"]["allocated_pct"].keys() == found["fgd"]["allocated_pct"].keys()
    assert "fgd, learning the mix" in out


def test_timed_reports_waits_by_load_policy_and_gpus(brim):
    options = ["--timed", "--arrivals", "60", "--load", "0.8", "--load", "1.2"]
    code, out, _ = brim(*options, "--json")
    found = last(out)
    assert code == 0
    assert list(found) == ["0.8", "1.2"]
    assert list(found["0.8"]) == ["packed", "packed-unpromised", "spread", "exclusive"]
    report = found["1.2"]["packed"]
    assert set(report) == {"utilisation_pct", "mean_wait_s", "p99_wait_s", "makespan_s", "wait_by_gpus"}
    assert set(report["wait_by_gpus"]) <= {"0", "1", "2"}
    assert found["1.2"]["exclusive"]["mean_wait_s"] >= report["mean_wait_s"]


def test_added_servers_shorten_waits(brim):
    options = ["--timed", "--arrivals", "60", "--load", "2", "--policy", "packed", "--json"]
    one = "gpus,model,vram_mib\n2,A100,24GiB\n"
    before = last(brim(*options, nodes=one)[1])["2.0"]["packed"]
    after = last(brim(*options, "--add-nodes", "2xA100-80", "--add-nodes", "1xL40S-48x4", nodes=one)[1])["2.0"][
        "packed"
    ]
    assert before["mean_wait_s"] > after["mean_wait_s"]


def test_servers_to_add_are_like_the_others():
    [server] = traces.ServerRow(gpus=2, vram_mib=24_576, cpus=32, ram_mib=1000).servers()
    added = traces.added_servers("3xH100-80x4", [server])
    assert [each.node.name for each in added] == ["added-H100-0", "added-H100-1", "added-H100-2"]
    assert {(each.node.cpus, each.node.ram_mib, len(each.devices)) for each in added} == {(64.0, 2000, 4)}
    assert {(device.model, device.total_mib) for each in added for device in each.devices} == {("H100", 81_920)}
    assert len(traces.added_servers("4xA100-80", [server])[0].devices) == 8


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(brim, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    code, out, _ = brim("--seeds", "1", "--plot", str(tmp_path / f"fill.{suffix}"))
    assert code == 0
    assert "drawn" in out
    assert (tmp_path / f"fill.{suffix}").read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_without_matplotlib_a_plot_is_refused_at_once(brim, tmp_path, monkeypatch):
    monkeypatch.setattr(trying, "find_spec", lambda name: None)
    code, _, err = brim("--plot", str(tmp_path / "fill.png"))
    assert code == 1
    assert "pip install 'brim[plot]'" in err


@pytest.mark.parametrize(
    ("options", "nodes", "tasks", "message"),
    [
        (["--policy", "tetris"], NODES, TASKS, "tetris is not one of balanced, packed"),
        (["--policy", "exclusive"], NODES, TASKS, "exclusive is not one of"),
        (["--load", "1", "--load", "2"], NODES, TASKS, "several need --timed"),
        (["--plot", "fill.pdf"], NODES, TASKS, "ends in .png or .svg"),
        (["--add-nodes", "four"], NODES, TASKS, "as in 4xA100-80"),
        ([], "gpus,vram_mib\n1,\n", TASKS, "nodes.csv, line 2, vram_mib"),
        ([], "gpus,vram_mib\n1,lots\n", TASKS, "nodes.csv, line 2, vram_mib"),
        ([], "gpus,vram_mib,colour\n1,8GiB,red\n", TASKS, "colour"),
        ([], "gpus,vram_mib\n1,8GiB,red\n", TASKS, "line 2: more fields"),
        ([], "gpus,vram_mib\n", TASKS, "no server in it"),
        ([], NODES, "vram_mib\n", "no task in it"),
        ([], NODES, "vram_mib,labels\n1GiB,zone\n", "label=value"),
        ([], NODES, "gpus\n1\n", "vram_mib is missing"),
    ],
)
def test_what_is_wrong_is_named(brim, options, nodes, tasks, message):
    code, _, err = brim(*options, nodes=nodes, tasks=tasks)
    assert code == 1
    assert message in err


def test_the_published_traces_columns_are_read(brim):
    nodes = "sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,P100\n"
    tasks = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        "a,1000,1024,1,500,,BE,Running,0,100,10\n"
        "b,1000,1024,1,1000,P100|T4,BE,Running,0,100,\n"
        "c,1000,1024,0,0,,BE,Running,0,,\n"
    )
    code, out, _ = brim("--format", "openb", "--seeds", "1", "--load", "1", "--json", nodes=nodes, tasks=tasks)
    assert code == 0
    assert last(out)["policy"] == "packed"
