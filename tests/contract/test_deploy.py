"""What is in deploy/ for Prometheus and Grafana fits what brim's services really show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from brim.core.model import Reason
from brim_services.metrics import AgentMetrics, ClusterMetrics, IntakeMetrics, PlacementMetrics
from brim_services.picture import Gpu, Picture, Server, WaitingLane

ROOT = Path(__file__).parents[2]
PROMETHEUS, GRAFANA = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "grafana"
TARGETS_OWN = {"instance", "job", "le"}
"""Labels that Prometheus itself adds, and that of a histogram's buckets."""


def shown() -> dict[str, set[str]]:
    """Every sample that the services show -> its labels."""
    intake, placement, agent, cluster = IntakeMetrics(), PlacementMetrics(), AgentMetrics(), ClusterMetrics()
    intake.messages.labels("admitted")
    placement.commits.labels("committed")
    placement.wait_seconds.labels("vision.segment")
    agent.settled.labels("process_gone")
    cluster.estimate_error.labels("vision.segment")
    gpu = Gpu("GPU-a", "n1", 0, "SIM", "up", 24_576, 512, 0, 0, 0, 0, 24_064, 4, 0, ())
    lane = WaitingLane("l", "vision.segment", 1000, 1, "t-1", 0.0, Reason("memory", "short"))
    cluster.observe(Picture(1.0, {"GPU-a": gpu}, {"n1": Server("n1", "up", 0.0, {})}, {"l": lane}, {}, 0, True), ())
    found: dict[str, set[str]] = {}
    for service in (intake, placement, agent, cluster):
        for metric in service.registry.collect():
            for sample in metric.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    return dict(json.loads((GRAFANA / "brim.json").read_text()))


def expressions() -> Iterator[str]:
    """Every PromQL expression in deploy/."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_metric_and_label_of_an_expression_is_shown(expression: str) -> None:
    samples = shown()
    names = re.findall(r"\bbrim_\w+", expression)
    assert names
    assert set(names) <= samples.keys()
    known = set().union(*(samples[name] for name in names)) | TARGETS_OWN
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    grouped = re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", expression)
    used = set(matched) | {label.strip() for labels in grouped for label in labels.split(",")}
    assert used <= known


def test_the_document_lists_every_metric_and_no_other() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    documented = set(re.findall(r"`(brim_[a-z_]+)", text))
    names = {name for name in shown() if name.startswith("brim_") and not name.endswith("_created")}
    assert documented == {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_alerts_say_what_is_wrong_with_labels_that_they_have() -> None:
    samples = shown()
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]:
        names = [rule["alert"] for rule in group["rules"]]
        assert len(names) == len(set(names))
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            summary = rule["annotations"]["summary"]
            labels = set().union(*(samples[name] for name in re.findall(r"\bbrim_\w+", rule["expr"])))
            assert set(re.findall(r"\$labels\.(\w+)", summary)) <= labels


@pytest.mark.parametrize("name", ["prometheus.yml", "compose.yml"])
def test_prometheus_scrapes_each_service_where_it_shows_its_metrics(name: str) -> None:
    config = yaml.safe_load((PROMETHEUS / name).read_text())
    assert all((PROMETHEUS / file).is_file() for file in config["rule_files"])
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    ports = {"brim-monitor": 8765, "brim-intake": 9301, "brim-placement": 9302, "brim-agent": 9303}
    assert jobs.keys() == ports.keys()
    for job, port in ports.items():
        found = [found["port"] for found in jobs[job].get("dns_sd_configs", ())]
        found += [int(url.split(":")[1]) for static in jobs[job].get("static_configs", ()) for url in static["targets"]]
        assert found == [port]
    if name == "compose.yml":
        services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        asked = {host for job in jobs.values() for found in job["dns_sd_configs"] for host in found["names"]}
        assert asked <= services.keys()


def test_the_dashboard_can_be_loaded() -> None:
    board = dashboard()
    panels = board["panels"]
    assert board["uid"]
    assert board["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(references) == len(set(references))
        assert 0 <= panel["gridPos"]["x"] <= panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_grafana_finds_the_dashboard_and_the_data() -> None:
    [provider] = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "brim.yml").read_text())["providers"]
    [source] = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "brim.yml").read_text())["datasources"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounted = {volume.split(":")[1] for volume in compose["grafana"]["volumes"]}
    assert f"{provider['options']['path']}/brim.json" in mounted
    assert source["type"] == "prometheus"
    assert source["url"].split("//")[1].split(":")[0] in compose
    board = dashboard()
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${datasource}"}
    [variable] = board["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
