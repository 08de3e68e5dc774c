"""Micro-batches give the gradients of the whole batch, in both engines and in bfloat16 (two ranks: test_two_ranks)."""

import importlib
import json

import pytest
import torch
from torch import Tensor, nn

from tests.errors import refused
from tests.transfer.test_train_net import ENGINES, work
from transfer.step import accumulate_losses

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

IMAGES = [torch.full((3,), float(number)) for number in range(1, 7)]


class Toy(nn.Module):
    """A model with two losses that are means over images; it records the size of each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3))
        self.sizes = []

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        self.sizes.append(len(batch))
        outputs = torch.stack(batch) @ self.weight
        return {"a": outputs.mean(), "b": (outputs**2).mean()}


def gradient(count: int, images: list[Tensor], factor: float = 1.0) -> tuple[Tensor, dict[str, float], list[int]]:
    toy = Toy()
    losses = accumulate_losses(toy, images, count, lambda loss: loss * factor)
    (torch.stack([*losses.values()]).sum() * factor).backward()
    assert toy.weight.grad is not None
    return toy.weight.grad / factor, {name: loss.item() for name, loss in losses.items()}, toy.sizes


@pytest.mark.parametrize(("count", "factor"), [(3, 1024.0), (6, 1.0)])
def test_the_gradients_of_the_whole_batch(count: int, factor: float) -> None:
    whole, losses, _ = gradient(1, IMAGES)
    parts, same_losses, sizes = gradient(count, IMAGES, factor)
    torch.testing.assert_close(parts, whole)
    assert same_losses == pytest.approx(losses) and sizes == [6 // count] * count


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_in_micro_batches_on_a_cpu(tmp_path, engine: str, monkeypatch) -> None:
    """The losses are near those in full precision, and the weights stay float32."""
    keys = {"SEED": 1, "SOLVER__MAX_ITER": 1, "SOLVER__IMS_PER_BATCH": 4, "DATASETS__TEST": ()}
    half = keys | {"SOLVER__AMP__ENABLED": True}
    exact = []
    losses = []
    if engine == "detectron2":
        heads = importlib.import_module("transfer.detectron2_engine.heads")
        monkeypatch.setattr(heads, "keep_rois_in_float32", lambda model: exact.append(model.training))
    for folder, run_keys in (("half", half | {"SOLVER__BF16": True}), ("full", keys)):
        work(tmp_path / folder, engine, **run_keys, SOLVER__ACCUMULATE=2)
        losses.append(json.loads((tmp_path / folder / "out/metrics.json").read_text())["total_loss"])
    assert exact == [True] * (engine == "detectron2")
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)
    state = torch.load(tmp_path / "half/out/model_final.pth")["model"]
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}
    refused(lambda: work(tmp_path / "fp16", engine, **half), "SOLVER.AMP.ENABLED", "float16", "SOLVER.BF16")
