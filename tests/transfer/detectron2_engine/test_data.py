"""The Detectron2 engine's reader and loaders."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pretrain.common import workers
from pretrain.common.errors import UserError
from tests.transfer import tiny_coco

pytest.importorskip("detectron2")


@pytest.mark.parametrize("workers", [0, 1])
def test_test_images_are_scaled_or_named(tmp_path: Path, workers: int) -> None:
    from detectron2.config import get_cfg

    from transfer.detectron2_engine import data as detectron2_data

    name = tiny_coco.write(tmp_path / "data")
    cfg = get_cfg()
    keys = {"DATALOADER__NUM_WORKERS": workers, "INPUT__MIN_SIZE_TEST": 0}
    cfg.merge_from_other_cfg(tiny_coco.config(tmp_path / "out", name, **keys))
    detectron2_data.register(name)
    Image.fromarray(np.full((64, 96), 25700, np.uint16)).save(tmp_path / "data" / "1.png")
    batches = detectron2_data.test_batches(cfg, name)
    assert len(batches) == 6
    images = [batch[0]["image"] for batch in batches]
    assert len(images) == 6 and images[0].unique().tolist() == [100]
    path = tmp_path / "data" / "2.png"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=r"cannot read image .*2\.png") as caught:
        list(batches)
    assert "\n" not in str(caught.value)


@pytest.fixture
def one_worker(tmp_path: Path) -> Any:
    """The test batches of one worker."""
    from detectron2.config import get_cfg

    from transfer.detectron2_engine import data as detectron2_data

    name = tiny_coco.write(tmp_path / "data")
    cfg = get_cfg()
    cfg.merge_from_other_cfg(tiny_coco.config(tmp_path / "out", name, DATALOADER__NUM_WORKERS=1))
    detectron2_data.register(name)
    return detectron2_data.test_batches(cfg, name)


def test_a_signal_to_the_job_does_not_end_an_evaluations_workers(one_worker: Any) -> None:
    before = set(multiprocessing.active_children())
    batches = iter(one_worker)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # from its parent it would be obeyed
    assert len(list(batches)) == 5


def test_an_evaluation_that_hangs_names_the_image_and_ends(one_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer.detectron2_engine import data as detectron2_data

    read = detectron2_data.open_upright

    def hang(path: str) -> Image.Image:
        time.sleep(15 * path.endswith("3.png"))
        return read(path)

    monkeypatch.setattr(detectron2_data, "open_upright", hang)
    monkeypatch.setattr(workers, "REPORT_AFTER_S", 1.0)
    monkeypatch.setattr(workers, "GIVE_UP_AFTER_S", 3.0)
    with pytest.raises(UserError, match=r"no batch for 3 s: worker process \d+ is reading .*3\.png; check"):
        list(one_worker)


def test_a_mask_that_would_crash_pycocotools_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer.detectron2_engine import data as detectron2_data

    tiny_coco.write(tmp_path / "coco" / "val2017")
    (tmp_path / "coco" / "annotations").mkdir()
    path = tmp_path / "coco" / "annotations" / "instances_val2017.json"
    content = json.loads((tmp_path / "coco" / "val2017" / "annotations.json").read_text())
    content["annotations"][0]["segmentation"] = [[0, 0, 1e9, 0, 9, 9]]
    path.write_text(json.dumps(content))
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    for name in ("coco_2017_val", f"coco:{path}:{tmp_path / 'coco' / 'val2017'}"):  # the first is Detectron2's own
        with pytest.raises(UserError, match=r"annotation 1: polygon reaches from 0 to 1e\+09"):
            detectron2_data.register(name)
