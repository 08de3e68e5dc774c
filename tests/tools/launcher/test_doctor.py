"""What the doctor finds on machines that lack something, and its remedy."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools.launcher.helpers import programs
from tools import launch
from tools.launcher import doctor
from tools.launcher.doctor import Finding


def found(tmp_path: Path, subject: str) -> list[Finding]:
    return [one for one in doctor.examine(tmp_path / "runs", tmp_path / "data") if one.subject.startswith(subject)]


def test_this_machine_can_run_the_project(tmp_path: Path, capsys: pytest.CaptureFixture):
    findings = doctor.examine(tmp_path / "runs", tmp_path / "data")
    assert [one for one in findings if one.state == "bad" and one.subject != "SLURM"] == []
    assert {"python", "packages", "disk", "data"} <= {one.subject for one in findings}
    assert all(one.remedy for one in findings if one.state == "bad")
    status = launch.main(["doctor", "--output", str(tmp_path), "--data-root", str(tmp_path)])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(findings) and status == any(line.startswith("bad") for line in shown)


def test_packages_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "timm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2" if name == "numpy" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (one,) = found(tmp_path, "packages")
    assert one.state == "bad" and "numpy 1.2 is not >=2.0" in one.text and "timm>=1.0.26 is not installed" in one.text
    assert "pip install -e" in one.remedy


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    programs(monkeypatch, tmp_path, path="/usr/bin:/bin", **{"nvidia-smi": "echo NVIDIA A100; echo NVIDIA A100"})
    (one,) = found(tmp_path, "GPUs")
    assert one.state == "bad" and "nvidia-smi shows 2, but torch" in one.text


@pytest.mark.parametrize("works", [True, False])
def test_each_gpu_is_tried(works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    properties = SimpleNamespace(name="H200", total_memory=140 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    import torch

    ones = torch.ones

    def on_gpu(*shape: int, device: str = "cpu") -> torch.Tensor:
        if device != "cpu" and not works:
            raise RuntimeError("CUDA error: no kernel image is available\nmore")
        return ones(*shape)

    monkeypatch.setattr("torch.ones", on_gpu)
    (one,) = found(tmp_path, "GPU")
    assert one.text.startswith("H200, 140 GiB")
    assert one.state == ("ok" if works else "bad") and ("no kernel image" in one.text) is not works


@pytest.mark.parametrize(
    ("scripts", "state", "text"),
    [
        ({}, "note", "no sbatch"),
        ({"sbatch": "exit 0", "sinfo": "exit 1"}, "note", "sinfo finds no cluster"),
        ({"sbatch": "exit 0", "sinfo": "echo 'gpu* up 4'; echo 'cpu up 2'; echo 'gpu* up 1'"}, "ok", "gpu*, cpu"),
    ],
)
def test_slurm(scripts: dict, state: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    programs(monkeypatch, tmp_path, **scripts)
    (tmp_path / "bin/echo").symlink_to("/bin/echo")
    (one,) = found(tmp_path, "SLURM")
    assert one.state == state and text in one.text


def test_data_sets_are_named(tmp_path: Path):
    for name in ("imagenet/train", "coco"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (one,) = found(tmp_path, "data")
    assert one.state == "ok" and one.text.startswith("imagenet, coco in ")


def test_a_disk_that_is_full_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    (one,) = [f for f in doctor.examine(tmp_path / "file/runs", tmp_path) if f.subject == "disk"]
    assert one.state == "bad" and "is not a folder that you can write to" in one.text
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=2**29))
    assert {f.subject: f.state for f in doctor.examine(tmp_path, tmp_path)}.items() >= {
        "disk": "note", "shared memory": "bad",
    }.items()  # fmt: skip
