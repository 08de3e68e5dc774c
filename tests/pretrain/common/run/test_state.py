"""What a stage records in state.json and failed.RANK.json, also if the disk is full or another job writes them."""

import errno
import json
import os
import socket
from unittest import mock

import pytest

from pretrain.common import files
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.run import state
from pretrain.common.run.state import (
    RunContext,
    has_recorded_failure,
    is_end_recorded,
    read_outcome,
    read_state,
    record_state,
    write_failure,
)
from tests.errors import refused


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, {"state": "complete"}),
        (Stopped("SIGTERM"), {"state": "stopped", "reason": "SIGTERM"}),
        (KeyboardInterrupt(), {"state": "stopped", "reason": "KeyboardInterrupt"}),
        (RuntimeError("a bug\nin two lines"), {"state": "failed", "reason": "a bug in two lines"}),
    ],
)
def test_a_stage_records_that_it_runs_and_how_it_ended(tmp_path, error, end):
    context = RunContext(submission="s", state_entries={"fingerprint": "f"})
    try:
        with record_state(tmp_path, "knn", context):
            running = read_state(tmp_path)
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    start = {"stage": "knn", "host": socket.gethostname(), "pid": os.getpid(), "attempt": 0, "job": "s"}
    assert running.items() >= {**start, "state": "running", "fingerprint": "f"}.items()
    ended = read_state(tmp_path)
    assert ended.items() >= {**start, **end}.items() and ended["started"] <= ended["ended"] <= ended["updated"]
    with record_state(tmp_path, "knn", context):
        assert not {"reason", "ended"} & read_state(tmp_path).keys()


def test_a_full_disk_hides_no_error(tmp_path, monkeypatch) -> None:
    full_disk = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(RuntimeError, match="a bug"), record_state(tmp_path, "knn", RunContext()):
        monkeypatch.setattr(files.os, "fsync", full_disk)
        raise RuntimeError("a bug")
    assert read_state(tmp_path)["state"] == "running"
    refused(lambda: record_state(tmp_path, "knn", RunContext()).__enter__(), "state.json", "No space left")
    monkeypatch.undo()

    def complete() -> None:
        with record_state(tmp_path, "knn", RunContext()):
            monkeypatch.setattr(files.os, "fsync", full_disk)

    refused(complete, "state.json", "No space left")  # a stage is not complete before this is recorded
    assert read_state(tmp_path)["state"] == "running"


def test_a_start_removes_the_failures_of_earlier_ones(tmp_path) -> None:
    """Another rank of the same job may fail before rank 0 starts the stage."""
    write_failure(tmp_path, 0, UserError("of an earlier start"), "")
    write_failure(tmp_path, 1, UserError("of this job"), "s")
    with record_state(tmp_path, "knn", RunContext(submission="s")):
        assert [path.name for path in tmp_path.glob("failed.*")] == ["failed.1.json"]
    with record_state(tmp_path, "knn", RunContext()):
        assert list(tmp_path.glob("failed.*")) == []


def test_what_was_killed_has_recorded_no_end_and_no_failure(tmp_path) -> None:
    assert not is_end_recorded(read_outcome(tmp_path, "s"))
    with record_state(tmp_path, "knn", RunContext(submission="s")):
        assert not is_end_recorded(read_outcome(tmp_path, "s"))
    assert is_end_recorded(read_outcome(tmp_path, "s"))
    assert not is_end_recorded(read_outcome(tmp_path, "another"))
    write_failure(tmp_path, 1, "a bug", "s")
    recorded = [(rank, job) for rank in (0, 1) for job in ("s", "t") if has_recorded_failure(tmp_path, rank, job)]
    assert recorded == [(1, "s")]


def test_a_damaged_record_is_empty(tmp_path) -> None:
    assert read_state(tmp_path) == {}
    for text in ("", "{", "[1]"):
        (tmp_path / "state.json").write_text(text)
        assert read_state(tmp_path) == {}
    (tmp_path / "failed.0.json").write_text(json.dumps({"job": "t"}))
    assert state.read_failure(tmp_path, "s") == {}
