"""A stage's identity consists of its keys and the content of its weights, not of paths; changes are described."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pretrain import keys
from pretrain.common.config.keys import Effect, Key
from pretrain.common.run.state import RunContext
from tests.errors import refused
from tests.tools.launcher.helpers import CONFIGS, TINY, build_pretrain, build_probe, build_transfer, complete
from tools.launcher.graphs import pipeline
from tools.launcher.graphs.checks import check_may_continue
from tools.launcher.graphs.graph import build_single
from tools.stages import recipes
from tools.stages.base import Stage
from tools.stages.completion import is_complete
from tools.stages.identity import describe_changes
from tools.stages.inputs import hash_content
from tools.stages.registry import build_stage


def pretraining(*more: str) -> Stage:
    return build_pretrain(recipes.find_recipe("mocov2"), [*TINY, "OUTPUT_DIR", "run", *more])


def detector(*overrides: str, base: str = "SOLVER: {MAX_ITER: 3}", engine: str = "torchvision") -> Stage:
    Path("base.yaml").write_text(base)
    Path("mask.yaml").write_text("_BASE_: base.yaml\nMODEL: {MASK_ON: true}\n")
    return build_transfer("mask.yaml", [*overrides, "OUTPUT_DIR", "mask"], engine=engine)


def with_contents(stage: Stage) -> Stage:
    return build_single(stage).nodes[0].stage


def knn(*more: str) -> Stage:
    return build_probe("knn", "random", "", ["OUTPUT_DIR", "knn", "PROBE.KNN_K", "20", *more])


def test_a_different_run_is_refused_and_each_change_is_named():
    complete(knn())
    changed = knn("PROBE.KNN_K", "5", "SEED", "7")
    refused(lambda: check_may_continue(changed), "knn contains a different run (PROBE.KNN_K 20 -> 5; SEED 0 -> 7)")
    Path("knn/results.json").unlink()  # nothing to protect
    check_may_continue(changed)


def test_a_changed_base_config_makes_a_different_run():
    complete(detector())
    assert is_complete(detector())
    longer = detector(base="SOLVER: {MAX_ITER: 5}")
    other = detector(base="SOLVER: {MAX_ITER: 5, BASE_LR: 7.0}")
    assert not is_complete(longer)
    check_may_continue(longer)
    refused(lambda: check_may_continue(other), "mask contains a different run (SOLVER.BASE_LR 0.001 -> 7.0)")
    other = detector(engine="detectron2")
    refused(lambda: check_may_continue(other), "a different run (arguments ", "'torchvision'", " -> ", "'detectron2'")


def test_a_queued_job_reads_the_config_as_it_was_submitted(monkeypatch: pytest.MonkeyPatch):
    from transfer import api
    from transfer.config import load_config

    received: list[api.Run] = []
    monkeypatch.setattr(api, "start", lambda run, job: received.append(run))
    base = f"_BASE_: {CONFIGS / 'coco_R50_FPN_1x.yaml'}\nSOLVER: {{MAX_ITER: 3, STEPS: '(2,)'}}"
    words = ["DATASETS.TRAIN", "('coco:a.json:images',)", "MODEL.ANCHOR_GENERATOR.SIZES", "[[16, 32, 64]]"]
    stage = detector(*words, base=base)
    expected = load_config("mask.yaml", [*words, "OUTPUT_DIR", stage.folder])
    queued = build_stage(json.loads(json.dumps(stage.to_json())))
    for name in ("mask.yaml", "base.yaml"):
        Path(name).unlink()
    queued.run(RunContext())
    assert received == [api.Run(expected, "torchvision", resume=True)]


def test_weights_count_by_content_and_not_by_path():
    def probe(weights: str) -> Stage:
        return with_contents(build_probe("linear", weights, "", ["OUTPUT_DIR", "linear"]))

    Path("a.pth").write_bytes(b"weights")
    before = probe("a.pth").fingerprint()
    Path("b.pth").write_bytes(b"weights")
    assert probe("b.pth").fingerprint() == before
    Path("a.pth").write_bytes(b"Weights")
    assert probe("a.pth").fingerprint() != before
    Path("d.pth").write_bytes(b"weights")
    first = with_contents(detector("MODEL.WEIGHTS", "d.pth"))
    Path("d.pth").write_bytes(b"others")
    second = with_contents(detector("MODEL.WEIGHTS", "d.pth"))
    assert describe_changes(second, first.identity).startswith("MODEL.WEIGHTS 'sha256:")


def test_the_content_of_a_folder_is_that_of_the_checkpoint_which_is_read():
    def save(path: str, iteration: int) -> str:
        """Save a checkpoint of pretraining or of a detector; return its content as a separate file."""
        Path(path).parent.mkdir(exist_ok=True)
        torch.save({"model": {"w": torch.full((99,), float(iteration))}, "iteration": iteration}, path)
        return hash_content(path)

    early = save("run/checkpoint_00000002.pth", 2)
    assert hash_content("run") == early
    final = save("run/checkpoint_final.pth", 4)
    assert hash_content("run") == final != early

    final = save("detector/model_final.pth", 899)
    longer = save("detector/model_0001000.pth", 1000)  # MAX_ITER was raised
    assert hash_content("detector") == longer != final
    newest = Path("detector/model_0001000.pth")
    newest.write_bytes(newest.read_bytes()[:500])
    assert hash_content("detector") == final
    assert hash_content(".") == ""


@pytest.mark.parametrize(
    ("build", "words", "is_other"),
    [
        (knn, "LINEAR.MOMENTUM 0.5 DATALOADER.NUM_WORKERS 1", False),
        (detector, "DATALOADER.NUM_WORKERS 1 TEST.EVAL_PERIOD 7", False),
        (detector, "MODEL.WEIGHTS a.pth", True),
        (detector, "DATASETS.TEST ('coco_2017_val',)", True),
        (detector, "FLOAT32_PRECISION high", True),
    ],
)
def test_only_keys_that_change_a_result_make_a_different_run(build: Callable[..., Stage], words: str, is_other: bool):
    complete(build())
    assert is_complete(build(*words.split())) != is_other


def test_a_moved_pipeline_stays_complete():
    Path("mask.yaml").write_text("VERSION: 2\n")
    Path("p.yaml").write_text(
        f"BRANCHES: {{a: {{PRETRAIN: {recipes.find_recipe('mocov2')}}}}}\nLINEAR: own\nTRANSFER: {{mask: mask.yaml}}\n"
        "ENGINE: torchvision\n"
    )
    stages = [complete(node.stage) for node in pipeline.load_pipeline("p.yaml", "one").nodes]
    Path("one").rename("elsewhere")
    moved = [node.stage for node in pipeline.load_pipeline("p.yaml", "elsewhere").nodes]
    assert len(moved) == len(stages) == 4 and all(is_complete(stage) for stage in moved)


def test_fingerprint_does_not_know_keys_at_their_default(monkeypatch: pytest.MonkeyPatch):
    earlier = build_pretrain(recipes.find_recipe("mocov2"), TINY).fingerprint()
    nesterov = Key("SOLVER.NESTEROV", False, None, "a key of a later version", Effect.RESULT)
    monkeypatch.setattr(keys, "KEYS", (*keys.KEYS, nesterov))
    assert build_pretrain(recipes.find_recipe("mocov2"), TINY).fingerprint() == earlier
    assert build_pretrain(recipes.find_recipe("mocov2"), [*TINY, "SOLVER.NESTEROV", "True"]).fingerprint() != earlier
