"""The shipped rules and the dashboard against a running attnd, by Debian's Prometheus, before and under load."""

from __future__ import annotations

import math

import pytest
from expressions import alternatives, dashboard_expressions, rule_expressions, rules, selectors
from prometheus import Prometheus
from returning import Returning
from running_server import Server

RATE_INTERVAL = "10s"


def test_o01_every_panel_has_data_before_any_client_came(prometheus: Prometheus) -> None:
    prometheus.wait_for_scrapes(3)
    for expression in dashboard_expressions(RATE_INTERVAL):
        assert prometheus.query(expression.text), f"no data: {expression}"


def test_every_panel_has_numbers_under_load(prometheus: Prometheus, load: Returning) -> None:
    busy = 'min(sum by (phase) (rate(attnd_tokens_total[10s]))) > 0 and min(rate(attnd_queue_depth[10s])) >= 0'
    prometheus.wait_for(lambda api: bool(api.query(busy)), "prefills and decodes")
    away_and_back = 'min(rate(attnd_snapshot_duration_seconds_count{op=~"spill|restore"}[10s])) > 0'
    prometheus.wait_for(lambda api: bool(api.query(away_and_back)), "sessions moved to disk and back")
    for expression in dashboard_expressions(RATE_INTERVAL):
        values = prometheus.values(expression.text)
        assert any(map(math.isfinite, values)), f"only {values}: {expression}"


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus, load: Returning) -> None:
    loaded = {rule["name"]: rule for rule in prometheus.rules()}
    assert set(loaded) == {rule.get("alert") or rule["record"] for rule in rules()}
    prometheus.wait_for(lambda api: all(rule["health"] == "ok" for rule in api.rules()), "all rules evaluated")
    assert not [rule for rule in prometheus.rules() if rule.get("lastError")]
    for rule in rules():
        if "record" in rule:
            assert prometheus.query(rule["record"]), f"{rule['record']} recorded nothing"


@pytest.mark.parametrize("expression", rule_expressions(), ids=lambda expression: expression.where)
def test_a_rules_series_all_exist(prometheus: Prometheus, load: Returning, expression) -> None:
    """A comparison that is false returns nothing, and so does a misspelt label: so each selector is asked by itself."""
    prometheus.query(expression.text)
    for name, filters in selectors(expression.text):
        for filter_ in alternatives(filters):
            assert prometheus.query(name + filter_), f"{expression.where}: {name}{filter_} selects nothing"


def test_no_alert_fires_for_a_healthy_server(prometheus: Prometheus, load: Returning) -> None:
    assert prometheus.query('ALERTS{alertname=~"Attnd.+"}') == []
    assert load.error is None, "a client that came back was refused"


def test_a_server_that_dies_is_noticed(prometheus: Prometheus, server: Server) -> None:
    """The last test: it ends the server. The unit tests of the rules wait out the alert's minute."""
    server.kill()
    prometheus.wait_for(lambda api: bool(api.query('ALERTS{alertname="AttndDown"}')), "AttndDown is pending")
    prometheus.wait_for(lambda api: api.values('up{job="attnd"}') == [0], "up == 0")
