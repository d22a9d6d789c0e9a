"""attnload's report in a real browser, of a real run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from chromium import Browser, Page
from looks import check_looks
from running_server import Server, binary


def test_readable_on_a_desk_and_on_a_phone_by_day_and_by_night(browser: Browser, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    server = Server("--kv_cache_bytes=256MiB", "--compute_threads=1")
    try:
        subprocess.run(
            [
                str(binary().with_name("attnload")),
                f"--target={server.target}",
                f"--metrics={server.metrics}",
                "--model=gpt2",
                "--rate=10",
                "--duration=5s",
                "--warmup=1s",
                "--prefill_tokens=64",
                "--decode_tokens=32",
                "--cancel_rate=0.02",
                f"--report={report}",
            ],
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )
    finally:
        server.kill()

    def await_content(page: Page) -> None:
        page.wait_for("document.querySelectorAll('svg').length > 0")

    for page in check_looks(browser, report.as_uri(), "load-report", await_content):
        text = page.evaluate("document.body.innerText")
        assert "NaN" not in text
        assert "undefined" not in text
