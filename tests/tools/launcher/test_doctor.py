"""The doctor checks this machine and names each problem."""

import importlib.metadata
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools import launch
from tools.launcher import doctor


def test_the_doctor_examines_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture):
    for name in ("imagenet/train", "coco"):
        (tmp_path / name).mkdir(parents=True)
    launch.main(["doctor", "--output", str(tmp_path), "--data-root", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"ok +packages +all \d+ are installed in the required versions", line) for line in lines)
    assert any(re.fullmatch(rf"ok +data +imagenet, .*coco with DATA.ROOT {tmp_path}; .*", line) for line in lines)
    assert any(re.fullmatch(rf"(ok|note) +disk +{tmp_path}: \d+ GiB free.*", line) for line in lines)


@pytest.mark.parametrize(("states", "status"), [(["ok", "note"], 0), (["ok", "bad", "note"], 1)])
def test_the_doctor_fails_only_if_a_finding_is_bad(states: list[str], status: int, monkeypatch, capsys):
    findings = [(f"part {number}", state, f"text {number}") for number, state in enumerate(states)]
    monkeypatch.setattr(doctor, "inspect_machine", lambda output, data_root: iter(findings))
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
    _, state, text = doctor._inspect_packages()
    assert state == "bad"
    assert "numpy>=2.0 is required, and 1.2 is installed" in text and "timm>=1.0.31 is required, and none" in text


def test_gpus_that_torch_cannot_use(programs: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    programs("/usr/bin:/bin", **{"nvidia-smi": "echo NVIDIA A100; echo NVIDIA A100"})
    ((_, state, text),) = doctor._inspect_gpus()
    assert state == "bad" and "nvidia-smi shows 2, but torch" in text


def test_a_gpu_older_than_torchs_kernels_is_named(monkeypatch: pytest.MonkeyPatch):
    gpu = SimpleNamespace(name="Tesla V100", total_memory=32 * 2**30, major=7, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100", "sm_75", "sm_80", "sm_120a"])
    ((subject, state, text),) = doctor._inspect_gpus()
    assert (subject, state) == ("GPU 0", "bad")
    assert "compute capability 7.0" in text and "from sm_75 on" in text and "CUDA 12.6" in text


def test_shared_memory_for_the_workers_of_eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for gib, state in ((0.5, "bad"), (4, "note"), (16, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, gib=gib: SimpleNamespace(free=gib * 2**30))
        _, actual, text = doctor._inspect_shared_memory(tmp_path)
        assert actual == state and ("--ipc=host" in text) == (state != "ok")


def test_a_disk_that_is_full_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    assert "is not a folder that you can write to" in doctor._inspect_disk(tmp_path / "file/runs")[2]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=2**29))
    assert doctor._inspect_disk(tmp_path)[1] == "note"
