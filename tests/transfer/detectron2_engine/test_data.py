"""The Detectron2 engine's reader, mapper and loaders."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fvcore.common.config import CfgNode
from PIL import Image

from pretrain.common import workers
from pretrain.common.errors import UserError
from tests.transfer import tiny_coco

pytest.importorskip("detectron2", reason="Detectron2 is not installed")
from detectron2.config import get_cfg
from detectron2.data import build_detection_train_loader

from transfer.detectron2_engine import data

pytestmark = pytest.mark.detectron2


def own_config(folder: Path, **keys: Any) -> tuple[CfgNode, str]:
    """Detectron2's config of a tiny detector, and the name of its data set, which is registered."""
    name = tiny_coco.write(folder / "data")
    cfg = get_cfg()
    cfg.merge_from_other_cfg(tiny_coco.config(folder / "out", name, **keys))
    data.register(name)
    return cfg, name


@pytest.mark.parametrize("workers", [0, 1])
def test_images_are_scaled_or_named(tmp_path: Path, workers: int) -> None:
    cfg, name = own_config(tmp_path, DATALOADER__NUM_WORKERS=workers, INPUT__MIN_SIZE_TEST=0)
    Image.fromarray(np.full((64, 96), 25700, np.uint16)).save(tmp_path / "data" / "1.png")
    batches = data.TestBatches(cfg, name)
    assert len(batches) == 6
    images = [batch[0]["image"] for batch in batches]
    assert len(images) == 6 and images[0].unique().tolist() == [100]
    path = tmp_path / "data" / "2.png"
    path.write_bytes(path.read_bytes()[:300])
    training = data.training_data(cfg)[0](seed=5, start=0, workers=workers)
    for loaded in (batches, itertools.islice(training, 9)):
        with pytest.raises(UserError, match=r"cannot read image .*2\.png") as caught:
            list(loaded)
        assert "\n" not in str(caught.value)


def test_the_stream_of_images_is_detectron2s(tmp_path: Path) -> None:
    cfg, _ = own_config(tmp_path, SEED=5)
    own, _ = data.training_data(cfg)
    batches = itertools.islice(own(seed=5, start=0, workers=0), 9)
    ids = [[record["image_id"] for record in batch] for batch in batches]
    theirs = itertools.islice(build_detection_train_loader(cfg), 9)
    assert ids == [[record["image_id"] for record in batch] for batch in theirs]
    assert [record["image_id"] for record in next(own(seed=5, start=4, workers=0))] == ids[4]


@pytest.fixture
def one_worker(tmp_path: Path) -> data.TestBatches:
    """The test batches of one worker."""
    return data.TestBatches(*own_config(tmp_path, DATALOADER__NUM_WORKERS=1))


def test_a_signal_to_the_job_does_not_end_an_evaluations_workers(one_worker: Any) -> None:
    before = set(multiprocessing.active_children())
    batches = iter(one_worker)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # from its parent it would be obeyed
    assert len(list(batches)) == 5


def test_an_evaluation_that_hangs_ends(one_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = data.open_upright

    def hang(path: str) -> Image.Image:
        time.sleep(15 * path.endswith("3.png"))
        return read(path)

    monkeypatch.setattr(data, "open_upright", hang)
    monkeypatch.setattr(workers, "TIMEOUT_S", 1.5)
    with pytest.raises(UserError, match="no batch for 3 s; check the disk"):
        list(one_worker)
