"""The records of a job's ranks: whose they are, and what happens where they cannot be written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pretrain.common.errors import ProcessLost, UserError
from tools.launcher import records
from tools.launcher.records import RankRecord, attempts

JOB = {"logs": "/runs/x/launch/s1"}


def test_records_tell_attempts_and_the_first_failure(tmp_path: Path):
    RankRecord(tmp_path, "s1", 0, 0).end("requeued", "SIGUSR2")
    RankRecord(tmp_path, "s1", 1, 1).fail(UserError("the value is 3; it must be 2"))
    RankRecord(tmp_path, "s1", 1, 0).fail(RuntimeError("later"))
    first, second = attempts(tmp_path, JOB)
    assert (first["state"], first["reason"]) == ("requeued", "SIGUSR2") and "failure" not in first
    assert second["state"] == "failed" and second["failure"]["rank"] == 1 and second["failure"]["user_error"]
    assert second["failure"]["error"] == "the value is 3; it must be 2"


def test_a_failure_is_told_where_rank_0_was_ended_before_its_record(tmp_path: Path):
    """SLURM ends the other ranks as soon as one has failed; rank 0 may still have been importing."""
    RankRecord(tmp_path, "s1", 0, 0).end("requeued", "SIGUSR2")
    RankRecord(tmp_path, "s1", 1, 1).fail(RuntimeError("rank 1 cannot go on"))
    first, second = attempts(tmp_path, JOB)
    assert (first["attempt"], first["state"], second["attempt"], second["state"]) == (0, "requeued", 1, "failed")
    assert second["failure"]["error"] == "RuntimeError: rank 1 cannot go on" and second["host"] and second["started"]


def test_what_followed_from_a_failure_does_not_hide_it(tmp_path: Path):
    """The rank that lost the other one may be faster than the parent that sees how the other one ended."""
    RankRecord(tmp_path, "s1", 0, 1).fail(ProcessLost("another process has ended"))
    assert attempts(tmp_path, JOB)[0]["failure"]["error"] == "another process has ended"
    RankRecord(tmp_path, "s1", 0, 0).failed("rank 0: it was killed by SIGKILL")
    RankRecord(tmp_path, "s1", 0, 2).fail(RuntimeError("later"))
    assert attempts(tmp_path, JOB)[0]["failure"]["error"] == "rank 0: it was killed by SIGKILL"


def test_an_earlier_jobs_records_are_not_this_ones(tmp_path: Path):
    RankRecord(tmp_path, "s0", 0, 0).fail(RuntimeError("earlier"))
    RankRecord(tmp_path, "s0", 1, 0).end("failed")
    RankRecord(tmp_path, "s1", 0, 0).end("done")
    (found,) = attempts(tmp_path, JOB)
    assert found["state"] == "done" and "failure" not in found


@pytest.mark.parametrize("damaged", ["", "[]", '{"attempt": 1'])
def test_a_damaged_record_is_left_out(tmp_path: Path, damaged: str):
    RankRecord(tmp_path, "s1", 0, 0).end("requeued")
    (tmp_path / "launch/ranks/s1.1.0.json").write_text(damaged)
    assert [one["attempt"] for one in attempts(tmp_path, JOB)] == [0]


def test_records_that_cannot_be_written_are_said_and_block_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "launch").write_text("a file where the folder belongs")
    record = RankRecord(tmp_path, "s", 0, 0)
    record.fail(UserError("no space left"))
    shown = capsys.readouterr().err
    assert "warning: cannot write" in shown and "error: no space left (of rank 0; it could not be recorded" in shown


def test_standard_error_may_be_on_the_full_disk_too(monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        records.warn("x" * 10)
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()
