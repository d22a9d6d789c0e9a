"""Docker for the tests: the one that answers, or a daemon of our own; and images where none can be pulled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "build/docker"  # kept, so that the next run finds its layers
MADE_BASE = "attnd-test-base:13"
MADE_PROMETHEUS = "attnd-test-prometheus:13"
PULL_SECONDS = 300


def run(*command: str | Path, check: bool = True, timeout: float = 600, **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout, **options)
    if check and done.returncode != 0:
        said = done.stdout[-3000:] + done.stderr[-3000:]
        raise AssertionError(f"{' '.join(map(str, command))}: status {done.returncode}\n{said}")
    return done


def docker(*arguments: str | Path, **options) -> str:
    return run("docker", *arguments, **options).stdout.strip()


def inspect(name: str) -> dict:
    return json.loads(docker("inspect", name))[0]


class Daemon:
    """Sets DOCKER_HOST when it had to start one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if run("docker", "version", check=False).returncode == 0:
            return
        DATA.mkdir(parents=True, exist_ok=True)
        # A socket's path is short, and a checkout's may not be.
        self._folder = tempfile.TemporaryDirectory(prefix="attnd-docker-")
        folder = Path(self._folder.name)
        os.environ["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
        self._log = (DATA / "dockerd.log").open("w")
        self._process = subprocess.Popen(
            ["dockerd", "-H", os.environ["DOCKER_HOST"], "--data-root", DATA / "data", "--exec-root", folder / "exec",
             "--pidfile", folder / "docker.pid"], stdout=self._log, stderr=subprocess.STDOUT)
        for _ in range(300):
            if run("docker", "version", check=False).returncode == 0:
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"dockerd did not start:\n{(DATA / 'dockerd.log').read_text()[-3000:]}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=60)


def have_image(name: str) -> bool:
    return run("docker", "image", "inspect", name, check=False).returncode == 0


def pull(name: str) -> bool:
    return have_image(name) or run("docker", "pull", "--quiet", name, check=False, timeout=PULL_SECONDS).returncode == 0


def default_of(file: str, pattern: str) -> str:
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert match, f"{file} has no {pattern}"
    return match.group(1)


def base_image() -> str:
    """The Dockerfile's own base, or the same Debian by debootstrap."""
    name = os.environ.get("ATTND_BASE_IMAGE") or default_of("Dockerfile", r"^ARG BASE=(\S+)")
    if pull(name):
        return name
    if not have_image(MADE_BASE):
        import_debian()
    return MADE_BASE


def import_debian() -> None:
    mirror = run("bash", "-c", ". deploy/source_builds/debian_source.sh && debian_mirror", cwd=ROOT).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "trixie"
        run("debootstrap", "--variant=minbase", "--include=ca-certificates", "trixie", tree, mirror)
        # As slim as the image that it stands for.
        left_out = ("var/lib/apt/lists", "var/cache/apt", "var/log",
                    "usr/share/doc", "usr/share/man", "usr/share/locale")
        slim = [f"--exclude=./{path}/*" for path in left_out]
        run("bash", "-c", 'tar -c -C "$0" "${@:2}" . | docker import - "$1"', tree, MADE_BASE, *slim)


def prometheus_image(base: str) -> str:
    """The compose file's, or Debian's package on the base."""
    name = default_of("deploy/docker-compose.yml", r"PROMETHEUS_IMAGE:-(\S+)\}")
    if pull(name):
        return name
    recipe = f"""FROM {base}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus
RUN mkdir /prometheus && chown 65534 /prometheus
USER 65534
ENTRYPOINT ["prometheus"]
"""
    docker("build", "--tag", MADE_PROMETHEUS, "-", input=recipe)
    return MADE_PROMETHEUS


def grafana_image() -> str | None:
    name = default_of("deploy/docker-compose.yml", r"GRAFANA_IMAGE:-(\S+)\}")
    return name if pull(name) else None
