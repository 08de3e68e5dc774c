"""The torchvision engine in two processes: they stop together, resume, and agree with one process."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pretrain.common import interrupt
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from tests.pretrain.ranks import run_ranks
from tests.transfer import tiny_coco
from tests.transfer.torchvision_engine.test_train import PRECISE, assert_equal_states, run, saved
from transfer.torchvision_engine import train as engine
from transfer.torchvision_engine.layers import ProcessSyncBatchNorm
from transfer.torchvision_engine.state import State


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


def _train_of_two(folder, name: str) -> None:
    """An uninterrupted run, one that stops because one of the two is asked to, its resumption, and a batch norm."""
    rank = int(os.environ["RANK"])
    keys = {"MODEL__MASK_ON": True, **PRECISE}
    metrics = run(tiny_coco.config(folder / "whole", name, **keys))
    (folder / f"metrics{rank}.json").write_text(json.dumps(metrics))
    calls = iter([""] + ["SIGUSR1"] * 100)  # in iteration 1; agreed in the one after it
    real, interrupt.stop_requested = interrupt.stop_requested, lambda: next(calls) if rank == 1 else ""
    try:
        run(tiny_coco.config(folder / "halves", name, **keys))
    except Stopped as stopped:
        (folder / f"stopped{rank}").write_text(str(stopped))
    interrupt.stop_requested = real
    torch.distributed.barrier()
    _stop_in_the_last_evaluation(rank, folder, tiny_coco.config(folder / "halves", name, **keys))
    run(tiny_coco.config(folder / "halves", name, **keys), resume=True)
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
        run(cfg, resume=True)
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
        run(cfg, resume=True)


def test_two_processes_stop_together_resume_and_agree(tmp_path):
    name = tiny_coco.write(tmp_path / "data")
    torch.manual_seed(0)
    images = torch.randn(3, 5, 4, 6) * 3 + 50
    torch.save(images, tmp_path / "images.pth")
    run_ranks(_train_of_two, 2, tmp_path, name, device=None)
    check_norm_of_two(tmp_path, images)
    assert (tmp_path / "halves" / "model_0000002.pth").is_file()
    assert (tmp_path / "stopped1").read_text() == "SIGUSR1"
    assert (tmp_path / "stopped0").read_text() == "another rank was asked to stop"
    whole = saved(tmp_path / "whole")
    assert_equal_states(whole, saved(tmp_path / "halves"))
    assert json.loads((tmp_path / "metrics1.json").read_text()) == {}
    metrics = json.loads((tmp_path / "metrics0.json").read_text())
    weights = str(tmp_path / "whole" / "model_final.pth")
    cfg = tiny_coco.config(tmp_path / "alone", name, MODEL__MASK_ON=True, MODEL__WEIGHTS=weights)
    assert run(cfg, eval_only=True) == metrics
    assert np.isfinite(metrics["bbox"]["AP"])
