"""The Detectron2 engine's reader, mapper and loaders."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fvcore.common.config import CfgNode
from PIL import Image

from tests.errors import refused
from tests.transfer import tiny_coco

pytest.importorskip("detectron2", reason="Detectron2 is not installed")
from detectron2.config import get_cfg

from transfer.detectron2_engine import data

pytestmark = pytest.mark.detectron2


def own_config(folder: Path, **keys: Any) -> tuple[CfgNode, str]:
    """Detectron2's config of a tiny detector, and the name of its data set, which is registered."""
    name = tiny_coco.write(folder / "data")
    cfg = get_cfg()
    cfg.merge_from_other_cfg(tiny_coco.config(folder / "out", name, **keys))
    data.register(name, cfg)
    return cfg, name


@pytest.mark.parametrize("workers", [0, 1])
def test_images_are_scaled_or_named(tmp_path: Path, workers: int) -> None:
    cfg, name = own_config(tmp_path, DATALOADER__NUM_WORKERS=workers, INPUT__MIN_SIZE_TEST=0)
    Image.fromarray(np.full((64, 96), 25700, np.uint16)).save(tmp_path / "data" / "1.png")
    batches, total = data.test_batches(cfg, name)
    images = [batch[0]["image"] for batch in batches]
    assert len(images) == total == 6 and images[0].unique().tolist() == [100]
    path = tmp_path / "data" / "2.png"
    path.write_bytes(path.read_bytes()[:300])
    training = data.training_data(cfg)[0](seed=5, start=0, workers=workers)
    for loaded in (data.test_batches(cfg, name)[0], itertools.islice(training, 9)):
        refused(lambda loaded=loaded: list(loaded), path)
