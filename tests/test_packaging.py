"""What an installation provides: the packages and the command `p2t`."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()
README = (ROOT / "README.md").read_text()


def test_every_package_is_installed() -> None:
    found = find_packages(str(ROOT), **PROJECT["tool"]["setuptools"]["packages"]["find"])
    here = {path.parent for name in ("pretrain", "transfer", "tools") for path in (ROOT / name).rglob("*.py")}
    assert set(found) == {str(path.relative_to(ROOT)).replace("/", ".") for path in here}


def test_every_other_file_of_a_package_is_installed() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    listed = {
        path
        for name, globs in patterns.items()
        for glob in globs
        for path in (ROOT / name.replace(".", "/")).glob(glob)
    }
    folders = [ROOT / name for name in ("pretrain", "transfer", "tools")]
    here = {path for folder in folders for path in folder.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert here and here <= listed


def imported(path: Path) -> Iterator[str]:
    """The packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def distributions(requirements: list[str]) -> set[str]:
    """Their names, without versions."""
    return {re.split(r"[^\w-]", line)[0].lower() for line in requirements}


def test_every_package_that_is_imported_is_declared() -> None:
    """Another package may bring one in today and no longer do so tomorrow."""
    own = {"pretrain", "transfer", "tools"}
    names = {name for folder in own for path in (ROOT / folder).rglob("*.py") for name in imported(path)}
    names -= {*sys.stdlib_module_names, *own, "detectron2"}  # make detectron2 installs that one
    extras = PROJECT["project"]["optional-dependencies"]
    optional = {one for name in ("peers", "export", "loggers", "faster") for one in distributions(extras[name])}
    names -= {name.replace("-", "_") for name in optional}  # only where they are asked for
    declared = distributions(PROJECT["project"]["dependencies"])
    providers = metadata.packages_distributions()
    missing = {name for name in names if not declared & {one.lower() for one in providers.get(name, [])}}
    assert len(names) > 10 and not missing


def test_the_lock_file_has_every_dependency_with_hashes() -> None:
    """CI installs it: what it lacks, or has in a version that is not allowed, would go untested."""
    entry = r"^([\w.-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
    entries = re.findall(entry, LOCK, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^[^#\s]", LOCK, re.MULTILINE)) > 100
    locked = {name: version for name, version, _ in entries}
    extras = PROJECT["project"]["optional-dependencies"]
    asked = PROJECT["project"]["dependencies"] + [one for name in extras if name != "peers" for one in extras[name]]
    for one in map(Requirement, asked):
        assert one.specifier.contains(locked[one.name]), one


def test_p2t_runs_the_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, function = PROJECT["project"]["scripts"]["p2t"].split(":")
    monkeypatch.setattr("sys.argv", ["p2t", "pretrain", "--method", "jcll"])
    with pytest.raises(SystemExit) as ended:
        getattr(importlib.import_module(module), function)()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "did you mean 'jcl'?" in message


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["project"]["version"], PROJECT["project"]["license"])
    titles = {reference["title"] for reference in citation["references"]}
    assert len(titles) == 5 and all(f"title     = {{{t}}}" in README or f"title   = {{{t}}}" in README for t in titles)
