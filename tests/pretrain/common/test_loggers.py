"""Weights & Biases gets each number of metrics.json once; its library runs without a service."""

from __future__ import annotations

import json
import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.common import loggers
from pretrain.common.metrics import MetricsWriter, drop_metrics, read_metrics
from tests.errors import refused

_BLOCK = 32768  # of the log format of LevelDB, in which wandb keeps an offline run


def points_of_wandb(folder: Path) -> Counter:
    """(name, iteration, value) of all offline runs beside a run folder, which must have one id."""
    files, found = sorted(folder.parent.glob("wandb/offline-run-*/run-*.wandb")), Counter()
    assert len({file.name for file in files}) == 1
    for file in files:
        for record in records_of_wandb(file):
            row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            step = row.pop("global_step", None)
            found += Counter((name, step, round(value, 4)) for name, value in row.items() if name[0] != "_")
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


def points_of_the_file(folder: Path) -> Counter:
    numbers = [(line["iteration"], line) for line in read_metrics(folder)]
    return Counter(
        (name, at, round(value, 4)) for at, line in numbers for name, value in line.items()
        if isinstance(value, (int, float)) and name != "iteration"
    )  # fmt: skip


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: the extra loggers")
    monkeypatch.setenv(loggers.VARIABLE, "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_each_number_is_sent_once_and_a_resumed_run_is_continued(wandb: None, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "jcl"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"SOLVER": {"BASE_LR": 0.03}}))
    for first in (0, 40):
        writer = MetricsWriter(folder, first)
        for step in (first, first + 20):
            writer.write(step, {"loss": 1 / (step + 1), "bbox/AP-a b": step, "verdict": "text"})
        writer.write(step, {"knn_top1": 55.5})
        writer.close()
    assert points_of_wandb(folder) == points_of_the_file(folder) and len(points_of_the_file(folder)) == 10
    record = records_of_wandb(next(tmp_path.glob("runs/wandb/offline-run-*/run-*.wandb")))
    run = next(part.run for part in record if part.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.display_name, config["SOLVER"]) == ("runs/jcl", {"BASE_LR": 0.03})
    assert (folder / loggers.RECORD).read_text() == run.run_id
    drop_metrics(folder, 0)
    assert not (folder / loggers.RECORD).exists()  # a new start is a new run


def test_what_fails_costs_one_warning(wandb: None, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def fail(**_options: Any) -> None:
        raise ConnectionError("unreachable")

    monkeypatch.setattr("wandb.init", fail)
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"loss": 1.0})
    writer.close()
    (message,) = [record.getMessage() for record in caplog.records if record.name == "pretrain.loggers"]
    assert message == "wandb failed: unreachable; the run continues without it" and len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize(("value", "names"), [("wandbb", "'wandbb'"), ("wandb", "pip install wandb")])
def test_a_name_that_cannot_log_is_refused(value: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loggers.VARIABLE, value)
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    refused(loggers.wanted, names)
