"""Two ranks train, stop, resume and refuse together, and their results equal those of one process.

One pair of processes runs all parts, because starting a pair takes longer than most of them.
"""

import gc
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torchvision.ops import FrozenBatchNorm2d

from pretrain.common.distributed import data_parallel, gather_objects
from pretrain.common.interrupt import StopRequest
from pretrain.common.run.state import RunContext
from pretrain.common.weights.file import compute_tensor_digest
from tests.errors import refused
from tests.pretrain.ranks import call_on_ranks
from tests.pretrain.runs import stopped
from tests.stops import stop_in_step
from tests.transfer import test_step as accumulate
from tests.transfer import tiny_coco
from tests.transfer.torchvision_engine.test_train import PRECISE, assert_equal_states, run, saved
from tests.transfer.training import test_batch_norm as frozen_bn
from tests.transfer.training.test_checkpoints import write
from tests.transfer.training.test_losses import break_loss
from transfer import api, step, train, train_net
from transfer.torchvision_engine.engine import TorchvisionEngine
from transfer.torchvision_engine.layers import ProcessSyncBatchNorm
from transfer.training import batch_norm, checkpoints

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

KEYS = {"MODEL__MASK_ON": True, **PRECISE}


def _all_parts(folder: Path, name: str) -> None:
    rank = dist.get_rank()
    _train(rank, folder, name)
    _resume_from_other_weights(rank, folder, name)
    _diverge(rank, folder, name)
    _batch_norm(rank)
    _pool_statistics(rank)
    _evaluate_one_network(folder, name)
    _pool_frozen_statistics(rank)
    _average_gradients_once(rank)
    _agree_on_a_checkpoint(rank, folder / f"rank{rank}")
    _refuse_data_of_one_rank(rank, folder)  # the last, as it changes the working directory


def _train(rank: int, folder: Path, name: str) -> None:
    """Train without interruption, then with two stops of a single rank: after a step and in an evaluation."""
    whole = tiny_coco.config(folder / "whole", name, **KEYS)
    halves = tiny_coco.config(folder / "halves", name, **KEYS)
    metrics = _run_and_record_garbage_collection(whole)
    if rank == 0:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    with pytest.MonkeyPatch.context() as patch:
        request = stop_in_step(patch, 2) if rank == 1 else StopRequest()
        stopped(lambda: run(halves, request=request), "SIGTERM")  # agreed in the precise BN that follows the step
    assert saved(folder / "halves", "model_0000001")["pending"] == "precise_bn"

    evaluate = TorchvisionEngine.evaluate
    request = StopRequest()
    evaluations = itertools.count(1)

    def evaluate_after_a_request(*args, **keys):
        if rank == 1 and next(evaluations) == 2:  # the last
            request.make("SIGUSR1")
        return evaluate(*args, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchvisionEngine, "evaluate", evaluate_after_a_request)
        stopped(lambda: run(halves, request=request, resume=True), "SIGUSR1")
    assert saved(folder / "halves")["iteration"] == 3 and saved(folder / "halves")["pending"] == "evaluation"
    assert run(halves, resume=True) == metrics


def _run_and_record_garbage_collection(cfg: Any) -> dict[str, Any]:
    """Train; Python may collect garbage in the first step and in evaluations, not in the other steps."""
    states: dict[str, list[bool]] = {"step": [], "evaluation": []}
    run_step = train.run_step
    evaluate = TorchvisionEngine.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run_step", lambda *args: states["step"].append(gc.isenabled()) or run_step(*args))
        patch.setattr(
            TorchvisionEngine, "evaluate", lambda *args: states["evaluation"].append(gc.isenabled()) or evaluate(*args)
        )
        metrics = run(cfg)
    assert states == {"step": [True, False, False, False], "evaluation": [True, True]}
    assert gc.isenabled() and gc.get_freeze_count() == 0
    return metrics


def _resume_from_other_weights(rank: int, folder: Path, name: str) -> None:
    """Resume from checkpoints of the same iteration that differ between ranks, which is refused."""
    state = saved(folder / "whole")
    state["model"]["backbone.fpn_output2.weight"] *= 1 + 0.001 * rank
    rank_folder = folder / f"rank_folder{rank}"
    rank_folder.mkdir()
    shutil.copy(folder / "whole" / "initial_weights.json", rank_folder)
    torch.save(state, rank_folder / "model_final.pth")
    refused(lambda: run(tiny_coco.config(rank_folder, name, **KEYS), resume=True), "differs between ranks")


def _diverge(rank: int, folder: Path, name: str) -> None:
    """Train with a loss that is not finite on one rank, which ends both in the same iteration."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            break_loss(patch, 1)
        refused(lambda: run(tiny_coco.config(folder / "diverged", name)), "diverged at iteration 1 ", "loss_cls nan")
    assert not [*(folder / "diverged").glob("*.pth")]


def _batch_norm(rank: int) -> None:
    """Compare batch norm over two ranks with that over one batch: outputs, gradients, running statistics."""
    images = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(0)) * 3 + 50
    rows = slice(0, 1) if rank == 0 else slice(1, 3)
    whole: Any = images.clone().requires_grad_()
    part: Any = images[rows].clone().requires_grad_()
    norm: Any = nn.BatchNorm2d(5)
    sync_norm: Any = ProcessSyncBatchNorm(5)
    expected = norm(whole)
    actual = sync_norm(part)
    (expected**3).sum().backward()
    (actual**3).sum().backward()
    assert torch.allclose(actual, expected[rows], rtol=1e-4, atol=1e-4)
    assert torch.allclose(part.grad, whole.grad[rows], rtol=1e-4, atol=1e-4)
    dist.all_reduce(sync_norm.weight.grad)
    assert torch.allclose(sync_norm.weight.grad, norm.weight.grad, rtol=1e-4, atol=1e-3)
    assert torch.allclose(sync_norm.running_mean, norm.running_mean, rtol=1e-5)
    assert torch.allclose(sync_norm.running_var, norm.running_var, rtol=1e-5)
    half = sync_norm(part.detach().bfloat16())  # statistics in float32
    assert half.dtype == torch.bfloat16 and torch.allclose(half.float(), expected[rows], atol=0.2)


def _pool_statistics(rank: int) -> None:
    norm: Any = nn.BatchNorm2d(3)
    norm.running_mean.fill_(1.0 + 2 * rank)
    norm.running_var.fill_(4.0 - 2 * rank)
    batch_norm.pool_batch_norm([norm])
    assert norm.running_mean.tolist() == [2.0] * 3
    assert norm.running_var.tolist() == [3.0 + 1.0] * 3  # mean of variances, variance of means


def _evaluate_one_network(folder: Path, name: str) -> None:
    """Average statistics that differ between ranks (BN without precise BN) before the evaluation."""
    keys = {"MODEL__RESNETS__NORM": "BN", "MODEL__FPN__NORM": "BN", "SOLVER__MAX_ITER": 2, "TEST__EVAL_PERIOD": 1}
    cfg = tiny_coco.config(folder / "bn", name, **keys)
    digests: list[str] = []
    evaluate = TorchvisionEngine.evaluate

    def watched(engine: TorchvisionEngine, model: nn.Module, *args: Any, **keys: Any) -> Any:
        digests.append(compute_tensor_digest(*model.state_dict().values()))
        return evaluate(engine, model, *args, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchvisionEngine, "evaluate", watched)
        run(cfg)
    assert len(digests) == 2 and gather_objects(digests) == [digests, digests]
    assert digests[-1] == compute_tensor_digest(*saved(folder / "bn")["model"].values())


def _pool_frozen_statistics(rank: int) -> None:
    """Pool statistics of two batches that differ in size, one per rank."""
    ranks = frozen_bn.network(FrozenBatchNorm2d)
    alone = frozen_bn.network(FrozenBatchNorm2d)
    frozen_bn.estimate(ranks, [frozen_bn.BATCHES[rank]])
    frozen_bn.estimate(alone, frozen_bn.BATCHES)  # both ranks have both
    torch.testing.assert_close(ranks[1].running_var, alone[1].running_var)


def _average_gradients_once(rank: int) -> None:
    toy = accumulate.Toy()
    reduced = []
    parallel: Any = data_parallel(toy)
    parallel.register_comm_hook(None, lambda group, bucket: reduced.append(1) or allreduce_hook(group, bucket))
    images = accumulate.IMAGES[3 * rank : 3 * rank + 3]
    losses = step.accumulate_losses(parallel, images, 3, lambda loss: loss)
    torch.stack([*losses.values()]).sum().backward()
    whole, *_ = accumulate.gradient(1, accumulate.IMAGES[:6])
    torch.testing.assert_close(toy.weight.grad, whole)
    assert len(reduced) == 1


def _agree_on_a_checkpoint(rank: int, out: Path) -> None:
    """Load the checkpoint that rank 0 chooses; both ranks end if only one of them sees the file."""
    if rank == 1:
        write(out, "model_0000005.pth", 5)
    refused(lambda: checkpoints.load_newest_on_all_ranks(out), out, "True on rank 1")
    (out / "model_0000005.pth").unlink(missing_ok=True)
    if rank == 0:
        write(out, "model_0000005.pth", 5)
    refused(lambda: checkpoints.load_newest_on_all_ranks(out), "rank 1 of 2", "model_0000005.pth")
    write(out, "model_0000005.pth", 5)
    if rank == 1:
        write(out, "model_0000009.pth", 9)
    newest = checkpoints.load_newest_on_all_ranks(out)
    assert newest is not None and newest[1]["iteration"] == 5


def _refuse_data_of_one_rank(rank: int, folder: Path) -> None:
    """End both ranks if one of them cannot use the data."""
    words = tiny_coco.command(folder, "coco:annotations.json:.", "torchvision")
    tiny_coco.write(folder / f"rank{rank}")
    os.chdir(folder / f"rank{rank}")  # each rank has its own disk
    annotations = Path("annotations.json")
    good = annotations.read_text()
    annotations.write_text("{" if rank == 0 else good)
    refused(lambda: tiny_coco.fine_tune(words), "annotations.json")
    annotations.write_text(good)
    own_disk = tiny_coco.command(Path(), "coco:annotations.json:.", "torchvision")  # rank 1 does not see the copy
    run = train_net.prepare(train_net.parse(own_disk))
    refused(lambda: api.start(run, RunContext()), "annotations that are read", "differs between ranks")
    if rank == 1:
        annotations.unlink()
    refused(lambda: tiny_coco.fine_tune(words), "rank 1 of 2", "annotations.json", "do all machines see")


def test_two_ranks_act_as_one(tmp_path: Path, name: str) -> None:
    call_on_ranks(_all_parts, 2, tmp_path, name)
    assert_equal_states(saved(tmp_path / "whole"), saved(tmp_path / "halves"))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    weights = str(tmp_path / "whole" / "model_final.pth")
    alone = tiny_coco.config(tmp_path / "alone", name, MODEL__MASK_ON=True, MODEL__WEIGHTS=weights)
    assert metrics["bbox"]["AP"] >= 0 and run(alone, eval_only=True) == metrics
