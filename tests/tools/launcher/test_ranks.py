"""The records of a job's ranks: whose they are, and what happens where they cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.common.errors import ProcessLost, UserError
from tools.launcher import ranks
from tools.launcher.ranks import RankRecord, attempts, mark_failed

ROOT = Path(__file__).parents[3]


def test_records_tell_attempts_and_the_first_failure(tmp_path: Path):
    RankRecord(tmp_path, "s1", "7", 0, 0, 2).end("requeued", "SIGUSR2")
    RankRecord(tmp_path, "s1", "7", 1, 1, 2).fail(UserError("the value is 3; it must be 2"))
    RankRecord(tmp_path, "s1", "7", 1, 0, 2).fail(RuntimeError("later"))
    first, second = attempts(tmp_path, "7")
    assert (first["state"], first["reason"]) == ("requeued", "SIGUSR2") and "failure" not in first
    assert second["state"] == "failed" and second["failure"]["rank"] == 1 and second["failure"]["user_error"]
    assert second["failure"]["error"] == "the value is 3; it must be 2"


def test_a_failure_is_told_where_rank_0_was_ended_before_its_record(tmp_path: Path):
    """SLURM ends the other ranks as soon as one has failed; rank 0 may still have been importing."""
    RankRecord(tmp_path, "s1", "7", 0, 0, 2).end("requeued", "SIGUSR2")
    RankRecord(tmp_path, "s1", "7", 1, 1, 2).fail(RuntimeError("rank 1 cannot go on"))
    first, second = attempts(tmp_path, "7")
    assert (first["attempt"], first["state"], second["attempt"], second["state"]) == (0, "requeued", 1, "failed")
    assert second["failure"]["error"] == "RuntimeError: rank 1 cannot go on" and second["host"] and second["started"]


def test_what_followed_from_a_failure_does_not_hide_it(tmp_path: Path):
    """The rank that lost the other one may be faster than the parent that sees how the other one ended."""
    lost = ProcessLost("another process has ended")
    RankRecord(tmp_path, "s1", "7", 0, 1, 2).fail(lost)
    assert attempts(tmp_path, "7")[0]["failure"]["error"] == "another process has ended"
    mark_failed(tmp_path / "launch/ranks/s1.7.0", 0, "rank 0: it was killed by SIGKILL")
    RankRecord(tmp_path, "s1", "7", 0, 1, 2).fail(lost)
    RankRecord(tmp_path, "s1", "7", 0, 1, 2).fail(RuntimeError("later"))
    assert attempts(tmp_path, "7")[0]["failure"]["error"] == "rank 0: it was killed by SIGKILL"


def test_an_earlier_jobs_failure_with_the_same_id_is_not_this_ones(tmp_path: Path):
    """Process ids come again in containers, SLURM's ids with a new cluster."""
    RankRecord(tmp_path, "20260101-100000-aaaaaa", "7", 0, 0, 1).fail(RuntimeError("earlier"))
    RankRecord(tmp_path, "20260101-100000-aaaaaa", "7", 1, 0, 1).end("failed")
    RankRecord(tmp_path, "20260102-100000-000000", "7", 0, 0, 1).end("done")
    (found,) = attempts(tmp_path, "7")
    assert found["state"] == "done" and "failure" not in found


@pytest.mark.parametrize("damaged", ["", "[]", '{"attempt": 1'])
def test_a_damaged_record_is_left_out(tmp_path: Path, damaged: str):
    RankRecord(tmp_path, "s", "7", 0, 0, 1).end("requeued")
    (tmp_path / "launch/ranks/s.7.1.0.json").write_text(damaged)
    assert [one["attempt"] for one in attempts(tmp_path, "7")] == [0]


_NO_ROOM = """
import resource, sys
from pathlib import Path
from tools.launcher.ranks import mark_failed
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # files can be made but not written, as on a full disk
mark_failed(Path(sys.argv[1]) / "launch/ranks/s.7.0", 1, "no space left")
"""


def test_half_a_failure_does_not_keep_others_from_saying_what_they_know(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", _NO_ROOM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "error: no space left (of rank 1; it could not be written" in done.stderr
    assert not list((tmp_path / "launch/ranks").iterdir())


def test_records_that_cannot_be_written_are_said_and_block_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "launch").write_text("a file where the folder belongs")
    record = RankRecord(tmp_path, "s", "7", 0, 0, 1)
    record.fail(UserError("no space left"))
    mark_failed(tmp_path / "launch" / "ranks" / "s.7.0", 0, "no space left")
    shown = capsys.readouterr().err
    assert "warning: cannot write" in shown and "error: no space left (of rank 0; it could not be written" in shown


def test_standard_error_may_be_on_the_full_disk_too(monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        ranks.warn("x" * 10)
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()


_WAITS = """
import sys, time
from pathlib import Path
from tools.launcher import ranks
ranks._POLL_S = ranks._GRACE_S = 0.2
ranks.RankRecord(sys.argv[1], "s", "7", 1, 0, 2)
print("waiting", flush=True)
time.sleep(120)
"""


def test_a_rank_ends_by_the_failure_of_another_in_this_attempt_only(tmp_path: Path):
    """The other one's process is still there: its exit hangs."""
    mark_failed(tmp_path / "launch/ranks/s.7.0", 1, "of the attempt before")
    waiting = subprocess.Popen([sys.executable, "-c", _WAITS, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert waiting.stdout is not None and waiting.stdout.readline() == b"waiting\n"
    time.sleep(1)
    assert waiting.poll() is None
    mark_failed(tmp_path / "launch/ranks/s.7.1", 1, "of this attempt")
    assert waiting.wait(timeout=30) == 1
    assert attempts(tmp_path, "7")[-1]["reason"] == "ended because another rank failed"


def test_a_rank_that_waits_reads_nobodys_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """64 ranks that read 64 files each second are a load on a file server; one look for one name is none."""
    looked: list[str] = []
    monkeypatch.setattr(ranks, "_POLL_S", 0.05)
    monkeypatch.setattr(ranks.os.path, "exists", lambda path: looked.append(str(path)) or False)
    monkeypatch.setattr(ranks, "read_json", lambda path: pytest.fail(f"{path} was read"))
    record = RankRecord(tmp_path, "s", "7", 0, 0, 64)
    for rank in range(1, 64):
        (tmp_path / f"launch/ranks/s.7.0.{rank}.json").write_text(json.dumps({"host": os.uname().nodename}))
    while len(looked) < 4:
        time.sleep(0.01)
    record.end("done")
    assert set(looked) == {str(tmp_path / "launch/ranks/s.7.0.failed")}
