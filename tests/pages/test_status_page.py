"""The status page in a real browser, beside a real server with real traffic."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chromium import Browser, Page
from looks import check_layout, check_looks, check_quiet
from running_server import Server, binary

import attnd


def get(server: Server, path: str) -> str:
    with urllib.request.urlopen(f"http://{server.metrics}{path}", timeout=10) as reply:
        return reply.read().decode()


def status(server: Server) -> dict:
    return json.loads(get(server, "/status.json"))


def url(server: Server) -> str:
    return f"http://{server.metrics}/"


def start(*flags: str) -> Server:
    return Server("--kv_cache_bytes=256MiB", "--compute_threads=2", *flags)


def bytes_shown(text: str) -> float:
    """The number of "4.70 MiB"."""
    number, unit = text.split(" ")
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


@pytest.fixture
def server() -> Iterator[Server]:
    running = start()
    yield running
    running.kill()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.open_page()
    opened.look(1280, 800, dark=False, phone=False)
    yield opened
    opened.close()


def shown(page: Page, name: str) -> str:
    return page.evaluate(f"document.querySelector('[data-v=\"{name}\"]').textContent")


def await_shown(page: Page, name: str, text: str, seconds: float = 10) -> None:
    page.wait_for(f"document.querySelector('[data-v=\"{name}\"]').textContent === {json.dumps(text)}", seconds)


def rows(page: Page, table: str) -> dict[str, list[str]]:
    cells = page.evaluate(
        f"[...document.getElementById('{table}').rows].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    return {heading: rest for heading, *rest in cells}


class Demo:
    """`attnctl demo` in the background: every answer that it gets is checked by it."""

    def __init__(self, server: Server, *flags: str) -> None:
        program = binary().with_name("attnctl")
        self._process = subprocess.Popen(
            [
                str(program),
                "demo",
                f"--server={server.target}",
                "--layers=2",
                "--q_heads=8",
                "--kv_heads=2",
                "--head_dim=64",
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> None:
        output, _ = self._process.communicate(timeout=120)
        assert self._process.returncode == 0, output

    def running(self) -> bool:
        return self._process.poll() is None


def fill(client: attnd.Client, tokens: int, steps: int) -> attnd.Session:
    """A session with a prefill of so many tokens and so many decodes after it."""
    session = client.create_session(num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=64)
    for count in [tokens] + [1] * steps:
        session.step(
            0,
            np.ones((count, 4, 64), np.float32),
            np.ones((count, 2, 64), np.float32),
            np.ones((count, 2, 64), np.float32),
        )
    return session


def test_what_stands_on_the_page_is_what_the_server_says(server: Server, page: Page) -> None:
    page.goto(url(server))
    with attnd.Client(server.target) as client:
        sessions = [fill(client, 100, 5) for _ in range(3)]
        await_shown(page, "sessions.active", "3")
        await_shown(page, "prefill.tokens", "300")
        await_shown(page, "decode.tokens", "15")
        truth = status(server)
        assert shown(page, "sessions.limit") == f"{truth['sessions']['limit']:,}"
        assert shown(page, "cache.tokens") == "315"
        assert shown(page, "cache.capacity") == "256 MiB"
        assert shown(page, "cache.used") == f"{truth['cache']['used_bytes'] // 1024} KiB"
        assert shown(page, "cache.percent") == f"{100 * truth['cache']['used_bytes'] / 2**28:.1f} %"
        assert shown(page, "queue.depth") == "0"
        assert shown(page, "requests.in_flight") == "0"
        for part in ("version", "onednn"):
            assert truth["build"][part] in shown(page, "build")
        assert shown(page, "build.isa") == truth["build"]["isa"]
        page.evaluate("document.querySelector('input[value=\"0\"]').click()")
        table = rows(page, "quantiles")
        assert table["prefill"][3] == "3"
        assert table["decode"][3] == "15"
        assert all(re.fullmatch(r"[\d.,]+ (µs|ms|s)", cell) for cell in table["decode"][:3])
        text = page.evaluate("document.documentElement.outerHTML")
        for session in sessions:
            assert session.session_id not in text
            session.close()
    await_shown(page, "sessions.active", "0")
    await_shown(page, "cache.used", "0 B")
    check_quiet(page, url(server))


def test_rates_follow_the_traffic_and_fall_back_to_zero(server: Server, page: Page) -> None:
    page.goto(url(server))
    await_shown(page, "decode.rate", "0")
    demo = Demo(server, "--sessions=4", "--prefill=256", "--decode=1500")
    rate = "Number(document.querySelector('[data-v=\"decode.rate\"]').textContent.replaceAll(',', ''))"
    page.wait_for(f"{rate} > 10", 60)
    page.wait_for("document.querySelectorAll('[data-spark=\"decode\"] polyline').length === 1")
    demo.finish()
    tokens = status(server)["phases"]["decode"]["tokens"]
    # The mean over five seconds cannot be more than all tokens in one of them.
    assert 10 < page.evaluate(rate) <= tokens
    await_shown(page, "decode.rate", "0", 15)
    await_shown(page, "decode.tokens", f"{tokens:,.0f}")
    check_quiet(page, url(server))


def test_errors_are_counted_by_reason_and_by_code(server: Server, page: Page) -> None:
    page.goto(url(server))
    await_shown(page, "sessions.active", "0")
    note = "document.querySelector('[data-v=\"errors.note\"]').hidden"
    assert page.evaluate(note) is False
    with attnd.Client(server.target) as client:
        for _ in range(4):
            with pytest.raises(attnd.AttndError):
                client.get_session("00000000000000000000000000000000")
    page.wait_for("document.getElementById('failures').rows.length === 2")
    assert rows(page, "failures") == {"refused: NEVER_EXISTED": ["4", "4"], "ended NOT_FOUND": ["4", "4"]}
    assert page.evaluate(note) is True


def test_sessions_that_made_room_are_shown(page: Page, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    server = start("--kv_cache_bytes=1MiB", "--eviction=lru", f"--spill_dir={spill}")
    try:
        page.goto(url(server))
        with attnd.Client(server.target) as client:
            sessions = [fill(client, 64, 0) for _ in range(20)]
            fill(client, 64, 1)
            (spill / f"{sessions[1].session_id}.attnd").write_bytes(b"damaged")
            with pytest.raises(attnd.AttndError):
                sessions[1].step(0, *(np.ones((1, heads, 64), np.float32) for heads in (4, 2, 2)))
            sessions[0].step(0, *(np.ones((1, heads, 64), np.float32) for heads in (4, 2, 2)))
            page.wait_for("document.getElementById('failures').rows.length === 4")
            time.sleep(0.3)  # more may be on its way to the disk than the step waited for
            truth = status(server)
            away = truth["sessions"]["spilled"]
            assert away > 5
            await_shown(page, "sessions.spilled", str(away))
            await_shown(page, "sessions.moved", f"{truth['snapshots']['spill']['count']} / 1")
            assert bytes_shown(shown(page, "cache.spilled")) == pytest.approx(truth["cache"]["spilled_bytes"], rel=5e-3)
            assert truth["sessions"]["evictions"] == {"dropped": 0, "spilled": truth["snapshots"]["spill"]["count"]}
            failures = rows(page, "failures")
            assert failures["restore failed"] == failures["session lost"] == ["1", "1"]
        check_quiet(page, url(server))
    finally:
        server.kill()


def test_sessions_that_were_dropped_are_shown(page: Page) -> None:
    server = start("--kv_cache_bytes=1MiB", "--eviction=lru")
    try:
        page.goto(url(server))
        with attnd.Client(server.target) as client:
            for _ in range(20):
                fill(client, 64, 0)
            dropped = status(server)["sessions"]["evictions"]["dropped"]
            assert dropped > 0
            await_shown(page, "sessions.dropped", str(dropped))
            page.wait_for("document.getElementById('failures').rows.length === 1")
            assert rows(page, "failures") == {"session evicted": [str(dropped)] * 2}
    finally:
        server.kill()


def test_a_server_that_is_gone_is_named_and_its_successor_starts_anew(page: Page) -> None:
    first = start()
    try:
        with attnd.Client(first.target) as client:
            fill(client, 10, 3)
        page.goto(url(first))
        await_shown(page, "decode.tokens", "3")
        assert page.evaluate("document.getElementById('alert').hidden") is True
        first.process.send_signal(signal.SIGKILL)
        text = page.wait_for("!document.getElementById('alert').hidden && document.getElementById('alert').textContent")
        assert text.startswith("No answer since ")
        assert page.evaluate("document.getElementById('badge').textContent") == "no answer"
        assert shown(page, "decode.tokens") == "3", "the last that was heard stays"
        check_layout(page)
        time.sleep(1)  # start times are told by the second
        second = start(f"--metrics_listen={first.metrics}")
        try:
            page.wait_for("document.getElementById('alert').hidden")
            await_shown(page, "decode.tokens", "0")
            assert page.evaluate("document.getElementById('badge').textContent") == "ready"
        finally:
            second.kill()
    finally:
        first.kill()


def test_readable_on_a_desk_and_on_a_phone_by_day_and_by_night(browser: Browser, tmp_path: Path) -> None:
    server = start("--kv_cache_bytes=64MiB", "--eviction=lru", f"--spill_dir={tmp_path / 'spill'}")
    try:
        check_all_looks(server, browser)
    finally:
        server.kill()


def check_all_looks(server: Server, browser: Browser) -> None:
    with attnd.Client(server.target) as client:
        held = [client.create_session(num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=64, reserve_tokens=20_000)]
        held += [fill(client, 3000, 2) for _ in range(20)]
        for _ in range(3):
            with pytest.raises(attnd.AttndError):
                client.get_session("00000000000000000000000000000000")

        def await_content(page: Page) -> None:
            demo = Demo(server, "--sessions=6", "--prefill=256", "--decode=700")
            page.wait_for("document.querySelectorAll('[data-spark=\"decode\"] polyline').length === 1")
            while demo.running():
                time.sleep(0.1)
            demo.finish()
            page.wait_for("document.getElementById('quantiles').rows.length === 6")
            assert "\u2013" not in shown(page, "decode.rate")

        for page in check_looks(browser, url(server), "status", await_content):
            assert int(shown(page, "sessions.spilled")) > 0
            assert page.evaluate("document.getElementById('badge').textContent") == "ready"
            small = page.evaluate(
                "[...document.querySelectorAll('main *')].filter((e) => e.textContent.trim() &&"
                " parseFloat(getComputedStyle(e).fontSize) < 12).length"
            )
            assert small == 0
        for session in held:
            session.close()
