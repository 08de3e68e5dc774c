"""The records of jobs and their ranks belong to one job, and may be impossible to write."""

import errno
import json
import sys
from pathlib import Path
from unittest import mock

import pytest

from pretrain.common import output
from pretrain.common.config import extensions
from pretrain.common.errors import ProcessLost, UserError
from pretrain.common.run.state import read_outcome, write_failure
from tests.tools.launcher.helpers import HERE, end, fake, job_of
from tools.launcher.execution.job import Job
from tools.launcher.execution.records import format_resume_command, read_imports, record_job
from tools.launcher.record_formats import LAUNCH_FILE, read_launch


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


@pytest.mark.parametrize("words", [["resume", "a"], ["--import", "m", "resume", "a"], ["--import=m", "resume", "a"]])
def test_the_command_of_a_record_is_not_that_of_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list):
    monkeypatch.setattr(sys, "argv", ["launch.py", "knn", "x"])
    resources = HERE.for_stage(fake(tmp_path))
    record_job(fake(tmp_path), resources, Job(tmp_path, "1", "local", "/l/s", "h", 0))
    monkeypatch.setattr(sys, "argv", ["launch.py", *words])
    record_job(fake(tmp_path), resources, Job(tmp_path, "2", "local", "/l/t", "h", 0))
    assert read_launch(tmp_path).command == "launch.py knn x" and job_of(tmp_path).id == "2"


def test_the_command_that_resumes_names_the_modules_of_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`status` runs without --import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(extensions.VARIABLE, raising=False)
    commands = {
        "a": "launch.py pipeline p.yaml --import 'my own.py' --import=lab.methods",
        "b": "launch.py knn x",
    }
    for name, command in commands.items():
        file = tmp_path / name / LAUNCH_FILE
        file.parent.mkdir(parents=True)
        record = {"version": 1, "spec": {}, "options": {}, "jobs": [], "command": command, "cwd": "/home/me"}
        file.write_text(json.dumps(record))
    imports = read_imports([tmp_path / "a", tmp_path / "b", tmp_path / "missing"])
    assert imports == ["/home/me/my own.py", "lab.methods"]
    options = "--import '/home/me/my own.py' --import lab.methods"
    assert format_resume_command(str(tmp_path / "a"), imports) == f"python tools/launch.py resume a {options}"
    assert format_resume_command(str(tmp_path / "b")) == "python tools/launch.py resume b"
