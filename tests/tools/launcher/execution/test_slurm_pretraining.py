"""Real stages on a real SLURM cluster, interrupted in several ways or on two nodes, equal those of one process."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
import yaml

from pretrain.common.run.state import read_json_or_empty
from pretrain.common.weights.file import read
from pretrain.monitor import TrainingMonitor
from tests.pretrain.runs import assert_same_end, lines, overrides
from tests.slurm_cluster import SlurmCluster
from tests.test_docs import FINE_TUNING, PRETRAINING
from tests.tools.launcher.execution.test_slurm_slow import attempts, is_complete
from tests.tools.launcher.helpers import CONFIGS, HERE, build_pretrain, job_of, run_alone, shown, submit_jobs, wait_for
from tools.launcher.graphs import pipeline
from tools.launcher.graphs.start import start_graph
from tools.launcher.job_options import JobOptions

pytestmark = pytest.mark.slurm
MASK = CONFIGS / "coco_mask_R50_FPN_1x_jcl.yaml"
RECIPE = CONFIGS / "pretrain" / "jcl_R18_IN100_100ep.yaml"
ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]
_TINY = "import pytest; from tests import tiny; tiny.use(pytest.MonkeyPatch())"
_SLOW_STEPS = """
import time
from pretrain.monitor import TrainingMonitor
real = TrainingMonitor.watch
def step(*args):
    time.sleep({})
    real(*args)
TrainingMonitor.watch = step
"""


def extend(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Let jobs import a module with this ``text``, as --import does; what it changes in this process is restored."""
    monkeypatch.setattr(torchvision.models, "resnet18", torchvision.models.resnet18)
    monkeypatch.setattr(TrainingMonitor, "watch", TrainingMonitor.watch)
    module = folder / f"extension_of_{folder.name}.py"  # this process imports those of other tests, too
    module.write_text(text)
    monkeypatch.setenv("P2T_IMPORT", str(module))


@pytest.mark.slow
def test_a_time_limit_shorter_than_an_epoch_still_ends_with_the_same_bits(
    slurm_options: JobOptions,
    slurm_cluster: SlurmCluster,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """An epoch of 6 steps takes 30 s after start-up; each attempt has 60 s, minus 40 s for the signal."""
    run_alone(build_pretrain("", overrides(images, tmp_path / "whole", "SOLVER.EPOCHS", "1")))
    extend(monkeypatch, tmp_path, _SLOW_STEPS.format(5))
    never = ("SOLVER.EPOCHS", "1", "SOLVER.CHECKPOINT_PERIOD", "1000000")
    stage = build_pretrain("", overrides(images, tmp_path / "cut", *never))
    (job,) = submit_jobs([stage], replace(slurm_options, time="1", signal_delay=40))
    slurm_cluster.wait_state(job, "COMPLETED", "FAILED", "TIMEOUT", seconds=420)
    assert is_complete(tmp_path / "cut") and attempts(tmp_path / "cut") > 1
    assert [line["iteration"] for line in lines(tmp_path / "cut", "loss")] == list(range(6))
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_a_preempted_pretraining_ends_bit_equal(
    slurm_options: JobOptions,
    slurm_cluster: SlurmCluster,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    more = ("SOLVER.EPOCHS", "5", "SOLVER.CHECKPOINT_PERIOD", "1000000")  # no checkpoint but the one asked for
    extend(monkeypatch, tmp_path, _TINY)
    run_alone(build_pretrain("", overrides(images, tmp_path / "whole", *more)))
    extend(monkeypatch, tmp_path, _TINY + _SLOW_STEPS.format(0.4))
    (job,) = submit_jobs([build_pretrain("", overrides(images, tmp_path / "cut", *more))], slurm_options)
    wait_for(lambda: len(lines(tmp_path / "cut", "loss")) > 2, seconds=120)
    slurm_cluster.preempt()
    slurm_cluster.wait_state(job, "COMPLETED", "FAILED", seconds=300)
    assert is_complete(tmp_path / "cut") and attempts(tmp_path / "cut") == 2
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_pretraining_on_two_nodes_equals_one_process(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, images: Path, tmp_path: Path
):
    groups = ("MODEL.BN_GROUPS", "4", "SOLVER.MAX_STEPS", "3", "SOLVER.BASE_LR", "0.01")
    stage = build_pretrain("", overrides(images, tmp_path / "slurm", *groups))
    (job,) = submit_jobs([stage], replace(slurm_options, nodes=2, tasks=2))
    run_alone(build_pretrain("", overrides(images, tmp_path / "here", *groups)))
    slurm_cluster.wait_state(job, "COMPLETED", "FAILED", seconds=120)
    assert shown(tmp_path / "slurm")["failure"] == {}
    losses = [[line["loss"] for line in lines(tmp_path / name, "loss")] for name in ("slurm", "here")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 3


SCENES = "coco:datasets/digits/coco/annotations/instances_train.json:datasets/digits/coco/train"
SMOKE = {  # digits, JCL, conversion and Mask R-CNN with a ResNet-18, each in a few steps
    "DATA": "digits --images 70 --val-images 20 --scenes 6 --val-scenes 4 datasets/digits",
    "BRANCHES": {"jcl": {"PRETRAIN": str(RECIPE)}},
    "OVERRIDES": f"{PRETRAINING} DATA.TRAIN folder:datasets/digits/images "
    "METHOD.NUM_KEYS 2 MODEL.QUEUE_SIZE 32 MODEL.STEM imagenet MODEL.BN_GROUPS 4 SOLVER.MAX_STEPS 40 "
    "SOLVER.LOG_PERIOD 1 DATA.VAL folder:datasets/digits/images PROBE.KNN_K 5 DEVICE cpu",
    "TRANSFER": {"mask": str(MASK)},
    "TRANSFER_OVERRIDES": f"{FINE_TUNING} MODEL.RESNETS.DEPTH 18 MODEL.RESNETS.RES2_OUT_CHANNELS 64 MODEL.DEVICE cpu "
    "SOLVER.MAX_ITER 40 SOLVER.STEPS (36,) SOLVER.BASE_LR 0.01 SOLVER.WARMUP_ITERS 10 MODEL.FPN.OUT_CHANNELS 64 "
    "MODEL.ROI_BOX_HEAD.FC_DIM 64 MODEL.ROI_MASK_HEAD.NUM_CONV 1 MODEL.ROI_MASK_HEAD.CONV_DIM 32 SEED 1 "
    f"""MODEL.ROI_HEADS.NUM_CLASSES 10 DATASETS.TRAIN "('{SCENES}',)" DATASETS.TEST "('{SCENES}',)" """,
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pipeline_preempted_twice_ends_in_the_same_table(
    slurm_options: JobOptions, slurm_cluster: SlurmCluster, tmp_path: Path, engine: str
):
    Path("smoke.yaml").write_text(yaml.safe_dump({**SMOKE, "ENGINE": engine}))
    assert start_graph(pipeline.load_pipeline("smoke.yaml", "whole"), HERE) == 0
    graph = pipeline.load_pipeline("smoke.yaml", "cut")
    assert start_graph(graph, slurm_options) == 0
    folders = {node.key: Path(node.stage.folder) for node in graph.nodes}
    for key, sign in (("jcl/pretrain", "step 1/"), ("jcl/mask", "training (on|from)")):
        log = folders[key] / "log.txt"
        wait_for(lambda: log.exists() and re.search(sign, log.read_text()), seconds=240)  # noqa: B023
        time.sleep(3)  # some steps into it
        slurm_cluster.preempt()
        slurm_cluster.wait_state(job_of(folders[key]).id, "COMPLETED", "FAILED", seconds=300)
        assert is_complete(folders[key]) and attempts(folders[key]) == 2
    slurm_cluster.wait_state(job_of("cut/report").id, "COMPLETED", seconds=240)
    whole, cut = (read_json_or_empty(Path(name, "jcl/mask/results.json"))["metrics"] for name in ("whole", "cut"))
    assert whole == cut
    weights, resumed = (read(Path(name, "jcl/mask/model_final.pth"))["model"] for name in ("whole", "cut"))
    assert weights.keys() == resumed.keys() and all(torch.equal(value, resumed[key]) for key, value in weights.items())
    reports = [Path(name, "report.md").read_text() for name in ("whole", "cut")]
    assert all(
        Path(guide).is_file() for text in reports for guide in re.findall(r"How to read this report: (.*)", text)
    )
    tables = ["## " + text.partition("## ")[2].partition("## Cost")[0] for text in reports]
    tables = [re.sub(r"\b[0-9a-f]{8}\b", "", text) for text in tables]  # files' hashes depend on their folder
    assert tables[0] == tables[1]
