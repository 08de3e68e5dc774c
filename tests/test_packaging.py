"""What an installation provides: the packages `pretrain` and `transfer`."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
import torchvision

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """The wheel contains only the Python interface, with all its files; the commands run from a checkout."""
    ours = ("pretrain", "transfer")
    for name in ours:
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=tmp_path / "source", check=True, capture_output=True, timeout=120
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = {str(path.relative_to(ROOT)) for name in ours for path in (ROOT / name).rglob("*.*")}
    assert names == {name for name in here if not name.endswith(".pyc")}
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "resnet18.pth")
    code = (
        "import sys, pretrain, transfer; assert sys.argv[1] in pretrain.__file__\n"
        "pretrain.load_backbone('resnet18.pth'); print(pretrain.__version__, 'jcl' in pretrain.METHODS)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    words = [sys.executable, "-c", code, tmp_path / "installed"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{PROJECT['project']['version']} True\n", done.stderr


def imported(path: Path) -> Iterator[str]:
    """Yield the packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def distributions(requirements: list[str]) -> set[str]:
    """Return the names in requirements, without versions."""
    return {re.split(r"[^\w-]", line)[0].lower() for line in requirements}


def test_every_package_that_is_imported_is_declared() -> None:
    """A package that is installed only because another one requires it may be missing tomorrow."""
    our_packages = {"pretrain", "transfer", "tools", "benchmarks"}
    names = {name for folder in our_packages for path in (ROOT / folder).rglob("*.py") for name in imported(path)}
    names -= {*sys.stdlib_module_names, *our_packages, "detectron2"}  # installed by make detectron2
    extras = PROJECT["project"]["optional-dependencies"]
    optional = set().union(*(distributions(extras[name]) for name in ("peers", "export", "loggers", "heif")))
    names -= {name.replace("-", "_") for name in optional}  # only where they are asked for
    declared = distributions(PROJECT["project"]["dependencies"])
    providers = metadata.packages_distributions()
    missing = {name for name in names if not declared & {package.lower() for package in providers.get(name, [])}}
    assert len(names) > 10 and not missing
