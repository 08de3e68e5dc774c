"""The state of a job is known even if the scheduler does not answer, the job is elsewhere, or a record is damaged."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pretrain.common.run.lease import read_start_time
from tests.errors import refused
from tests.tools.launcher.helpers import ELSEWHERE, LOCAL, SLURM, end, job_of, nobody_reads, started
from tools import launch
from tools.launcher.execution import jobs, slurm, status
from tools.launcher.execution.job import CANCEL, Job, query_states
from tools.launcher.execution.records import find_launch_files

GONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
JOB = Job.from_record(Path("run"), SLURM)
DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


@pytest.mark.parametrize(
    ("squeue", "sacct", "state"),
    [
        ("echo '77|COMPLETING|None|n'", None, "FINISHING"),
        ("echo '77|RESIZING|None|n'", None, "RUNNING (resizing)"),
        ("echo '77|SUSPENDED|None|n'", None, "RUNNING (suspended)"),
        ("echo '77|CONFIGURING|Prolog|n'", None, "RUNNING (configuring)"),
        ("echo '77|RUNNING|Prolog|n'", None, "RUNNING"),
        ("echo '77|SPECIAL_EXIT|JobHeldUser|n'", None, "PENDING (JobHeldUser)"),
        ("echo '77|RUNNING|None|of somebody else'", None, "ENDED"),  # ids started again from 1
        ("echo '77|RUNNING|None|n|/l/t/submission.sh'", None, "ENDED"),  # and this user's stages have equal names
        ("echo '77|PENDING|JobHeldUser|re|named|/l/s/submission.sh'", None, "PENDING (JobHeldUser)"),
        ("echo '77|RUNNING|None|n|/tmp/copy of a wrapper'", None, "RUNNING"),
        (GONE, "echo '77|TIMEOUT|None|renamed|sbatch -v /l/s/submission.sh'", "TIMEOUT"),
        (GONE, "echo '77|TIMEOUT|None|n|sbatch /l/t/submission.sh'", "ENDED"),
        ("echo '77|RUNNING|None|n'; echo an unrelated line", None, "RUNNING"),
        (GONE, "echo '77|CANCELLED by 0|None|n'", "CANCELLED"),
        (GONE, "echo '77|CANCELLED+|None|n'", "CANCELLED"),
        (GONE, "echo '77|OUT_OF_ME+|None|n'", "OUT_OF_MEMORY"),
        (GONE, "echo '77|TIMEOUT|TimeLimit|n'", "TIMEOUT (TimeLimit)"),
        (GONE, None, "ENDED"),  # purged long ago
        (DOWN, None, "UNKNOWN"),
        (DOWN, "echo '77|FAILED|None|n'", "FAILED"),
        ("echo '<html>Bad gateway</html>'", None, "UNKNOWN"),
        (DOWN, "echo 'sacct: nonsense'", "UNKNOWN"),
        (None, None, "UNKNOWN"),
    ],
)
def test_states_of_a_slurm_job(programs: Callable, squeue: str | None, sacct: str | None, state: str):
    programs(**{name: text for name, text in (("squeue", squeue), ("sacct", sacct)) if text is not None})
    word, _, reason = state.partition(" ")
    assert query_states([JOB]) == [(word, reason.strip("()"))]


def test_each_cluster_is_asked_for_its_own_jobs(programs: Callable, monkeypatch: pytest.MonkeyPatch):
    """Job 77 runs on alex, and one of the same id and name has ended on the default cluster."""
    on_alex = f"case \"$*\" in *'-M alex'*) echo '77|RUNNING|None|n';; *-M*) echo 'CLUSTER: fritz';; *) {GONE};; esac"
    squeue = f'[ -z "$SLURM_CLUSTERS$SQUEUE_USERS" ] || exit 1; {on_alex}'
    programs(squeue=squeue, scancel='echo "$*" >> cancelled')
    for name in ("SLURM_CLUSTERS", "SQUEUE_USERS"):  # the shell's cluster, where these jobs are not
        monkeypatch.setenv(name, "other")
    elsewhere = [replace(JOB, slurm_cluster=cluster) for cluster in ("alex", "fritz")]
    assert [state.word for state in query_states([*elsewhere, JOB])] == ["RUNNING", "ENDED", "ENDED"]
    jobs.cancel(started(Path("run"), {**SLURM, "slurm_cluster": "alex"}))
    assert Path("cancelled").read_text() == "-M alex 77\n"


def test_cancel_stops_a_launcher_between_two_stages_of_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture):
    with subprocess.Popen(["sleep", "60"]) as launcher:
        started(tmp_path / "p/a", {**LOCAL, "launcher": {str(launcher.pid): read_start_time(launcher.pid)}})
        jobs.cancel(tmp_path / "p/a")  # which has ended
        assert "no running jobs" in capsys.readouterr().out and launcher.poll() is None
        jobs.cancel(tmp_path / "p")
        assert launcher.wait(30) == -CANCEL


def test_a_report_that_waits_for_an_earlier_one_is_cancelled_with_it(programs: Callable):
    squeue = 'for id in 76 77; do echo "$id|PENDING|Dependency|n"; done'
    programs(squeue=squeue, scancel='echo "$*" >> cancelled')
    jobs.cancel(started(Path("report"), ELSEWHERE, {**SLURM, "id": "76"}, SLURM))
    assert Path("cancelled").read_text() == "76\n77\n"


@pytest.mark.parametrize(
    ("scancel", "why"),
    [
        ("echo not yours; exit 1", "not yours"),  # as wrappers of some sites print
        ("echo retrying >&2; exec sleep 9", "timed out after 0.5 seconds"),
        ("exit 3", "exit status 3"),
    ],
)
def test_why_slurm_did_not_obey_is_named(programs: Callable, scancel: str, why: str):
    programs("/usr/bin:/bin", scancel=scancel)
    refused(lambda: slurm.cancel_job("77", timeout_s=0.5), "scancel 77 failed", why, "try again")


@pytest.mark.parametrize("variable", ["SCANCEL_STATE", "SCANCEL_INTERACTIVE", "SCANCEL_USER", "SLURM_CLUSTERS"])
def test_no_variable_of_the_shell_keeps_a_job_from_being_cancelled(
    programs: Callable, monkeypatch: pytest.MonkeyPatch, variable: str
):
    monkeypatch.setenv(variable, "RUNNING")
    programs("/usr/bin:/bin", scancel=f'[ -z "${variable}" ] && ! read answer')
    slurm.cancel_job("77")


def test_a_job_of_another_user_is_not_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with subprocess.Popen(["sleep", "60"]) as process:
        record = {**LOCAL, "processes": {str(process.pid): read_start_time(process.pid)}}
        folder = started(tmp_path / "run", record)

        def refuse(pid: int, number: int) -> None:
            raise PermissionError(1, "Operation not permitted")

        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", refuse)
            refused(lambda: jobs.cancel(folder), f"process {process.pid} of {folder} belongs to another user; ask")
        process.kill()


def refuse_if_running(folder: Path) -> None:
    job = job_of(folder)
    job.check_not_running(query_states([job])[0])


@pytest.mark.parametrize(
    ("job", "why"), [(SLURM, "SLURM does not answer; try again"), (ELSEWHERE, "use another-machine, where it started")]
)
def test_a_second_job_is_refused_where_nobody_knows_of_the_first(
    tmp_path: Path, programs: Callable, capsys: pytest.CaptureFixture, job: dict[str, Any], why: str
):
    folder = started(tmp_path / "run", LOCAL, job)
    for state in ("", "running", "requeued"):  # which waits for its turn
        if state:
            end(folder, state)
        refused(lambda: refuse_if_running(folder), "may still be running in", f"({why}); if you know", "ended: rm /")
        refused(lambda: jobs.cancel(folder), f"job {job['id']} of", f"may still be running ({why})")
        status.print_status(folder)
        printed = capsys.readouterr().out
        assert re.search(rf"unknown: .*{why}(.*\n)*knn +unknown", printed) and "lost" not in printed
    end(folder, "complete")
    refuse_if_running(folder)
    jobs.cancel(folder)
    assert "no running jobs" in capsys.readouterr().out
    status.print_status(folder)
    assert re.search("knn +complete", capsys.readouterr().out)


def test_a_jobs_copy_of_the_code_holds_no_stages(tmp_path: Path):
    started(tmp_path / "runs/a", LOCAL)
    started(tmp_path / "runs/a/launch/20260101-000000-abcdef/code/configs/knn", LOCAL)
    started(tmp_path / "runs/b/launch/20260101-000000-abcdef/code/configs/knn", LOCAL)
    assert find_launch_files(tmp_path / "runs") == [tmp_path / "runs/a/launch/launch.json"]
    refused(lambda: status.print_status(tmp_path / "runs/b"), "nothing was started in")


def test_a_refused_scancel_is_one_line_and_the_others_are_cancelled(programs: Callable, capsys: pytest.CaptureFixture):
    scancel = 'for id; do :; done; echo "$*" >> asked; [ $id != 78 ] || { echo no permission >&2; exit 1; }'
    programs(squeue='for id in 77 78 79; do echo "$id|RUNNING|None|n"; done', scancel=scancel)
    for job in ("77", "78", "79"):
        started(Path("runs", job), {**SLURM, "id": job})
    refused(lambda: jobs.cancel(Path("runs"), now=True), "scancel 78 failed: no permission")
    assert Path("asked").read_text().splitlines() == [f"--signal=KILL {job}" for job in (77, 78, 79)]
    assert capsys.readouterr().out.count("cancelled slurm job") == 2


def test_all_jobs_are_cancelled_where_nobody_reads_their_names(programs: Callable):
    programs(squeue='for id in 77 78; do echo "$id|RUNNING|None|n"; done', scancel='echo "$*" >> cancelled')
    for job in ("77", "78"):
        started(Path("runs", job), {**SLURM, "id": job})
    with nobody_reads():
        assert launch.main(["cancel", "runs"]) == 0
    assert Path("cancelled").read_text() == "77\n78\n"


def test_the_output_of_a_job_that_was_cancelled_before_it_began(tmp_path: Path, programs: Callable):
    programs(squeue="echo '77|CANCELLED|Resources|n'")
    run = started(tmp_path / "run", {**SLURM, "logs": str(tmp_path / "run/launch/s")})
    refused(lambda: jobs.print_logs(run, 0, False), "rank 0 of job 77 has ended without output (cancelled): ")


def test_a_folder_that_may_not_be_read_is_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """These tests may run as root, who may read everything."""
    monkeypatch.setattr("os.listdir", mock.Mock(side_effect=PermissionError(13, "Permission denied", str(tmp_path))))
    with pytest.raises(PermissionError):  # one line of every command
        status.collect(tmp_path)


def test_the_last_line_of_a_job_is_its_own_and_not_that_of_srun_or_submitit(tmp_path: Path):
    job = replace(JOB, folder=tmp_path, logs=str(tmp_path))
    warning = "submitit WARNING (2026-11-26 14:59:24,633) - Bypassing signal SIGCONT"
    (tmp_path / "77_0_log.err").write_text(f"ValueError: odd\n{warning}\nsrun: error: 127.0.1.1: task 0: Killed\n")
    for reason in ("", "Resources", "JobHeldUser", "PartitionTimeLimit"):  # what it was waiting for
        assert job.describe_end(slurm.JobState("CANCELLED", reason)) == "ValueError: odd"
    assert "has failed" in job.describe_end(slurm.JobState("CANCELLED", "DependencyNeverSatisfied"))
    refusal = "srun: unrecognized option '--container-image=a'"
    (tmp_path / "77_0_log.err").write_text(f'{refusal}\nTry "srun --help" for more information\n')
    assert job.describe_end(slurm.JobState("FAILED")) == refusal
