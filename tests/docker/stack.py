"""The compose stack under a project name of its own, on free ports."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from daemon import ROOT, docker, inspect, run
from prometheus import PrometheusApi

PROJECT = "attndtest"
FILE = ROOT / "deploy/docker-compose.yml"


def compose_command() -> list[str]:
    if run("docker", "compose", "version", check=False).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"]


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s: {what}")


class Stack:
    def __init__(self, image: str, prometheus: str, grafana: str | None, **settings: str) -> None:
        self.services = ["attnd", "prometheus"] + (["grafana"] if grafana else [])
        self._environment = os.environ | {
            "ATTND_IMAGE": image, "PROMETHEUS_IMAGE": prometheus, "ATTND_PUBLISH": "127.0.0.1:",
            "ATTND_PUBLISH_METRICS": "127.0.0.1:", "PROMETHEUS_PUBLISH": "127.0.0.1:", "GRAFANA_PUBLISH": "127.0.0.1:",
        } | ({"GRAFANA_IMAGE": grafana} if grafana else {}) | settings
        self._command = [*compose_command(), "-p", PROJECT, "-f", str(FILE), "--profile", "load"]

    def compose(self, *arguments: str, check: bool = True) -> str:
        return run(*self._command, *arguments, check=check, env=self._environment).stdout

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*self._command, *arguments], env=self._environment, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)

    def up(self, *arguments: str) -> None:
        self.compose("up", "--detach", "--no-build", *arguments, *self.services)
        wait_for(lambda: all(self.health(name) == "healthy" for service in self.services
                             for name in self.containers(service)), "all containers are healthy", 90)

    def change(self, **settings: str) -> None:
        """Starts anew what the settings of compose's file change."""
        self._environment |= settings
        self.up()

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "1", check=False)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--quiet", service).split()

    def container(self, service: str) -> str:
        (name,) = self.containers(service)
        return name

    def health(self, container: str) -> str:
        return inspect(container)["State"]["Health"]["Status"]

    def published(self, container: str, port: int) -> str:
        return docker("port", container, f"{port}/tcp").splitlines()[0]

    def target(self) -> str:
        return self.published(self.container("attnd"), 50051)

    def prometheus(self) -> PrometheusApi:
        return PrometheusApi(self.published(self.container("prometheus"), 9090))

    def address(self, container: str) -> str:
        (network,) = inspect(container)["NetworkSettings"]["Networks"].values()
        return network["IPAddress"]
