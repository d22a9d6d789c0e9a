"""The compose stack: what is watched, what is felt when it is loaded, restarted, and scaled."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections import Counter
from collections.abc import Callable

import attnd
import grpc
import numpy as np
import pytest
from clients import ROUND_ROBIN, Calls, HealthProbe, OpenStream
from daemon import docker, inspect
from expressions import Expression, dashboard, dashboard_expressions, rules
from returning import Returning
from stack import Stack, wait_for

# What Grafana makes of the scrape interval of 5 s: four of them.
RATE_INTERVAL = "20s"
UP = 'up{job="attnd"}'


def is_of_disk(expression: Expression) -> bool:
    """True of what has no numbers while no session goes to disk or comes from there."""
    return 'op="spill"' in expression.text or 'op="restore"' in expression.text


def test_o01_o02_prometheus_finds_attnd_and_every_panel_has_data(stack: Stack) -> None:
    prometheus = stack.prometheus()
    prometheus.wait_for_scrapes(3)
    assert prometheus.values(UP) == [1]
    (series,) = prometheus.query(UP)
    assert series["metric"]["instance"] == stack.address(stack.container("attnd")) + ":9464"
    for expression in dashboard_expressions(RATE_INTERVAL):
        assert prometheus.query(expression.text), f"no data: {expression}"


def test_its_alerts_are_loaded_and_silent(stack: Stack) -> None:
    prometheus = stack.prometheus()
    assert {rule["name"] for rule in prometheus.rules()} == {rule.get("alert") or rule["record"] for rule in rules()}
    prometheus.wait_for(lambda api: all(rule["health"] == "ok" for rule in api.rules()), "all rules evaluated", 60)
    assert prometheus.query('ALERTS{alertname=~"Attnd.+"}') == []


def test_grafana_serves_the_dashboard(stack: Stack) -> None:
    if "grafana" not in stack.services:
        pytest.skip("Grafana's image cannot be pulled here; tests/run monitoring reads its files with Grafana's models")
    address = stack.published(stack.container("grafana"), 3000)
    with urllib.request.urlopen(f"http://{address}/api/dashboards/uid/attnd", timeout=10) as answer:
        assert json.load(answer)["dashboard"]["title"] == dashboard()["title"]
    with urllib.request.urlopen(f"http://{address}/api/datasources/proxy/uid/attnd-prometheus/api/v1/query?query=up",
                                timeout=10) as answer:
        assert json.load(answer)["data"]["result"]


def test_under_load_every_panel_has_numbers_and_health_stays_fast(stack: Stack, say: Callable[[str], None]) -> None:
    load = stack.popen("run", "--rm", "-T", "load")
    prometheus = stack.prometheus()
    try:
        with HealthProbe(stack.target()) as probe:
            busy = "min(sum by (phase) (rate(attnd_tokens_total[20s]))) > 0"
            prometheus.wait_for(lambda api: bool(api.query(busy)), "prefills and decodes in the last 20 s", 60)
            for expression in dashboard_expressions(RATE_INTERVAL):
                values = prometheus.values(expression.text)
                assert is_of_disk(expression) or any(map(math.isfinite, values)), f"only {values}: {expression}"
            said, _ = load.communicate(timeout=300)
    finally:
        load.kill()
    assert load.returncode == 0, said
    say(f"under load, {probe.check()}")
    assert prometheus.query('ALERTS{alertname=~"Attnd.+"}') == []


def test_o09_a_saturated_server_answers_its_probe_at_once(stack: Stack, say: Callable[[str], None]) -> None:
    """More than it can do, on every thread it has: a probe that waited would have it restarted, sessions and all."""
    load = stack.popen("run", "--rm", "-T", "load", "--target=attnd:50051", "--model=llama3-8b", "--rate=200",
                       "--duration=20s", "--prefill_tokens=256", "--decode_tokens=64", "--check_rate=0")
    prometheus = stack.prometheus()
    waits = "max_over_time(attnd_queue_depth[20s])"
    refused = 'attnd_rejected_total{reason="QUEUE_FULL"}'
    before = max(prometheus.values(refused))
    try:
        with HealthProbe(stack.target()) as probe:
            load.communicate(timeout=300)
            seen, turned_away = max(prometheus.values(waits)), max(prometheus.values(refused)) - before
    finally:
        load.kill()
    # How many wait is a matter of how fast the machine is: so many as it can serve within --max_queue_delay.
    assert seen > 0 and turned_away > 0
    say(f"with up to {seen:.0f} requests waiting and {turned_away:.0f} refused, {probe.check()}")
    state = inspect(stack.container("attnd"))["State"]
    assert state["Running"] and not state["OOMKilled"] and inspect(stack.container("attnd"))["RestartCount"] == 0


def test_p07_a_restart_in_the_middle_of_a_session_is_said(stack: Stack) -> None:
    container = stack.container("attnd")
    q = np.ones((1, 2, 8), np.float32)
    with attnd.Client(stack.target(), timeout=20) as client:
        session = client.create_session(num_layers=1, num_q_heads=2, num_kv_heads=2, head_dim=8)
        session.step(0, q, q, q)
    docker("restart", "--time=40", container)
    wait_for(lambda: stack.health(container) == "healthy", "healthy again")
    with attnd.Client(stack.target(), timeout=20) as client:
        with pytest.raises(attnd.SessionLost) as lost:
            client.step(0, [attnd.Segment(session.session_id, 1)], q, q, q)
        assert lost.value.reason == "NEVER_EXISTED"
        assert [*client.list_sessions()] == []


@pytest.fixture(scope="module")
def replicas(stack: Stack) -> list[str]:
    stack.up("--scale", "attnd=2")
    prometheus = stack.prometheus()
    prometheus.wait_for(lambda api: api.values(UP) == [1, 1], "both replicas are scraped", 60)
    return stack.containers("attnd")


def test_o06_without_affinity_a_step_is_not_found_and_never_a_new_session(
        stack: Stack, replicas: list[str], say: Callable[[str], None]) -> None:
    both = "ipv4:" + ",".join(f"{stack.address(name)}:50051" for name in replicas)
    calls = Calls(both, ROUND_ROBIN)
    sessions = [calls.create() for _ in range(10)]
    outcomes: Counter[str] = Counter()
    for session in sessions:
        sent = 0
        for value in range(10):
            try:
                answer = calls.step(session, value, position=sent)
                sent += 1
            except grpc.RpcError as error:
                outcomes[error.code().name] += 1
                continue
            outcomes["OK"] += 1
            assert math.isfinite(answer)
    say(f"100 steps by round robin over two replicas: {dict(outcomes)}")
    assert set(outcomes) == {"OK", "NOT_FOUND"}
    active = sum(len([*attnd.Client(f"{stack.address(name)}:50051").list_sessions()]) for name in replicas)
    assert active == len(sessions)


def test_o06_with_a_channel_per_session_every_step_finds_it(stack: Stack, replicas: list[str]) -> None:
    both = "ipv4:" + ",".join(f"{stack.address(name)}:50051" for name in replicas)
    for _ in range(10):
        calls = Calls(both)  # pick_first, as is the default
        session = calls.create()
        assert [calls.step(session, value) for value in (2, 4, 9)] == pytest.approx([2, 3, 5])


def test_o04_a_replica_that_leaves_ends_its_streams_and_clients_go_on_elsewhere(
        stack: Stack, replicas: list[str], say: Callable[[str], None]) -> None:
    leaving, staying = replicas
    old = Calls(f"{stack.address(leaving)}:50051")
    sessions = [old.create() for _ in range(20)]
    streams = [OpenStream(old) for _ in sessions]
    for session, stream in zip(sessions, streams, strict=True):
        assert [stream.step(session, value) for value in (2, 4)] == pytest.approx([2, 3])
    start = time.monotonic()
    docker("stop", "--time=40", leaving)
    took = time.monotonic() - start
    ends = Counter(error.code().name if (error := stream.end()) else "OK" for stream in streams)
    status = inspect(leaving)["State"]["ExitCode"]
    say(f"20 open streams: docker stop took {took:.1f} s, exit status {status}, ends {dict(ends)}")
    assert status == 0 and took < 40
    assert set(ends) <= {"UNAVAILABLE", "OK"}
    new = Calls(f"{stack.address(staying)}:50051")
    with pytest.raises(grpc.RpcError) as lost:
        new.step(sessions[0], 9)
    assert lost.value.code() == grpc.StatusCode.NOT_FOUND
    for _ in sessions:
        replayed = new.create()
        answers = [new.step(replayed, value, position) for position, value in enumerate((2, 4, 9))]
        assert answers == pytest.approx([2, 3, 5])
        # The answer of the last one was lost, say: the same place is rewritten, nothing is appended twice.
        assert new.step(replayed, 9, 2) == pytest.approx(5)


def test_compose_stop_lets_attnd_drain(stack: Stack, replicas: list[str], say: Callable[[str], None]) -> None:
    running = [name for name in replicas if inspect(name)["State"]["Running"]]
    assert running
    start = time.monotonic()
    stack.compose("stop", "attnd")
    say(f"compose stop took {time.monotonic() - start:.1f} s")
    assert [inspect(name)["State"]["ExitCode"] for name in running] == [0] * len(running)
    prometheus = stack.prometheus()
    prometheus.wait_for(lambda api: bool(api.query('ALERTS{alertname="AttndDown"}')), "AttndDown is pending", 60)


def test_sessions_that_go_to_disk_and_come_back_have_their_numbers(stack: Stack) -> None:
    stack.change(ATTND_KV_CACHE_BYTES="16MiB", ATTND_EVICTION="lru", ATTND_SPILL_DIR="/var/lib/attnd/spill")
    prometheus = stack.prometheus()
    returning = Returning(stack.target())
    try:
        away_and_back = 'min(rate(attnd_snapshot_duration_seconds_count{op=~"spill|restore"}[20s])) > 0'
        prometheus.wait_for(lambda api: bool(api.query(away_and_back)), "sessions moved to disk and back", 60)
        expressions = [*filter(is_of_disk, dashboard_expressions(RATE_INTERVAL))]
        assert expressions
        for expression in expressions:
            values = prometheus.values(expression.text)
            assert any(map(math.isfinite, values)), f"only {values}: {expression}"
    finally:
        returning.stop()
    assert returning.error is None
