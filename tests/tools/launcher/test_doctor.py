"""The doctor: what it finds here, and what it must name."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.tools.launcher.helpers import programs
from tools import launch
from tools.launcher import doctor


def test_this_machine_is_examined(tmp_path: Path, capsys: pytest.CaptureFixture):
    for name in ("imagenet/train", "coco"):
        (tmp_path / name).mkdir(parents=True)
    launch.main(["doctor", "--output", str(tmp_path), "--data-root", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"ok +packages +all \d+ are installed in versions that fit", line) for line in lines)
    assert any(re.fullmatch(rf"ok +data +imagenet, coco in {tmp_path}; .*", line) for line in lines)
    assert any(re.fullmatch(rf"(ok|note) +disk +{tmp_path}: \d+ GiB free.*", line) for line in lines)


@pytest.mark.parametrize(("states", "status"), [(["ok", "note"], 0), (["ok", "bad", "note"], 1), (["bad"], 1)])
def test_only_a_bad_finding_is_a_failure(
    states: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    findings = [(f"part {number}", state, f"text {number}") for number, state in enumerate(states)]
    monkeypatch.setattr(doctor, "examine", lambda output, data_root: iter(findings))
    assert launch.main(["doctor"]) == status
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert lines == [[state, "part", part.split()[1], text] for part, state, text in findings]


def test_packages_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "timm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2" if name == "numpy" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    _, state, text = doctor._packages()
    assert state == "bad" and "numpy 1.2 is not >=2.0" in text and "timm>=1.0.26 is not installed" in text


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    programs(monkeypatch, tmp_path, path="/usr/bin:/bin", **{"nvidia-smi": "echo NVIDIA A100; echo NVIDIA A100"})
    ((_, state, text),) = doctor._gpus()
    assert state == "bad" and "nvidia-smi shows 2, but torch" in text


def test_a_disk_that_is_full_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    assert "is not a folder that you can write to" in doctor._disk(tmp_path / "file/runs")[2]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=2**29))
    assert doctor._disk(tmp_path)[1] == "note" and [state for _, state, _ in doctor._shared_memory()] == ["bad"]
