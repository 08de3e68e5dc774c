"""`make setup` with a Python that only records how it is called: what it refuses, and what it repairs."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Answers as Python does where the rule asks; -m venv copies it to .venv/bin. It has no pip if no_pip exists, and so on.
PYTHON = """\
#!/bin/bash
echo "$(env | grep -E '^(PIP|PYTHON)[A-Z]*_?' | sort | tr '\\n' ' ')|$*" >> {folder}/calls
case "$*" in
    *print*) cat {folder}/version 2>/dev/null || echo Python 3.12.0 of /opt/${{0##*/}};;
    *"version_info <"*) [ ! -e {folder}/version ] || [[ $0 != .venv/* ]];;
    *"-m venv"*) [ ! -e {folder}/no_venv ] || exit 1
        rm -rf .venv {folder}/no_pip; mkdir -p .venv/bin; cp $0 .venv/bin/python; touch .venv/pyvenv.cfg
        while [ -e {folder}/slow ]; do sleep 0.1; done
        echo "VIRTUAL_ENV='$PWD/.venv'" > .venv/bin/activate;;
    *"import pip"*) [ ! -e {folder}/no_pip ];;
    *ensurepip*) [ -e {folder}/broken_pip ] || rm -f {folder}/no_pip;;
    *"pip -q install"*) [ ! -e {folder}/no_network ];;
    *"-I tools/packages.py"*) [ ! -e {folder}/incomplete ];;
esac
"""
# What a site's modules or the shell may set, and what of it reaches Python and pip.
HIDDEN_VARIABLES = ["PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONSAFEPATH", "PYTHONOPTIMIZE", "PYTHONINSPECT"]
HIDDEN_VARIABLES += [f"PIP_{name}" for name in ("TARGET", "PREFIX", "PYTHON", "ROOT", "DRY_RUN", "NO_DEPS", "REPORT")]
HIDDEN_VARIABLES += [
    f"PIP_{name}" for name in ("REQUIREMENT", "EDITABLE", "IGNORE_INSTALLED", "PLATFORM", "PYTHON_VERSION")
]
HIDDEN_VARIABLES += [f"PIP_{name}" for name in ("ISOLATED", "REQUIRE_HASHES", "NO_BUILD_ISOLATION", "PRE", "SRC")]
KEPT_VARIABLES = [f"PIP_{name}" for name in ("INDEX_URL", "FIND_LINKS", "NO_INDEX", "CONSTRAINT", "CACHE_DIR", "PROXY")]
KEPT_VARIABLES += ["PIP_CONFIG_FILE", "PIP_CERT", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONPYCACHEPREFIX"]
# The user's words, and what pip is asked for or what the error says.
EXTRAS = [
    ("EXTRAS=dev, docs", ".[dev,docs]"),
    ("EXTRAS=docs\tdev", ".[dev,docs]"),
    ("EXTRAS= dev docs ", ".[dev,docs]"),
    ("EXTRAS=,docs,,dev,docs,", ".[dev,docs]"),
    ("EXTRAS=dev\ndocs", ".[dev,docs]"),
    ("EXTRAS=heif", ".[heif]"),
    ("EXTRAS=", "."),
    ("LOCKED=1", "requirements.lock"),
    ("LOCKED=0", ".[dev,docs]"),
]
REFUSED_EXTRAS = [
    *(
        (f"EXTRAS={name}", f"EXTRAS: there is no {name} in pyproject.toml; choose from dev docs export")
        for name in ("dve",)
    ),
    *(
        (f"EXTRAS={text}", "choose from dev docs export")
        for text in ("dev;docs", "[dev]", "a:b", "d%", "../dev", "dev=1", "a'b")
    ),
    ("EXTRAS=dev#1", "there is no dev#1 in"),
    ("EXTRAS=DEV,docs", "there is no DEV in"),
    (
        "LOCKED=1 EXTRAS=heif,dev",
        "there is no heif in requirements.lock (LOCKED=1); choose from dev docs export loggers.",
    ),
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON.format(folder=tmp_path))
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def start_make(project: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    inherited = ("MAKEFLAGS", "LOCKED", "EXTRAS", "PYTHON", "PIP_")  # from the make that runs the tests, or the shell
    environment = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
    environment |= {"XDG_CACHE_HOME": str(project / "cache"), **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(["make", *words], cwd=project, env=environment, stdout=pipe, stderr=pipe, text=True)


def make(project: Path, *words: str, **variables: str) -> tuple[int, str]:
    with start_make(project, *words, **variables) as process:
        _, text = process.communicate(timeout=60)
    return process.returncode, text


def calls(project: Path) -> list[str]:
    lines = (project / "calls").read_text().splitlines()
    (project / "calls").unlink()
    return lines


@pytest.mark.parametrize("name", HIDDEN_VARIABLES + KEPT_VARIABLES)
def test_a_site_s_modules_do_not_reach_pip(project: Path, name: str):
    assert make(project, "setup", "PYTHON=./python", **{name: "of_the_site", "PIP_USER": "1"}) == (0, "")
    lines = calls(project)
    expected = {
        "PIP_DISABLE_PIP_VERSION_CHECK=1",
        "PIP_USER=0",
        "PYTHON=./python",
        *([f"{name}=of_the_site"] if name in KEPT_VARIABLES else []),
    }
    assert all({*line.partition(" |")[0].split()} == expected for line in lines)
    steps = ["-m venv --clear .venv", "-m pip -q install -e .[dev,docs]", "-I tools/packages.py dev,docs"]
    assert [step for line in lines if (step := line.partition("|")[2]) in steps] == steps
    assert make(project, "setup", **{name: "of_the_site"})[0] == 0
    assert not [line for line in calls(project) if "install" in line]


def test_a_second_setup_waits_for_the_first(project: Path):
    """It would find a .venv without bin/activate, and advise to remove it."""
    slow = project / "slow"
    slow.touch()
    try:
        first = start_make(project, "setup", "PYTHON=./python")
        while first.poll() is None and not (project / ".venv/pyvenv.cfg").exists():
            time.sleep(0.05)
        second = start_make(project, "setup", "PYTHON=./python")
        assert second.stderr and second.stderr.readline() == "waiting for another make setup in this folder\n"
    finally:
        slow.unlink()
    for process in (first, second):
        process.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)


def test_a_named_python_is_used_or_refused(project: Path):
    status, text = make(project, "setup", "PYTHON=/no/such/python3.13")
    assert status == 2 and "error: PYTHON=/no/such/python3.13 does not run or is older than Python 3.11" in text
    assert not (project / ".venv").exists()
    assert make(project, "setup", "PYTHON=./python")[0] == 0
    assert make(project, "setup", "PYTHON=.venv/bin/python")[0] == 0
    (project / "other").symlink_to("python")
    status, text = make(project, "setup", "PYTHON=./other")
    assert status == 2 and "error: .venv has Python 3.12.0 of /opt/python, not PYTHON=./other; run make clean" in text


@pytest.mark.parametrize(("words", "requirement"), EXTRAS)
def test_extras(project: Path, words: str, requirement: str):
    for count in (1, 0):
        assert make(project, "setup", "PYTHON=./python", words) == (0, "")
        assert sum(line.endswith(f" {requirement}") for line in calls(project) if "install" in line) == count
    assert (project / ".venv/bin/python").exists()


@pytest.mark.parametrize(("words", "text"), REFUSED_EXTRAS)
def test_unknown_extras_are_refused(project: Path, words: str, text: str):
    status, answer = make(project, "setup", *words.split())
    assert status == 2 and text in answer and answer.count("\n") == 1
    assert not (project / ".venv").exists()


FAULTS = [
    ("touch no_pip", "-I -m ensurepip"),  # an environment of uv
    ("touch no_pip broken_pip", "-m venv --clear .venv"),
    ("ln -sf /nowhere/python .venv/bin/python", "-m venv --clear .venv"),
    (
        "echo VIRTUAL_ENV=/elsewhere/.venv > .venv/bin/activate",
        "error: activating .venv does not lead to it: it was moved",
    ),
    ("rm .venv/bin/activate .venv/pyvenv.cfg", "error: activating .venv does not lead to it"),  # of conda
    ("rm .venv/bin/activate", "-m venv --clear .venv"),  # its creation was interrupted
    ("rm -r .venv; mkdir .venv", "-m venv --clear .venv"),
    ("mv .venv disk; ln -s disk .venv", ""),
    ("rm -r .venv; ln -s /nowhere/disk .venv", "error: .venv is not a virtual environment; move it away"),
    ("rm -r .venv; touch .venv", "error: .venv is not a virtual environment; move it away"),
    ("rm .venv/bin/python .venv/pyvenv.cfg", "error: .venv is not a virtual environment; move it away"),
    ("touch no_network pyproject.toml", "error: .venv is incomplete, for the reason above"),
    ("touch incomplete requirements.lock", "error: .venv is incomplete, for the reason above"),
    ("rm -r .venv; touch no_venv", "error: ./python cannot create .venv with pip, for the reason above"),
    (
        "echo Python 3.9.2 of /usr > version",
        "error: .venv has Python 3.9.2 of /usr, which is older than Python 3.11; run make",
    ),
]


@pytest.mark.parametrize(("fault", "expected"), FAULTS)
def test_a_setup_ends_complete_or_with_its_remedy(project: Path, fault: str, expected: str):
    assert make(project, "setup", "PYTHON=./python") == (0, "")
    os.utime(project / "pyproject.toml", (0, 0))
    os.utime(project / "requirements.lock", (0, 0))
    calls(project)
    subprocess.run(fault, shell=True, cwd=project, check=True)
    status, text = make(project, "setup", "PYTHON=./python")
    if expected.startswith("error: "):
        assert status == 2 and text.startswith(expected) and text.count("\n") == 2, text  # and make's
    else:
        repairs = [
            step
            for line in calls(project)
            if "ensurepip" in line or " venv " in line
            for step in [line.partition("|")[2]]
        ]
        assert (status, text) == (0, "") and repairs[-1:] == [expected] * bool(expected)
        assert make(project, "setup", "PYTHON=./python") == (0, "")
        assert not [line for line in calls(project) if "install" in line]


def test_no_row_is_lost() -> None:
    tables = (HIDDEN_VARIABLES, KEPT_VARIABLES, EXTRAS, REFUSED_EXTRAS, FAULTS)
    assert [len(table) for table in tables] == [23, 11, 9, 11, 15]


def test_help_names_every_target_in_one_of_two_groups() -> None:
    text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    use, develop = text.split("To develop it:")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^  make ([\w-]+)", text, re.MULTILINE)
    assert sorted(named) == sorted({*phony.split()} - {"help", "check-python"})
    assert "make demo-quick" in use and "make test " in develop
