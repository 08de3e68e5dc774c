"""With equal weights, the torchvision engine equals Detectron2: losses, gradients, detections and data."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.common import images
from tests.pretrain import image_formats
from tests.transfer import tiny_coco
from transfer import train
from transfer.api import Run
from transfer.torchvision_engine import data
from transfer.torchvision_engine.evaluation import to_coco
from transfer.torchvision_engine.mapper import ImageMapper, build_mapper
from transfer.torchvision_engine.model import build_model
from transfer.training import samplers

pytest.importorskip("detectron2", reason="Detectron2 is not installed")
import detectron2.data.transforms as T
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, DatasetMapper, detection_utils, get_detection_dataset_dicts
from detectron2.data.common import AspectRatioGroupedDataset
from detectron2.data.datasets import load_coco_json
from detectron2.data.samplers import RepeatFactorTrainingSampler, TrainingSampler
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.modeling import build_model as build_theirs
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks
from detectron2.utils.events import EventStorage

from transfer.detectron2_engine.data import adapt_detectron2, register

pytestmark = pytest.mark.detectron2

KEYPOINT = {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1, "MODEL__ROI_BOX_HEAD__SMOOTH_L1_BETA": 0.5}
KINDS = {"faster": {}, "mask": {"MODEL__MASK_ON": True}, "keypoint": KEYPOINT}
WIDE = {"MODEL__RESNETS__DEPTH": 50, "MODEL__RESNETS__RES2_OUT_CHANNELS": 256}
CASES = [("faster", 18), ("mask", 50), ("keypoint", 18)]


def both(tmp_path, kind: str, depth: int = 18, **keys):
    """Build our config and Detectron2's, with equal values, and register the data set for both."""
    name = tiny_coco.write(tmp_path / kind, keypoints=kind == "keypoint")
    ours = tiny_coco.config(tmp_path / "out", name, **KINDS[kind], **(WIDE if depth == 50 else {}), **keys)
    theirs = get_cfg()
    theirs.merge_from_other_cfg(tiny_coco.strip_own_keys(ours))
    register(tiny_coco.read_data_sets(ours)[name], ours)
    _, file, folder = name.split(":")
    DatasetCatalog[name] = lambda: load_coco_json(file, folder, name)  # the reference
    return ours, theirs


def models(ours, theirs):
    """Build both detectors with equal weights; BN statistics are those of a batch, as after training."""
    torch.manual_seed(0)
    our_model = build_model(ours, torch.device("cpu"))
    with torch.no_grad():
        # Larger weights keep scores away from ties.
        our_model.roi_heads.box_predictor.cls_score.weight.mul_(30 if ours.MODEL.RESNETS.DEPTH == 18 else 3)
        our_model.proposal_generator.rpn_head.anchor_deltas.weight.mul_(5)
    norms = [m for m in our_model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        our_model.backbone(torch.randn(4, 3, 96, 96))
    for norm in norms:
        norm.momentum = 0.1
    their_model = build_theirs(theirs)
    their_model.load_state_dict(our_model.state_dict(), strict=True)
    return our_model, their_model


def batch_of(ours, theirs, indices, seed=3):
    """Build the same images and targets for both: ours from our mapper, theirs in Detectron2's structures."""
    records, flips = data.load_training_records(ours, tiny_coco.read_data_sets(ours))
    mapper = build_mapper(ours, True, flips)
    our_batch = [mapper(records[i], (seed, i)) for i in indices]
    their_batch = []
    for record in our_batch:
        target = record["target"]
        size: Any = record["image"].shape[-2:]
        instances = Instances(size, gt_boxes=Boxes(target["boxes"]), gt_classes=target["labels"])
        if "masks" in target:
            kind = PolygonMasks if isinstance(target["masks"], list) else BitMasks
            instances.gt_masks = kind(copy.deepcopy(target["masks"]))
        if "keypoints" in target:
            instances.gt_keypoints = Keypoints(target["keypoints"])
        their_batch.append({k: v for k, v in record.items() if k != "target"} | {"instances": instances})
    return our_batch, their_batch


def losses_of(model, batch, seed=11):
    model.train()
    torch.manual_seed(seed)  # both engines draw their samples in the same order
    with EventStorage():
        return model(batch)


@pytest.mark.core
@pytest.mark.parametrize(("kind", "depth"), CASES)
def test_losses_and_gradients_are_equal(tmp_path, kind, depth):
    ours, theirs = both(tmp_path, kind, depth)
    our_model, their_model = models(ours, theirs)
    our_batch, their_batch = batch_of(ours, theirs, [0, 2, 3])
    a = losses_of(our_model, our_batch)
    b = losses_of(their_model, their_batch)
    assert set(a) == set(b)
    for name in a:
        assert a[name].item() == pytest.approx(b[name].item(), abs=1e-4, rel=1e-4), name
        assert a[name].item() > 0, name
    torch.stack([*a.values()]).sum().backward()
    torch.stack([*b.values()]).sum().backward()
    grads = dict(their_model.named_parameters())
    for name, parameter in zip(our_model.state_dict(), our_model.state_dict(keep_vars=True).values(), strict=True):
        if isinstance(parameter, torch.nn.Parameter):
            actual: Any = parameter.grad
            expected: Any = grads[name].grad
            atol = 1e-3 * expected.abs().max().item() + 1e-7
            assert torch.allclose(actual, expected, rtol=1e-2, atol=atol), name


@pytest.mark.parametrize(("kind", "depth"), CASES)
def test_detections_are_equal(tmp_path, kind, depth):
    ours, theirs = both(tmp_path, kind, depth)
    our_model, their_model = models(ours, theirs)
    our_model.eval()
    their_model.eval()
    records, ids = data.load_coco(tiny_coco.read_data_sets(ours)[ours.DATASETS.TEST[0]])
    mapper = build_mapper(ours, False)
    for record in [mapper(records[i], (0, i)) for i in range(3)]:
        with torch.no_grad():
            our_results: list[Any] = to_coco(our_model([record])[0], record, list(range(len(ids))))
            their_results = instances_to_coco_json(their_model([record])[0]["instances"], record["image_id"])
        assert len(our_results) == len(their_results) > 5
        for a, b in zip(our_results, their_results, strict=True):
            assert a["category_id"] == b["category_id"]
            assert a["score"] == pytest.approx(b["score"], abs=1e-5)
            assert a["bbox"] == pytest.approx(b["bbox"], abs=1e-3)
            if kind == "mask":
                assert a["segmentation"] == b["segmentation"]
            if kind == "keypoint":
                points = np.array([a["keypoints"], b["keypoints"]]).reshape(2, 17, 3)
                assert np.abs(points[0, :, :2] - points[1, :, :2]).max() < 1e-3
                assert np.abs(points[0, :, 2] - points[1, :, 2]).max() < 1e-5


VARIANTS: dict[str, dict[str, Any]] = {
    "frozen BN, two stages frozen": {"MODEL__RESNETS__NORM": "FrozenBN", "MODEL__BACKBONE__FREEZE_AT": 3},
    "four convolutions in the box head": {"MODEL__ROI_BOX_HEAD__NUM_CONV": 2, "MODEL__ROI_BOX_HEAD__NORM": "BN"},
    "norms in the mask head": {"MODEL__ROI_MASK_HEAD__NORM": "GN"},
    "stride in the 1x1": {"MODEL__RESNETS__STRIDE_IN_1X1": True, **WIDE},
    "other anchors": {"MODEL__ANCHOR_GENERATOR__SIZES": [[20, 40]]},
    "bit masks": {"INPUT__MASK_FORMAT": "bitmask"},
    "an image without instances": {"DATALOADER__FILTER_EMPTY_ANNOTATIONS": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_equal_for_other_values_of_the_keys(tmp_path, variant):
    ours, theirs = both(tmp_path, "mask", **VARIANTS[variant])
    our_model, their_model = models(ours, theirs)
    frozen = [[p.requires_grad for p in model.parameters()].count(False) for model in (our_model, their_model)]
    assert frozen[0] == frozen[1]
    is_empty = variant == "an image without instances"
    our_batch, their_batch = batch_of(ours, theirs, [5, 0] if is_empty else [0, 1])
    if is_empty:
        assert len(our_batch[0]["target"]["boxes"]) == 0
        del their_batch[0]["instances"]._fields["gt_masks"]
    a = losses_of(our_model, our_batch)
    b = losses_of(their_model, their_batch)
    assert {k: v.item() for k, v in a.items()} == pytest.approx({k: v.item() for k, v in b.items()}, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("kind", "masks"), [("mask", "polygon"), ("mask", "bitmask"), ("keypoint", "polygon")])
def test_the_data_path_is_equal(tmp_path, kind, masks, flip, monkeypatch):
    """For every image, training gets equal pixels, boxes, polygons, bit masks and keypoints."""
    ours, theirs = both(tmp_path, kind, INPUT__FORMAT="BGR", INPUT__MASK_FORMAT=masks)
    theirs.MODEL.MASK_ON = True
    monkeypatch.setattr(np.random, "default_rng", lambda seeds: _Heads())
    dicts: Any = get_detection_dataset_dicts(theirs.DATASETS.TRAIN, min_keypoints=int(kind == "keypoint"))
    records, flips = data.load_training_records(ours, tiny_coco.read_data_sets(ours))
    assert [d["image_id"] for d in dicts] == [r["image_id"] for r in records] == [1, 2, 3, 4, 5]
    for size in (64, 80, 100):
        mapper = ImageMapper([size], "choice", 128, flip, "BGR", masks, flips if kind == "keypoint" else ())
        augmentations = [T.ResizeShortestEdge([size], 128, "choice"), T.RandomFlip(1.0 if flip else 0.0)]
        settings = {k: v for k, v in DatasetMapper.from_config(theirs, True).items() if k != "augmentations"}
        reference = DatasetMapper(**settings, augmentations=augmentations)
        for entry, record in zip(dicts, records, strict=True):
            expected = reference(entry)
            actual = mapper(record, (0, 0))
            assert torch.equal(actual["image"], expected["image"])
            instances = expected["instances"]
            target = actual["target"]
            assert torch.allclose(target["boxes"], instances.gt_boxes.tensor, atol=1e-5)
            assert torch.equal(target["labels"], instances.gt_classes)
            if masks == "bitmask":
                assert torch.equal(target["masks"], instances.gt_masks.tensor)
            else:
                flat = [np.concatenate(p) for p in target["masks"]], [np.concatenate(p) for p in instances.gt_masks]
                assert np.allclose(np.concatenate(flat[0]), np.concatenate(flat[1]), atol=1e-9)
            if kind == "keypoint":
                assert torch.allclose(target["keypoints"], instances.gt_keypoints.tensor, atol=1e-5)


def test_every_image_file_gives_both_engines_the_pixels_of_pretraining(tmp_path):
    adapt_detectron2()
    mapper = ImageMapper([64], "choice", 128, False, "RGB", "")
    for kind in [*image_formats.lossless(), *image_formats.lossy()]:
        path = tmp_path / "image"
        path.write_bytes(kind.data)
        pixels = images.decode(kind.data, "x")
        record: Any = {"file_name": str(path)}
        np.testing.assert_array_equal(mapper.read(record), pixels, err_msg=kind.name)
        np.testing.assert_array_equal(detection_utils.read_image(str(path), "RGB"), pixels, err_msg=kind.name)
        np.testing.assert_array_equal(detection_utils.read_image(str(path), "BGR"), pixels[:, :, ::-1])
        grayscale = np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
        np.testing.assert_array_equal(detection_utils.read_image(str(path), "L"), grayscale)


class _Heads:
    """A generator that always draws 0, which selects the first size and a flip."""

    def random(self):
        return 0.0

    def integers(self, *_):
        return 0


def test_order_of_images_and_aspect_ratio_groups_are_equal():
    """The stream of indices and the batches equal those of Detectron2's sampler and grouping, on two processes."""
    wide = [True, False, True, True, False, False, True]
    for rank in range(2):
        sampler = TrainingSampler(7, seed=9)
        sampler._rank, sampler._world_size = rank, 2
        dicts = ({"width": 2 if wide[i] else 1, "height": 1.5, "index": i} for i in sampler)
        reference = AspectRatioGroupedDataset(dicts, 3)
        expected = [[d["index"] for d in batch] for batch in itertools.islice(reference, 20)]
        batches = samplers.index_batches([1.0] * 7, wide, 3, 9, rank, 2, 0)
        assert [[i for _, i in b] for b in itertools.islice(batches, 20)] == expected
        later = samplers.index_batches([1.0] * 7, wide, 3, 9, rank, 2, 12)
        assert [[i for _, i in b] for b in itertools.islice(later, 8)] == expected[12:]
    factors = [1.0, 2.5, 1.3]
    reference = RepeatFactorTrainingSampler(torch.tensor(factors), seed=4)
    assert list(itertools.islice(samplers.index_stream(factors, 4), 40)) == list(itertools.islice(reference, 40))


def test_initial_values_have_the_same_spread(tmp_path):
    """After building, every tensor has the standard deviation of Detectron2's, including 0."""
    torch.manual_seed(0)
    for kind in KINDS:
        ours, theirs = both(tmp_path, kind, 18, MODEL__ROI_BOX_HEAD__NUM_CONV=1)
        our_model = build_model(ours, torch.device("cpu"))
        their_model = build_theirs(theirs)
        their_state = their_model.state_dict()
        for name, tensor in our_model.state_dict().items():
            if tensor.is_floating_point() and tensor.numel() > 1:
                expected = their_state[name].std().item()
                assert tensor.std().item() == pytest.approx(expected, rel=5 / tensor.numel() ** 0.5, abs=1e-7), name


def test_detectron2_reads_our_checkpoint(tmp_path):
    """Detectron2's checkpointer reads every tensor, as it does for MODEL.WEIGHTS."""
    ours, theirs = both(tmp_path, "mask", SOLVER__MAX_ITER=1, DATASETS__TEST=())
    data_sets = tiny_coco.read_data_sets(ours)
    train.run(Run(ours, "torchvision"), torch.device("cpu"), data_sets)
    torch.manual_seed(1)
    their_model = build_theirs(theirs)
    left = DetectionCheckpointer(their_model).load(str(tmp_path / "out" / "model_final.pth"))
    saved = torch.load(tmp_path / "out" / "model_final.pth", weights_only=True)["model"]
    assert set(saved) == set(their_model.state_dict())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in their_model.state_dict().items())
    assert left.get("engine") == "torchvision"
