"""The packages of an environment: which are missing, too old or cannot be imported."""

import importlib
import importlib.metadata
import sys

import pytest

from tools import packages


def test_requirements_include_those_of_extras():
    assert {"torchvision>=0.25", "mkdocs>=1.6,<2"} <= set(packages.read_requirements(["docs"]))
    with pytest.raises(ValueError, match="no extra 'dve'"):
        packages.read_requirements(["dve"])


def test_packages_that_are_missing_or_too_old_are_named():
    version = importlib.metadata.version("tabulate")
    found = packages.find_unfit(["tabulate>=99", "no-such-package>=1", "numpy>=2.0"])
    assert found == [
        f"tabulate>=99 is required, and {version} is installed",
        "no-such-package>=1 is required, and none is installed",
    ]


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch):
    assert packages.find_broken(["pyyaml>=6", "tabulate>=0.9"]) == []

    def fail(name: str) -> None:
        raise OSError("libGL.so.1 is missing")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert packages.find_broken(["PyYAML>=6"]) == ["yaml cannot be imported: OSError: libGL.so.1 is missing"]


def test_the_exit_status_says_whether_something_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(packages, "find_unfit", lambda requirements: [])
    monkeypatch.setattr(packages, "find_broken", lambda requirements: [])
    monkeypatch.setattr(sys, "argv", ["packages.py", "dev,docs"])
    assert packages.main() == 0
    monkeypatch.setattr(sys, "argv", ["packages.py", "dve"])
    assert packages.main() == 1 and capsys.readouterr().err.startswith("error: no extra 'dve'")
