"""Six drawn images with boxes, polygons and keypoints in COCO's format, and the config of a tiny detector on them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from PIL import Image, ImageDraw

from pretrain.common.run.state import RunContext
from tests.resnets import resnet_state
from transfer import api, preflight, train_net
from transfer.coco import data
from transfer.config import dump, load_config
from transfer.weights.convert import convert

_PARTS = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
NAMES = ["nose", *(f"{side}_{part}" for part in _PARTS for side in ("left", "right"))]
SIZES = [(96, 64), (64, 96), (96, 64), (80, 70), (64, 96), (96, 64)]  # width, height


def write(folder: Path, keypoints: bool = False, rle: bool = False) -> str:
    """Write the data set (the last image is empty, one object is a crowd); return its name, `coco:<json>:<images>`."""
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    annotations = []
    for number, (width, height) in enumerate(SIZES, start=1):
        photo = Image.fromarray(rng.integers(0, 90, (height, width, 3), dtype=np.uint8))
        for slot in range(0 if number == len(SIZES) else 2):
            x = rng.uniform(2, width / 2 - 10) + slot * width / 2 - 1
            y = rng.uniform(2, height - 46)
            w = min(rng.uniform(14, width / 2 - 12), width - x - 1)
            h = rng.uniform(20, 40)
            category = 1 if keypoints else 1 + (number + slot) % 3
            polygon = [x, y, x + w, y, x + w, y + h, x + w / 2.3, y + h / 1.7, x, y + h]
            ImageDraw.Draw(photo).polygon(polygon, fill=[(255, 40, 40), (40, 255, 40), (40, 40, 255)][category - 1])
            crowd = number == 2 and slot == 1
            # The ids of the categories have gaps.
            record: dict[str, Any] = {"id": len(annotations) + 1, "image_id": number, "category_id": category * 7}
            record |= {"bbox": [x, y, w, h], "area": w * h * 0.8, "iscrowd": int(crowd)}
            record["segmentation"] = _rle(polygon, height, width) if rle or crowd else [polygon]
            annotations.append(record)
            if keypoints:
                points = np.stack([rng.uniform(x, x + w, 17), rng.uniform(y, y + h, 17), rng.integers(0, 3, 17)], 1)
                points[:, :2] = points[:, :2].round()
                points[points[:, 2] == 0] = 0
                seen = int((points[:, 2] > 0).sum())
                annotations[-1] |= {"keypoints": points.flatten().tolist(), "num_keypoints": seen}
        photo.save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "height": height, "width": width})
    categories = [{"id": 7, "name": "person"}] if keypoints else [{"id": 7 * i, "name": f"c{i}"} for i in (1, 2, 3)]
    if keypoints:
        categories[0] |= {"keypoints": NAMES, "skeleton": [[1, 2]]}
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(content))
    return f"coco:{folder / 'annotations.json'}:{folder}"


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Change the annotation file of a data set, `coco:<json>:<images>`, in place; return its content."""
    path = Path(name.split(":")[1])
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return content


def _rle(polygon: list[float], height: int, width: int) -> dict:
    from pycocotools import mask as coco_mask

    polygons: Any = [polygon]  # which pycocotools' stubs lack
    rle: Any = coco_mask.merge(coco_mask.frPyObjects(polygons, height, width))
    return {"size": [height, width], "counts": rle["counts"].decode()}


BASE = str(Path(__file__).parents[2] / "configs" / "coco_R50_FPN_1x.yaml")
_SMALL = (  # what makes the detector of BASE small
    "MODEL.RESNETS.DEPTH 18 MODEL.RESNETS.RES2_OUT_CHANNELS 64 MODEL.FPN.OUT_CHANNELS 32 "
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN 200 MODEL.RPN.PRE_NMS_TOPK_TEST 100 MODEL.RPN.POST_NMS_TOPK_TRAIN 100 "
    "MODEL.RPN.POST_NMS_TOPK_TEST 50 MODEL.ROI_HEADS.NUM_CLASSES 3 MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 64 "
    "MODEL.ROI_BOX_HEAD.FC_DIM 64 MODEL.ROI_MASK_HEAD.NUM_CONV 2 MODEL.ROI_MASK_HEAD.CONV_DIM 32 "
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS [32,32] MODEL.DEVICE cpu INPUT.MIN_SIZE_TRAIN [64,80] "
    "INPUT.MAX_SIZE_TRAIN 128 INPUT.MIN_SIZE_TEST 80 INPUT.MAX_SIZE_TEST 128 DATALOADER.NUM_WORKERS 0 "
    "SOLVER.IMS_PER_BATCH 2 SOLVER.BASE_LR 0.01 SOLVER.MAX_ITER 4 SOLVER.STEPS [3] SOLVER.WARMUP_ITERS 2 "
    "SOLVER.CHECKPOINT_PERIOD 100 TEST.PRECISE_BN.ENABLED False SEED 5"
)
MODEL_KEYS: dict[str, Any] = dict(zip(_SMALL.split()[::2], _SMALL.split()[1::2], strict=True))


def words(keys: dict) -> list[str]:
    """Return `KEY VALUE` overrides."""
    return [word for key, value in keys.items() for word in (key, repr(value) if not isinstance(value, str) else value)]


def run_words(output: Path, name: str, keys: dict[str, Any]) -> list[str]:
    """Return the overrides of a tiny detector trained and tested on ``name``; `__` in keys means a dot."""
    run_keys = {"DATASETS.TRAIN": (name,), "DATASETS.TEST": (name,), "OUTPUT_DIR": str(output)}
    return words(MODEL_KEYS | run_keys | {key.replace("__", "."): value for key, value in keys.items()})


def command(folder: Path, name: str, engine: str, *flags: str, **keys: Any) -> list[str]:
    """Return a command line of train_net with the overrides of `run_words`: two iterations, to ``folder``/out."""
    keys = {"SOLVER.MAX_ITER": 2, "SOLVER.STEPS": [], **keys}
    return ["--config-file", BASE, "--engine", engine, *flags, *run_words(folder / "out", name, keys)]


def fine_tune(argv: list[str], context: RunContext | None = None) -> dict[str, Any]:
    """Run a command line of train_net in this process; return the content of results.json."""
    return api.run_rank(train_net.prepare(train_net.parse(argv)), context or RunContext())


def train(folder: Path, name: str, engine: str, *flags: str, **keys: Any) -> dict[str, Any]:
    """Run `command` in this process; return the content of results.json."""
    return fine_tune(command(folder, name, engine, *flags, **keys))


def write_backbone(folder: Path, arch: str = "resnet18", seed: int = 0, name: str = "w.pth") -> Path:
    """Save a random ResNet as s.pth, and convert it to Detectron2's names; return the converted file."""
    torch.save(resnet_state(arch, head=False, seed=seed), folder / "s.pth")
    convert(folder / "s.pth", folder / name)
    return folder / name


def config(folder: Path, name: str, **keys: Any) -> CfgNode:
    """Return the config with the overrides of `run_words`."""
    return load_config(BASE, run_words(folder, name, keys))


def read_data_sets(cfg: CfgNode, *names: str) -> data.DataSets:
    """Return the data sets of a config, or those named, as a rank other than the first reads them: without checks."""
    data_sets = data.DataSets(cfg, names or preflight.data_names(cfg, eval_only=False))
    data_sets.read_rest(cfg.OUTPUT_DIR)
    return data_sets


def check_data_sets(cfg: CfgNode, names: Sequence[str], recorded: Any = None) -> list[str]:
    """Check data sets as rank 0 does; return the classes."""
    return data.DataSets(cfg, names).check(cfg.OUTPUT_DIR, recorded)


def strip_own_keys(cfg: CfgNode) -> CfgNode:
    """Return a config without those of this project's keys that have their defaults, as config.yaml contains it."""
    return CfgNode.load_cfg(dump(cfg))
