"""Jobs are preempted, time out, are requeued and killed on a real two-node SLURM cluster."""

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm_cluster import SlurmCluster
from tests.tools.launcher.helpers import fake, outcome, shown, steps, submit_jobs, wait_for
from tools.launcher.job_options import JobOptions

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def attempts(folder: Path) -> int:
    """Return the number of starts of the last job."""
    return outcome(folder).get("attempt", -1) + 1


def is_complete(folder: Path) -> bool:
    return outcome(folder)["state"] == "complete"


def is_counting(folder: Path) -> bool:
    return outcome(folder)["state"] == "running" and (folder / "count.0").exists()


def test_ten_preemptions_in_a_row_cost_no_step(slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path):
    (job,) = submit_jobs([fake(tmp_path, "count", 300, 0.1)], replace(slurm_options, nodes=2, tasks=2))
    for number in range(10):
        wait_for(lambda n=number: attempts(tmp_path) > n and is_counting(tmp_path), 120)
        slurm_cluster.preempt()
        wait_for(lambda: outcome(tmp_path)["state"] == "requeued")
        assert outcome(tmp_path)["reason"].startswith("SIGUSR2: counted to ")
    slurm_cluster.wait_state(job, "COMPLETED", seconds=120)
    assert attempts(tmp_path) == 11
    for rank in range(4):
        assert steps(tmp_path, rank) == list(range(300))
    assert shown(tmp_path)["state"] == "complete"


@pytest.mark.parametrize(("is_deaf", "reason"), [(False, "SIGUSR2: counted"), (True, "did not stop in time")])
def test_a_run_beyond_its_time_limit_is_requeued(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path, is_deaf: bool, reason: str
):
    stage = fake(tmp_path, "count", 240, 0.25, "", is_deaf)
    (job,) = submit_jobs([stage], replace(slurm_options, time="1", signal_delay=45))
    wait_for(lambda: outcome(tmp_path)["state"] == "requeued", 120)
    assert outcome(tmp_path)["reason"].startswith(reason)
    slurm_cluster.wait_state(job, "COMPLETED", "TIMEOUT", "FAILED", seconds=300)
    assert is_complete(tmp_path) and attempts(tmp_path) > 1
    counted = steps(tmp_path)
    assert (sorted(set(counted)) if is_deaf else counted) == list(range(240))
    assert len(counted) - 240 < attempts(tmp_path)  # each attempt resumes: it repeats at most the interrupted step


def test_time_outs_are_capped(slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path):
    capped = replace(slurm_options, time="1", signal_delay=45, max_timeouts=0)
    (job,) = submit_jobs([fake(tmp_path, "count", 2000, 0.25)], capped)
    slurm_cluster.wait_state(job, "FAILED", seconds=120)
    assert shown(tmp_path)["state"] == "failed"
    assert "used all its attempts" in outcome(tmp_path)["failure"]["error"]


def test_kill_9_of_a_rank_ends_the_job(slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path):
    (job,) = submit_jobs([fake(tmp_path, "hang")], replace(slurm_options, nodes=2, tasks=2))
    wait_for(lambda: len(list(tmp_path.glob("pid.*"))) == 4)
    os.kill(int((tmp_path / "pid.3").read_text()), signal.SIGKILL)
    slurm_cluster.wait_state(job, "FAILED", seconds=60)
    assert shown(tmp_path)["state"] in ("failed", "lost")


@pytest.mark.parametrize("is_lost", [False, True], ids=["requeue", "lost node"])
def test_an_operators_requeue_or_a_lost_node_costs_no_more_than_the_step(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path, is_lost: bool
):
    (job,) = submit_jobs([fake(tmp_path, "count", 60, 0.2)], slurm_options)
    wait_for(lambda: is_counting(tmp_path) and len(steps(tmp_path)) > 2)
    node = slurm_cluster.node_of(job)
    if is_lost:
        slurm_cluster.kill_node(node)
    else:
        subprocess.run(["scontrol", "requeue", job], check=True)
    try:
        slurm_cluster.wait_state(job, "COMPLETED", seconds=180)
    finally:
        if is_lost:
            slurm_cluster.start_node(node)
    counted = steps(tmp_path)
    assert (sorted(set(counted)) if is_lost else counted) == list(range(60))
    assert len(counted) <= 61  # the second attempt resumed: it repeats at most the interrupted step
    assert attempts(tmp_path) == 2
