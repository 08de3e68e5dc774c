"""Statistics of frozen batch norm are estimated from training images, equally in both engines."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from pretrain.common.interrupt import StopRequest
from pretrain.common.ranks.agreement import AgreedStop
from tests.pretrain.runs import stopped
from tests.transfer.test_train_net import work
from transfer.training import batch_norm

NORM = "backbone.bottom_up.stem.conv1.norm"


def network(norm: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    first: Any = norm(8)
    second: Any = norm(4)
    for layer in (first, second):
        layer.weight.data.uniform_(0.5, 2)
        layer.bias.data.normal_()
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), first, nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False), second)


def estimate(
    model: nn.Module, batches: list[torch.Tensor], backbone: nn.Module | None = None, request: StopRequest | None = None
) -> None:
    """Estimate the statistics of ``batches`` for the frozen norms of ``backbone`` (default: the whole model)."""
    engine = SimpleNamespace(
        frozen_norm=FrozenBatchNorm2d,
        run_backbone=lambda model, batch: (backbone or model)(batch),
        stop=AgreedStop(request or StopRequest(), torch.device("cpu")),
    )
    data = SimpleNamespace(batches=lambda **_: iter([*batches, None]))
    trainer: Any = SimpleNamespace(model=model, engine=engine, data=data, cfg=SimpleNamespace(SEED=0))
    batch_norm.estimate_frozen_bn(trainer, len(batches))


GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [torch.randn(2, 3, 12, 12, generator=GENERATOR), torch.randn(3, 3, 20, 8, generator=GENERATOR) * 2 + 1]


def test_one_batch_gives_what_batch_norm_does_with_it() -> None:
    """On the batch of the statistics, the frozen network equals one with batch norm in training mode."""
    frozen = network(FrozenBatchNorm2d)
    plain = network(nn.BatchNorm2d)
    plain.load_state_dict(frozen.state_dict(), strict=False)
    estimate(frozen, BATCHES[:1])
    torch.testing.assert_close(frozen(BATCHES[0]), plain(BATCHES[0]), rtol=1e-4, atol=1e-5)


def test_every_pixel_of_several_batches_counts_alike() -> None:
    """The first norm's statistics are those of all its inputs together, though the batches differ in size; norms that
    are trained, and those outside the backbone, keep theirs.
    """
    backbone = network(FrozenBatchNorm2d).append(nn.BatchNorm2d(4))
    head: Any = FrozenBatchNorm2d(4)
    estimate(nn.Sequential(backbone, head).train(), BATCHES, backbone)
    inputs = torch.cat([backbone[0](batch).transpose(0, 1).flatten(1) for batch in BATCHES], dim=1)
    torch.testing.assert_close(backbone[1].running_mean, inputs.mean(1))
    torch.testing.assert_close(backbone[1].running_var, inputs.var(1, unbiased=False))
    for norm in (backbone[5], head):
        assert (norm.running_mean == 0).all() and (norm.running_var == 1).all()


def test_a_stop_changes_nothing() -> None:
    frozen = network(FrozenBatchNorm2d)
    request = StopRequest()
    request.make("asked")
    stopped(lambda: estimate(frozen, BATCHES, request=request))
    assert (frozen[1].running_mean == 0).all() and not frozen[1]._forward_hooks


KEYS = {"MODEL__BACKBONE__FREEZE_AT": 5, "SOLVER__FROZEN_BN_ITER": 2, "SOLVER__MAX_ITER": 2, "SEED": 3}


@pytest.mark.detectron2
def test_both_engines_take_the_same(tmp_path) -> None:
    weights = tmp_path / "weights.pth"
    work(tmp_path / "first", "torchvision", **KEYS | {"SOLVER__FROZEN_BN_ITER": 0, "SOLVER__MAX_ITER": 1})
    torch.save(torch.load(tmp_path / "first/out/model_final.pth")["model"], weights)
    states = []
    alike = {"INPUT__MIN_SIZE_TRAIN": [64], "INPUT__RANDOM_FLIP": "none"}  # the engines draw them differently
    for engine in ("torchvision", "detectron2"):
        work(tmp_path / engine, engine, **KEYS, **alike, MODEL__WEIGHTS=str(weights))
        states.append(torch.load(tmp_path / engine / "out/model_final.pth")["model"])
    for name, tensor in states[0].items():
        if name.startswith("backbone.bottom_up.") and "running" in name:
            torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-5)
    assert states[0][f"{NORM}.running_mean"].abs().max() > 1e-3
