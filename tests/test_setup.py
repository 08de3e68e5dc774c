"""`make setup` with a Python that only records how it is called: what it refuses, and what it repairs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Answers as Python does where the rule asks; -m venv copies it to .venv/bin. It has no pip if no_pip exists, and so on.
PYTHON = """\
#!/bin/bash
echo "$PYTHONPATH|$PIP_TARGET$PIP_PYTHON|$PIP_USER|$*" >> {folder}/calls
case "$*" in
    *print*) echo Python 3.12.0 of /opt/${{0##*/}};;
    *"-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp $0 .venv/bin/python;;
    *"pip --version"*) [ ! -e {folder}/no_pip ];;
    *ensurepip*) rm {folder}/no_pip;;
    *"pip -q install"*) [ ! -e {folder}/no_network ];;
    *"-I tools/packages.py"*) [ ! -e {folder}/incomplete ];;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON.format(folder=tmp_path))
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(project: Path, *words: str, **variables: str) -> tuple[int, str]:
    inherited = ("MAKEFLAGS", "LOCKED", "EXTRAS", "PYTHON")  # from the make that runs the tests
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    environment |= {"XDG_CACHE_HOME": str(project / "cache"), **variables}
    done = subprocess.run(["make", *words], cwd=project, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def calls(project: Path) -> list[str]:
    lines = (project / "calls").read_text().splitlines()
    (project / "calls").unlink()
    return lines


def test_a_site_s_modules_do_not_reach_pip(project: Path):
    site = {"PYTHONPATH": "/site", "PIP_TARGET": "/t", "PIP_PYTHON": "/usr/bin/python3", "PIP_USER": "1"}
    assert make(project, "setup", "PYTHON=./python", **site)[0] == 0
    lines = calls(project)
    assert all(line.startswith("||0|") for line in lines)
    steps = ["-m venv --clear .venv", "-m pip -q install -e .[dev,docs]", "-I tools/packages.py dev,docs"]
    assert [line.removeprefix("||0|") for line in lines if line.removeprefix("||0|") in steps] == steps
    assert (project / ".venv/.set-up-dev-docs").exists()


def test_a_named_python_is_used_or_refused(project: Path):
    status, text = make(project, "setup", "PYTHON=/no/such/python3.13")
    assert status == 2 and "error: PYTHON=/no/such/python3.13 does not run or is older than Python 3.11" in text
    assert not (project / ".venv").exists()
    assert make(project, "setup", "PYTHON=./python")[0] == 0
    assert make(project, "setup", "PYTHON=.venv/bin/python")[0] == 0
    (project / "other").symlink_to("python")
    status, text = make(project, "setup", "PYTHON=./other")
    assert status == 2 and "error: .venv has Python 3.12.0 of /opt/python, not PYTHON=./other; run make clean" in text


def test_extras_may_have_blanks(project: Path):
    assert make(project, "setup", "PYTHON=./python", "EXTRAS=dev, docs") == (0, "")
    assert any(line.endswith("install -e .[dev,docs]") for line in calls(project))
    assert make(project, "setup", "PYTHON=./python", "EXTRAS=dev,docs") == (0, "")
    assert not any("install" in line for line in calls(project))  # the same


@pytest.mark.parametrize(("fault", "is_stuck"), [("no_pip", False), ("no_network", True), ("incomplete", True)])
def test_a_setup_ends_complete_or_with_its_remedy(project: Path, fault: str, is_stuck: bool):
    assert make(project, "setup", "PYTHON=./python")[0] == 0
    (project / fault).touch()
    (project / "requirements.lock").touch()
    os.utime(project / ".venv/.set-up-dev-docs", (0, 0))
    status, text = make(project, "setup", "PYTHON=./python")
    assert (status == 2) == is_stuck and ("error: .venv is incomplete, for the reason above" in text) == is_stuck
    (project / fault).unlink(missing_ok=True)
    assert make(project, "setup", "PYTHON=./python")[0] == 0


def test_an_environment_whose_python_is_gone_is_created_again(project: Path):
    assert make(project, "setup", "PYTHON=./python")[0] == 0
    (project / ".venv/bin/python").unlink()
    (project / ".venv/bin/python").symlink_to("/nowhere/python")
    calls(project)
    assert make(project, "setup", "PYTHON=./python")[0] == 0
    assert any(line.endswith("-m venv --clear .venv") for line in calls(project))


def test_help_names_every_target_in_one_of_two_groups() -> None:
    text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    use, develop = text.split("To develop it:")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^  make ([\w-]+)", text, re.MULTILINE)
    assert sorted(named) == sorted({*phony.split()} - {"help", "check-python"})
    assert "make demo-quick" in use and "make test " in develop
