"""The image by itself: what it is, what it needs, how it stops, and that it keeps to its container's limits."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from attnd.v1 import attnd_pb2 as pb
from clients import Calls, OpenStream
from daemon import docker, inspect, run
from stack import wait_for


def is_healthy(name: str) -> bool:
    return inspect(name)["State"]["Health"]["Status"] == "healthy"


def target(name: str) -> str:
    return docker("port", name, "50051/tcp").splitlines()[0]


def test_it_is_small_not_root_and_says_what_it_is(image: str, base: str, say: Callable[[str], None]) -> None:
    found = inspect(image)
    size, base_size = (inspect(name)["Size"] / 1e6 for name in (image, base))
    say(f"image {size:.0f} MB, of which {base_size:.0f} MB are the base")
    assert size - base_size < 120
    settings = found["Config"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", settings["User"])
    assert settings["Entrypoint"] == ["attnd"] and settings["StopSignal"] == "SIGTERM"
    assert set(settings["ExposedPorts"]) == {"50051/tcp", "9464/tcp"}
    assert settings["Healthcheck"]["Test"][:3] == ["CMD", "attnctl", "health"]
    assert {"ATTND_LISTEN=0.0.0.0:50051", "ATTND_METRICS_LISTEN=0.0.0.0:9464"} <= set(settings["Env"])
    version = docker("run", "--rm", image, "--version").split()[-1]
    assert settings["Labels"]["org.opencontainers.image.version"] == version
    assert settings["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_it_holds_its_programs_and_no_compiler(image: str) -> None:
    script = 'id -u; for p in attnd attnctl attnload; do command -v $p || echo no $p; done; command -v gcc cmake; true'
    said = docker("run", "--rm", "--entrypoint", "sh", image, "-c", script).split("\n")
    assert said == ["65532", "/usr/local/bin/attnd", "/usr/local/bin/attnctl", "/usr/local/bin/attnload"]


@pytest.mark.parametrize(("cpu", "isa"), [("qemu64", "baseline"), ("Nehalem-v1", "sse41")])
def test_o07_it_runs_on_any_x86_64(image: str, cpu: str, isa: str) -> None:
    """The oldest processor that there is, emulated: SSE2 and nothing more. There is no x86-64 below it."""
    emulator = Path("/usr/bin/qemu-x86_64-static")
    name = docker("run", "--detach", "--publish", "127.0.0.1::50051", "--volume", f"{emulator}:/qemu:ro",
                  "--entrypoint", "/qemu", image, "-cpu", cpu, "/usr/local/bin/attnd", "--kv_cache_bytes=64MiB")
    try:
        wait_for(lambda: "serving on" in docker("logs", name), "attnd serves", 120)
        calls = Calls(target(name))
        assert calls.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).isa == isa
        session = calls.create()
        assert [calls.step(session, value) for value in (2, 4, 9)] == pytest.approx([2, 3, 5])
    finally:
        docker("rm", "--force", "--volumes", name)


def test_it_needs_no_capability_and_writes_no_file(container: Callable[..., str]) -> None:
    name = container("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true", "--memory=512m")
    wait_for(lambda: is_healthy(name), "healthy")
    calls = Calls(target(name))
    session = calls.create()
    assert [calls.step(session, value) for value in (2, 4, 9)] == pytest.approx([2, 3, 5])


@pytest.mark.parametrize(("cpus", "threads"), [("1", "1"), ("1.5", "1"), ("2", "2")])
def test_d01_threads_and_cache_follow_the_containers_limits(image: str, cpus: str, threads: str) -> None:
    said = docker("run", "--rm", f"--cpus={cpus}", "--memory=1g", image, "--print_config")
    assert f"--compute_threads={threads}\n" in said
    assert "--kv_cache_bytes=512MiB\n" in said


def decode_rate(name: str) -> float:
    said = docker("exec", name, "attnctl", "demo", "--sessions=4", "--layers=1", "--prefill=512", "--decode=200",
                  "--stream")
    match = re.search(r"^decode .* ([\d.]+) tokens/s", said, re.MULTILINE)
    assert match, said
    return float(match.group(1))


def test_d01_the_default_is_as_fast_as_the_best_number_of_threads(
        container: Callable[..., str], say: Callable[[str], None]) -> None:
    limits = ("--cpus=2", "--memory=1g")
    names = {"default": container(*limits)} | {n: container(*limits, flags=(f"--compute_threads={n}",)) for n in "124"}
    for name in names.values():
        wait_for(lambda name=name: is_healthy(name), "healthy")
    rates: dict[str, list[float]] = {key: [] for key in names}
    for _ in range(5):  # in turns: other work on the machine meets all of them
        for key, name in names.items():
            rates[key].append(decode_rate(name))
    medians = {key: statistics.median(values) for key, values in rates.items()}
    figures = ", ".join(f"{key} {value:.0f}" for key, value in medians.items())
    say(f"decode in a container of 2 processors, by --compute_threads, tokens/s: {figures}")
    assert medians["default"] >= 0.8 * max(medians.values())


def test_o03_g04_docker_stop_drains_and_ends_with_zero(
        container: Callable[..., str], say: Callable[[str], None]) -> None:
    """An open stream without traffic, and one whose steps never end."""
    name = container("--cpus=2", "--memory=1g")
    wait_for(lambda: is_healthy(name), "healthy")
    assert docker("exec", name, "cat", "/proc/1/cmdline").strip("\0") == "attnd"
    assert docker("exec", name, "stat", "-c", "%u", "/proc/1") == "65532"
    calls = Calls(target(name))
    session = calls.create()
    idle = OpenStream(calls)
    assert idle.step(session, 3) == 3
    docker("exec", "--detach", name, "attnctl", "demo", "--sessions=2", "--layers=1", "--prefill=2048",
           "--decode=1000000", "--stream")
    wait_for(lambda: docker("exec", name, "attnctl", "session", "list").count("\n") >= 3, "the demo's sessions")
    start = time.monotonic()
    docker("stop", "--time=40", name)
    took = time.monotonic() - start
    error = idle.end()
    state = inspect(name)["State"]
    say(f"docker stop took {took:.1f} s, exit status {state['ExitCode']}; the open stream ended with "
        f"{error.code().name if error else 'OK'}")
    assert state["ExitCode"] == 0 and not state["OOMKilled"]
    assert took < 10
    assert error is None or error.code().name == "UNAVAILABLE"
    assert "drained" in run("docker", "logs", name).stderr


def test_a_mistake_on_the_command_line_ends_at_once_and_says_why(image: str) -> None:
    done = run("docker", "run", "--rm", image, "--kv_cache_bytes=nonsense", check=False)
    assert done.returncode not in (0, 125, 126, 127) and "nonsense" in done.stderr
