"""Whole runs on tiny images: resumed runs are bitwise equal; bad input, other runs and checkpoints are refused."""

import json
import shutil
from unittest import mock

import pytest
import torch

from pretrain import schedule, train
from pretrain.common.device import autocast
from pretrain.common.files import sha256
from pretrain.common.run.state import RunContext, update_state
from pretrain.config import load_config
from pretrain.model import objectives
from pretrain.optim import set_learning_rate
from tests.errors import refused
from tests.pretrain.runs import (
    STEPS_PER_EPOCH,
    assert_same_end,
    build_state,
    lines,
    load_newest,
    run,
    stopped,
)
from tests.pretrain.test_steps import config
from tests.stops import stop_after, stop_before_batch

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def test_a_run_folder_is_self_contained(whole):
    names = {p.name for p in whole.iterdir()}
    expected = "config.yaml metrics.json log.txt checkpoint_final.pth results.json environment.txt state.json"
    assert {*expected.split(), "views.png"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    logged = lines(whole, "loss")
    assert [line["iteration"] for line in logged] == list(range(2 * STEPS_PER_EPOCH))
    assert {"lr", "queue_accuracy", "positive_similarity", "feature_spread", "images_per_second"} <= logged[0].keys()
    results = json.loads((whole / "results.json").read_text())
    assert results["metrics"]["knn_val_images"] == 16
    assert results["checkpoint_sha256"] == sha256(whole / "checkpoint_final.pth")
    assert "] device cpu, 1 process\n" in (whole / "log.txt").read_text().splitlines(keepends=True)[0]
    assert "split BN with 2 groups" in (whole / "log.txt").read_text()


def test_another_config_in_the_same_folder_is_refused(images, whole):
    refused(lambda: run(images, whole, "SOLVER.BASE_LR", "0.06"), "SOLVER.BASE_LR 0.03 -> 0.06", "--change-recipe")
    refused(lambda: run(images, whole, "SEED", "1", "SOLVER.CHANGE_RECIPE", "True"), "SEED 0 -> 1", "OUTPUT_DIR")


def test_the_checkpoints_that_the_user_asks_for_outlast_the_run(images, whole, tmp_path):
    """By default, only the final one does."""
    out = tmp_path / "run"
    run(images, out, "SOLVER.CHECKPOINT_KEEP", "3", "SOLVER.CHECKPOINT_PERIOD", "2", "SOLVER.MAX_STEPS", "10")
    names = ["checkpoint_00000006.pth", "checkpoint_00000008.pth", "checkpoint_final.pth"]
    assert sorted(path.name for path in out.glob("checkpoint_*")) == names
    assert [path.name for path in whole.glob("checkpoint_*")] == names[-1:]


def test_a_resumed_run_may_change_what_errors_advise_to_change(images, whole, tmp_path):
    """Steps, the images' path and precision may change; another learning rate needs consent and is recorded."""
    moved = shutil.copytree(images, tmp_path / "moved")
    out = tmp_path / "run"
    run(images, out, "SOLVER.MAX_STEPS", "3")
    words = ["DATALOADER.ON_CORRUPT", "skip", "SOLVER.CHECKPOINT_KEEP", "9"]
    words += ["PROBE.KNN_K", "3", "DATA.VAL", f"folder:{images}", "LINEAR.EPOCHS", "90"]  # keys that only probes read
    run(moved, out, "SOLVER.MAX_STEPS", "6", *words)
    results = run(moved, out, *words, "SOLVER.BASE_LR", "0.01", "SOLVER.AMP", "bf16", "SOLVER.CHANGE_RECIPE", "True")
    assert results["steps"] == 12
    changes = ["step 6: SOLVER.AMP 'none' -> 'bf16'", "step 6: SOLVER.BASE_LR 0.03 -> 0.01"]
    assert sorted(results["recipe_changes"]) == changes == sorted(load_newest(out)[1]["recipe_changes"])
    assert [line["iteration"] for line in lines(out, "loss")] == list(range(12))
    assert lines(out, "loss")[6]["lr"] < 0.01 and f"changed after {changes[1]}" in (out / "log.txt").read_text()
    assert "BASE_LR: 0.01" in (out / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["class0/0000.png", "class1/000.png"])
def test_other_images_in_the_same_folder_are_refused(images, whole, tmp_path, name):
    """An image has another name, or another label."""
    data = shutil.copytree(images, tmp_path / "moved")
    (data / "train/class0/000.png").rename(data / "train" / name)
    shutil.copytree(whole, tmp_path / "run")
    refused(lambda: run(data, tmp_path / "run"), data, tmp_path / "run")


@pytest.mark.core
def test_a_stop_in_the_middle_of_an_epoch_resumes_to_the_same_bits(images, whole, tmp_path):
    stopped(lambda: run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2", context=stop_after(5)), "SIGTERM")
    path, saved = load_newest(tmp_path / "run")
    assert 0 < saved["step"] < STEPS_PER_EPOCH
    run(images, tmp_path / "run", "DATALOADER.NUM_WORKERS", "2")
    assert f"resumed from {path.name} at step {saved['step']} of 12" in (tmp_path / "run/log.txt").read_text()
    assert_same_end(whole, tmp_path / "run")


def test_a_stop_while_no_batch_arrives_loses_no_step(images, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_before_batch(patch, 4)
        assert stopped(lambda: run(images, tmp_path / "run"), "SIGTERM") == "no batch arrives"
    assert load_newest(tmp_path / "run")[1]["step"] == 3
    run(images, tmp_path / "run")
    assert_same_end(whole, tmp_path / "run")


@pytest.mark.parametrize("moment", ["before kNN", "before results.json"])
def test_a_kill_around_knn_neither_loses_nor_repeats_its_line(images, whole, tmp_path, monkeypatch, moment):
    killed = mock.Mock(side_effect=KeyboardInterrupt)
    every = ("PROBE.KNN_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "0")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*((train.knn, "evaluate") if moment == "before kNN" else (train, "write_json")), killed)
        run(images, tmp_path / "run", *every)
    run(images, tmp_path / "run", *every)
    assert "resumed from checkpoint_" in (tmp_path / "run/log.txt").read_text()
    expected = [(line["iteration"], line["knn_top1"]) for line in lines(whole, "knn_top1")]
    resumed = [(line["iteration"], line["knn_top1"]) for line in lines(tmp_path / "run", "knn_top1")]
    assert resumed == expected and [iteration for iteration, _ in expected] == [5, 11]


def test_a_loss_that_is_not_finite_names_step_rate_and_images(images, tmp_path):
    """Nothing is left of an earlier run in the folder, either."""
    update_state(tmp_path, stage="pretrain")
    for name in ("results.json", "metrics.json", "events.out.tfevents.1.host"):
        (tmp_path / name).write_text('{"iteration": 0, "loss": 99.0}\n')
    diverging = ("SOLVER.BASE_LR", "1e30", "SOLVER.CHECKPOINT_PERIOD", "1000")
    refused(lambda: run(images, tmp_path, *diverging), "at step 2", "learning rate 9.83e+29", ".png")
    names = {path.name for path in tmp_path.iterdir()}
    assert not names & {"checkpoint_final.pth", "results.json", "events.out.tfevents.1.host"}
    assert "99.0" not in (tmp_path / "metrics.json").read_text()


def test_the_learning_rate_follows_the_batch_where_a_recipe_says_so():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    for batch, reference, lr in (("64", "256", 0.0075), ("512", "256", 0.06), ("512", "0", 0.03)):
        cfg = load_config(None, ["SOLVER.IMS_PER_BATCH", batch, "SOLVER.REFERENCE_BATCH", reference])
        assert set_learning_rate(optimizer, cfg.SOLVER, 0, 10) == pytest.approx(lr)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_the_initial_weights_of_a_run_are_not_needed_on_resume(images, whole, tmp_path, monkeypatch):
    weights = tmp_path / "start/checkpoint_final.pth"
    read = []
    real = objectives.read_backbone
    shutil.copytree(whole, weights.parent)
    monkeypatch.setattr(objectives, "read_backbone", lambda path: read.append(path) or real(path))
    run(images, tmp_path / "run", "MODEL.WEIGHTS", str(weights), "SOLVER.MAX_STEPS", "2")
    weights.unlink()
    assert run(images, tmp_path / "run", "MODEL.WEIGHTS", str(weights), "SOLVER.MAX_STEPS", "3")["steps"] == 3
    assert read == [str(weights)]


def test_both_schedules_run_over_the_epochs_where_max_steps_ends_the_run(images, tmp_path, monkeypatch):
    seen = []
    real = schedule.compute_ema_momentum
    monkeypatch.setattr(
        schedule, "compute_ema_momentum", lambda step, **at: seen.append((step, at)) or real(step, **at)
    )
    run(images, tmp_path, "SOLVER.MAX_STEPS", "3")
    assert [step / settings["total_steps"] for step, settings in seen] == [s / (2 * STEPS_PER_EPOCH) for s in range(3)]
    rates = [schedule.compute_learning_rate(s, STEPS_PER_EPOCH, 2, base_lr=0.03, kind="cosine") for s in range(3)]
    assert [line["lr"] for line in lines(tmp_path, "loss")] == rates


def test_skipped_steps_are_counted_over_a_stop(images, tmp_path, monkeypatch):
    words = ("SOLVER.AMP", "fp16", "MODEL.QUEUE_SIZE", "16", "SOLVER.MAX_STEPS", "4")
    done = [0]
    context = RunContext()
    real_step = train.training_step

    def training_step(state, batch, step):
        weight = state.objective.encoder.network.conv1.weight
        hook = weight.register_hook(lambda grad: hook.remove() or grad * (torch.inf if step in (0, 2) else 1.0))
        done[0] += 1
        if done[0] >= 2:
            context.stop.make("preempted")
        return real_step(state, batch, step)

    # Half precision is slow on a CPU, and the scaler alone decides what is skipped.
    monkeypatch.setattr(objectives, "autocast", lambda amp, device_type: autocast("none", device_type))
    monkeypatch.setattr(train.knn, "evaluate", lambda *_: {})
    monkeypatch.setattr(train, "training_step", training_step)
    stopped(lambda: run(images, tmp_path, *words, context=context))
    assert run(images, tmp_path, *words)["skipped_steps"] == 2
    assert [line["loss_scale"] for line in lines(tmp_path, "loss")] == [2.0**16, 2.0**15, 2.0**15, 2.0**14]
    assert "fp16: 2 of 4 steps were skipped" in (tmp_path / "log.txt").read_text()


def test_a_state_round_trips_and_other_bn_groups_are_reported(caplog):
    first = build_state(config("jcl"))
    with torch.no_grad():
        first.objective.encoder.network.conv1.weight += 1
    second = build_state(config("jcl", "MODEL.BN_GROUPS", "4"))
    first.step = 3
    second.load_state_dict(first.state_dict())
    assert second.step == 3
    first_state = first.objective.model.state_dict()
    second_state = second.objective.model.state_dict()
    torch.testing.assert_close(first_state, second_state, rtol=0, atol=0)
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "computed over 2 groups and now over 4" in warning


def test_weights_that_are_not_finite_are_not_saved():
    poisoned = build_state(config("mocov2"))
    with torch.no_grad():
        poisoned.objective.encoder.network.conv1.weight[0] = float("nan")
    refused(poisoned.state_dict, "step 0", "nothing was saved")


@pytest.mark.parametrize(("changes", "name"), [({"optimizer": None}, "'optimizer'"), ({"state_dict": [1]}, "fit")])
def test_a_checkpoint_that_no_run_can_resume_from_is_one_line(changes, name):
    state = build_state(config("mocov2"))
    saved = {**state.state_dict(), **changes}
    saved = {key: value for key, value in saved.items() if value is not None}
    refused(lambda: state.load_state_dict(saved), "the checkpoint", name, "choose another OUTPUT_DIR")
