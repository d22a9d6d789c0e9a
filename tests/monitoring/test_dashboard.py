"""The dashboard's JSON and what it names (O01)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml
from expressions import DEPLOY, dashboard, dashboard_expressions, panels, rule_expressions, rules, selectors
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

# In no panel and no rule, and why.
NOT_SHOWN = {
    "process_virtual_memory_bytes": "the cache is one mapping of its whole size from the start, so it never changes",
}
# Of Prometheus itself.
FOREIGN = {"up", "ALERTS"}


def test_it_is_what_the_sdk_makes_of_panels_py() -> None:
    done = subprocess.run([sys.executable, DEPLOY / "grafana/dashboard.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_grafanas_own_models_read_it_without_loss() -> None:
    register_default_plugins()
    read = Dashboard.from_json(dashboard())
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == dashboard()
    # What the models do not know by type they keep as plain dictionaries.
    for panel in read.panels or []:
        assert type(panel).__name__ in {"Panel", "RowPanel"}
        for target in getattr(panel, "targets", None) or []:
            assert type(target).__name__ == "Dataquery", panel.title


def test_o01_its_datasource_is_the_provisioned_one() -> None:
    provisioned = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
    uids = [source["uid"] for source in provisioned["datasources"]]
    text = json.dumps(dashboard())
    assert "__inputs" not in text and "${DS_" not in text

    def named(node: object) -> list[str]:
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        own = [node["datasource"]["uid"]] if isinstance(node, dict) and node.get("datasource") else []
        return own + [uid for child in children for uid in named(child)]

    assert set(named(dashboard())) == set(uids) and len(uids) == 1


def test_panels_are_titled_described_with_units_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids)) > 0
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def exported_names(metrics_reference: dict[str, str]) -> set[str]:
    names = set()
    for name, kind in metrics_reference.items():
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def test_every_metric_that_is_asked_for_exists(metrics_reference: dict[str, str]) -> None:
    known = exported_names(metrics_reference) | FOREIGN | {rule["record"] for rule in rules() if "record" in rule}
    for expression in dashboard_expressions() + rule_expressions():
        names = {name for name, _ in selectors(expression.text)}
        assert names, expression
        assert names <= known, f"{expression.where}: {names - known}"


@pytest.mark.parametrize("where", ["dashboard", "dashboard or rules"])
def test_every_metric_is_seen_somewhere(metrics_reference: dict[str, str], where: str) -> None:
    expressions = dashboard_expressions() + (rule_expressions() if where != "dashboard" else [])
    seen = {name for expression in expressions for name, _ in selectors(expression.text)}
    unseen = {name for name, kind in metrics_reference.items()
              if not seen & ({f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name})}
    assert unseen == set(NOT_SHOWN)
