"""The report groups what belongs together, and never compares what does not."""

import json
from pathlib import Path

import pytest

from tests.tools.reporting.runs import DIGITS, cells, column, detector, pretrain, probe, provenance, render, write
from tools import launch


def test_probes_with_equal_settings_share_a_cell(tmp_path: Path):
    config = pretrain(tmp_path / "jcl")
    for seed, top1 in ((0, 68.0), (1, 68.4)):
        probe(tmp_path / f"jcl/linear_{seed}", config, top1, "SEED", seed, recipe="R50_IN1k_100ep")
    probe(tmp_path / "jcl/knn", config, 50.0)  # the probe at the end of the pretraining, which is shown once
    text = render([tmp_path])
    assert cells(text, "jcl")[2:] == ["50.0", "68.0 / 68.4", "88.0"]


def test_runs_of_equal_name_have_a_row_each(tmp_path: Path):
    for pipeline, knn in (("demo", 70.2), ("digits_methods", 65.5)):
        config = pretrain(tmp_path / pipeline / "jcl/pretrain", *DIGITS, knn=knn)
        probe(tmp_path / pipeline / "jcl/knn", config, knn)
        random = {"source": "random", "seed": 0, "arch": "resnet18"}
        probe(tmp_path / pipeline / "random/knn", config, knn - 10, source=random)
    text = render([tmp_path / "demo", tmp_path / "digits_methods"])
    assert "- Every pretraining run: backbone resnet18, pretrained on digits, epochs 15, seed 0.\n" in text
    assert cells(text, "demo/jcl") == ["demo/jcl", "jcl", "70.2"]
    assert cells(text, "digits_methods/jcl")[-1] == "65.5"
    assert cells(text, "demo/random") == ["demo/random", "random", "60.2"]
    assert cells(text, "digits_methods/random")[-1] == "55.5"
    assert render([tmp_path, tmp_path / "demo"]).count("demo/jcl") == 1  # given twice, shown once


def test_probes_in_a_folder_of_their_own_join_the_pretraining_they_name(tmp_path: Path):
    config = pretrain(tmp_path / "runs/jcl", *DIGITS)
    pretrain(tmp_path / "runs/other", *DIGITS, knn=40.0)
    probe(tmp_path / "runs/linear_lr10", config, 61.0, "DATA.TRAIN", "digits", recipe="R18_IN100_100ep")
    other = {"source": "r50.pth", "source_sha256": "ab" * 32, "arch": "resnet50", "encoder": ""}
    probe(tmp_path / "runs/knn_r50", config, 33.0, source=other)
    text = render([tmp_path / "runs"])
    assert column(text, "jcl", "linear top-1") == "61.0" and column(text, "other", "linear top-1") == "-"
    assert cells(text, "knn_r50")[:3] == ["knn_r50", "r50.pth (abababab)", "resnet50"]


def test_a_probe_joins_the_run_that_wrote_its_checkpoint(tmp_path: Path):
    """A run with an equal recipe in the same folder is another run; a renamed folder is still the same run."""
    older = pretrain(tmp_path / "jcl", *DIGITS, "SOLVER.BASE_LR", "0.03")
    (tmp_path / "jcl").rename(tmp_path / "older")
    newer = pretrain(tmp_path / "jcl", *DIGITS, knn=50.0)
    probe(tmp_path / "knn_of_older", older, 60.0, "PROBE.KNN_K", 5)
    probe(tmp_path / "jcl/knn", newer, 61.0, "PROBE.KNN_K", 5, source=provenance(newer, source_sha256="ab" * 32))
    text = render([tmp_path])
    assert sorted(cells(text, "older")[2:]) == ["50.0", "60.0"] and "61.0" not in cells(text, "jcl")


def test_unequal_protocols_never_share_a_column(tmp_path: Path):
    probes = (("a", (), 51.0), ("b", ("PROBE.KNN_K", 5), 70.2), ("c", ("PROBE.IMAGE_SIZE", 64), 55.0))
    for name, overrides, top1 in probes:
        config = pretrain(tmp_path / name, *DIGITS, knn=None)
        probe(tmp_path / name / "knn", config, top1, *overrides)
    text = render([tmp_path])
    assert cells(text, "run")[2:] == [
        "kNN top-1 (k 200, image size 32, resize 37)",
        "kNN top-1 (k 5, image size 32, resize 37)",
        "kNN top-1 (k 200, image size 64, resize 73)",
    ]
    assert [cells(text, name)[2:] for name in "abc"] == [["51.0", "-", "-"], ["-", "70.2", "-"], ["-", "-", "55.0"]]
    assert "- kNN: temperature 0.07, max images 100000, amp none, on corrupt error, train digits, " in text


def test_the_heading_names_what_was_scored(tmp_path: Path):
    config = pretrain(tmp_path / "photos", *DIGITS, "DATA.TRAIN", "folder:/photos", knn=None, rankme=36.44)
    text = render([tmp_path])
    assert "## Pretraining without accuracy" in text and cells(text, "photos") == ["photos", "jcl", "36.4"]
    assert "- Every pretraining run: backbone resnet18, pretrained on folder:/photos, epochs 15, seed 0.\n" in text
    probe(tmp_path / "photos/knn", config, 60.0, "DATA.PROBE_TRAIN", "cifar10")
    probe(tmp_path / "photos/knn_100", config, 40.0, "DATA.PROBE_TRAIN", "cifar100")
    first, second = render([tmp_path]).split("\n## ")[1:]
    assert first.startswith("Accuracy on the validation images of cifar10, in percent")
    assert second.startswith("Accuracy on the validation images of cifar100, in percent")
    assert "train cifar10," in first and "pretrained on folder:/photos, " in first
    assert cells(first, "photos")[-1] == "60.0" and cells(second, "photos")[-1] == "40.0"


def test_rankme_is_a_column_of_the_runs_that_have_it(tmp_path: Path):
    pretrain(tmp_path / "new", *DIGITS, rankme=36.44)
    pretrain(tmp_path / "old", *DIGITS, "SEED", "1")
    text = render([tmp_path])
    assert column(text, "new", "RankMe") == "36.4" and column(text, "old", "RankMe") == "-"
    assert column(text, "new", "kNN top-1") == "50.0" and "RankMe: effective rank" in text


def test_initial_weights_of_a_pretraining_are_shown(tmp_path: Path):
    pretrain(tmp_path / "scratch", *DIGITS)
    config = pretrain(tmp_path / "continued", *DIGITS, "MODEL.WEIGHTS", "/w/imagenet.pth")
    write(tmp_path / "mask", detector(weights=provenance(config)))
    text = render([tmp_path])
    assert column(text, "scratch", "pretrained on") == "digits"
    assert column(text, "continued", "pretrained on") == "digits, from imagenet.pth"
    assert "- Every pretraining run: pretrained on digits, from imagenet.pth, " in text  # the detector's


@pytest.mark.parametrize(
    ("overrides", "engine"),
    [
        ("", "torchvision"),
        ("SOLVER.MAX_ITER 180000", "detectron2"),
        ("MODEL.ROI_BOX_HEAD.NORM BN", "detectron2"),
        ("INPUT.MIN_SIZE_TEST 600", "detectron2"),
        ("DATASETS.TEST ('other',)", "detectron2"),
    ],
)
def test_engines_schedules_heads_and_data_never_share_a_table(overrides: str, engine: str, tmp_path: Path):
    write(tmp_path / "a", detector())
    write(tmp_path / "b", detector(*overrides.split(), engine=engine))
    text = render([tmp_path])
    heads = [part.split("\n| run ")[0] for part in text.split("\n## ")[1:] if "\n| run " in part]
    assert len(heads) == 2 and heads[0] != heads[1]


def test_equal_runs_in_other_places_share_a_table(tmp_path: Path):
    write(tmp_path / "a", detector())
    overrides = "OUTPUT_DIR /x SEED 5 MODEL.DEVICE cpu DATALOADER.NUM_WORKERS 0 TEST.BEST bbox/AP"
    overrides += " SOLVER.CHECKPOINT_PERIOD 1000 SOLVER.CHECKPOINT_KEEP 2"
    write(tmp_path / "b", detector(*overrides.split()))
    text = render([tmp_path])
    assert text.count("| run ") == 1 and "Not compared" not in text  # also next to the paper's random row


def test_images_with_more_objects_than_predictions_count_are_explained_once(tmp_path: Path):
    ceiling = {"images_over_limit": 7, "AP_ceiling": 66.34, "AR_ceiling": 66.67}
    sets = {"coco_2017_val": {"bbox": {"AP": 38.0, **ceiling, "AP@300": 41.5}, "segm": {"AP": 36.0, "AP@300": 40.2}}}
    for name in ("a", "b"):
        write(tmp_path / name, detector("TEST.DETECTIONS_PER_IMAGE", "300", datasets=sets))
    text = render([tmp_path])
    assert text.count("7 images") == 1 and "bbox AP is at most 66.3, and AR at most 66.7" in text
    assert column(text, "a", "box AP@300") == "41.5" and column(text, "a", "mask AP@300") == "40.2"


def test_a_test_set_without_annotations_is_explained(tmp_path: Path):
    sets = {"coco:test-dev.json:images": {"bbox": {"AP": None, "AP50": None}}}
    (name,) = sets
    write(tmp_path / "a", detector("DATASETS.TEST", str((name,)), datasets=sets, unscored={name: "nothing is scored"}))
    text = render([tmp_path / "a"])
    assert "nothing is scored." in text and column(text, "a", "box AP") == "-"


def test_a_run_that_ended_early_shares_a_table_and_is_named(tmp_path: Path):
    words = ("TEST.PATIENCE", "2")
    write(tmp_path / "a", detector(*words, iteration=8, ended_early="after 8 of 12 iterations: no gain"))
    write(tmp_path / "b", detector(*words))
    text = render([tmp_path])
    assert text.count("| run ") == 1 and "Ended early: a after 8 of 12 iterations: no gain." in text


def test_each_test_set_has_its_own_numbers(tmp_path: Path):
    sets = {"coco_2017_val": {"bbox": {"AP": 38.0}}, "other_val": {"bbox": {"AP": 11.0}}}
    write(tmp_path / "a", detector("DATASETS.TEST", str(tuple(sets)), datasets=sets))
    first, second, *_ = render([tmp_path / "a"]).split("\n## ")[1:]
    assert "-> coco_2017_val" in first and column(first, "a", "box AP") == "38.0"
    assert "-> other_val" in second and column(second, "a", "box AP") == "11.0"


def test_json_has_the_scores_with_their_protocols_and_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = pretrain(tmp_path / "jcl", *DIGITS)
    probe(tmp_path / "jcl/linear", config, 68.0, recipe="own")
    write(tmp_path / "mask", detector(weights=provenance(config)))
    write(tmp_path / "damaged", {"stage": "knn"})
    assert launch.main(["report", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    scores = {Path(score["folder"]).name: score for score in content["scores"]}
    assert scores["jcl"]["metrics"] == {"top1": 50.0} and scores["jcl"]["protocol"]["k"] == 200
    assert scores["linear"]["metrics"] == {"top1": 68.0, "top5": 88.0} and scores["linear"]["test"] == "digits"
    assert scores["mask"]["metrics"]["bbox/AP"] == 38.0 and scores["mask"]["origin"]["method"] == "jcl"
    assert "it lacks 'source'" in content["unreadable"][0] and content["incomplete"] == []
