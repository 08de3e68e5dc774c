"""The script and the environment that sbatch receives, and what is refused before."""

import errno
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from pretrain.common.errors import UserError
from tests.errors import refused
from tests.tools.launcher.fake_stages import FakeOnCpu
from tests.tools.launcher.helpers import chain, fake, job_of, run_alone, submit_jobs
from tools.launcher.execution import records, submit
from tools.launcher.graphs.graph import build_single
from tools.launcher.graphs.start import start_graph
from tools.launcher.job_options import JobOptions

OPTIONS = JobOptions(cluster="slurm", gpus=0)


def test_a_refused_sbatch_leaves_nothing_and_is_reported_once(tmp_path: Path, cluster: Path, programs: Callable, capfd):
    programs(sbatch="echo 1200; echo 'sbatch: error: invalid partition' >&2; echo 'sbatch: error: no' >&2; exit 1")
    text = refused(lambda: run_alone(fake(tmp_path / "runs/run"), OPTIONS))
    assert text == "sbatch refused fake-run: sbatch: error: invalid partition sbatch: error: no"
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "runs").exists()
    programs(sbatch="echo Eingereicht: 77")
    text = "sbatch: Eingereicht: 77; look for fake-run in squeue"
    refused(lambda: run_alone(fake(tmp_path / "runs/run"), OPTIONS), text)
    assert list(tmp_path.glob("runs/run/launch/code-*"))  # a job may be queued


def test_sbatch_gets_the_users_environment_only(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    passed_on = {"SBATCH_ACCOUNT": "mine", "SUBMITIT_PREEMPT_SIGNAL": "USR2", "SLURM_CONF": "/etc/slurm.conf"}
    hidden = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SUBMITIT_EXECUTOR": "local", "RANK": "1"}
    hidden |= {"SBATCH_PARTITION": "cpu", "SBATCH_TIMELIMIT": "1", "SBATCH_QOS": "low"}  # sbatch prefers them
    for name, value in {**passed_on, **hidden}.items():
        monkeypatch.setenv(name, value)
    sbatch = {"qos": "high", "clusters": "alex"}
    submit_jobs([fake(tmp_path / "run")], replace(OPTIONS, partition="gpu", time="2:00:00", sbatch=sbatch))
    received = dict(line.split("=", 1) for line in (cluster / "env").read_text().splitlines() if "=" in line)
    assert passed_on.items() <= received.items() and hidden.keys().isdisjoint(received)
    assert {"#SBATCH --partition=gpu", "#SBATCH --clusters=alex"} < set(
        (cluster / "100.script").read_text().split("\n")
    )
    job = job_of(tmp_path / "run")
    assert (job.id, job.slurm_cluster) == ("100", "alex")


@pytest.mark.parametrize(
    ("options", "hidden", "counting"),
    [
        (
            replace(OPTIONS, gpus=2),
            "GPUS_PER_NODE=1 CPUS_PER_GPU=1 GRES=gpu:a100:1 GPU_BIND=closest MEM_PER_GPU=9G",
            "PARTITION=cpu QOS=a GRES_FLAGS=x",
        ),
        (
            OPTIONS,
            "JOB_NAME=a SIGNAL=INT@9 REQUEUE=1 NO_REQUEUE=1 OPEN_MODE=truncate ARRAY_INX=0-9 TIMELIMIT=1 OUTPUT=a "
            "ERROR=a WAIT=1",
            "MEM_PER_NODE=100M WAIT_ALL_NODES=1 GRES=scratch:9",
        ),
        (replace(OPTIONS, account="a", sbatch={"switches": "1"}), "ACCOUNT=b REQ_SWITCH=2", "WCKEY=c"),
        (
            replace(OPTIONS, cpu={"partition": "cpu"}),
            "PARTITION=gpu CONSTRAINT=a100 QOS=gpu MEM_PER_NODE=400G EXCLUSIVE=user RESERVATION=r GRES=shard:1",
            "ACCOUNT=b WCKEY=c",
        ),
    ],
    ids=["GPUs", "what every script has", "given", "a stage on CPU nodes"],
)
def test_variables_of_options_in_the_script_are_hidden_and_the_others_shown(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: JobOptions, hidden: str, counting: str
):
    for word in f"{hidden} {counting}".split():
        monkeypatch.setenv("SBATCH_" + word.partition("=")[0], word.partition("=")[2])
    stage = FakeOnCpu(str(tmp_path / "run")) if options.cpu else fake(tmp_path / "run")
    submit_jobs([stage], options)
    received = set(re.findall("^SBATCH_(.*)", (cluster / "env").read_text(), re.MULTILINE))
    assert received == set(counting.split())
    script = submit.preview_script([stage], options.for_stage(stage), tmp_path, "")
    shown = re.findall(r"^# .*$", script, re.MULTILINE)[-1]
    assert set(re.findall(r"SBATCH_([^ ,]*)", shown)) == received


@pytest.mark.parametrize("is_single", [True, False])
def test_a_full_disk_at_submission_is_one_line_and_leaves_no_copy(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_single: bool
):
    full = OSError(errno.EDQUOT, "Disk quota exceeded", "a file")
    monkeypatch.setattr(shutil, "copy2", mock.Mock(side_effect=full))
    graph = build_single(fake(tmp_path / "full")) if is_single else chain(tmp_path / "full")
    text = refused(lambda: start_graph(graph, OPTIONS), tmp_path / "full/launch", "Disk quota exceeded", "free space")
    assert len(text) < 300 and not list(cluster.glob("*.script"))
    assert not list(tmp_path.glob("full/*"))


def test_a_modules_python_path_stays_behind_the_jobs_code(tmp_path: Path):
    options = replace(OPTIONS, setup=("export PYTHONPATH=/module:/other",))
    script = submit.preview_script([fake(tmp_path / "a run's")], options.for_stage(fake("a")), Path("/the code"), "")
    lines = [line for line in script.splitlines() if line.startswith("export PYTHON")]
    for setup, behind in ((lines, ":/module:/other"), (lines[1:], "")):
        text = "\n".join([*setup, 'printf %s "$PYTHONPATH"'])
        shown = subprocess.run(["bash", "-c", text], env={}, capture_output=True, text=True)
        assert shown.stdout == f"/the code{behind}"


def test_a_job_that_cannot_be_recorded_is_a_warning(cluster: Path, tmp_path: Path, monkeypatch, capsys):
    def full(*_given: object) -> None:
        raise UserError("cannot write launch.json: No space left on device")

    monkeypatch.setattr(records, "write_json", full)
    (job,) = submit_jobs([fake(tmp_path / "run")], OPTIONS)
    assert job == "100"
    assert re.search("No space left.*slurm job 100 is submitted", capsys.readouterr().err)


def test_jobs_are_told_apart_by_name(tmp_path: Path):
    """Names serve in squeue, and to recognize another user's job with the same id."""
    jcl, sce = (replace(fake(tmp_path / f"demo/{name}/x"), root=str(tmp_path / "demo")) for name in ("jcl", "sce"))
    names = [submit.name_job(stages) for stages in ([jcl], [sce], [jcl, sce], [fake(tmp_path / "jcl")])]
    assert names == ["demo-jcl-x", "demo-sce-x", "demo-fake", "fake-jcl"]
    assert submit.name_job([fake(tmp_path / "#1: it's \u00e9")]) == "fake-_1__it_s__"
