"""COCO metrics have known values, work without predictions, and equal Detectron2's."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.common.files import atomic_write
from tests.transfer import tiny_coco
from transfer.coco import results
from transfer.coco.reading import read_annotations


def perfect(content: dict[str, Any]) -> list[Any]:
    from pycocotools import mask

    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    detections = []
    for record in content["annotations"]:
        code = record["segmentation"]
        if isinstance(code, list):
            rle: Any = mask.merge(mask.frPyObjects(code, *sizes[record["image_id"]]))
            code = {"size": list(rle["size"]), "counts": rle["counts"].decode()}
        fields = {k: record[k] for k in ("image_id", "category_id", "bbox", "keypoints") if k in record}
        detections.append({**fields, "segmentation": code, "score": 0.9})
    return detections


@pytest.fixture
def people(tmp_path: Path) -> dict[str, Any]:
    return read_annotations(tiny_coco.write(tmp_path / "people", keypoints=True).split(":")[1])


@pytest.fixture
def things(name: str) -> dict[str, Any]:
    return read_annotations(name.split(":")[1])


@pytest.mark.parametrize("score", [100, 0])
def test_perfect_predictions_score_100_and_none_0(people: dict[str, Any], score: int) -> None:
    metrics = results.evaluate(people, perfect(people) if score else [], results.TASKS)
    assert list(metrics) == list(results.TASKS)
    for row in metrics.values():
        assert [row[name] for name in ("AP", "AP50", "AP75", "AR", "AP-person")] == pytest.approx([score] * 5)
    assert metrics["bbox"]["APl"] is None  # no object above 96 x 96 pixels
    assert "APs" not in metrics["keypoints"]


def test_metrics_are_a_table_in_the_log_unless_all_are_0() -> None:
    zeros = {"AP": 0.0, "AP50": 0.004, "AP75": 0.0, "APs": None}
    assert results.format_table({"bbox": zeros, "segm": zeros}).startswith("every AP of bbox and segm is 0.00: ")
    assert "bbox" in results.format_table({"bbox": zeros, "segm": {**zeros, "AP50": 0.5}}).splitlines()[2]
    assert "every" not in results.format_table({"bbox": dict.fromkeys(zeros)})  # there is no truth to compare with


def test_a_shifted_box_counts_where_its_iou_suffices(things: dict[str, Any]) -> None:
    detections = perfect(things)
    for record in detections:
        x, y, w, h = record["bbox"]
        record["bbox"] = [x + 0.26 * w, y, w, h]  # IoU 0.74 / 1.26 = 0.587: right at 0.50 and 0.55
    metrics = results.evaluate(things, detections, ["bbox"])["bbox"]
    assert metrics["AP50"] == pytest.approx(100) and metrics["AP75"] == 0
    assert metrics["AP"] == pytest.approx(20)


def test_annotation_id_zero_is_an_object_like_any_other(things: dict[str, Any]) -> None:
    for number, record in enumerate(things["annotations"]):
        record |= {"id": number, "keypoints": None}  # null means none
        del record["area"]
    assert results.evaluate(things, perfect(things), ["bbox"])["bbox"]["AP"] == pytest.approx(100)


def test_other_keypoints_have_their_own_sigmas(people: dict[str, Any]) -> None:
    for record in people["annotations"]:
        record["keypoints"] = record["keypoints"][:9]
        record["num_keypoints"] = 3
        record["keypoints"][2::3] = [2, 2, 2]
    metrics = results.evaluate(people, perfect(people), ["keypoints"], [0.1, 0.1, 0.1])
    assert metrics["keypoints"]["AP"] == pytest.approx(100)


def test_keypoints_of_objects_without_an_area_are_scored_by_their_boxes(people: dict[str, Any]) -> None:
    detections = perfect(people)
    for record in detections:
        record["keypoints"] = [value + 0.1 * (index % 3 == 0) for index, value in enumerate(record["keypoints"])]
    scores = []
    for area in ({}, {"area": 0}, {"area": 0.25}):
        for record in people["annotations"]:
            record.pop("area", None)
            record |= area
        scores.append(results.evaluate(people, detections, ["keypoints"])["keypoints"]["AP"])
    assert scores == [scores[0]] * 3 and scores[0] == pytest.approx(100)


def crowded(*counts: tuple[int, ...]) -> dict[str, Any]:
    """Return a data set: of each image, the number of objects of each class."""
    annotations = []
    for image_id, of_classes in enumerate(counts, 1):
        classes = [category_id for category_id, count in enumerate(of_classes, 1) for _ in range(count)]
        for i, category_id in enumerate(classes):
            x, y = i % 20 * 20, i // 20 * 20
            square = {"bbox": [x, y, 15, 15], "segmentation": [[x, y, x + 15, y, x + 15, y + 15, x, y + 15]]}
            points = {"keypoints": [x + 5, y + 5, 2] * 17, "num_keypoints": 17, "area": 225}
            annotations.append({"image_id": image_id, "category_id": category_id, "iscrowd": 0, **square, **points})
    images = [{"id": i, "width": 400, "height": 400} for i in range(1, len(counts) + 1)]
    categories = [{"id": i, "name": f"c{i}"} for i in range(1, len(counts[0]) + 1)]
    return {"images": images, "annotations": annotations, "categories": categories}


CEILINGS = {  # task, objects per image and class, detections per image -> images, AP and AR of perfect detections
    "one class": ("bbox", [(150,)], 300, (1, 100 * 67 / 101, 100 * 100 / 150)),
    "masks": ("segm", [(150,)], 300, (1, 100 * 67 / 101, 100 * 100 / 150)),
    "two images": ("bbox", [(150,), (90,)], 300, (1, 100 * 80 / 101, 100 * 190 / 240)),
    "two classes, one of few": ("bbox", [(150, 3)], 300, (1, (100 + 100 * 67 / 101) / 2, (100 + 100 * 100 / 150) / 2)),
    "the detector's limit": ("bbox", [(30,)], 20, (1, 100 * 67 / 101, 100 * 20 / 30)),
    "the detector's limit, rare first": ("bbox", [(30, 10)], 20, (1, (100 + 100 * 34 / 101) / 2, (100 + 100 / 3) / 2)),
    "keypoints": ("keypoints", [(25,)], 100, (1, 100 * 81 / 101, 100 * 20 / 25)),
    "exactly the limit": ("bbox", [(100,)], 100, ()),
    "several classes, none above 100": ("bbox", [(80, 70)], 300, ()),
}


@pytest.mark.parametrize("case", CEILINGS)
def test_perfect_detections_reach_the_ceiling_and_no_more(case: str) -> None:
    task, counts, most, expected = CEILINGS[case]
    content = crowded(*counts)
    detections: list[Any] = perfect(content)
    rare_first = sorted(detections, key=lambda d: sum(e["category_id"] == d["category_id"] for e in detections))
    by_image = [[d for d in rare_first if d["image_id"] == image["id"]][:most] for image in content["images"]]
    row = results.evaluate(content, [d for some in by_image for d in some], [task], detections_per_image=most)[task]
    assert [row["AP"], row["AR"]] == pytest.approx(list(expected[1:]) or [100, 100])
    ceiling = [row[name] for name in ("images_over_limit", "AP_ceiling", "AR_ceiling") if name in row]
    assert ceiling == pytest.approx(list(expected))
    assert [row.get("AP@300"), row.get("AR@300")] == ([pytest.approx(100)] * 2 if most == 300 else [None] * 2)


def test_a_crowd_and_another_limit_leave_the_tables_as_they_are(people: dict[str, Any]) -> None:
    detections: list[Any] = perfect(people)
    for number, record in enumerate(detections):
        record["score"] = 0.1 + number / 100
        record["bbox"][0] += number % 3
    plain = results.evaluate(people, detections, results.TASKS)
    more = results.evaluate(people, detections, results.TASKS, detections_per_image=300)
    for task, row in plain.items():
        assert row == {name: more[task][name] for name in row}
        assert more[task].keys() - row.keys() == {"AP@300", "AR@300"}
    content = crowded((150,))
    for record in content["annotations"][60:]:
        record["iscrowd"] = 1
    assert "AP_ceiling" not in results.evaluate(content, [], ["bbox"])["bbox"]


@pytest.mark.detectron2
def test_equals_detectron2s_evaluator(tmp_path: Path, people: dict[str, Any]) -> None:
    from detectron2.evaluation.coco_evaluation import _evaluate_predictions_on_coco
    from pycocotools.coco import COCO

    rng = np.random.default_rng(0)
    detections: list[Any] = perfect(people) + perfect(people)
    for record in detections:
        record["bbox"] = (np.array(record["bbox"]) + rng.normal(0, 3, 4)).clip(1).tolist()
        record["score"] = float(rng.uniform())
        record["keypoints"] = (np.array(record["keypoints"]) + rng.normal(0, 1.5, 51)).tolist()
    ours: Any = results.evaluate(people, detections, results.TASKS)
    (tmp_path / "a.json").write_text(json.dumps(people))
    with contextlib.redirect_stdout(io.StringIO()):
        for task in results.TASKS:
            copied = json.loads(json.dumps(detections))
            stats = _evaluate_predictions_on_coco(COCO(str(tmp_path / "a.json")), copied, task).stats
            names = ["AP", "AP50", "AP75", *(["APm", "APl"] if task == "keypoints" else ["APs", "APm"])]
            expected = [None if value < 0 else pytest.approx(100 * value) for value in stats[:5]]
            assert [ours[task][name] for name in names] == expected
            assert task == "segm" or 0 < ours[task]["AP"] < 100  # masks were not moved


def test_results_file(tmp_path: Path, things: dict[str, Any]) -> None:
    cfg = tiny_coco.config(tmp_path, "coco:a.json:b", MODEL__ROI_BOX_HEAD__NUM_CONV=4, SOLVER__MAX_ITER=90000)
    cfg.SOLVER.IMS_PER_BATCH = 16
    metrics = {"coco:a.json:b": results.evaluate(things, [], ["bbox"])}
    weights = {"path": "w.pth", "sha256": "ab", "provenance": {"method": "jcl"}}
    predictions = results.predictions_file("coco:a.json:b")
    atomic_write(tmp_path / predictions, "[]")
    results.write_results(cfg, metrics, engine="torchvision", weights=weights, iteration=5)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["metrics"]["bbox"]["AP"] == 0 and content["metrics"]["bbox"]["APl"] is None
    assert content["schedule"]["name"] == "1x" and content["protocol"]["heads"] == "4conv2fc"
    assert content["predictions"] == {"coco:a.json:b": predictions}
    assert content["weights"] == weights and content["engine"]["name"] == "torchvision"
    one_data_set: dict[str, results.Metrics] = {"a": {"bbox": {"AP": 1.0}}}
    two_data_sets = one_data_set | {"b": {"bbox": {"AP": 2.0, "APl": None}}}
    assert results.flatten_metrics(one_data_set) == {"bbox/AP": 1.0} and results.flatten_metrics({}) == {}
    assert results.flatten_metrics(two_data_sets) == {"a/bbox/AP": 1.0, "b/bbox/AP": 2.0}
