"""A run folder belongs to one run: who may enter it, what a fresh start finds, what a resumed run needs."""

import time

import pytest
import torch

from pretrain import schedule, train
from pretrain.common import checkpoint, interrupt
from pretrain.common.errors import UserError
from pretrain.common.lock import claim
from pretrain.common.run_folder import begin
from pretrain.model import objectives
from tests.pretrain.runs import STEPS_PER_EPOCH, lines, run

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

SHORT = ("SOLVER.MAX_STEPS", "3")


@pytest.fixture(scope="module")
def stopped(images, tmp_path_factory):
    """A run stopped after its second step."""
    output = tmp_path_factory.mktemp("runs") / "stopped"
    calls = iter([""] * 2 + ["preempted"] * 99)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupt, "stop_requested", lambda: next(calls))
        with pytest.raises(interrupt.Stopped):
            run(images, output, *SHORT)
    return output


def _copy_of(folder, to, **changes):
    """A run folder whose one checkpoint is ``folder``'s with other values; None leaves a key out."""
    state = {**checkpoint.newest(folder)[1], **changes}
    to.mkdir()
    checkpoint.save(
        checkpoint.path_of_step(to, state["step"]), {key: value for key, value in state.items() if value is not None}
    )
    return to


def test_a_folder_in_use_is_refused_and_left_alone(images, tmp_path):
    with claim(tmp_path, "the owner's work"), pytest.raises(UserError, match="in use: the owner's work on"):
        run(images, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_fresh_start_leaves_nothing_of_another_run(images, tmp_path):
    begin(tmp_path, "pretrain")
    for name in ("results.json", "metrics.json", "events.out.tfevents.1.host"):
        (tmp_path / name).write_text('{"iteration": 0, "loss": 99.0}\n')
    with pytest.raises(UserError, match="not finite"):  # ends before it writes its own results
        run(images, tmp_path, "SOLVER.BASE_LR", "1e30", "SOLVER.CHECKPOINT_PERIOD", "1000")
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "events.out.tfevents.1.host").exists()
    assert "99.0" not in (tmp_path / "metrics.json").read_text()


def test_what_only_probes_read_may_change_on_resume(images, stopped, tmp_path):
    folder = _copy_of(stopped, tmp_path / "run")
    words = ("PROBE.KNN_K", "3", "DATA.VAL", f"folder:{images}", "DATA.PROBE_TRAIN", f"folder:{images}")
    assert run(images, folder, *words, "LINEAR.EPOCHS", "5", *SHORT)["steps"] == 3
    assert "resumed from checkpoint_0000000" in (folder / "log.txt").read_text()


def test_the_weights_a_run_began_with_are_not_needed_on_resume(images, stopped, tmp_path, monkeypatch):
    weights = tmp_path / "start.pth"
    weights.write_bytes(next(stopped.glob("checkpoint_*.pth")).read_bytes())
    words = ("MODEL.WEIGHTS", str(weights), *SHORT)
    read = []
    real = objectives.read_backbone
    monkeypatch.setattr(objectives, "read_backbone", lambda path: read.append(path) or real(path))
    calls = iter([""] * 2 + ["preempted"] * 99)
    with monkeypatch.context() as patch:
        patch.setattr(interrupt, "stop_requested", lambda: next(calls))
        with pytest.raises(interrupt.Stopped):
            run(images, tmp_path / "run", *words)
    assert read == [str(weights)]
    weights.unlink()
    assert run(images, tmp_path / "run", *words)["steps"] == 3


def test_a_checkpoint_is_written_before_knn(images, tmp_path, monkeypatch):
    monkeypatch.setattr(train.knn, "evaluate", lambda *_: pytest.fail("killed"))
    words = ("PROBE.KNN_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "1000")
    with pytest.raises(pytest.fail.Exception):
        run(images, tmp_path, *words)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found[1]["step"] == STEPS_PER_EPOCH


def test_checkpoints_and_knn_count_in_no_rate(images, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def taking(seconds, function):
        def timed(*args):
            now[0] += seconds
            return function(*args)

        return timed

    monkeypatch.setattr(train.Watch, "step", taking(2.0, train.Watch.step))
    monkeypatch.setattr(checkpoint, "save", taking(1000.0, lambda path, *_: path.touch()))
    monkeypatch.setattr(
        train.knn, "evaluate", taking(1000.0, lambda *_: {"top1": 0.0, "train_images": 1, "val_images": 1})
    )
    run(images, tmp_path, "PROBE.KNN_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "1", "SOLVER.MAX_STEPS", "7")
    rates = [(line["images_per_second"], line["eta_seconds"]) for line in lines(tmp_path, "loss")]
    assert rates == [(4.0, 2.0 * (6 - step)) for step in range(7)]  # kNN comes after the sixth


def test_both_schedules_run_over_the_epochs_where_max_steps_ends_the_run(images, tmp_path, monkeypatch):
    seen, real = [], schedule.ema_momentum
    monkeypatch.setattr(schedule, "ema_momentum", lambda *args: seen.append(args[0]) or real(*args))
    run(images, tmp_path, "SOLVER.MAX_STEPS", "3")
    assert seen == [step / (2 * STEPS_PER_EPOCH) for step in range(3)]
    rates = [schedule.learning_rate(s, STEPS_PER_EPOCH, 2, base_lr=0.03, kind="cosine") for s in range(3)]
    assert [line["lr"] for line in lines(tmp_path, "loss")] == rates


def test_skipped_steps_are_counted_over_a_stop(images, tmp_path, monkeypatch):
    words = ("SOLVER.AMP", "fp16", "MODEL.QUEUE_SIZE", "16", "SOLVER.MAX_STEPS", "4")
    done, real_embed, real_step = [0], objectives.embed, train.training_step

    def training_step(training, batch, step):
        weight = training.objective.encoder.conv1.weight
        hook = weight.register_hook(lambda grad: hook.remove() or grad * (torch.inf if step in (0, 2) else 1.0))
        done[0] += 1
        return real_step(training, batch, step)

    # Half precision is slow on a CPU, and the scaler alone decides what is skipped.
    monkeypatch.setattr(
        objectives, "embed", lambda encoder, x, mean, std, **_: real_embed(encoder, x, mean=mean, std=std)
    )
    monkeypatch.setattr(train.knn, "evaluate", lambda *_: {})
    monkeypatch.setattr(train, "training_step", training_step)
    with monkeypatch.context() as patch:
        patch.setattr(interrupt, "stop_requested", lambda: "preempted" if done[0] >= 2 else "")
        with pytest.raises(interrupt.Stopped):
            run(images, tmp_path, *words)
    assert run(images, tmp_path, *words)["skipped_steps"] == 2
    assert [line["loss_scale"] for line in lines(tmp_path, "loss")] == [2.0**16, 2.0**15, 2.0**15, 2.0**14]
    assert "fp16: 2 of 4 steps were skipped" in (tmp_path / "log.txt").read_text()
