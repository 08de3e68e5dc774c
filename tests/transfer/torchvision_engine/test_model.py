"""The whole detector, without Detectron2."""

from __future__ import annotations

import pytest
import torch

from tests.transfer import tiny_coco
from transfer.torchvision_engine.data import training_records
from transfer.torchvision_engine.loader import training_batches
from transfer.torchvision_engine.model import build_model


@pytest.mark.parametrize("kind", ["mask", "keypoint"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16])
def test_losses_in_half_precision_are_near_those_in_full(tmp_path, kind, dtype):
    keys = {f"MODEL__{kind.upper()}_ON": True}
    name = tiny_coco.write(tmp_path / "data", keypoints=kind == "keypoint")
    cfg = tiny_coco.config(tmp_path, name, MODEL__ROI_HEADS__NUM_CLASSES=1 if kind == "keypoint" else 3, **keys)
    records, info = training_records(cfg)
    batch = next(training_batches(cfg, records, info.flip, seed=0, start=0, workers=0))
    torch.manual_seed(0)
    model = build_model(cfg, torch.device("cpu")).train()
    values = {}
    for half in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=half):
            losses = model(batch)
            torch.stack(list(losses.values())).sum().backward()
        values[half] = {key: loss.item() for key, loss in losses.items()}
        assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
    assert values[True] == pytest.approx(values[False], rel=0.02)
