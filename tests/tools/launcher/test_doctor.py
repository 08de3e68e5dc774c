"""The doctor: what it finds here, and what it must name."""

from __future__ import annotations

import importlib.metadata
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
    status = launch.main(["doctor", "--output", str(tmp_path), "--data-root", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert status == any(line.startswith("bad") for line in lines)
    assert any("all " in line and "versions that fit" in line for line in lines)
    assert any(f"imagenet, coco in {tmp_path}" in line for line in lines)


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
