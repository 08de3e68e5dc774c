"""Runs of the torchvision engine: their files, resuming, and errors."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fvcore.common.config import CfgNode

from tests.errors import refused
from tests.pretrain.runs import stopped
from tests.stops import stop_in_step
from tests.transfer import tiny_coco
from transfer import train
from transfer.api import Run
from transfer.torchvision_engine.engine import TorchvisionEngine

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


PRECISE = {"TEST__PRECISE_BN__ENABLED": True, "TEST__PRECISE_BN__NUM_ITER": 2, "TEST__EVAL_PERIOD": 2}


def run(cfg: CfgNode, **options: Any) -> dict[str, Any]:
    """Train; return the metrics of the only test data set."""
    request = options.pop("request", None)
    data_sets = tiny_coco.read_data_sets(cfg)
    return train.run(Run(cfg, "torchvision", **options), torch.device("cpu"), data_sets, request)["metrics"]


def masks(out: Path, name: str) -> CfgNode:
    return tiny_coco.config(
        out, name, MODEL__MASK_ON=True, DATALOADER__NUM_WORKERS=1, SOLVER__CHECKPOINT_PERIOD=2, **PRECISE
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train without interruption; return the data set, the folder and the metrics."""
    folder = tmp_path_factory.mktemp("finished")
    name = tiny_coco.write(folder / "data")
    return name, folder / "out", run(masks(folder / "out", name), visualize=2)


def saved(folder, name: str = "model_final") -> dict:
    return torch.load(folder / f"{name}.pth", weights_only=True)


def assert_equal_states(a: dict, b: dict) -> None:
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)


def test_a_run_leaves_the_files_of_detectron2(finished):
    _, out, metrics = finished
    assert sorted(p.name for p in out.glob("*.pth")) == ["model_0000001.pth", "model_0000003.pth", "model_final.pth"]
    assert (out / "last_checkpoint").read_text() == "model_final.pth"
    lines = [json.loads(line) for line in (out / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 3]
    assert {"bbox/AP", "segm/AP50"} <= set(lines[0]) and set(metrics) == {"bbox", "segm"}
    losses = "loss_rpn_cls loss_rpn_loc loss_cls loss_box_reg loss_mask total_loss"
    assert {*losses.split(), "lr", "time", "data_time", "eta_seconds", "images_per_second", "bbox/AP"} <= set(lines[1])
    assert lines[1]["lr"] == pytest.approx(0.001)  # 0.01 times GAMMA after step 3
    predictions = json.loads(next(out.glob("inference/*/coco_instances_results.json")).read_text())
    assert {p["category_id"] for p in predictions} <= {7, 14, 21}
    assert "counts" in predictions[0]["segmentation"]
    assert len(list((out / "visualizations").glob("*.png"))) == 2
    names = saved(out)["model"]
    assert "backbone.bottom_up.res2.0.conv1.norm.running_mean" in names
    assert "roi_heads.mask_head.mask_fcn1.weight" in names
    log = (out / "log.txt").read_text()
    assert "step 4/4  total_loss" in log and "] device cpu, 1 process\n" in log.splitlines(keepends=True)[0]


def test_a_stopped_run_resumes_to_the_bit_equal_result(finished, tmp_path, monkeypatch):
    name, whole, metrics = finished
    with monkeypatch.context() as patch:
        request = stop_in_step(patch, 3)
        stopped(lambda: run(masks(tmp_path, name), request=request), "SIGTERM")
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"
    assert run(masks(tmp_path, name), resume=True) == metrics
    assert_equal_states(saved(whole), saved(tmp_path))


def test_a_run_may_end_where_it_was_stopped(tmp_path, name, monkeypatch):
    """With MAX_ITER at the iterations that are completed, it ends as a run of that length."""
    with monkeypatch.context() as patch:
        request = stop_in_step(patch, 3)
        stopped(lambda: run(masks(tmp_path / "cut", name), request=request), "SIGTERM")
    ends = [tmp_path / "cut", tmp_path / "short"]
    for out in ends:
        cfg = masks(out, name)
        cfg.SOLVER.MAX_ITER = 3
        run(cfg, resume=True)
    assert_equal_states(*map(saved, ends))


def test_steps_that_fp16_skips_are_counted(tmp_path, monkeypatch, name):
    scaler = torch.amp.grad_scaler.GradScaler
    build_model = TorchvisionEngine.build_model
    iterations = itertools.count()  # the gradients of the first and the third overflow

    def build(*args):
        model = build_model(*args)
        weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        weight.register_hook(lambda grad: grad * (torch.inf if next(iterations) in (0, 2) else 1.0))
        return model

    monkeypatch.setattr(TorchvisionEngine, "build_model", build)
    # The CPU has no fast fp16.
    monkeypatch.setattr(torch.amp.grad_scaler, "GradScaler", lambda device, enabled: scaler(device))
    out = tmp_path / "out"
    cfg = tiny_coco.config(out, name, DATASETS__TEST=())
    with monkeypatch.context() as patch:
        request = stop_in_step(patch, 3)
        stopped(lambda: run(cfg, request=request), "SIGTERM")
    assert saved(out, "model_0000002")["skipped_steps"] == 2
    run(cfg, resume=True)
    assert saved(out)["skipped_steps"] == 2
    last = json.loads((out / "metrics.json").read_text().splitlines()[-1])
    assert (last["iteration"], last["loss_scale"], last["skipped_steps"]) == (3, 2.0**14, 2)
    assert "fp16: 2 of 4 steps were skipped" in (out / "log.txt").read_text()


def test_a_checkpoint_of_detectron2s_own_trainer_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    torch.save({"model": {}, "trainer": {}}, tmp_path / "out" / "model_0000001.pth")
    cfg = tiny_coco.config(tmp_path / "out", tiny_coco.write(tmp_path / "data"))
    refused(lambda: run(cfg, resume=True), "model_0000001.pth", "torchvision")


def test_a_diverging_run_names_iteration_rate_and_images(tmp_path, name):
    cfg = tiny_coco.config(tmp_path / "out", name, SOLVER__BASE_LR=1e18, SOLVER__WARMUP_ITERS=0)
    text = refused(lambda: run(cfg), "(learning rate 1e+18)", "images: ", ".png", "SOLVER.BASE_LR")
    assert re.search(r"diverged at iteration [123] ", text)
