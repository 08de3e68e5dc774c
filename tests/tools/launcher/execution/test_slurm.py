"""The launcher on a real two-node SLURM cluster (skipped where SLURM is not installed)."""

import socket
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.common.run.state import read_json_or_empty
from tests.errors import refused
from tests.slurm_cluster import NODES, SlurmCluster
from tests.tools.launcher.helpers import ROOT, fake, job_of, outcome, shown, steps, submit_jobs, wait_for
from tools.launcher.execution import jobs as all_jobs
from tools.launcher.execution import status
from tools.launcher.graphs.graph import Node, build_graph
from tools.launcher.graphs.start import start_graph
from tools.launcher.job_options import JobOptions, resolve_options

pytestmark = pytest.mark.slurm


def test_a_stage_runs_on_two_nodes_with_two_ranks_each(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path
):
    (job,) = submit_jobs([fake(tmp_path, "count", 2)], replace(slurm_options, nodes=2, tasks=2))
    slurm_cluster.wait_state(job, "COMPLETED")
    results = read_json_or_empty(tmp_path / "results.json")
    assert [steps(tmp_path, rank) for rank in range(4)] == [[0, 1]] * 4
    assert results["ranks"] == {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": NODES[0]}
    assert shown(tmp_path)["state"] == "complete"


def test_values_reach_sbatch_unchanged(slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path):
    folder = tmp_path / "a folder; touch hacked $(touch hacked)"
    comment = 'it\'s "50 %" of $HOME; `id`'
    (job,) = submit_jobs([fake(folder)], replace(slurm_options, sbatch={"comment": comment}))
    slurm_cluster.wait_state(job, "COMPLETED")
    shown_job = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout
    assert f"Comment={comment}" in shown_job
    assert read_json_or_empty(folder / "results.json")["metrics"] == {"count": 1}
    assert not list(tmp_path.glob("hacked"))


def test_each_job_of_an_array_runs_its_own_stage(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path
):
    folder = tmp_path / "a folder; it's"
    jobs = submit_jobs([fake(folder / str(count), "count", count) for count in (1, 2)], slurm_options)
    for job in jobs:
        slurm_cluster.wait_state(job, "COMPLETED")
    assert [steps(folder / name, 0) for name in ("1", "2")] == [[0], [0, 1]]


def test_data_are_unpacked_on_each_node_and_removed_at_the_end(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The lines are those of the documentation's example; the one machine of both nodes has one /tmp."""
    text = (ROOT / "docs/sites/node_local_data.yaml").read_text().replace("/project/data/imagenet.tar", "data.tar")
    Path("site.yaml").write_text(text.replace("gpus: h100:4", "gpus: 0").replace("{mem: 0}", "{}"))
    with tarfile.open("data.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("image.png"))
    Path("bin").mkdir()
    Path("bin/tar").write_text(f'#!/bin/sh\necho $SLURMD_NODENAME >> {tmp_path}/nodes\nexec /bin/tar "$@"\n')
    Path("bin/tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    monkeypatch.setenv("USER", "someone")
    options = resolve_options({"cluster": "slurm", "nodes": 2, "time": "30"}, "site.yaml")
    slurm_cluster.wait_idle()
    (job,) = submit_jobs([fake(tmp_path / "run", "list_data", "$NODE_DATA")], options)
    slurm_cluster.wait_state(job, "COMPLETED")
    assert sorted(Path("nodes").read_text().split()) == list(NODES)
    assert [Path(f"run/data.{rank}").read_text() for rank in (0, 1)] == [f"/tmp/someone-{job} image.png"] * 2
    assert not Path(f"/tmp/someone-{job}").exists()


def test_a_failed_stage_ends_its_own_branch_only(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture
):
    nodes = (
        Node("bad/pretrain", fake(tmp_path / "bad", "fail")),
        Node("bad/linear", fake(tmp_path / "bad_child"), ("bad/pretrain",)),
        Node("good/pretrain", fake(tmp_path / "good")),
        Node("good/linear", fake(tmp_path / "good_child"), ("good/pretrain",)),
    )
    graph = build_graph(str(tmp_path), nodes, fake(tmp_path / "report"))
    assert start_graph(graph, slurm_options) == 0
    assert len(list(tmp_path.glob("**/code-*"))) == 1  # one copy of the code for five jobs
    slurm_cluster.wait_state(job_of(tmp_path / "report").id, "COMPLETED")
    ended = [slurm_cluster.state(job_of(node.stage.folder).id) for node in nodes]
    assert ended == ["FAILED", "CANCELLED", "COMPLETED", "COMPLETED"]
    capsys.readouterr()
    assert start_graph(graph, slurm_options) == 0  # again: only what failed or was skipped
    assert capsys.readouterr().out.count("already complete") == 2
    assert len(read_json_or_empty(tmp_path / "good/launch/launch.json")["jobs"]) == 1
    assert len(read_json_or_empty(tmp_path / "bad/launch/launch.json")["jobs"]) == 2
    all_jobs.cancel(tmp_path)


def test_a_job_without_the_users_variables_runs_and_keeps_what_its_set_up_lines_say(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path
):
    setup = (f"export PYTHONPATH={ROOT}", "export MASTER_ADDR=localhost")
    (job,) = submit_jobs([fake(tmp_path)], replace(slurm_options, tasks=2, sbatch={"export": "NONE"}, setup=setup))
    slurm_cluster.wait_state(job, "COMPLETED")
    ranks = read_json_or_empty(tmp_path / "results.json")["ranks"]
    assert ranks == {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}


def test_jobs_that_end_before_their_stage_say_why(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """A setup line fails, a node does not see the run folder, or a parent fails."""
    options = replace(slurm_options, setup=("export A=b", "module load cuda/12.4", "export C=d"))
    nodes = (Node("a", fake(tmp_path / "p/a")), Node("b", fake(tmp_path / "p/b"), ("a",)))
    assert start_graph(build_graph(str(tmp_path / "p"), nodes, fake(tmp_path / "p/report")), options) == 0
    (unseen,) = submit_jobs([fake(tmp_path / "p/c")], replace(slurm_options, sbatch={"begin": "now+2"}))
    Path(job_of(tmp_path / "p/c").logs).rename(tmp_path / "on another disk")
    slurm_cluster.wait_state(unseen, "FAILED")
    slurm_cluster.wait_state(job_of(tmp_path / "p/b").id, "CANCELLED")
    slurm_cluster.wait_state(job_of(tmp_path / "p/report").id, "FAILED")
    capsys.readouterr()
    assert status.print_status(tmp_path / "p") == 1
    printed = capsys.readouterr().out
    assert printed.startswith("3 failed, 1 cancelled\n")
    assert "p/a: NonZeroExitCode: setup line failed with status 127: module load cuda/12.4; fix it in" in printed
    assert "p/b: DependencyNeverSatisfied (a job that it waits for has failed)" in printed
    assert "p/c: JobLaunchFailure: it wrote nothing; can its nodes see" in printed
    refused(lambda: all_jobs.print_logs(tmp_path / "p/c", 0, True), "has ended without output", "JobLaunchFailure")


def test_a_job_whose_port_is_taken_uses_another(slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path):
    (first,) = submit_jobs([fake(tmp_path / "first")], slurm_options)
    with socket.socket() as server:
        server.bind(("", 20000 + (int(first) + 1) % 12000))
        server.listen()
        (job,) = submit_jobs([fake(tmp_path / "next")], replace(slurm_options, tasks=2))
        assert int(job) == int(first) + 1
        slurm_cluster.wait_state(job, "COMPLETED")
        port = int(read_json_or_empty(tmp_path / "next/results.json")["port"])
        assert port > server.getsockname()[1]


def test_cancel_ends_only_its_own(slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path):
    (cancelled,) = submit_jobs([fake(tmp_path / "cancelled", "count", 1000, 0.1)], slurm_options)
    (other,) = submit_jobs([fake(tmp_path / "other", "count", 30, 0.1)], slurm_options)
    wait_for(lambda: outcome(tmp_path / "cancelled")["state"] == "running")
    all_jobs.cancel(tmp_path / "cancelled")
    slurm_cluster.wait_state(cancelled, "CANCELLED")
    slurm_cluster.wait_state(other, "COMPLETED")
    assert outcome(tmp_path / "cancelled")["state"] == "stopped"  # it had time to write its checkpoint
