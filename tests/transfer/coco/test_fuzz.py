"""Whatever an annotation file contains, it is read or refused in one line."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from transfer.coco import data, pictures, results
from transfer.torchvision_engine.data import load_coco

LEAVES = [
    *(None, True, "", "a", "../a", "\0", "\ud800", "/", "1.png", [], {}, [[]], {"id": 1}),
    *(0, -1, 1, 2, 7, 64, 96, 1.5, -0.0, 1e9, 1e308, 2**31, 2**63, 10**400, float("nan"), float("inf")),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("data")
    tiny_coco.write(folder, keypoints=True)
    content = json.loads((folder / "annotations.json").read_text())
    return folder, content | {"annotations": content["annotations"][:4], "images": content["images"][:2]}


def spoil(value: Any, rng: random.Random) -> Any:
    """``value`` with one part of it, at any depth, replaced, repeated or removed."""
    parts = list(value if isinstance(value, dict) else range(len(value))) if isinstance(value, (dict, list)) else []
    if not parts or rng.random() < 0.1:
        return rng.choice(LEAVES)
    part = rng.choice(parts)
    if rng.random() < 0.1:
        del value[part]
    elif isinstance(value, list) and rng.random() < 0.1:
        value.append(value[part])
    else:
        value[part] = spoil(value[part], rng)
    return value


@pytest.mark.parametrize("seed", range(4))
def test_a_spoiled_file_is_read_or_refused(good: tuple[Path, dict[str, Any]], seed: int) -> None:
    folder, content = good
    rng = random.Random(seed)
    path = folder / "spoiled.json"
    for _ in range(20):
        spoiled = copy.deepcopy(content)
        for _ in range(rng.randint(1, 3)):
            spoiled = spoil(spoiled, rng)
        path.write_text(json.dumps(spoiled))
        _read_or_refuse(lambda: data.read(path))
        keys = {"MODEL__MASK_ON": rng.random() < 0.5, "MODEL__KEYPOINT_ON": rng.random() < 0.5}
        name = f"coco:{path}:{folder}{rng.choice(['', ':skip_bad'])}"
        cfg = tiny_coco.config(folder / "out", name, MODEL__ROI_HEADS__NUM_CLASSES=1, **keys)
        prepared = _read_or_refuse(lambda cfg=cfg: data.prepare(cfg, lambda line: None))
        if prepared is not None:
            checked = data.resolve(prepared.DATASETS.TEST[0])
            tasks = ["bbox", *(["segm"] if cfg.MODEL.MASK_ON else [])]
            _read_or_refuse(lambda prepared=prepared: load_coco(prepared.DATASETS.TEST[0]))
            _read_or_refuse(lambda checked=checked, tasks=tasks: results.evaluate(checked[0], [], tasks))
            _read_or_refuse(lambda checked=checked: pictures.draw(*checked, [], folder / "pictures", count=1))


def _read_or_refuse(read: Callable[[], Any]) -> Any:
    with contextlib.suppress(UserError):
        return read()
    return None
