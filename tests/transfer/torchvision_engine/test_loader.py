"""The torchvision engine's loaders, without Detectron2."""

from __future__ import annotations

import itertools

import pytest
import torch

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer.torchvision_engine import data, loader


def test_a_record_is_a_function_of_its_position_in_the_stream(tmp_path):
    """The images of a pass, in batches that begin anywhere, have the same sizes, flips and boxes."""
    cfg = tiny_coco.config(tmp_path / "out", tiny_coco.write(tmp_path), SOLVER__IMS_PER_BATCH=1)
    records, info = data.training_records(cfg)

    def some(start: int) -> list[dict]:
        batches = loader.training_batches(cfg, records, info.flip, seed=3, start=start, workers=0)
        return [batch[0] for batch in itertools.islice(batches, 20 - start)]

    for first, again in zip(some(0)[7:], some(7), strict=True):
        assert first["file_name"] == again["file_name"] and torch.equal(first["image"], again["image"])
        assert torch.equal(first["target"]["boxes"], again["target"]["boxes"])
    assert len({(one["file_name"], *one["image"].shape, one["image"][0, 9, :9].sum().item()) for one in some(0)}) > 10
    (tested,) = next(loader.evaluation_batches(cfg, records, range(1)))
    assert "target" not in tested


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named_in_one_line(tmp_path, workers):
    name = tiny_coco.write(tmp_path)
    path = tmp_path / "2.png"
    path.write_bytes(path.read_bytes()[:300])
    cfg = tiny_coco.config(tmp_path / "out", name, DATALOADER__NUM_WORKERS=workers)
    records, info = data.training_records(cfg)
    training = loader.training_batches(cfg, records, info.flip, seed=0, start=0, workers=workers)
    for batches in (itertools.islice(training, 9), loader.evaluation_batches(cfg, records, range(6))):
        with pytest.raises(UserError, match=r"cannot read image .*2\.png") as caught:
            list(batches)
        assert "\n" not in str(caught.value)
