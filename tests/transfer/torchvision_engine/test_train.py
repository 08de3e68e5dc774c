"""Runs of the torchvision engine: files, resume, refusals, several processes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from fvcore.common.config import CfgNode
from torch import nn

from pretrain.common import interrupt, skipped_steps
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from tests.transfer import tiny_coco
from transfer.torchvision_engine import train as engine
from transfer.torchvision_engine.layers import ProcessSyncBatchNorm
from transfer.torchvision_engine.state import State


@pytest.fixture(autouse=True, scope="module")
def single_process():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        yield


PRECISE = {"TEST__PRECISE_BN__ENABLED": True, "TEST__PRECISE_BN__NUM_ITER": 2, "TEST__EVAL_PERIOD": 2}


def masks(out: Path, name: str) -> CfgNode:
    return tiny_coco.config(
        out, name, MODEL__MASK_ON=True, DATALOADER__NUM_WORKERS=1, SOLVER__CHECKPOINT_PERIOD=2, **PRECISE
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The data set, the folder and the metrics of a run without interruption."""
    folder = tmp_path_factory.mktemp("finished")
    name = tiny_coco.write(folder / "data")
    return name, folder / "out", engine.run(masks(folder / "out", name), visualize=2)


@pytest.fixture
def copied(finished, tmp_path):
    """The same, in a folder that a test may change."""
    shutil.copytree(finished[1], tmp_path / "out")
    return finished[0], tmp_path / "out", finished[2]


def stop_after(monkeypatch, steps: int) -> None:
    """A stop is requested while step ``steps`` (from 1) runs."""
    calls = iter([""] * (steps - 1) + ["SIGTERM"] * 100)
    monkeypatch.setattr(interrupt, "stop_requested", lambda: next(calls))


def saved(folder, name: str = "model_final") -> dict:
    return torch.load(folder / f"{name}.pth", weights_only=True)


def assert_equal_states(a: dict, b: dict) -> None:
    assert a["model"].keys() == b["model"].keys()
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), name
    for key, state in a["optimizer"]["state"].items():
        assert torch.equal(state["momentum_buffer"], b["optimizer"]["state"][key]["momentum_buffer"])


def test_a_run_leaves_the_files_of_detectron2(finished, tmp_path):
    name, out, metrics = finished
    assert sorted(p.name for p in out.glob("*.pth")) == ["model_0000001.pth", "model_0000003.pth", "model_final.pth"]
    assert (out / "last_checkpoint").read_text() == "model_final.pth"
    lines = [json.loads(line) for line in (out / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 3]
    assert {"bbox/AP", "segm/AP50"} <= set(lines[0])
    last = lines[1]
    parts = ["loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg", "loss_mask"]
    assert {*parts, "total_loss", "lr", "time", "data_time", "eta_seconds", "bbox/AP"} <= set(last)
    assert last["lr"] == pytest.approx(0.001)  # 0.01 times GAMMA after step 3
    assert set(metrics) == {"bbox", "segm"}
    predictions = json.loads(next(out.glob("inference/*/coco_instances_results.json")).read_text())
    assert {p["category_id"] for p in predictions} <= {7, 14, 21}
    assert "counts" in predictions[0]["segmentation"]
    assert len(list((out / "visualizations").glob("*.jpg"))) == 2
    names = saved(out)["model"]
    assert "backbone.bottom_up.res2.0.conv1.norm.running_mean" in names
    assert "roi_heads.mask_head.mask_fcn1.weight" in names
    assert "iter: 3" in (out / "log.txt").read_text()

    evaluated = engine.run(
        tiny_coco.config(tmp_path / "eval", name, MODEL__MASK_ON=True, MODEL__WEIGHTS=str(out / "model_final.pth")),
        eval_only=True,
    )
    assert evaluated == metrics


def check_resumed(expected: Path, cfg: CfgNode, monkeypatch) -> dict:
    """A run of ``cfg`` that stops in iteration 2 and is resumed ends in the state of ``expected``."""
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped, match="SIGTERM"):
            engine.run(cfg)
    assert (Path(cfg.OUTPUT_DIR) / "last_checkpoint").read_text() == "model_0000002.pth"
    metrics = engine.run(cfg, resume=True)
    assert_equal_states(saved(expected), saved(Path(cfg.OUTPUT_DIR)))
    return metrics


def test_a_stopped_run_resumes_to_the_bit_equal_result(finished, tmp_path, monkeypatch):
    name, whole, metrics = finished
    assert check_resumed(whole, masks(tmp_path / "halves", name), monkeypatch) == metrics


@pytest.mark.slow
def test_a_stopped_run_with_keypoints_resumes_to_the_bit_equal_result(tmp_path, monkeypatch):
    name = tiny_coco.write(tmp_path / "data", keypoints=True)
    whole, halves = (
        tiny_coco.config(tmp_path / out, name, MODEL__KEYPOINT_ON=True, MODEL__ROI_HEADS__NUM_CLASSES=1)
        for out in ("whole", "halves")
    )
    assert engine.run(whole) == check_resumed(tmp_path / "whole", halves, monkeypatch)


def test_steps_that_fp16_skips_are_counted_and_many_in_a_row_end_the_run(tmp_path, monkeypatch):
    scaler, build_model = torch.amp.GradScaler, engine.build_model
    overflow, iterations = [0, 2], itertools.count()  # the iterations whose gradients overflow

    def build(*args):
        model = build_model(*args)
        weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        weight.register_hook(lambda grad: grad * (torch.inf if next(iterations) in overflow else 1.0))
        return model

    monkeypatch.setattr(engine, "build_model", build)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device))  # the CPU has no fast fp16
    name, out = tiny_coco.write(tmp_path / "data"), tmp_path / "out"
    cfg = tiny_coco.config(out, name, DATASETS__TEST=())
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped, match="SIGTERM"):
            engine.run(cfg)
    assert saved(out, "model_0000002")["skipped_steps"] == 2
    engine.run(cfg, resume=True)
    assert saved(out)["skipped_steps"] == 2
    last = json.loads((out / "metrics.json").read_text().splitlines()[-1])
    assert (last["iteration"], last["loss_scale"], last["skipped_steps"]) == (3, 2.0**14, 2)
    assert "fp16: 2 of 4 steps were skipped" in (out / "log.txt").read_text()

    overflow[:] = range(100)
    monkeypatch.setattr(skipped_steps, "MAX_IN_A_ROW", 2)
    with pytest.raises(
        UserError, match=r"fp16: the 2 steps up to step 1 were all skipped.* loss scale of 3\.28e\+04; set SOLVER"
    ):
        engine.run(tiny_coco.config(tmp_path / "all", name))


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(copied):
    name, out, _ = copied
    expected = saved(out)
    for broken in ("model_final.pth", "model_0000003.pth"):
        (out / broken).write_bytes((out / broken).read_bytes()[:5000])
    engine.run(masks(out, name), resume=True)
    assert "trying the checkpoint before it" in (out / "log.txt").read_text()
    assert_equal_states(saved(out), expected)
    iterations = [json.loads(line)["iteration"] for line in (out / "metrics.json").read_text().splitlines()]
    assert iterations == [1, 3]


def test_a_finished_run_evaluates_again_and_trains_no_more(copied):
    name, out, metrics = copied
    written = (out / "model_final.pth").stat().st_mtime_ns
    assert engine.run(masks(out, name), resume=True) == metrics
    assert (out / "log.txt").read_text().count("training on 5 images") == 1
    assert (out / "model_final.pth").stat().st_mtime_ns == written


def test_another_engines_checkpoint_is_not_resumed(tmp_path):
    name = tiny_coco.write(tmp_path / "data")
    (tmp_path / "out").mkdir()
    torch.save({"model": {}, "trainer": {}}, tmp_path / "out" / "model_0000001.pth")
    with pytest.raises(UserError, match="resume with the engine that wrote it"):
        engine.run(tiny_coco.config(tmp_path / "out", name), resume=True)


def test_weights_are_not_resumed(tmp_path):
    (tmp_path / "out").mkdir()
    state = {"model": {"a": torch.ones(1)}, "iteration": 1, "engine": "torchvision"}
    torch.save(state, tmp_path / "out" / "model_0000001.pth")
    (tmp_path / "out" / "last_checkpoint").write_text("model_0000001.pth")
    name = tiny_coco.write(tmp_path / "data")
    with pytest.raises(
        UserError, match=r"model_0000001\.pth lacks optimizer, scaler, seed, window: it cannot be resumed"
    ):
        engine.run(tiny_coco.config(tmp_path / "out", name), resume=True)


def test_a_diverging_run_names_iteration_rate_and_images(tmp_path):
    name = tiny_coco.write(tmp_path / "data")
    cfg = tiny_coco.config(tmp_path / "out", name, SOLVER__BASE_LR=1e18, SOLVER__WARMUP_ITERS=0)
    with pytest.raises(
        UserError, match=r"diverged at iteration [123] \(learning rate 1e\+18\).*images: .*png.*BASE_LR"
    ):
        engine.run(cfg)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named_in_one_line(tmp_path, workers):
    name = tiny_coco.write(tmp_path / "data")
    for path in (tmp_path / "data").glob("*.png"):
        path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=r"cannot read image .*png") as caught:
        engine.run(tiny_coco.config(tmp_path / "out", name, DATALOADER__NUM_WORKERS=workers))
    assert "\n" not in str(caught.value)


def test_half_precision_on_a_cpu_is_refused(tmp_path):
    name = tiny_coco.write(tmp_path / "data")
    with pytest.raises(UserError, match=r"SOLVER.AMP.ENABLED is True.*CUDA"):
        engine.run(tiny_coco.config(tmp_path / "out", name, SOLVER__AMP__ENABLED=True))


def spawn(function, *args) -> None:
    """Runs ``function(rank, *args)`` in two gloo processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_enter, (port, function, args), nprocs=2)


def _enter(rank: int, port: int, function, args) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    function(rank, *args)
    torch.distributed.destroy_process_group()


def _norm_of_two(rank: int, folder) -> None:
    images = torch.load(folder / "images.pth")
    share = (images[:1] if rank == 0 else images[1:]).requires_grad_()
    norm = ProcessSyncBatchNorm(5)
    out = norm(share)
    (out**3).sum().backward()
    torch.save([out, share.grad, norm.weight.grad, norm.running_mean, norm.running_var], folder / f"{rank}.pth")


def check_norm_of_two(tmp_path, images: torch.Tensor) -> None:
    """Batch norm over two processes equals that over one batch: outputs, gradients, running statistics."""
    whole, norm = images.clone().requires_grad_(), nn.BatchNorm2d(5)
    out = norm(whole)
    (out**3).sum().backward()
    a, b = (torch.load(tmp_path / f"{rank}.pth") for rank in range(2))
    for index, expected in ((0, out), (1, whole.grad)):
        assert torch.allclose(torch.cat([a[index], b[index]]), expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(a[2] + b[2], norm.weight.grad, rtol=1e-4, atol=1e-3)
    for got in (a, b):
        assert torch.allclose(got[3], norm.running_mean, rtol=1e-5)
        assert torch.allclose(got[4], norm.running_var, rtol=1e-5)


def _train_of_two(rank: int, folder, name: str) -> None:
    """An uninterrupted run, one that stops because one of the two is asked to, its resumption, and a batch norm."""
    keys = {"MODEL__MASK_ON": True, **PRECISE}
    metrics = engine.run(tiny_coco.config(folder / "whole", name, **keys))
    (folder / f"metrics{rank}.json").write_text(json.dumps(metrics))
    calls = iter([""] + ["SIGUSR1"] * 100)  # in iteration 1; agreed in the one after it
    real, interrupt.stop_requested = interrupt.stop_requested, lambda: next(calls) if rank == 1 else ""
    try:
        engine.run(tiny_coco.config(folder / "halves", name, **keys))
    except Stopped as stopped:
        (folder / f"stopped{rank}").write_text(str(stopped))
    interrupt.stop_requested = real
    torch.distributed.barrier()
    _stop_in_the_last_evaluation(rank, folder, tiny_coco.config(folder / "halves", name, **keys))
    engine.run(tiny_coco.config(folder / "halves", name, **keys), resume=True)
    _norm_of_two(rank, folder)
    _other_weights(rank, folder, tiny_coco.config(folder / f"own{rank}", name, **keys))
    messages: list[str] = []
    window = [{"data_time": 0.25 + 0.5 * rank, "time": 1.0, "total_loss": 2.0}] * 2
    training = SimpleNamespace(cfg=tiny_coco.config(folder, name), window=window, rate=lambda i: 0.1, world=2,
                               device=torch.device("cpu"), log=SimpleNamespace(info=messages.append))  # fmt: skip
    line = State.summary(training, 1)  # type: ignore[arg-type]
    assert line["data_time"] == 0.75 and "75% waiting for data (loader-bound" in messages[0]


def _stop_in_the_last_evaluation(rank: int, folder, cfg) -> None:
    """One of the two is asked to stop while both evaluate: both stop, the last checkpoint is written."""
    evaluate, calls = engine.evaluate, iter(["after iteration 1", "after the last"])

    def stopped(*args):
        if next(calls) == "after the last" and rank == 1:
            interrupt.request_stop("SIGUSR1")
        return evaluate(*args)

    next(calls)  # this part of the run begins after iteration 2
    engine.evaluate = stopped
    with pytest.raises(Stopped, match="SIGUSR1"):
        engine.run(cfg, resume=True)
    interrupt.clear()
    engine.evaluate = evaluate
    assert saved(folder / "halves")["iteration"] == 3 and not (folder / "halves" / "evaluating.pth").exists()


def _other_weights(rank: int, folder, cfg) -> None:
    """Each process sees a checkpoint of that iteration, but not the same one."""
    shutil.copytree(folder / "whole", cfg.OUTPUT_DIR)
    if rank == 1:
        state = saved(folder / "whole")
        state["model"]["backbone.fpn_output2.weight"] *= 1.001
        torch.save(state, folder / "own1" / "model_final.pth")
    with pytest.raises(UserError, match=r"the start \(iteration, digest of the weights\) differs between ranks: \(4, "):
        engine.run(cfg, resume=True)


def test_two_processes_stop_together_resume_and_agree(tmp_path):
    name = tiny_coco.write(tmp_path / "data")
    torch.manual_seed(0)
    images = torch.randn(3, 5, 4, 6) * 3 + 50
    torch.save(images, tmp_path / "images.pth")
    spawn(_train_of_two, tmp_path, name)
    check_norm_of_two(tmp_path, images)
    assert (tmp_path / "halves" / "model_0000002.pth").is_file()
    assert (tmp_path / "stopped1").read_text() == "SIGUSR1"
    assert (tmp_path / "stopped0").read_text() == "a signal to another process of this run"
    whole = saved(tmp_path / "whole")
    assert_equal_states(whole, saved(tmp_path / "halves"))
    assert json.loads((tmp_path / "metrics1.json").read_text()) == {}
    metrics = json.loads((tmp_path / "metrics0.json").read_text())
    weights = str(tmp_path / "whole" / "model_final.pth")
    cfg = tiny_coco.config(tmp_path / "alone", name, MODEL__MASK_ON=True, MODEL__WEIGHTS=weights)
    assert engine.run(cfg, eval_only=True) == metrics
    assert np.isfinite(metrics["bbox"]["AP"])
