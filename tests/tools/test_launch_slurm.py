"""The launcher on a real two-node SLURM cluster (skipped where SLURM is not installed)."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm_cluster import NODES, SlurmCluster
from tools.launcher import control, stages
from tools.launcher.graph import Graph, Node, submit_all
from tools.launcher.options import Options, resolve
from tools.launcher.ranks import attempts
from tools.launcher.run import run_stage
from tools.launcher.spec import StageSpec, read_json
from tools.launcher.submit import submit

pytestmark = pytest.mark.slurm
FAKE = "tests.tools.fake_stages"


@pytest.fixture
def options(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Options:
    slurm_cluster.wait_idle()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the fake stages are not in the jobs' own copy
    return resolve({"cluster": "slurm", "gpus": 0, "time": "30", "signal_delay": 30})


def stage(folder: Path, function: str, *args: object) -> StageSpec:
    return StageSpec("fake", str(folder), f"{FAKE}:{function}", args=(str(folder), *args))


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def last_attempt(folder: Path, job_id: str) -> dict:
    return (attempts(folder, job_id) or [{}])[-1]


def steps(folder: Path, rank: int = 0) -> list[int]:
    return [int(line) for line in (folder / f"steps.{rank}").read_text().split()]


def test_a_stage_runs_on_two_nodes_with_two_ranks_each(options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):
    (job,) = submit([stage(tmp_path, "count", 2)], replace(options, nodes=2, tasks=2))
    slurm_cluster.wait_state(job.job_id, "COMPLETED")
    results = read_json(tmp_path / "results.json")
    assert [steps(tmp_path, rank) for rank in range(4)] == [[0, 1]] * 4
    assert results["ranks"] == {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": NODES[0]}
    assert control.summary(tmp_path / "launch" / "launch.json")["state"] == "done"


def test_one_ranks_exception_ends_all(options: Options, slurm_cluster: SlurmCluster, tmp_path: Path, capsys):
    (job,) = submit([stage(tmp_path, "fail", 1)], replace(options, nodes=2, tasks=2))
    slurm_cluster.wait_state(job.job_id, "FAILED")
    control.print_status(tmp_path)
    assert "rank 1 on" in (shown := capsys.readouterr().out) and "RuntimeError: rank 1 cannot go on" in shown


def test_values_reach_sbatch_unchanged(options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):
    folder = tmp_path / "a folder; touch hacked $(touch hacked)"
    comment = 'it\'s "50 %" of $HOME; `id`'
    (job,) = submit([stage(folder, "count", 1)], replace(options, comment=comment))
    slurm_cluster.wait_state(job.job_id, "COMPLETED")
    told = subprocess.run(["scontrol", "show", "job", job.job_id], capture_output=True, text=True).stdout
    assert f"Comment={comment}" in told
    assert read_json(folder / "results.json")["metrics"] == {"count": 1}
    assert not list(Path.cwd().glob("hacked")) and not list(tmp_path.glob("hacked"))


def tiny(images: Path, output: Path, *more: str) -> list[str]:
    """Overrides for a pretraining of seconds."""
    return [
        "METHOD.NAME", "jcl", "METHOD.NUM_KEYS", "2", "METHOD.JCL_LAMBDA", "4.0", "MODEL.ARCH", "resnet18",
        "MODEL.STEM", "cifar", "MODEL.HEAD_HIDDEN_DIMS", "[16]", "MODEL.EMBEDDING_DIM", "8", "MODEL.QUEUE_SIZE", "20",
        "SOLVER.IMS_PER_BATCH", "8", "SOLVER.EPOCHS", "1", "SOLVER.LOG_PERIOD", "1", "DEVICE", "cpu",
        "DATA.TRAIN", f"folder:{images}", "VIEWS.IMAGE_SIZE", "16", "DATALOADER.NUM_WORKERS", "0", "PROBE.KNN_K", "5",
        "OUTPUT_DIR", str(output), *more,
    ]  # fmt: skip


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.json").read_text().splitlines() if "loss" in line]


def test_pretraining_on_two_nodes_equals_one_process(
    options: Options, slurm_cluster: SlurmCluster, images: Path, tmp_path: Path
):
    groups = ("MODEL.BN_GROUPS", "4", "SOLVER.MAX_STEPS", "3", "SOLVER.BASE_LR", "0.01")
    spec = stages.pretrain("", tiny(images, tmp_path / "slurm", *groups))
    (job,) = submit([spec], replace(options, nodes=2, tasks=2))
    run_stage(stages.pretrain("", tiny(images, tmp_path / "here", *groups)), Options(cluster="debug"))
    slurm_cluster.wait_state(job.job_id, "COMPLETED", "FAILED", seconds=120)
    assert control.summary(tmp_path / "slurm/launch/launch.json")["failure"] == {}
    assert losses(tmp_path / "slurm") == pytest.approx(losses(tmp_path / "here"), rel=1e-4)
    assert len(losses(tmp_path / "here")) == 3


def graph_of(folder: Path, nodes: list[Node]) -> Graph:
    report = StageSpec("report", str(folder / "report"), f"{FAKE}:count", args=(str(folder / "report"), 1))
    return Graph("pipeline", str(folder), tuple(nodes), report)


def test_a_failed_stage_ends_its_own_branch_only(options: Options, slurm_cluster: SlurmCluster, tmp_path: Path, capsys):
    nodes = [
        Node("bad/pretrain", stage(tmp_path / "bad", "fail")),
        Node("bad/linear", stage(tmp_path / "bad_child", "count", 1), ("bad/pretrain",)),
        Node("good/pretrain", stage(tmp_path / "good", "count", 1)),
        Node("good/linear", stage(tmp_path / "good_child", "count", 1), ("good/pretrain",)),
    ]
    graph = graph_of(tmp_path, nodes)
    assert submit_all(graph, options) == 0
    report = read_json(tmp_path / "report/launch/launch.json")["jobs"][-1]["id"]
    slurm_cluster.wait_state(report, "COMPLETED")
    ended = {node.key: slurm_cluster.state(_job(node.spec.folder)) for node in nodes}
    assert ended == {
        "bad/pretrain": "FAILED", "bad/linear": "CANCELLED", "good/pretrain": "COMPLETED", "good/linear": "COMPLETED",
    }  # fmt: skip
    capsys.readouterr()
    assert submit_all(graph, options) == 0  # again: only what failed or was left out
    assert capsys.readouterr().out.count("already complete") == 2
    assert _job(nodes[0].spec.folder) != _job(nodes[2].spec.folder)
    assert len(read_json(tmp_path / "good/launch/launch.json")["jobs"]) == 1
    assert len(read_json(tmp_path / "bad/launch/launch.json")["jobs"]) == 2
    control.cancel(tmp_path)


def test_an_array_keeps_its_cap(options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):
    specs = [stage(tmp_path / f"point{i}", "count", 3, 0.3) for i in range(4)]
    jobs = submit(specs, replace(options, parallel=2))
    array = jobs[0].job_id.split("_")[0]
    told = subprocess.run(["scontrol", "show", "job", array], capture_output=True, text=True).stdout
    assert "ArrayTaskThrottle=2" in told
    for job, spec in zip(jobs, specs, strict=True):
        slurm_cluster.wait_state(job.job_id, "COMPLETED")
        assert read_json(Path(spec.folder) / "results.json")["metrics"] == {"count": 3}


def test_cancel_ends_only_its_own(options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):
    (mine,) = submit([stage(tmp_path / "mine", "count", 1000, 0.1)], options)
    (other,) = submit([stage(tmp_path / "other", "count", 30, 0.1)], options)
    wait_for(lambda: last_attempt(tmp_path / "mine", mine.job_id).get("state") == "running")
    control.cancel(tmp_path / "mine")
    slurm_cluster.wait_state(mine.job_id, "CANCELLED")
    slurm_cluster.wait_state(other.job_id, "COMPLETED")
    assert last_attempt(tmp_path / "mine", mine.job_id)["state"] == "stopped"  # it had the time to write its checkpoint


def _job(folder: str) -> str:
    return read_json(Path(folder) / "launch" / "launch.json")["jobs"][-1]["id"]
