"""Files from somebody else cannot run code or forge output; SECURITY.md names these tests."""

import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common.errors import UserError, one_line
from pretrain.common.logs import setup_logging
from pretrain.common.run.state import update_state, write_failure
from pretrain.config import load_config
from tests.errors import refused
from tests.pretrain.runs import overrides
from tests.tools.launcher.helpers import build_probe, end
from tests.tools.reporting.runs import detector, write
from tools import convert_to_d2, launch, report
from tools.launcher import job_options
from tools.launcher.graphs import pipeline

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\r"


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable, tuple]:
        return open, (str(self.marker), "w")


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a file that every payload would create, after checking that one does."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "code has run"
    pickle.loads(pickle.dumps(Payload(file)))
    file.unlink()
    return file


READERS: dict[str, Callable[[Path], Any]] = {
    "stages": lambda file: load_config(file, []),
    "pipeline": lambda file: pipeline.load_pipeline(str(file)),
    "site": lambda file: job_options.resolve_options({"cluster": "local"}, str(file)),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_yaml_file_runs_no_code(marker: Path, kind: str):
    file = marker.with_name("a.yaml")
    file.write_text(f"OUTPUT_DIR: !!python/object/apply:builtins.open ['{marker}', w]\n")
    refused(lambda: READERS[kind](file))
    assert not marker.exists()


def run_folder(folder: Path, text: str, jobs_id: str = "1") -> Path:
    """Write a run folder as the launcher leaves it, with ``text`` in every text field."""
    logs = folder / "launch/submission"
    logs.mkdir(parents=True)
    spec = build_probe("knn", "random", "", ["OUTPUT_DIR", str(folder)]).to_json()
    job = {"id": jobs_id, "cluster": "slurm", "name": text, "logs": str(logs), "host": text, "tasks": 1, "submitted": 0}
    record = {"spec": {**spec, "stage": text, "entry": text}, "options": vars(job_options.JobOptions()), "jobs": [job]}
    (folder / "launch/launch.json").write_text(json.dumps(record, default=list))
    end(folder, "failed", stage=text, host=text, reason=text, job="submission")
    write_failure(folder, 0, UserError(text), "submission")
    for kind in ("out", "err"):
        (logs / f"{jobs_id}_0_log.{kind}").write_text(f"\x1b[32mgreen\x1b[0m {text}\n")
    (folder / "environment.txt").write_text(f"git: {text}\n")
    weights = {"source": text, "method": text, "epoch": text}
    write(folder, detector(weights=weights))
    (folder / "config.yaml").write_text(json.dumps({"METHOD": {"NAME": text}}))
    return folder


COMMANDS = {
    "report": lambda folder: report.main([str(folder)]),
    "status": lambda folder: launch.main(["status", str(folder)]),
    "logs": lambda folder: launch.main(["logs", str(folder)]),
    "compare": lambda folder: launch.main(["compare", str(folder), str(folder.with_name("other"))]),
    "convert": lambda folder: convert_to_d2.main([str(folder), str(folder.with_name("out.pth"))]),
    "resume": lambda folder: launch.main(["resume", str(folder)]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_foreign_run_folder_runs_no_code(marker: Path, command: str, capsys: pytest.CaptureFixture):
    folder = run_folder(marker.with_name("run"), "a")
    run_folder(marker.with_name("other"), "b")
    for name in ("1_submitted.pkl", "1_0_result.pkl"):
        (folder / "launch/submission" / name).write_bytes(pickle.dumps(Payload(marker)))
    torch.save({"step": 1, "state_dict": Payload(marker)}, folder / "checkpoint_final.pth")
    (folder / "model_final.pkl").write_bytes(pickle.dumps(Payload(marker)))
    (folder / "config.yaml").write_text(f"SEED: !!python/object/apply:builtins.open ['{marker}', w]\n")
    assert answered(command, folder, capsys)
    assert not marker.exists()


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "convert"])
def test_control_sequences_do_not_reach_the_terminal(marker: Path, command: str, capsys: pytest.CaptureFixture):
    folder = run_folder(marker.with_name("run"), ESCAPES)
    run_folder(marker.with_name("other"), ESCAPES[::-1])
    shown = answered(command, folder, capsys).replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert "owned" in shown
    assert all(line.isprintable() for line in shown.replace("\t", " ").split("\n")), repr(shown)


def answered(command: str, folder: Path, capsys: pytest.CaptureFixture) -> str:
    """Return what a command prints on both streams, including the line of an error."""
    try:
        COMMANDS[command](folder)
    except UserError as error:
        print(one_line(error))
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_control_sequences_do_not_reach_the_log(tmp_path: Path):
    setup_logging(tmp_path)
    logging.getLogger("pretrain.mine").info(f"image {ESCAPES}")
    logging.getLogger("elsewhere").info("not ours")
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    assert line.endswith(r"image \x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe" + r"\r") and line.isprintable()


@pytest.mark.parametrize("kind", ["launch", "pipeline"])
def test_another_users_run_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    folder = run_folder(tmp_path / "run", "a")
    (folder / "launch/launch.json").rename(folder / f"launch/{kind}.json")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    words = (f"{kind}.json belongs to another user (uid ", "; rerun the original")
    refused(lambda: launch.main(["resume", str(folder)]), *words)


def test_a_checkpoint_that_is_resumed_runs_no_code(marker: Path, images: Path):
    from pretrain.train import main

    folder = marker.with_name("run")
    cfg = load_config(None, overrides(images, folder))
    folder.mkdir()
    update_state(folder, stage="pretrain")
    (folder / "config.yaml").write_text(cfg.dump())
    torch.save({"step": 1, "state_dict": Payload(marker)}, folder / "checkpoint_0000000001.pth")
    refused(lambda: main(cfg), "weights_only=False")
    assert not marker.exists()
