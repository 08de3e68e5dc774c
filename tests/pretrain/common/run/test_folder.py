"""environment.txt records where a run was started, and where it was resumed."""

import os
import shutil
import subprocess

import pytest
import torch
from torch.cuda import nccl

from pretrain.common.run.folder import check_stage_of, find_checkpoints, read_git_state, write_environment
from pretrain.common.run.state import update_state
from tests.errors import refused


def test_a_resumed_run_keeps_the_record_of_its_first_environment(tmp_path, monkeypatch):
    for word in ("first", os.fsdecode(b"\xff")):  # a path need not be UTF-8
        monkeypatch.setattr("sys.argv", ["train.py", word])
        write_environment(tmp_path)
    lines = (tmp_path / "environment.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("command:")] == [
        "command: train.py first",
        r"command: train.py '\udcff'",
    ]


def test_a_driver_that_is_too_old_hides_no_error(tmp_path, monkeypatch) -> None:
    """Such a driver counts GPUs, but torch cannot use them or read their names."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: pytest.fail("the driver is too old"))
    write_environment(tmp_path)
    assert "devices: cpu\n" in (tmp_path / "environment.txt").read_text()


def test_the_environment_names_what_numbers_on_gpus_depend_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0")
    write_environment(tmp_path)
    text = (tmp_path / "environment.txt").read_text()
    assert "devices: NVIDIA H100, NVIDIA H100\n" in text and "\ndriver: " in text
    assert "cuDNN 92600, NCCL 2.30.7\n" in text and "TORCH_DIST_USE_NCCL2=0\n" in text
    assert "tf32: convolutions True, matrix products False\n" in text


@pytest.mark.parametrize(
    "name", ["metrics.json", "results.json", "events.out.tfevents.17.host.1.0", "views.png", "config.yaml", "knn.csv"]
)
def test_a_folder_with_files_of_another_program_is_refused(tmp_path, name: str) -> None:
    for harmless in ("notes.txt", "recipe.yaml", "model_final.pth"):
        (tmp_path / harmless).touch()
    check_stage_of(tmp_path, "knn")
    (tmp_path / name).touch()
    (tmp_path / "launch").mkdir()  # the launcher's own contains launch.json
    refused(lambda: check_stage_of(tmp_path, "knn"), tmp_path, name, "OUTPUT_DIR")
    update_state(tmp_path, stage="knn")
    check_stage_of(tmp_path, "knn")


def test_a_checkpoint_of_any_stage_is_found(tmp_path) -> None:
    assert find_checkpoints(tmp_path / "absent") == []
    names = {"checkpoint_00000008.pth", "checkpoint_final.pth", "model_0000001.pth"}
    for name in (*names, "results.json", ".checkpoint_00000009.pth.tmp.pth"):
        (tmp_path / name).touch()
    assert {path.name for path in find_checkpoints(tmp_path)} == names


def test_files_next_to_the_code_are_no_uncommitted_changes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("pretrain.common.run.folder.__file__", str(tmp_path / "pretrain/common/run/folder.py"))
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), (*author, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(("git", *words), cwd=tmp_path, check=True)
    (tmp_path / "tuning.yaml").touch()
    assert "with uncommitted changes" not in read_git_state()
    assert read_git_state(("tuning.yaml",)).endswith(" with uncommitted changes")
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain/new.py").touch()
    assert read_git_state().endswith(" with uncommitted changes")
    (tmp_path / "GIT_STATE").write_text("a copy's\n")
    assert read_git_state().endswith(" with uncommitted changes")  # a file that was left here is not believed
    shutil.rmtree(tmp_path / ".git")
    assert read_git_state() == "a copy's"
