"""Weights & Biases and MLflow hold the numbers of metrics.json, each once; both libraries run without a service."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.common import loggers
from pretrain.common.errors import UserError
from pretrain.common.metrics import MetricsWriter, read_metrics
from tests.transfer import tiny_coco
from transfer import train_net

ROOT = Path(__file__).parents[3]
_BLOCK = 32768  # of the log format of LevelDB, in which wandb keeps an offline run


def points_of_wandb(folder: Path) -> Counter:
    """(name, iteration, value) of all offline runs below a run folder, which must have one id."""
    files, found = sorted(folder.glob("wandb/offline-run-*/run-*.wandb")), Counter()
    assert len({file.name for file in files}) == 1
    for file in files:
        for record in records_of_wandb(file):
            row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            found += Counter((k, row["iteration"], v) for k, v in row.items() if k[0] != "_" and k != "iteration")
    return found


def records_of_wandb(file: Path) -> list[Any]:
    """The records of an offline run that has ended; wandb's own process completes the file."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[Any] = []
    deadline = time.monotonic() + 30
    while not any(record.HasField("exit") for record in found) and time.monotonic() < deadline:
        time.sleep(0.1)
        data, at, parts, found = file.read_bytes(), 7, b"", []
        while at + 7 <= len(data):
            if _BLOCK - at % _BLOCK < 7:
                at += _BLOCK - at % _BLOCK
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                found.append(Record.FromString(parts))
                parts = b""
    return found


def points_of_mlflow(folder: Path) -> Counter:
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(), Counter()
    run = json.loads((folder / loggers.RECORD).read_text())["mlflow"]["run"]
    for name in client.get_run(run).data.metrics:
        found += Counter((name, point.step, point.value) for point in client.get_metric_history(run, name))
    return found


POINTS = {"wandb": points_of_wandb, "mlflow": points_of_mlflow}


def points_of_the_file(folder: Path) -> Counter:
    numbers = [(line["iteration"], line) for line in read_metrics(folder)]
    return Counter(
        (name, at, value) for at, line in numbers for name, value in line.items()
        if isinstance(value, (int, float)) and name != "iteration"
    )  # fmt: skip


@pytest.fixture(params=["wandb", "mlflow"])
def logger(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed: the extra loggers")
    monkeypatch.setenv(loggers.VARIABLE, request.param)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    return request.param


def test_a_run_without_a_line_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "wanted", lambda: ["wandb"])
    loggers.Loggers(tmp_path).update()
    assert list(tmp_path.iterdir()) == []


def test_the_numbers_are_those_of_the_file_and_a_resumed_run_doubles_none(logger: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "jcl"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"SOLVER": {"BASE_LR": 0.03}}))
    writer = MetricsWriter(folder)
    for step in (19, 39, 59):
        writer.write(step, {"loss": 1 / (step + 1), "bbox/AP-a b": step, "verdict": "text", "AP": None})  # type: ignore[dict-item]
    writer.close()
    assert POINTS[logger](folder) == points_of_the_file(folder) and len(points_of_the_file(folder)) == 6
    first = json.loads((folder / loggers.RECORD).read_text())
    writer = MetricsWriter(folder, 40)  # a crash lost what came after step 40
    writer.write(39, {"knn_top1": 55.5})  # due at the checkpoint
    for step in (59, 79):
        writer.write(step, {"loss": 1 / (step + 1), "bbox/AP-a b": step})
    writer.close()
    assert POINTS[logger](folder) == points_of_the_file(folder) and len(points_of_the_file(folder)) == 9
    assert set(POINTS[logger](folder).values()) == {1}
    assert json.loads((folder / loggers.RECORD).read_text())[logger]["run"] == first[logger]["run"]
    MetricsWriter(folder).close()  # a new start is a new run
    assert not (folder / loggers.RECORD).exists()


def test_a_run_has_its_name_and_config(logger: str, tmp_path: Path) -> None:
    folder = tmp_path / "demo" / "jcl"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"SOLVER": {"BASE_LR": 0.03}}))
    writer = MetricsWriter(folder)
    writer.write(0, {"loss": 1.0})
    writer.close()
    if logger == "mlflow":
        from mlflow.tracking import MlflowClient

        run = MlflowClient().get_run(json.loads((folder / loggers.RECORD).read_text())["mlflow"]["run"])
        assert (run.info.run_name, run.data.params) == ("demo/jcl", {"SOLVER.BASE_LR": "0.03"})
        assert run.info.status == "FINISHED"
    else:
        (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        run = next(record.run for record in records_of_wandb(file) if record.HasField("run"))
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert (run.display_name, config["SOLVER"]) == ("demo/jcl", {"BASE_LR": 0.03})


@pytest.mark.parametrize(
    "engine", ["torchvision", pytest.param("detectron2", marks=[pytest.mark.detectron2, pytest.mark.slow])]
)
def test_a_detector_is_logged_by_either_engine(logger: str, tmp_path: Path, engine: str) -> None:
    name = tiny_coco.write(tmp_path / "data")

    def work(*flags: str, **keys: Any) -> None:
        words = tiny_coco.command(tmp_path, name, engine, *flags, TEST__EVAL_PERIOD=2, **keys)
        train_net.work(train_net.parse(words))

    work(SOLVER__MAX_ITER=2)
    work("--resume", SOLVER__MAX_ITER=4)
    sent = POINTS[logger](tmp_path / "out")
    in_file = points_of_the_file(tmp_path / "out")
    # Beside the file's numbers there are those of the first run's end, whose iteration the resumed run has not logged.
    assert set(sent.values()) == {1} and in_file - sent == Counter()
    assert all(iteration < 3 for _, iteration, _ in sent - in_file)
    assert {"total_loss", "bbox/AP"} <= {name for name, *_ in in_file}


def test_a_service_that_fails_costs_one_warning_and_is_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: the extra loggers")
    monkeypatch.setenv(loggers.VARIABLE, "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with caplog.at_level(logging.WARNING, "pretrain.loggers"):
        writer = MetricsWriter(tmp_path)
        for step in range(3):
            writer.write(step, {"loss": float(step)})
        writer.close()
    (message,) = [record.getMessage() for record in caplog.records if record.name == "pretrain.loggers"]
    assert message.startswith("mlflow failed: ") and "\n" not in message
    assert len(read_metrics(tmp_path)) == 3
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    writer = MetricsWriter(tmp_path, 3)
    writer.write(3, {"loss": 3.0})
    assert points_of_mlflow(tmp_path) == points_of_the_file(tmp_path) and len(points_of_the_file(tmp_path)) == 4


def test_what_fails_in_the_middle_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    fails_at = [1]

    def send(iteration: int, values: Any) -> None:
        if iteration in fails_at:
            raise ConnectionError("gone")
        sent.append((iteration, dict(values)))

    monkeypatch.setattr(loggers, "wanted", lambda: ["own"])
    monkeypatch.setitem(loggers._OPEN, "own", lambda folder, run: loggers._Run("1", send, lambda: None))
    for start in (0, 2):
        writer = MetricsWriter(tmp_path, start)
        for step in (start, start + 1):
            writer.write(step, {"loss": float(step)})
        fails_at.clear()
    assert sent == [(step, {"loss": float(step)}) for step in range(4)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wandbb", r"P2T_LOGGERS names 'wandbb'; give wandb or mlflow, .*; did you mean 'wandb'\?"),
        ("wandb, mlflow", r"P2T_LOGGERS names mlflow, which is not installed; run: pip install mlflow-skinny"),
    ],
)
def test_a_name_that_cannot_log_is_refused(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loggers.VARIABLE, value)
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None if name == "mlflow" else name)
    with pytest.raises(UserError, match=message):
        loggers.wanted()


def test_mlflow_needs_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loggers.VARIABLE, "mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI is not set; set it to a server or to file:FOLDER"):
        loggers.wanted()


@pytest.mark.parametrize(
    "words",
    [
        ["tools/launch.py", "pretrain", "--method", "jcl", "--cluster", "local", "--gpus", "0"],
        ["transfer/train_net.py", "--config-file", "configs/coco_R50_FPN_1x_jcl.yaml"],
        ["-m", "pretrain"],
    ],
)
def test_every_command_refuses_it_at_the_start(words: list[str]) -> None:
    environment = {**os.environ, loggers.VARIABLE: "tensorbored", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "P2T_LOGGERS names 'tensorbored'; give wandb or mlflow" in done.stderr
