"""The records of jobs and their ranks belong to one job, and may be impossible to write."""

import errno
from pathlib import Path
from unittest import mock

import pytest

from pretrain.common import output
from pretrain.common.errors import ProcessLost, UserError
from pretrain.common.run.state import read_outcome, write_failure
from tests.tools.launcher.helpers import end


def test_an_outcome_is_that_of_one_job(tmp_path: Path):
    """State and failures of an earlier job and damaged files do not count; a rank may fail before rank 0 starts."""
    end(tmp_path, "stopped", reason="SIGUSR2")
    write_failure(tmp_path, 0, RuntimeError("earlier"), "s")
    assert read_outcome(tmp_path, "t") == {"state": "", "reason": "", "failure": {}}
    write_failure(tmp_path, 1, UserError("the value is 3; it must be 2"), "t")
    (tmp_path / "failed.2.json").write_text('{"rank": 2')
    for rank_0_has_started in (False, True):
        if rank_0_has_started:
            end(tmp_path, "failed", job="t", reason="later")
            write_failure(tmp_path, 0, RuntimeError("later"), "t")
        outcome = read_outcome(tmp_path, "t")
        failure = outcome["failure"]
        assert outcome["state"] == "failed" and failure["host"] and failure["ended"] and failure["user_error"]
        assert (failure["rank"], failure["error"]) == (1, "the value is 3; it must be 2")
    end(tmp_path, "complete", job="t")  # a rank may fail at its exit
    assert read_outcome(tmp_path, "t")["failure"] == {}


def test_what_followed_from_a_failure_does_not_hide_it(tmp_path: Path):
    """A rank that lost its peer may report that before the parent sees how the peer ended."""
    write_failure(tmp_path, 1, ProcessLost("another process has ended"), "")
    assert read_outcome(tmp_path)["failure"]["error"] == "another process has ended"
    write_failure(tmp_path, 0, "rank 0: it was killed by SIGKILL", "")
    write_failure(tmp_path, 2, RuntimeError("later"), "")
    assert read_outcome(tmp_path)["failure"]["error"] == "rank 0: it was killed by SIGKILL"


def test_standard_error_may_be_on_the_full_disk_too(monkeypatch: pytest.MonkeyPatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("sys.stderr", mock.Mock(flush=mock.Mock(side_effect=full)))
    output.warn("a warning")  # raises nothing
