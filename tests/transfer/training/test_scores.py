"""The best evaluation is kept, and a run without a gain ends early, the same after a stop."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import transfer.training.scores
from pretrain.common.files import read_json
from tests.errors import refused
from tests.pretrain.runs import stopped
from tests.transfer import tiny_coco
from tests.transfer.test_train_net import ENGINES, EVALUATION, stop_in, work
from transfer.training.scores import Scores

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

BEST = {"SOLVER__CHECKPOINT_PERIOD": 1, "SOLVER__CHECKPOINT_KEEP": 2, "TEST__EVAL_PERIOD": 2, "TEST__BEST": "bbox/AP"}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace evaluations by given box APs, one after the other."""

    def score(*values: float | None) -> None:
        metrics = [{"bbox": {"AP": value, "AP50": 0.0}} for value in values]
        monkeypatch.setattr("transfer.engine.Engine.evaluate_set", mock.Mock(side_effect=metrics))

    return score


def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path: Path, scored: Callable[..., None]) -> None:
    out = tmp_path / "out"
    scored(1.0, 3.0, 2.0)
    work(tmp_path, "torchvision", **BEST, SOLVER__MAX_ITER=6)
    names = ["model_0000004.pth", "model_0000005.pth", "model_best.pth", "model_final.pth"]
    assert [path.name for path in sorted(out.glob("*.pth"))] == names
    assert torch.load(out / "model_best.pth")["iteration"] == 3 and read_json(out / "best.json")["value"] == 3.0
    scored(2.5, None, 4.0)  # a resumed run remembers; an evaluation may have no such objects
    work(tmp_path, "torchvision", "--resume", **BEST, SOLVER__MAX_ITER=11)
    assert torch.load(out / "model_best.pth")["iteration"] == 10 and read_json(out / "best.json")["value"] == 4.0
    scored(0.5)  # AP50 is 0: another metric's value does not count
    work(tmp_path, "torchvision", "--resume", **BEST | {"TEST__BEST": "bbox/AP50"}, SOLVER__MAX_ITER=12)
    assert torch.load(out / "model_best.pth")["iteration"] == 11
    assert read_json(out / "best.json")["metric"] == "bbox/AP50"


def test_a_run_killed_between_the_checkpoint_and_its_value_repeats_both(tmp_path, scored, monkeypatch):
    scored(5.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(transfer.training.scores, "write_json", mock.Mock(side_effect=KeyboardInterrupt))
        work(tmp_path, "torchvision", **BEST, SOLVER__MAX_ITER=3)
    scored(5.0, 4.0)
    work(tmp_path, "torchvision", "--resume", **BEST, SOLVER__MAX_ITER=3)
    assert read_json(tmp_path / "out/best.json")["value"] == 5.0
    assert torch.load(tmp_path / "out/model_best.pth")["iteration"] == 1


@pytest.mark.parametrize(
    ("values", "best", "without_gain"),
    [
        ([], None, 0),
        ([1.0, 3.0, 3.0, 2.0], (4, 3.0), 2),
        ([None, float("nan")], None, 2),
        ([None, 0.0, None], (4, 0.0), 1),
    ],
)
def test_the_first_highest_score_is_the_best(values: list[Any], best: Any, without_gain: int) -> None:
    scores = Scores()
    for number, value in enumerate(values, start=1):
        scores.add("bbox/AP", "data", 2 * number, value)
    assert (scores.best, scores.count_without_gain()) == (best, without_gain)
    assert Scores.from_json(json.loads(json.dumps(scores.to_json()))) == scores
    scores.add("bbox/AP", "data", 4, 9.0)  # iterations that are run again
    assert scores.best == (4, 9.0) and scores.count_without_gain() == 0
    scores.add("bbox/AP50", "data", 6, 1.0)
    assert scores.best == (6, 1.0)


def test_a_score_that_the_data_cannot_have_is_refused(tmp_path: Path) -> None:
    keys = {"TEST__BEST": "bbox/AP-c4", "TEST__EVAL_PERIOD": 1}
    refused(lambda: work(tmp_path, "torchvision", **keys), "TEST.BEST", "'c4'", "c1, c2, c3")
    name = tiny_coco.write(tmp_path / "unlabeled")
    tiny_coco.edit(name, lambda content: content["annotations"].clear())
    keys = {"TEST__BEST": "bbox/AP", "DATASETS__TEST": (name,)}
    rare = tiny_coco.write(tmp_path / "rare")
    tiny_coco.edit(rare, lambda content: [record.update(category_id=7) for record in content["annotations"]])
    only_c1 = {"TEST__BEST": "bbox/AP-c3", "DATASETS__TEST": (rare,)}
    refused(lambda: work(tmp_path, "torchvision", **only_c1), "TEST.BEST", rare, "has no c3")
    refused(lambda: work(tmp_path, "torchvision", **keys), "TEST.BEST", name, "DATASETS.TEST")


PATIENT = {"SOLVER__MAX_ITER": 12, "TEST__EVAL_PERIOD": 2, "TEST__BEST": "bbox/AP", "TEST__PATIENCE": 2}
ENDED = "after 8 of 12 iterations: no gain in bbox/AP in 2 evaluations since 3.00 after 4 iterations (TEST.PATIENCE 2)"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_without_a_gain_ends_early_and_goes_on_with_more_patience(tmp_path, scored, engine, capsys):
    out = tmp_path / "out"
    scored(1.0, 3.0, 3.0, 2.0)
    results = work(tmp_path, engine, **PATIENT, SOLVER__STEPS=(7, 9))
    assert (results["iteration"], results["ended_early"]) == (8, ENDED)
    assert results["schedule"]["iterations"] == 12 and results["metrics"]["bbox"]["AP"] == 2.0
    assert sorted(path.name for path in out.glob("*.pth")) == ["model_best.pth", "model_final.pth"]
    assert (torch.load(out / "model_final.pth")["iteration"], torch.load(out / "model_best.pth")["iteration"]) == (7, 3)
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if "SOLVER.STEPS" in line)
    assert "at iteration 9," in warning

    written = {path: path.read_bytes() for path in (out / "results.json", out / "model_final.pth", out / "best.json")}
    scored(2.0)
    assert work(tmp_path, engine, "--resume", **PATIENT, SOLVER__STEPS=(7, 9)) == results
    assert {path: path.read_bytes() for path in written} == written and ENDED in capsys.readouterr().out
    scored(3.0, 2.5)
    more = PATIENT | {"TEST__PATIENCE": 4}
    results = work(tmp_path, engine, "--resume", **more, SOLVER__STEPS=(7, 9))
    assert results["iteration"] == 12 and "ended_early" not in results
    values = torch.load(out / "model_final.pth")["scores"]["values"]
    assert dict(values) == {2: 1.0, 4: 3.0, 6: 3.0, 8: 2.0, 10: 3.0, 12: 2.5}


def test_a_stopped_run_ends_at_the_same_iteration_with_the_same_weights(tmp_path, monkeypatch):
    """Stops come in the evaluations; a random detector's AP falls and rises."""
    keys = {**PATIENT, "TEST__PATIENCE": 1, "SOLVER__BASE_LR": 0.03}
    keys |= {"TEST__PRECISE_BN__ENABLED": True, "TEST__PRECISE_BN__NUM_ITER": 2}
    whole = work(tmp_path, "torchvision", **keys, OUTPUT_DIR=str(tmp_path / "whole"))
    assert whole["iteration"] < 12 and whole["ended_early"]
    done = 0
    while done < whole["iteration"]:
        done += 2
        with monkeypatch.context() as patch:
            options = {"context": stop_in(patch, EVALUATION, 2 if done > 2 else 1), **keys}
            stopped(lambda options=options: work(tmp_path, "torchvision", "--resume", **options), "SIGTERM")
        assert (tmp_path / f"out/model_{done - 1:07d}.pth").is_file()
    cut = work(tmp_path, "torchvision", "--resume", **keys)
    assert [cut[name] for name in ("iteration", "ended_early", "metrics")] == [
        whole[name] for name in ("iteration", "ended_early", "metrics")
    ]
    ends = [torch.load(tmp_path / name / "model_final.pth") for name in ("whole", "out")]
    torch.testing.assert_close(ends[0]["model"], ends[1]["model"], rtol=0, atol=0)
    assert ends[0]["scores"] == ends[1]["scores"]
