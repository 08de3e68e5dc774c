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
    """An earlier job's and damaged records are ignored. Rank 0 may not have begun when another fails."""
    RankRecord(tmp_path, "s0", 0, 0).fail(RuntimeError("earlier"))
    RankRecord(tmp_path, "s1", 0, 0).end("requeued", "SIGUSR2")
    RankRecord(tmp_path, "s1", 1, 1).fail(UserError("the value is 3; it must be 2"))
    for rank_0_has_begun in (False, True):
        if rank_0_has_begun:
            RankRecord(tmp_path, "s1", 1, 0).fail(RuntimeError("later"))
        first, second = attempts(tmp_path, JOB)
        assert (first["attempt"], first["state"], first["reason"]) == (0, "requeued", "SIGUSR2")
        assert "failure" not in first and (second["attempt"], second["state"]) == (1, "failed")
        assert second["host"] and second["started"] and second["failure"]["user_error"]
        assert (second["failure"]["rank"], second["failure"]["error"]) == (1, "the value is 3; it must be 2")
    (tmp_path / "launch/ranks/s1.2.0.json").write_text('{"attempt": 2')
    assert len(attempts(tmp_path, JOB)) == 2


def test_what_followed_from_a_failure_does_not_hide_it(tmp_path: Path):
    """The rank that lost the other one may be faster than the parent that sees how the other one ended."""
    RankRecord(tmp_path, "s1", 0, 1).fail(ProcessLost("another process has ended"))
    assert attempts(tmp_path, JOB)[0]["failure"]["error"] == "another process has ended"
    RankRecord(tmp_path, "s1", 0, 0).die("rank 0: it was killed by SIGKILL")
    RankRecord(tmp_path, "s1", 0, 2).fail(RuntimeError("later"))
    assert attempts(tmp_path, JOB)[0]["failure"]["error"] == "rank 0: it was killed by SIGKILL"


def test_records_that_cannot_be_written_are_said_and_block_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "launch").write_text("a file where the folder belongs")
    RankRecord(tmp_path, "s", 0, 0).begin()
    RankRecord(tmp_path, "s", 0, 1).fail(UserError("no space left"))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: running (of rank 0; it could not be recorded: cannot write ")
    assert second.startswith("error: no space left (of rank 1; it could not be recorded: cannot write ")


def test_standard_error_may_be_on_the_full_disk_too(monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        records.warn("x" * 10)
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()
