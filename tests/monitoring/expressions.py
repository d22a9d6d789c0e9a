"""The queries of the dashboard and of the rules, and what they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/attnd.json"
RULES = sorted((DEPLOY / "prometheus/rules").glob("*.yml"))

# Of PromQL, beside functions (which a parenthesis follows).
KEYWORDS = {"and", "or", "unless", "on", "by", "bool", "ignoring", "without", "offset", "group_left", "group_right"}
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?![a-zA-Z0-9_:]|\s*\()(\{[^}]*\})?")
GROUPING = re.compile(r"\b(by|on|ignoring|without|group_left|group_right)\s*\([^)]*\)")


@dataclass(frozen=True)
class Expression:
    where: str
    text: str


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def panels() -> Iterator[dict]:
    for panel in dashboard()["panels"]:
        yield panel
        yield from panel.get("panels", [])


def dashboard_expressions(rate_interval: str = "1m") -> list[Expression]:
    """With Grafana's variables replaced by what it would put in their place."""
    return [
        Expression(f"{panel['title']}, {target['refId']}",
                   target["expr"].replace("$instance", ".*").replace("$__rate_interval", rate_interval))
        for panel in panels() for target in panel.get("targets", [])
    ]


def rules() -> list[dict]:
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict]:
    return [rule for rule in rules() if "alert" in rule]


def rule_expressions() -> list[Expression]:
    return [Expression(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


def selectors(expr: str) -> set[tuple[str, str]]:
    """Metrics and the filters on their labels: ("up", '{job="attnd"}')."""
    without_groupings = GROUPING.sub(" ", expr)
    found = set()
    for match in SELECTOR.finditer(without_groupings):
        follows_a_digit = re.search(r"[0-9.]$", without_groupings[: match.start()])  # the unit of "[5m]"
        if match.group(1) not in KEYWORDS and not follows_a_digit:
            found.add((match.group(1), match.group(2) or ""))
    return found


def alternatives(filters: str) -> list[str]:
    """The filter with each of the alternatives of a =~"A|B" by itself: a name that is misspelt matches nothing."""
    match = re.search(r'=~"([A-Z_]+(?:\|[A-Z_]+)+)"', filters)
    if not match:
        return [filters]
    return [filters.replace(match.group(0), f'="{name}"') for name in match.group(1).split("|")]
