"""Generates the stubs from the wire contract while building: src/attnd/v1/*_pb2*.

The contract is proto/ at the root of the repository; a source distribution carries a copy of it.
"""

import importlib.metadata
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
PROTO_FILES = ("attnd/v1/attnd.proto", "attnd/v1/error_details.proto")
OUTPUT = HERE / "src"


def proto_root() -> Path:
    for root in (HERE / "proto", HERE.parent.parent / "proto"):
        if (root / PROTO_FILES[0]).is_file():
            return root
    raise FileNotFoundError(f"{PROTO_FILES[0]} is neither in {HERE / 'proto'} nor two folders above {HERE}")


def generate() -> None:
    import grpc_tools
    from grpc_tools import protoc

    root = proto_root()
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={OUTPUT}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{root}", f"-I{well_known}", *outputs, *PROTO_FILES]) != 0:
        raise RuntimeError("protoc failed, see its messages above")
    for path in (OUTPUT / "attnd" / "v1").glob("*_pb2_grpc.py"):
        text = path.read_text()
        path.write_text(re.sub(r"^from attnd\.v1 import", "from . import", text, flags=re.MULTILINE))


class BuildPy(build_py):
    def run(self) -> None:
        generate()
        super().run()


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for name in PROTO_FILES:
            target = Path(base_dir) / "proto" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(proto_root() / name, target)


def dependencies() -> list[str]:
    """What the stubs will import: nothing older than the generator, which says what it needs itself."""
    protobuf = next(r for r in importlib.metadata.requires("grpcio-tools") or [] if r.startswith("protobuf"))
    return ["numpy>=1.24", "ml_dtypes>=0.4", f"grpcio>={importlib.metadata.version('grpcio-tools')}", protobuf]


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist}, install_requires=dependencies())
