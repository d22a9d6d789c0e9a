"""What is published: a source distribution, the wheel that is built from it, and the installed package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from running_server import ROOT, Server

STUBS = {
    f"attnd/v1/{name}"
    for proto in ("attnd", "error_details")
    for name in (f"{proto}_pb2.py", f"{proto}_pb2.pyi", f"{proto}_pb2_grpc.py")
}


def run(*command: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git knows and what is new: from a checkout that nobody has built in."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "client/python", "proto", cwd=ROOT)
    for name in filter(None, listed.splitlines()):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    backend = "import sys, setuptools.build_meta; print(setuptools.build_meta.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", backend, folder / "dist", cwd=folder / "client/python")
    [made] = (folder / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the source distribution, far from the repository."""
    folder = sdist.parent / "wheel"
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist)
    [made] = folder.iterdir()
    return made


def test_the_source_distribution_carries_the_contract(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert {"proto/attnd/v1/attnd.proto", "proto/attnd/v1/error_details.proto"} <= names


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "client/python/src"
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py") if "_pb2" not in path.name}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules | STUBS | {"attnd/py.typed"}
    assert wheel.name.endswith("-py3-none-any.whl")


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        [license_file] = [name for name in archive.namelist() if name.endswith("LICENSE")]
        assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
        return message_from_string(archive.read(name).decode())


def test_the_metadata_is_whole(wheel: Path) -> None:
    fields = metadata(wheel)
    assert (fields["Name"], fields["License-Expression"]) == ("attnd", "Apache-2.0")
    assert fields["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "client/python/README.md").read_text()
    assert fields.get_payload().strip() == readme.strip()
    needed = {re.split(r"[<>=!;\[ ]", requirement)[0] for requirement in fields.get_all("Requires-Dist")}
    assert {"numpy", "ml_dtypes", "grpcio", "protobuf", "torch", "transformers"} <= needed
    plain = [requirement for requirement in fields.get_all("Requires-Dist") if "extra ==" not in requirement]
    assert not [requirement for requirement in plain if requirement.startswith(("torch", "transformers"))]


def test_the_installed_wheel_works_without_the_repository(wheel: Path, server: Server, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    # The other packages are those of the tests' environment, behind its own.
    [site] = environment.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    program = f"""
import asyncio, attnd, attnd.aio
print(attnd.__file__)
with attnd.Client({server.target!r}) as client:
    print(client.attend([[0.0]], [[0.0], [0.0]], [[2.0], [8.0]]).out)
async def main():
    async with attnd.aio.Client({server.target!r}) as client:
        print((await client.attend([[0.0]], [[0.0], [0.0]], [[2.0], [8.0]])).out)
asyncio.run(main())
"""
    where, *outs = run(python, "-c", program, cwd=tmp_path).splitlines()
    assert where.startswith(str(site))
    assert outs == ["[[5.]]", "[[5.]]"]
