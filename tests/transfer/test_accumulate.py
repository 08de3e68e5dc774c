"""A batch in parts: the gradients of the whole, with one average over ranks; both engines take it; bfloat16."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretrain.common import distributed
from pretrain.common.batch_split import slice_bounds
from pretrain.common.distributed import data_parallel
from pretrain.common.errors import UserError
from tests.pretrain.ranks import run_ranks
from tests.transfer.test_train_net import ENGINES, work
from transfer.accumulate import Accumulated

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

IMAGES = [torch.full((3,), float(number)) for number in range(1, 8)]


class Toy(nn.Module):
    """Two losses that are means over images; it notes how many images came at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.sizes = nn.Parameter(torch.randn(3)), []

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        self.sizes.append(len(batch))
        outputs = torch.stack(batch) @ self.weight
        return {"a": outputs.mean(), "b": (outputs**2).mean()}


def gradient(count: int, images: list[Tensor], factor: float = 1.0) -> tuple[Tensor, dict[str, float], list[int]]:
    toy = Toy()
    losses = Accumulated(toy, count, lambda loss: loss * factor)(images)
    (sum(losses.values()) * factor).backward()
    assert toy.weight.grad is not None
    return toy.weight.grad / factor, {name: loss.item() for name, loss in losses.items()}, toy.sizes


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("factor", [1.0, 1024.0])
def test_the_gradients_of_the_whole_batch(count: int, factor: float) -> None:
    whole, losses, _ = gradient(1, IMAGES)
    parts, same_losses, sizes = gradient(count, IMAGES, factor)
    torch.testing.assert_close(parts, whole)
    assert same_losses == pytest.approx(losses) and sum(sizes) == 7 and len(sizes) == count


def test_an_evaluation_is_not_divided() -> None:
    toy = Toy().eval()
    Accumulated(toy, 3, lambda loss: loss).eval()(IMAGES)
    assert toy.sizes == [7]


def _ranks(folder: Path) -> None:
    toy, rank = Toy(), distributed.rank()
    start, stop = slice_bounds(6, rank, 2)
    reduced = []
    parallel: Any = data_parallel(toy, torch.device("cpu"))
    parallel.register_comm_hook(None, lambda _, bucket: reduced.append(1) or _mean(bucket))
    losses = Accumulated(parallel, 3, lambda loss: loss)(IMAGES[start:stop])
    sum(losses.values()).backward()
    assert len(reduced) == 1 and distributed.world_size() == 2
    torch.save(toy.weight.grad, folder / f"{rank}.pth")


def _mean(bucket: Any) -> Any:
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_two_ranks_average_once(tmp_path: Path) -> None:
    run_ranks(_ranks, 2, tmp_path)
    whole, *_ = gradient(1, IMAGES[:6])
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pth"), whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_takes_parts(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    inner = Accumulated.forward

    def noted(self: Accumulated, batch: list[Any]) -> Any:
        handle = self.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        try:
            return inner(self, batch)
        finally:
            handle.remove()

    monkeypatch.setattr(Accumulated, "forward", noted)
    keys = {"SOLVER__IMS_PER_BATCH": 3, "SOLVER__MAX_ITER": 2, "SEED": 1}
    work(tmp_path, engine, **keys, SOLVER__ACCUMULATE=2)
    assert sizes == [1, 2, 1, 2]
    assert "ACCUMULATE: 2" in (tmp_path / "out/config.yaml").read_text()
    with pytest.raises(UserError, match=r"a different config \(SOLVER\.ACCUMULATE 2 -> 3\)"):
        work(tmp_path, engine, "--resume", **keys, SOLVER__ACCUMULATE=3)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/metrics.json").read_text().splitlines()]


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_on_a_cpu(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"SEED": 1, "SOLVER__MAX_ITER": 1, "SOLVER__AMP__ENABLED": True}
    exact: list[bool] = []
    if engine == "detectron2":
        heads = importlib.import_module("transfer.detectron2_engine.heads")
        monkeypatch.setattr(heads, "keep_rois_in_float32", lambda model: exact.append(model.training))
    work(tmp_path / "half", engine, **keys, SOLVER__BF16=True)
    assert exact == [True] * (engine == "detectron2")
    work(tmp_path / "parts", engine, **keys, SOLVER__BF16=True, SOLVER__ACCUMULATE=2)
    work(tmp_path / "full", engine, SEED=1, SOLVER__MAX_ITER=1)
    half, full = (
        next(line["total_loss"] for line in lines(tmp_path / name) if "total_loss" in line) for name in ("half", "full")
    )
    assert half != full and half == pytest.approx(full, rel=0.05)
    state = torch.load(tmp_path / "half/out/model_final.pth")["model"]
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}
    with pytest.raises(UserError, match=r"float16 needs a CUDA device; set it False, or SOLVER\.BF16 True"):
        work(tmp_path / "fp16", engine, **keys)
    with pytest.raises(UserError, match=r"SOLVER\.BF16 is True, but SOLVER\.AMP\.ENABLED is False"):
        work(tmp_path, engine, SOLVER__BF16=True)
