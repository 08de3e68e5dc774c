"""Preemption, time limits, requeues and deaths on a real two-node SLURM cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pretrain.common import checkpoint
from tests.slurm_cluster import NODES, SlurmCluster
from tests.tools.launcher.helpers import (
    CONFIGS,
    HERE,
    fake,
    job_of,
    last_attempt,
    run_alone,
    shown,
    steps,
    tries,
    wait_for,
)
from tools import make_data
from tools.launcher import pipeline, stages
from tools.launcher.graph import run
from tools.launcher.options import Options
from tools.launcher.spec import read_record
from tools.launcher.submit import submit
from transfer import train_net

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


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
    slurm_options: Options, slurm_cluster: SlurmCluster, images: Path, tmp_path: Path
):
    groups = ("MODEL.BN_GROUPS", "4", "SOLVER.MAX_STEPS", "3", "SOLVER.BASE_LR", "0.01")
    spec = stages.pretrain("", tiny(images, tmp_path / "slurm", *groups))
    (job,) = submit([spec], replace(slurm_options, nodes=2, tasks=2))
    run_alone(stages.pretrain("", tiny(images, tmp_path / "here", *groups)))
    slurm_cluster.wait_state(job.job_id, "COMPLETED", "FAILED", seconds=120)
    assert shown(tmp_path / "slurm")["failure"] == {}
    assert losses(tmp_path / "slurm") == pytest.approx(losses(tmp_path / "here"), rel=1e-4)
    assert len(losses(tmp_path / "here")) == 3


def preempt(cluster: SlurmCluster, seconds: int = 3) -> None:
    """A job of the higher partition takes both nodes for some seconds."""
    words = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", f"--wrap=sleep {seconds}"]
    subprocess.run(["sbatch", *words], check=True, capture_output=True)


def reasons(folder: Path) -> list[tuple[str, str]]:
    return [(one["state"], one["reason"].split(":")[0]) for one in tries(folder)]


def is_counting(folder: Path) -> bool:
    return last_attempt(folder).get("state") == "running" and (folder / "count.0").exists()


def test_preemption_costs_no_step(slurm_options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):
    (job,) = submit([fake(tmp_path, "count", 60, 0.2)], replace(slurm_options, nodes=2, tasks=2))
    wait_for(lambda: is_counting(tmp_path))
    preempt(slurm_cluster)
    slurm_cluster.wait_state(job.job_id, "COMPLETED", seconds=120)
    assert reasons(tmp_path) == [("requeued", "SIGUSR2"), ("done", "")]
    for rank in range(4):
        assert steps(tmp_path, rank) == list(range(60))
    assert shown(tmp_path)["state"] == "done"


def test_ten_preemptions_in_a_row_cost_no_step(slurm_options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):
    (job,) = submit([fake(tmp_path, "count", 300, 0.1)], replace(slurm_options, nodes=2))
    for number in range(10):
        wait_for(lambda n=number: len(tries(tmp_path)) > n and is_counting(tmp_path), 120)
        preempt(slurm_cluster, seconds=1)
        wait_for(lambda: last_attempt(tmp_path)["state"] != "running")
    slurm_cluster.wait_state(job.job_id, "COMPLETED", seconds=120)
    assert reasons(tmp_path) == [("requeued", "SIGUSR2")] * 10 + [("done", "")]
    for rank in range(2):
        assert steps(tmp_path, rank) == list(range(300))


@pytest.mark.parametrize(("is_deaf", "reason"), [(False, "SIGUSR2"), (True, "not stopped in time")])
def test_a_run_longer_than_its_time_limit_comes_back(
    slurm_options: Options, slurm_cluster: SlurmCluster, tmp_path: Path, is_deaf: bool, reason: str
):
    spec = fake(tmp_path, "count", 240, 0.25, "", is_deaf)
    (job,) = submit([spec], replace(slurm_options, time="1", signal_delay=45))
    slurm_cluster.wait_state(job.job_id, "COMPLETED", "TIMEOUT", "FAILED", seconds=300)
    ended = reasons(tmp_path)
    assert ended[0] == ("requeued", reason) and ended[-1] == ("done", "") and len(ended) > 1
    counted = steps(tmp_path)
    assert (sorted(set(counted)) if is_deaf else counted) == list(range(240))
    assert len(counted) - 240 < len(ended)  # each start goes on: it repeats at most the step that was cut off


def test_time_outs_are_capped(slurm_options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):
    capped = replace(slurm_options, time="1", signal_delay=45, max_timeouts=0)
    (job,) = submit([fake(tmp_path, "count", 2000, 0.25)], capped)
    slurm_cluster.wait_state(job.job_id, "FAILED", seconds=120)
    last = last_attempt(tmp_path)
    assert last["state"] == "failed" and "timed-out too many times" in last["failure"]["error"]


def test_kill_9_of_a_rank_ends_the_job(slurm_options: Options, slurm_cluster: SlurmCluster, tmp_path: Path):
    (job,) = submit([fake(tmp_path, "hang")], replace(slurm_options, nodes=2, tasks=2))
    wait_for(lambda: len(list(tmp_path.glob("pid.*"))) == 4)
    os.kill(int((tmp_path / "pid.3").read_text()), signal.SIGKILL)
    slurm_cluster.wait_state(job.job_id, "FAILED", seconds=60)
    assert shown(tmp_path)["state"] in ("failed", "killed")


@pytest.mark.parametrize("is_lost", [False, True], ids=["requeue", "lost node"])
def test_an_operators_requeue_or_a_lost_node_costs_no_more_than_the_step(
    slurm_options: Options, slurm_cluster: SlurmCluster, tmp_path: Path, is_lost: bool
):
    (job,) = submit([fake(tmp_path, "count", 60, 0.2)], slurm_options)
    wait_for(lambda: is_counting(tmp_path) and len(steps(tmp_path)) > 2)
    shown = subprocess.run(["squeue", "-h", "-j", job.job_id, "-o", "%N"], capture_output=True, text=True)
    node = shown.stdout.strip()
    assert node in NODES
    if is_lost:
        slurm_cluster.kill_node(node)
    else:
        subprocess.run(["scontrol", "requeue", job.job_id], check=True)
    try:
        slurm_cluster.wait_state(job.job_id, "COMPLETED", seconds=180)
    finally:
        if is_lost:
            slurm_cluster.start_node(node)
    counted = steps(tmp_path)
    assert (sorted(set(counted)) if is_lost else counted) == list(range(60))
    assert len(counted) <= 61  # the second attempt went on: it repeats at most the step that was cut off
    assert len(tries(tmp_path)) == 2
    assert read_record(tmp_path / "results.json")["metrics"] == {"count": 60}


def test_a_preempted_pretraining_ends_bit_equal(
    slurm_options: Options,
    slurm_cluster: SlurmCluster,
    images: Path,
    tmp_path: Path,
):
    more = ("SOLVER.EPOCHS", "6", "SOLVER.CHECKPOINT_PERIOD", "1000000")  # no checkpoint but the one asked for
    whole = stages.pretrain("", tiny(images, tmp_path / "whole", *more))
    run_alone(whole)
    spec = stages.pretrain("", tiny(images, tmp_path / "cut", *more))
    (job,) = submit([spec], slurm_options)
    metrics = tmp_path / "cut" / "metrics.json"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, seconds=120)
    preempt(slurm_cluster)
    slurm_cluster.wait_state(job.job_id, "COMPLETED", "FAILED", seconds=300)
    assert reasons(tmp_path / "cut") == [("requeued", "SIGUSR2"), ("done", "")]
    one, two = (checkpoint.read(tmp_path / name / checkpoint.FINAL) for name in ("whole", "cut"))
    assert one["step"] == two["step"] and one["state_dict"].keys() == two["state_dict"].keys()
    for name, value in one["state_dict"].items():
        assert torch.equal(value, two["state_dict"][name]), name


MASK, RECIPE = CONFIGS / "coco_mask_R50_FPN_1x_jcl.yaml", CONFIGS / "pretrain" / "jcl_R18_IN100_100ep.yaml"


ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pipeline_preempted_twice_ends_in_the_same_table(
    slurm_options: Options,
    slurm_cluster: SlurmCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "smoke.yaml"
    file.write_text(yaml.safe_dump({**smoke_plan(tmp_path), "ENGINE": engine}))
    assert run(pipeline.load(str(file), "whole"), HERE) == 0
    graph = pipeline.load(str(file), "cut")
    assert run(graph, slurm_options) == 0
    specs = {node.key: node.spec for node in graph.nodes}
    jobs = {key: job_of(spec.folder)["id"] for key, spec in specs.items()}
    for key, sign in (("jcl/pretrain", "step 1/"), ("jcl/mask", "training (on|from)")):
        log = Path(specs[key].folder) / "log.txt"
        wait_for(lambda: log.exists() and re.search(sign, log.read_text()), seconds=240)  # noqa: B023
        time.sleep(3)  # some steps into it
        preempt(slurm_cluster)
        slurm_cluster.wait_state(jobs[key], "COMPLETED", "FAILED", seconds=300)
        assert reasons(Path(specs[key].folder)) == [("requeued", "SIGUSR2"), ("done", "")]
    slurm_cluster.wait_state(job_of(tmp_path / "cut/report")["id"], "COMPLETED", seconds=240)
    found = [read_record(tmp_path / name / "jcl/mask/results.json")["metrics"] for name in ("whole", "cut")]
    assert found[0] == found[1] and found[0]["bbox"]["AP50"] > 0 and found[0]["segm"]["AP50"] > 0
    one, two = ((tmp_path / name / "report.md").read_text() for name in ("whole", "cut"))
    assert re.sub(r"\b[0-9a-f]{8}\b", "", one) == re.sub(r"\b[0-9a-f]{8}\b", "", two)  # files' hashes know their folder


def smoke_plan(folder: Path) -> dict[str, Any]:
    """Digits, JCL, conversion and Mask R-CNN with a ResNet-18, each in a few steps."""
    digits = folder / "digits"
    truth = f"coco:{digits}/coco/annotations/instances_"
    coco = [f"('{truth}{split}.json:{digits}/coco/{split}',)" for split in ("train", "val")]
    size = ["--images", "64", "--val-images", "16", "--scenes", "8", "--val-scenes", "4"]
    return {
        "DATA": ["digits", *size, str(digits)],
        "BRANCHES": {"jcl": {"PRETRAIN": str(RECIPE)}},
        "OVERRIDES": [
            "DATA.TRAIN", f"folder:{digits}/images/train", "DATA.VAL", f"folder:{digits}/images/val", "METHOD.NUM_KEYS",
            "2", "VIEWS.IMAGE_SIZE", "32", "MODEL.STEM", "imagenet", "MODEL.QUEUE_SIZE", "32", "SOLVER.IMS_PER_BATCH",
            "8", "SOLVER.EPOCHS", "5", "SOLVER.LOG_PERIOD", "1", "DATALOADER.NUM_WORKERS", "0", "PROBE.KNN_K", "5",
            "DEVICE", "cpu",
        ],
        "TRANSFER": {"mask": str(MASK)},
        "TRANSFER_OVERRIDES": [
            "DATASETS.TRAIN", coco[0], "DATASETS.TEST", coco[1], "MODEL.ROI_HEADS.NUM_CLASSES", "10",
            "MODEL.RESNETS.DEPTH", "18", "MODEL.RESNETS.RES2_OUT_CHANNELS", "64", "MODEL.DEVICE", "cpu",
            "SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "40", "SOLVER.STEPS", "(36,)", "SOLVER.BASE_LR", "0.01",
            "SOLVER.WARMUP_ITERS", "10", "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0", "SOLVER.CHECKPOINT_PERIOD", "1000",
            "INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64", "DATALOADER.NUM_WORKERS", "0",
            "MODEL.FPN.OUT_CHANNELS", "64", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "32",
            "MODEL.ROI_BOX_HEAD.FC_DIM", "64", "MODEL.ROI_MASK_HEAD.NUM_CONV", "1",
            "MODEL.ROI_MASK_HEAD.CONV_DIM", "32", "TEST.DETECTIONS_PER_IMAGE", "40",
            "TEST.PRECISE_BN.NUM_ITER", "2", "SEED", "1",
        ],
    }  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_transfer_on_two_nodes_equals_two_processes_here(
    slurm_options: Options,
    slurm_cluster: SlurmCluster,
    tmp_path: Path,
    engine: str,
):
    plan = smoke_plan(tmp_path)
    make_data.main([str(word) for word in plan["DATA"]])
    words = [
        *plan["TRANSFER_OVERRIDES"],
        "SOLVER.MAX_ITER",
        "3",
        "SOLVER.STEPS",
        "()",
        "MODEL.WEIGHTS",
        "",
    ]
    spec = stages.transfer(str(MASK), [*words, "OUTPUT_DIR", str(tmp_path / "slurm")], engine=engine)
    (job,) = submit([spec], replace(slurm_options, nodes=2, tasks=1))
    here = ["--config-file", str(MASK), "--num-gpus", "2", "--engine", engine]
    here += [*words, "OUTPUT_DIR", str(tmp_path / "here")]
    train_net.main(here)
    slurm_cluster.wait_state(job.job_id, "COMPLETED", "FAILED", seconds=240)
    assert shown(tmp_path / "slurm")["failure"] == {}
    one, two = (read_record(tmp_path / name / "results.json") for name in ("slurm", "here"))
    assert one["engine"]["name"] == engine and one["iteration"] == two["iteration"] == 3
    losses = []
    for name in ("slurm", "here"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.json").read_text().splitlines()]
        losses.append({k: v for line in lines for k, v in line.items() if "loss" in k})
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) > 4


def test_a_linear_probe_on_two_nodes_equals_one_process(
    slurm_options: Options,
    slurm_cluster: SlurmCluster,
    images: Path,
    tmp_path: Path,
):
    more = ["LINEAR.AUGMENT", "none", "LINEAR.EPOCHS", "3", "LINEAR.IMS_PER_BATCH", "16", "LINEAR.BASE_LR", "0.1"]
    words = [*tiny(images, tmp_path), *more, "OUTPUT_DIR"]
    one, two = (stages.probe("linear", "random", "", [*words, str(tmp_path / name)]) for name in ("slurm", "here"))
    (job,) = submit([one], replace(slurm_options, nodes=2, tasks=2))
    run_alone(two)
    slurm_cluster.wait_state(job.job_id, "COMPLETED", "FAILED", seconds=120)
    assert shown(tmp_path / "slurm")["failure"] == {}
    first, second = (checkpoint.newest(tmp_path / name) for name in ("slurm", "here"))
    assert first and second
    for name, value in first[1]["state_dict"].items():
        assert torch.allclose(value, second[1]["state_dict"][name], atol=1e-4), name
    one, two = (read_record(tmp_path / name / "results.json") for name in ("slurm", "here"))
    assert one["metrics"] == two["metrics"]


def test_a_sweep_on_slurm_ends_in_a_table(
    slurm_options: Options,
    slurm_cluster: SlurmCluster,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.chdir(tmp_path)
    more = ("SOLVER.MAX_STEPS", "2", "LINEAR.EPOCHS", "1", "LINEAR.IMS_PER_BATCH", "16")
    (tmp_path / "linear.yaml").write_text("LINEAR: {BASE_LR: 1.0}\n")
    plan = {
        "PRETRAIN": str(RECIPE), "GRID": {"METHOD.JCL_LAMBDA": [1, 4]}, "LINEAR": "linear.yaml",
        "OVERRIDES": [*tiny(images, tmp_path)[:-2], *more],
    }  # fmt: skip
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(plan))
    graph = pipeline.load("sweep.yaml", "out")
    assert run(graph, replace(slurm_options, parallel=1)) == 0
    slurm_cluster.wait_state(job_of(tmp_path / "out/report")["id"], "COMPLETED", seconds=300)
    table = (tmp_path / "out/sweep.md").read_text()
    assert re.search(r"^\| 1 +\|", table, re.M) and re.search(r"^\| 4 +\|", table, re.M) and "not done" not in table
    assert (tmp_path / "out/sweep.png").exists()
    capsys.readouterr()
    assert run(graph, slurm_options) == 0  # again: nothing is submitted, the table is drawn at once
    assert "array" not in (shown := capsys.readouterr().out) and table in shown
