"""What is handed to sbatch: the script, the environment, and what is refused before."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tests.tools.launcher.helpers import ROOT, fake, programs
from tools.launcher import launch_file, submit
from tools.launcher.options import Options
from tools.launcher.spec import read_json

OPTIONS = Options(cluster="slurm", gpus=0)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that take the place of SLURM's; the folder in which sbatch leaves its environment and script."""
    received = tmp_path / "received"
    received.mkdir()
    script = f"env > {received}/env\ncp $1 {received}/script\necho Submitted batch job 77"
    programs(monkeypatch, tmp_path, "/usr/bin:/bin", sbatch=script, srun=script)
    return received


def environment(received: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (received / "env").read_text().splitlines() if "=" in line)


def test_a_refused_sbatch_leaves_nothing_and_is_told_once(sbatch: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    program = tmp_path / "bin/sbatch"
    program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\necho 'sbatch: error: no' >&2\nexit 1\n")
    with pytest.raises(
        UserError, match=r"^sbatch refused fake-run: sbatch: error: invalid partition sbatch: error: no$"
    ):
        submit.submit([fake(tmp_path / "runs/run")], OPTIONS)
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "runs").exists()


def test_a_job_that_may_have_been_submitted_keeps_its_code(sbatch: Path, tmp_path: Path):
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho accepted\n")
    with pytest.raises(UserError, match=r"sbatch did not name the job of fake-run: .*see squeue"):
        submit.submit([fake(tmp_path / "run")], OPTIONS)
    assert list((tmp_path / "run").glob("launch/*/code/pretrain/train.py"))


def test_sbatch_hears_the_users_shell_and_no_outer_job(sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = {
        "SBATCH_RESERVATION": "day1", "SBATCH_ACCOUNT": "mine", "SBATCH_PARTITION": "cpu", "SBATCH_TIMELIMIT": "5",
        "SBATCH_WCKEY": "w", "SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SUBMITIT_PREEMPT_SIGNAL": "USR2",
        "SUBMITIT_EXECUTOR": "local", "RANK": "1", "SLURM_CONF": "/etc/slurm.conf",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    submit.submit([fake(tmp_path / "run")], replace(OPTIONS, partition="gpu"))
    received = environment(sbatch)
    kept = ("SBATCH_RESERVATION", "SBATCH_ACCOUNT", "SBATCH_WCKEY", "SUBMITIT_PREEMPT_SIGNAL", "SLURM_CONF")
    assert {name: received.get(name) for name in given} == {
        name: given[name] if name in kept else None for name in given
    }
    assert "#SBATCH --partition=gpu" in (sbatch / "script").read_text()
    assert read_json(tmp_path / "run/launch/launch.json")["jobs"][-1]["id"] == "77"


def test_a_modules_python_path_stays_behind_the_jobs_code(tmp_path: Path):
    script = submit.preview([fake(tmp_path / "a run's")], replace(OPTIONS, setup=("export PYTHONPATH=/module:/other",)))
    lines = [line for line in script.splitlines() if line.startswith("export PYTHON")]
    for setup, behind in ((lines, ":/module:/other"), (lines[1:], "")):
        shown = subprocess.run(
            ["bash", "-c", "\n".join([*setup, 'printf %s "$PYTHONPATH"'])], env={}, capture_output=True, text=True
        )
        assert shown.stdout == f"{tmp_path}/a run's/launch/DRY-RUN/code{behind}"


def test_any_option_of_sbatch_and_options_of_a_fake(tmp_path: Path):
    options = replace(
        OPTIONS, gpus=8, sbatch={"reservation": "day 1", "exclusive": ""},
        stages={"fake": {"partition": "cpu", "gpus": 1, "sbatch": {"licenses": "a"}}},
    )  # fmt: skip
    lines = submit.preview([fake(tmp_path)], options).splitlines()
    for line in ("reservation='day 1'", "exclusive", "licenses=a", "partition=cpu", "gpus-per-node=1", "requeue"):
        assert f"#SBATCH --{line}" in lines


@pytest.mark.parametrize("name", ["50%", "a\\b"])
def test_what_slurm_takes_for_a_pattern_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match="which SLURM interprets as a pattern"):
        submit.check_for_sbatch(fake(tmp_path / name))


@pytest.mark.parametrize("name", ["TERM", "SIGUSR2", "", "NONE"])
def test_a_signal_that_means_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", name)
    with pytest.raises(UserError, match="it must be USR1 or USR2"):
        submit.check_for_sbatch(fake(tmp_path))


def test_slurm_that_is_not_here_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not installed on this machine; run this on a login node"):
        submit.submit([fake(tmp_path / "run")], OPTIONS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("at", ["snapshot", "write_json"])
def test_a_full_disk_is_one_line_before_and_a_warning_after_the_job_is_submitted(
    sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, at: str
):
    def full(*_given: object) -> None:
        if at == "snapshot":
            raise OSError(28, "No space left on device")
        raise UserError("cannot write launch.json: No space left on device")

    monkeypatch.setattr(submit if at == "snapshot" else launch_file, at, full)
    if at == "snapshot":
        with pytest.raises(UserError, match=r"cannot write .*No space left on device.*; free space"):
            submit.submit([fake(tmp_path / "run")], OPTIONS)
        assert not (sbatch / "script").exists() and not (tmp_path / "run").exists()
    else:
        (job,) = submit.submit([fake(tmp_path / "run")], OPTIONS)
        assert job.job_id == "77"
        assert re.search("No space left.*slurm job 77 is under way", capsys.readouterr().err)


def test_snapshot_holds_the_code_and_its_state(tmp_path: Path):
    code = submit.snapshot(tmp_path)
    assert (code / "pretrain/train.py").read_bytes() == (ROOT / "pretrain/train.py").read_bytes()
    assert (code / "tools/launcher/job.py").is_file() and not list(code.glob("**/__pycache__"))
    assert (code / "GIT_STATE").read_text().strip()


def test_jobs_are_told_apart_by_name(tmp_path: Path):
    """In squeue, and by the guard against a foreign job of the same id."""
    stages = [
        replace(fake(tmp_path / "demo" / name / "pretrain"), root=str(tmp_path / "demo")) for name in ("jcl", "sce")
    ]
    assert [submit.job_name([stage]) for stage in stages] == ["demo:jcl/pretrain", "demo:sce/pretrain"]
    assert submit.job_name(stages) == "demo:fake"
    assert submit.job_name([fake(tmp_path / "jcl")]) == "fake-jcl"
    assert "--job-name=demo:jcl/pretrain\n" in submit.preview([stages[0]], OPTIONS)
