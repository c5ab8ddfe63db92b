"""The dashboard and the alerts name what a real daemon serves, and the manual lists all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as families

from tests import promql
from tests.daemon.publishing import publishing, service, wired
from tests.daemon.running import PATIENCE, Node, Running, made
from tests.spaces import ROOT, eventually, nft

DOCS = ROOT / "docs" / "monitoring"
TARGET = frozenset({"instance", "job", "node"})  # what Prometheus adds to all that it scrapes
FOREIGN = {"up": frozenset[str]()}  # what it makes itself
CLOSED = ("state", "scope", "band")  # labels whose every value is always there
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: away
contexts: [{name: away, context: {cluster: away, user: nobody}}]
clusters: [{name: away, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: nobody, user: {}}]
"""

Json = dict[str, Any]


class Served:
    """What daemons serve: each sample's name with its labels and their values, and the families."""

    def __init__(self) -> None:
        self.labels: dict[str, set[str]] = {}
        self.values: dict[tuple[str, str], set[str]] = {}
        self.families: set[str] = set()

    def take(self, daemon: Running) -> None:
        for family in families(daemon.get("/metrics")[1].decode()):
            total = "_total" if family.type == "counter" else ""
            self.families.add(f"{family.name}{total}")
            for sample in family.samples:
                self.labels.setdefault(sample.name, set()).update(sample.labels)
                for label, value in sample.labels.items():
                    self.values.setdefault((sample.name, label), set()).add(value)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """By a daemon on bare metal that has repaired something, and one of a cluster that is away."""
    found, folder = Served(), tmp_path_factory.mktemp("monitoring")
    with wired() as lab, publishing(lab, folder / "metal") as node:
        node.save("a.yaml", service("a", 5000, count=10, protocol="UDP"))
        with node.running() as daemon:
            pod = lab.vms[0].pod
            assert daemon.is_in("in sync", pod)
            nft(pod, "flush ruleset")
            assert eventually(lambda: daemon.metric("drift_repaired_total") > 0, PATIENCE)
            found.take(daemon)
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG)
    with made(folder / "cluster", source="kubernetes") as node:
        _name(node, kubeconfig)
        with node.running() as daemon:
            found.take(daemon)
    return found


def _name(node: Node, kubeconfig: Path) -> None:
    with node.config.open("a") as stream:
        stream.write(f'[kubernetes]\nkubeconfig = "{kubeconfig}"\nnode_name = "one"\n')


def dashboard() -> Json:
    return dict(json.loads((DOCS / "dashboard.json").read_text()))


def alerts() -> list[Json]:
    (group,) = yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def panels() -> list[Json]:
    return [one for one in dashboard()["panels"] if one["type"] != "row"]


def _asked() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for place, target in enumerate(panel["targets"]):
            yield f"{panel['title']} {place}", target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", _variable(variable["query"]["query"])
    for alert in alerts():
        yield alert["alert"], alert["expr"]


def _variable(query: str) -> str:
    """label_values(METRIC, LABEL) asks for what `count by` does."""
    match = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
    assert match is not None, query
    return f"count by ({match[2]}) ({match[1]})"


ASKED = dict(_asked())


@pytest.mark.parametrize("title", ASKED)
def test_what_is_asked_for_is_served(served: Served, title: str) -> None:
    expression = promql.read(ASKED[title])
    known: Mapping[str, set[str] | frozenset[str]] = {**served.labels, **FOREIGN}
    assert expression.metrics
    for metric, labels in expression.metrics.items():
        assert metric in known, f"there is no {metric}"
        assert labels <= known[metric] | TARGET, f"{metric} has only {known[metric]}"
    every = {label for metric in expression.metrics for label in known[metric]} | TARGET
    assert expression.grouped <= every
    for metric, label, sign, value in expression.wanted:
        if label in CLOSED:
            there = served.values[metric, label]
            values = value.split("|") if "~" in sign else [value]
            assert set(values) <= there, f"{label} is one of {there}"


def test_the_reader_of_expressions_finds_what_they_name() -> None:
    found = promql.read(
        'topk(3, sum by (a, b) (rate(x_total{c="1",d!~"by (e)"}[5m])) / on (a) y) > 0.5 or time()'
    )
    assert found.metrics == {"x_total": {"c", "d"}, "y": set()}
    assert found.grouped == {"a", "b"}
    assert ("x_total", "d", "!~", "by (e)") in found.wanted
    for wrong in ("sun(x)", "x{a}", "x ; y"):
        with pytest.raises(ValueError, match=r"."):
            promql.read(wrong)


def test_every_metric_is_in_the_manual_and_none_that_is_not(served: Served) -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    named = set(re.findall(r"^\| `(portranger_\w+)", text, re.MULTILINE))
    assert named == served.families
    for family, labels in re.findall(r"^\| `(portranger_\w+)\{([\w, ]+)\}`", text, re.MULTILINE):
        assert set(labels.split(", ")) == served.labels[family]


def test_every_metric_of_ours_that_can_go_wrong_is_looked_at(served: Served) -> None:
    named = {metric for asked in ASKED.values() for metric in promql.read(asked).metrics}
    bases = {re.sub("_(bucket|count|sum)$", "", name) for name in named}
    left_out = {"portranger_process_virtual_memory_bytes"}
    assert served.families - bases == left_out


def test_the_dashboard_can_be_imported_anywhere() -> None:
    board = dashboard()
    assert board["id"] is None
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert list(variables) == ["datasource", "instance", "netns"]
    assert variables["datasource"]["type"] == "datasource"
    ids = [one["id"] for one in board["panels"]]
    assert len(ids) == len(set(ids))
    types = {one["id"] for one in board["__requires"] if one["type"] == "panel"}
    for panel in panels():
        assert panel["description"]
        assert panel["type"] in types
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval"}


def test_no_two_panels_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_what_it_means_and_what_to_do(served: Served, alert: Json) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    said = alert["annotations"]
    assert set(said) == {"summary", "description", "runbook"}
    assert len(said["runbook"]) > 40
    expression = promql.read(alert["expr"])
    left = {label for name in expression.metrics for label in served.labels.get(name, ())} | TARGET
    if " by (" in alert["expr"]:
        left = expression.grouped
    if alert["expr"].startswith("count("):
        left = set()
    assert set(re.findall(r"\$labels\.(\w+)", " ".join(said.values()))) <= left


def test_no_two_alerts_have_one_name() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(names) == len(set(names))
