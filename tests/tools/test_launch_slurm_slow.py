"""Preemption, time limits, requeues and deaths on a real two-node SLURM cluster."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm_cluster import NODES, SlurmCluster
from tests.tools.test_launch_slurm import last_attempt, options, stage, steps, wait_for  # noqa: F401  (a fixture)
from tools.launcher import control
from tools.launcher.options import Options
from tools.launcher.ranks import attempts
from tools.launcher.spec import read_json
from tools.launcher.submit import submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def preempt(cluster: SlurmCluster, seconds: int = 3) -> None:
    """A job of the higher partition takes both nodes for some seconds."""
    words = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", f"--wrap=sleep {seconds}"]
    subprocess.run(["sbatch", *words], check=True, capture_output=True)


def reasons(folder: Path, job_id: str) -> list[tuple[str, str]]:
    return [(one["state"], one["reason"].split(":")[0]) for one in attempts(folder, job_id)]


def is_counting(folder: Path, job_id: str) -> bool:
    return last_attempt(folder, job_id).get("state") == "running" and (folder / "count.0").exists()


def test_preemption_costs_no_step(options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):  # noqa: F811
    (job,) = submit([stage(tmp_path, "count", 60, 0.2)], replace(options, nodes=2, tasks=2))
    wait_for(lambda: is_counting(tmp_path, job.job_id))
    preempt(slurm_cluster)
    slurm_cluster.wait_state(job.job_id, "COMPLETED", seconds=120)
    assert reasons(tmp_path, job.job_id) == [("requeued", "SIGUSR2"), ("done", "")]
    for rank in range(4):
        assert steps(tmp_path, rank) == list(range(60))
    assert control.summary(tmp_path / "launch" / "launch.json")["state"] == "done"


def test_a_run_longer_than_its_time_limit_comes_back(
    options: Options,  # noqa: F811
    slurm_cluster: SlurmCluster,
    tmp_path: Path,
):
    (job,) = submit([stage(tmp_path, "count", 200, 0.25)], replace(options, time="1", signal_delay=45))
    slurm_cluster.wait_state(job.job_id, "COMPLETED", seconds=300)
    ended = reasons(tmp_path, job.job_id)
    assert ended[0] == ("requeued", "SIGUSR2") and ended[-1] == ("done", "") and len(ended) > 1
    assert steps(tmp_path) == list(range(200))


def test_time_outs_are_capped(options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):  # noqa: F811
    capped = replace(options, time="1", signal_delay=45, max_timeouts=0)
    (job,) = submit([stage(tmp_path, "count", 2000, 0.25)], capped)
    slurm_cluster.wait_state(job.job_id, "FAILED", seconds=120)
    last = last_attempt(tmp_path, job.job_id)
    assert last["state"] == "failed" and "timed-out too many times" in last["failure"]["error"]


def test_an_operators_requeue_goes_on_from_the_disk(
    options: Options,  # noqa: F811
    slurm_cluster: SlurmCluster,
    tmp_path: Path,
):
    (job,) = submit([stage(tmp_path, "count", 60, 0.2)], options)
    wait_for(lambda: is_counting(tmp_path, job.job_id))
    subprocess.run(["scontrol", "requeue", job.job_id], check=True)
    slurm_cluster.wait_state(job.job_id, "COMPLETED", seconds=120)
    assert len(attempts(tmp_path, job.job_id)) == 2
    assert steps(tmp_path) == list(range(60))


def test_kill_9_of_a_rank_ends_the_job(options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):  # noqa: F811
    (job,) = submit([stage(tmp_path, "hang")], replace(options, nodes=2, tasks=2))
    wait_for(lambda: len(list(tmp_path.glob("pid.*"))) == 4)
    os.kill(int((tmp_path / "pid.3").read_text()), signal.SIGKILL)
    slurm_cluster.wait_state(job.job_id, "FAILED", seconds=60)
    assert control.summary(tmp_path / "launch" / "launch.json")["state"] in ("failed", "killed")


def test_a_lost_node_costs_no_more_than_the_step(
    options: Options,  # noqa: F811
    slurm_cluster: SlurmCluster,
    tmp_path: Path,
):
    (job,) = submit([stage(tmp_path, "count", 60, 0.2)], options)
    wait_for(lambda: is_counting(tmp_path, job.job_id))
    node = subprocess.run(["squeue", "-h", "-j", job.job_id, "-o", "%N"], capture_output=True, text=True).stdout.strip()
    assert node in NODES
    slurm_cluster.kill_node(node)
    try:
        slurm_cluster.wait_state(job.job_id, "COMPLETED", seconds=180)
    finally:
        slurm_cluster.start_node(node)
    assert sorted(set(steps(tmp_path))) == list(range(60))
    assert len(attempts(tmp_path, job.job_id)) == 2
    assert read_json(tmp_path / "results.json")["metrics"] == {"count": 60}
