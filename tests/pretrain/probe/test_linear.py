"""The linear probe as a stage: it learns, resumes, and refuses what cannot work."""

import functools
import json
import os
import shutil

import pytest
import torch

from pretrain.common import distributed, interrupt
from pretrain.common.run.state import RunContext
from pretrain.probe import features, linear
from pretrain.probe.data import load_probe_data
from tests.errors import refused
from tests.pretrain.probe.configs import probe_config
from tests.pretrain.ranks import call_on_ranks
from tests.pretrain.runs import load_newest, stopped
from tests.resnets import resnet_state
from tests.stops import stop_before_batch

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

STEPS_PER_EPOCH = 3


def test_the_learning_rate_is_chosen_on_images_that_no_head_learns_from(images, tmp_path, monkeypatch):
    learned: set[float] = set()
    real = linear.Heads.step
    train = load_probe_data(probe_config(images, tmp_path / "run")).train
    monkeypatch.setattr(linear, "extract", lambda _, data, *__, **___: _positions(train, data))
    monkeypatch.setattr(linear.Heads, "step", lambda self, x, y: learned.update(x[:, 0].tolist()) or real(self, x, y))
    scores = {
        "0.1": {"held_out_top1": 50.0, "top1": 70.0, "top5": 1.0},
        "1": {"held_out_top1": 60.0, "top1": 65.0, "top5": 2.0},
    }
    seen: list[list[float]] = []

    def score(heads, val, held_out):
        seen.append(held_out.features_NF[:, 0].tolist())
        return scores

    monkeypatch.setattr(linear.Heads, "score", score)
    cfg = probe_config(images, tmp_path / "run", "LINEAR.LRS", "[0.1, 1.0]")
    results = linear.main(cfg, "random")
    assert seen[0] == [9, 19, 29, 39] and learned.isdisjoint(seen[0]) and learned <= set(range(48))
    assert results["metrics"] == {**scores["1"], "learning_rate": 1.0}
    assert results["protocol"]["chosen_on"] == "a tenth of the training images"


def _positions(train, data):
    """Return features whose first entry is the position of the image among all training images."""
    names = [train.image_name(i) for i in range(len(train))]
    positions = [names.index(data.image_name(i)) if data.image_name(i) in names else -1 for i in range(len(data))]
    x = torch.zeros(len(data), 64)
    x[:, 0] = torch.tensor(positions)
    return features.Features(x, torch.from_numpy(data.labels), len(data.classes))


def _assert_same_end(first, second):
    """Assert that results, metrics, weights and momentum are bitwise equal."""
    read = [json.loads((folder / "results.json").read_text()) for folder in (first, second)]
    assert read[0]["per_learning_rate"] == read[1]["per_learning_rate"]
    assert (first / "metrics.json").read_text() == (second / "metrics.json").read_text()
    a = load_newest(first)[1]
    b = load_newest(second)[1]
    assert a["step"] == b["step"] == 4 * STEPS_PER_EPOCH
    for name in ("state_dict", "optimizer"):
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=True)  # NaN: a head that diverged


def _after_steps(monkeypatch, steps, event):
    """Call ``event`` in step number ``steps`` of this attempt."""
    real = linear.Heads.step
    done = []

    def step(self, *batch):
        done.append(1)
        if len(done) == steps:
            event()
        return real(self, *batch)

    monkeypatch.setattr(linear.Heads, "step", step)


def _die():
    raise KeyboardInterrupt


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_a_probe_that_is_killed_and_stopped_within_epochs_reaches_the_same_end(images, tmp_path, monkeypatch, augment):
    """It is killed in its second epoch of three steps, then asked to stop in the fourth step of each attempt."""
    more = ("LINEAR.AUGMENT", augment, "LINEAR.LRS", "[0.1, 1e38, 1.0]", "LINEAR.IMS_PER_BATCH", "14")
    linear.main(probe_config(images, tmp_path / "whole", *more), "random")
    cfg = probe_config(images, tmp_path / "stopped", *more)
    reached = []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        _after_steps(patch, 5, _die)
        linear.main(cfg, "random")
    while not (tmp_path / "stopped/results.json").is_file():
        with monkeypatch.context() as patch:
            context = RunContext()
            _after_steps(patch, 4, lambda context=context: context.stop.make("asked"))
            try:
                linear.main(cfg, "random", context=context)
            except interrupt.Stopped as stop:
                assert str(stop) == "asked" and "contains the checkpoint of step" in stop.remedy
        reached.append(load_newest(tmp_path / "stopped")[1]["step"])
        if len(reached) == 1 and augment != "none":  # no batch arrives after two more steps
            with monkeypatch.context() as patch:
                stop_before_batch(patch, 3)
                stopped(lambda: linear.main(cfg, "random"), "SIGTERM")
            assert load_newest(tmp_path / "stopped")[1]["step"] == 9
    assert reached == ([7, 11, 12] if augment == "none" else [7, 12])
    _assert_same_end(tmp_path / "whole", tmp_path / "stopped")


def test_heads_of_several_rates_learn_as_each_would_alone_and_one_that_diverges_scores_0(images, tmp_path):
    def run(rates):
        return linear.main(probe_config(images, tmp_path / rates, "LINEAR.LRS", rates), "random")

    results = run("[0.12345678, 1e38]")
    scores = results["per_learning_rate"]
    assert scores["1e+38"] == {"top1": 0.0, "top5": 0.0, "diverged": True}
    assert scores["0.12345678"] == run("[0.12345678, 0.3]")["per_learning_rate"]["0.12345678"]
    assert results["metrics"]["learning_rate"] == 0.12345678
    log = (tmp_path / "[0.12345678, 1e38]/log.txt").read_text()
    assert "head of learning rate 1e+38 diverged" in log and "device cpu, 1 process\n" in log
    refused(lambda: run("[1e38]"), "not finite", "lower LINEAR.BASE_LR")


def test_a_complete_folder_is_left_as_it_is_and_another_probe_is_refused(images, tmp_path):
    linear.main(probe_config(images, tmp_path), "random")
    before = (tmp_path / "results.json").stat().st_mtime_ns
    free = ("DATALOADER.NUM_WORKERS", "1", "SOLVER.LOG_PERIOD", "3", "PROBE.KNN_K", "7")
    results = linear.main(probe_config(images, tmp_path, *free), "random")
    assert results == json.loads((tmp_path / "results.json").read_text())
    for key, value, changed in [
        ("LINEAR.EPOCHS", "5", "LINEAR.EPOCHS 4 -> 5"),
        ("PROBE.CROP", "center", "resize 0 -> 18"),
        ("MODEL.ARCH", "resnet34", "resnet34"),
    ]:
        refused(functools.partial(linear.main, probe_config(images, tmp_path, key, value), "random"), changed)
    assert (tmp_path / "results.json").stat().st_mtime_ns == before


def test_other_images_are_refused_on_resume(images, tmp_path, monkeypatch):
    data = tmp_path / "data"
    shutil.copytree(images, data)
    cfg = probe_config(data, tmp_path / "run")
    with monkeypatch.context() as patch:
        context = RunContext()
        _after_steps(patch, 1, lambda: context.stop.make("asked"))
        stopped(lambda: linear.main(cfg, "random", context=context))
    image = data / "train/class0/000.png"
    image.rename(data / "train/class1/999.png")  # another label
    refused(lambda: linear.main(cfg, "random"), "names or labels of the images in", data, "have changed")
    (data / "train/class1/999.png").unlink()
    refused(lambda: linear.main(cfg, "random"), "train_images 48 -> 47")


def _rank_by_rank(images, root) -> None:
    """Run on two ranks; rank 1 has another OUTPUT_DIR, as if its disk were not shared."""
    rank_folder = root / f"rank{distributed.rank()}"

    def run(folder, context=None):
        return linear.main(probe_config(images, folder), "random", context=context)

    whole = run(root / "whole")
    context = RunContext()
    with pytest.MonkeyPatch.context() as patch:
        if distributed.rank() == 1:
            _after_steps(patch, 4, lambda: context.stop.make("asked"))
        stopped(
            lambda: run(rank_folder, context), ("a signal to another process of this run", "asked")[distributed.rank()]
        )
    for _ in ("resumed", "complete"):
        assert run(rank_folder)["per_learning_rate"] == whole["per_learning_rate"]
    rank_folder.mkdir(exist_ok=True)
    os.chdir(rank_folder)  # where each rank finds another backbone under the same name
    torch.save(resnet_state(seed=distributed.rank()), "r18.tar")
    cfg = probe_config(images, rank_folder)
    refused(lambda: features.load_frozen("r18.tar", cfg, torch.device("cpu")), "r18.tar", "rank 0")


def test_two_ranks_stop_together_and_resume_from_what_rank_0_sees(images, tmp_path):
    call_on_ranks(_rank_by_rank, 2, images, tmp_path)
    _assert_same_end(tmp_path / "whole", tmp_path / "rank0")
    assert "resumed at step 5 of 12" in (tmp_path / "rank0/log.txt").read_text()  # all ranks know one step later
    assert not list((tmp_path / "rank1").glob("*.pth")) and not (tmp_path / "rank1/results.json").exists()
