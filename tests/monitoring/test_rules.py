"""Prometheus' configuration, its rules and their unit tests (rules/*.yml), and the runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from expressions import DEPLOY, RULES, alerts

RULE_TESTS = sorted((Path(__file__).parent / "rules").glob("*.yml"))


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    assert "SUCCESS" in promtool("check", "config", DEPLOY / "prometheus/prometheus.yml")
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_not_before(path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_is_tested_both_ways() -> None:
    fires, silent = set(), set()
    for path in RULE_TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test["promql_expr_test"]:
                assert f'alertname="{test["name"]}"' in case["expr"], test["name"]
                (fires if case["exp_samples"] else silent).add(test["name"])
            assert len(test["input_series"]) >= 1
    names = {alert["alert"] for alert in alerts()}
    assert names == fires == silent


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_what_it_means_and_what_to_do(alert: dict) -> None:
    name = alert["alert"]
    assert re.fullmatch(r"Attnd([A-Z][a-z]+)+", name)
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    path, anchor = alert["annotations"]["runbook_url"].split("#")
    assert (path, anchor) == ("deploy/README.md", name.lower())
    entry = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", (DEPLOY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert entry, f"the runbook has no entry '### {name}'"
    for part in ("**Meaning.**", "**First look.**", "**Fix.**"):
        assert part in entry.group(1), f"{name}: no {part}"


def test_the_runbook_has_no_entry_without_an_alert() -> None:
    entries = re.findall(r"^### (Attnd\w+)$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    assert sorted(entries) == sorted(alert["alert"] for alert in alerts())
