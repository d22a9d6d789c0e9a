"""Debian's Prometheus as a child process, with the shipped configuration on another address."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from expressions import DEPLOY, RULES

SCRAPE_SECONDS = 1


class PrometheusApi:
    """A client of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise ConnectionError("Prometheus is starting") from error
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[dict]:
        """The series of an instant query. A scalar is one of them."""
        data = self.get("/api/v1/query", query=expr)
        return data["result"] if data["resultType"] == "vector" else [{"metric": {}, "value": data["result"]}]

    def values(self, expr: str) -> list[float]:
        return [float(series["value"][1]) for series in self.query(expr)]

    def rules(self) -> list[dict]:
        return [rule for group in self.get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def wait_for(self, condition: Callable[[PrometheusApi], bool], what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if condition(self):
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds} s: {what}")

    def wait_for_scrapes(self, count: int) -> None:
        expr = 'min(count_over_time(up{job="attnd"}[5m])) >= ' + str(count)
        self.wait_for(lambda api: bool(api.query(expr)), f"{count} scrapes")


def derived_config(metrics_address: str) -> dict:
    """The shipped configuration, scraping one address instead of a compose network's, and sooner."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] |= {key: f"{SCRAPE_SECONDS}s" for key in config["global"]}
    config["rule_files"] = [str(path) for path in RULES]
    job = next(job for job in config["scrape_configs"] if job["job_name"] == "attnd")
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [metrics_address]}]
    config["scrape_configs"] = [job]
    return config


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Prometheus(PrometheusApi):
    def __init__(self, metrics_address: str, folder: Path) -> None:
        super().__init__(f"127.0.0.1:{free_port()}")
        program = shutil.which("prometheus")
        assert program, "Prometheus is not installed: deploy/setup --tests"
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(derived_config(metrics_address)))
        self._log = (folder / "prometheus.log").open("w")
        self.process = subprocess.Popen(
            [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={self.address}"], stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self.wait_for(lambda api: api.values('up{job="attnd"}') == [1], 'up{job="attnd"} == 1')
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"{error}\n{(folder / 'prometheus.log').read_text()[-3000:]}") from error

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)
        self._log.close()
