"""What deploy/ tells attnd: settings that there are, directories that can be written, time enough to end."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from running_server import binary

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DIRECTORIES = {"ATTND_SPILL_DIR", "ATTND_SNAPSHOT_ON_DRAIN", "ATTND_RESTORE"}


def config(environment: dict[str, str]) -> dict[str, str]:
    """What attnd makes of these settings; fails where one is wrong."""
    done = subprocess.run([binary(), "--print_config"], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.removeprefix("--").split("=", 1) for line in done.stdout.splitlines())


def check_settings(environment: dict[str, str]) -> None:
    flags = config(environment)
    for name in environment:
        assert name.removeprefix("ATTND_").lower() in flags, name


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def uncommented(text: str) -> str:
    """With what is commented out, where no space follows the #."""
    return re.sub(r"^(\s*)#(?=\S)", r"\1", text, flags=re.MULTILINE)


@pytest.mark.parametrize("prepare", [str, uncommented])
def test_kubernetes(prepare) -> None:
    service, stateful_set = yaml.safe_load_all(prepare((DEPLOY / "kubernetes/attnd.yaml").read_text()))
    spec = stateful_set["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    check_settings(environment)
    pre_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pre_stop + seconds(environment["ATTND_DRAIN_TIMEOUT"]) + 40
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {environment[name] for name in DIRECTORIES & environment.keys()} == set(mounts)
    claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
    scratch = {volume["name"] for volume in pod["volumes"] if "sizeLimit" in volume["emptyDir"]}
    assert set(mounts.values()) == claims | scratch
    assert mounts[environment["ATTND_SPILL_DIR"]] in scratch
    assert (prepare is uncommented) == ("ATTND_RESTORE" in environment) == bool(claims)
    for name in DIRECTORIES & environment.keys() - {"ATTND_SPILL_DIR"}:
        assert mounts[environment[name]] in claims
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]


def compose_environment() -> tuple[dict, dict[str, str]]:
    """The service, and its settings when nothing is set: ${NAME:-default}."""
    stack = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    service = stack["services"]["attnd"]
    for volume in service["volumes"]:
        assert volume.split(":")[0] in stack["volumes"]
    return service, {name: re.sub(r"^\$\{[A-Z_]+:-(.*)\}$", r"\1", value)
                     for name, value in service["environment"].items()}


def test_compose_passes_settings_on_under_their_names_and_with_attnds_own_defaults() -> None:
    service, defaults = compose_environment()
    for name, value in service["environment"].items():
        assert value == "${" + name + ":-" + defaults[name] + "}"
    unset: dict[str, str] = {}
    assert config(unset) == config(defaults)
    assert DIRECTORIES <= defaults.keys()
    grace = seconds(re.sub(r"^\$\{[A-Z_]+:-(.*)\}$", r"\1", service["stop_grace_period"]))
    assert grace > seconds(defaults["ATTND_DRAIN_TIMEOUT"]) + 40


def test_the_documented_directories_lie_in_the_volume_that_the_image_has_for_its_user() -> None:
    service, _ = compose_environment()
    (mount,) = [volume.split(":")[1] for volume in service["volumes"]]
    text = (DEPLOY / "README.md").read_text()
    exported = dict(re.findall(r"\b(ATTND_(?:EVICTION|SPILL_DIR|SNAPSHOT_ON_DRAIN|RESTORE))=(\S+)", text))
    assert exported.keys() == DIRECTORIES | {"ATTND_EVICTION"}
    check_settings(exported)
    for name in DIRECTORIES:
        assert Path(exported[name]).parent == Path(mount)
    user = re.search(r"^USER (\d+):(\d+)$", (DEPLOY.parent / "Dockerfile").read_text(), re.MULTILINE)
    assert user
    line = f"install --directory --owner={user[1]} --group={user[2]} --mode=0700 {mount}"
    assert line in (DEPLOY.parent / "Dockerfile").read_text()
