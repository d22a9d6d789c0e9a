"""The image and the stack, once for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "monitoring")]

from daemon import Daemon, base_image, docker, grafana_image, prometheus_image, run  # noqa: E402
from daemon import ROOT  # noqa: E402
from stack import Stack  # noqa: E402

IMAGE = "attnd-test:0.1.0"


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Prints a figure into the log, past pytest's capture."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def print_line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n    {text}", flush=True)

    return print_line


@pytest.fixture(scope="session")
def base() -> Iterator[str]:
    running = Daemon()
    yield base_image()
    running.stop()


@pytest.fixture(scope="session")
def image(base: str) -> str:
    """Built by whichever builder `docker build` uses; ATTND_TEST_IMAGE names one that is built already."""
    if given := os.environ.get("ATTND_TEST_IMAGE"):
        return given
    jobs = os.environ.get("ATTND_BUILD_JOBS", "")
    run("docker", "build", "--tag", IMAGE, "--build-arg", f"BASE={base}", "--build-arg", f"BUILD_JOBS={jobs}", ROOT,
        timeout=3600)
    return IMAGE


@pytest.fixture
def container(image: str) -> Iterator[Callable[..., str]]:
    """Starts containers of a test's own: container("--cpus=2", flags=["--max_sessions=3"]) is one's id."""
    started: list[str] = []

    def start(*options: str, flags: tuple[str, ...] = ()) -> str:
        started.append(docker("run", "--detach", "--publish", "127.0.0.1::50051", *options, image, *flags))
        return started[-1]

    yield start
    for name in started:
        docker("rm", "--force", "--volumes", name)


@pytest.fixture(scope="module")
def stack(image: str, base: str) -> Iterator[Stack]:
    running = Stack(image, prometheus_image(base), grafana_image(), ATTND_MEMORY=os.environ.get("ATTND_MEMORY", "4g"))
    running.down()  # what a run that was killed has left
    running.up()
    yield running
    running.down()
