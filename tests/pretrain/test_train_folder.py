"""A run folder belongs to one run: other runs are refused, and so are checkpoints that do not fit."""

import pytest
import torch

from pretrain import schedule, train
from pretrain.common import interrupt
from pretrain.common.errors import UserError
from pretrain.common.run.state import update_state
from pretrain.common.weights.file import tensor_digest
from pretrain.model import objectives
from pretrain.state import build_checkpoint, restore_checkpoint
from tests.errors import refused
from tests.pretrain.runs import STEPS_PER_EPOCH, build_state, lines, run
from tests.pretrain.test_steps import config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def test_a_fresh_start_leaves_nothing_of_another_run(images, tmp_path):
    update_state(tmp_path, stage="pretrain")
    for name in ("results.json", "metrics.json", "events.out.tfevents.1.host"):
        (tmp_path / name).write_text('{"iteration": 0, "loss": 99.0}\n')
    with pytest.raises(UserError, match="not finite"):  # ends before it writes its own results
        run(images, tmp_path, "SOLVER.BASE_LR", "1e30", "SOLVER.CHECKPOINT_PERIOD", "1000")
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "events.out.tfevents.1.host").exists()
    assert "99.0" not in (tmp_path / "metrics.json").read_text()


def test_the_initial_weights_of_a_run_are_not_needed_on_resume(images, tmp_path, monkeypatch):
    weights = tmp_path / "start/checkpoint_final.pth"
    read = []
    real = objectives.read_backbone
    run(images, weights.parent, "SOLVER.MAX_STEPS", "1")
    monkeypatch.setattr(objectives, "read_backbone", lambda path: read.append(path) or real(path))
    run(images, tmp_path / "run", "MODEL.WEIGHTS", str(weights), "SOLVER.MAX_STEPS", "2")
    weights.unlink()
    assert run(images, tmp_path / "run", "MODEL.WEIGHTS", str(weights), "SOLVER.MAX_STEPS", "3")["steps"] == 3
    assert read == [str(weights)]


def test_both_schedules_run_over_the_epochs_where_max_steps_ends_the_run(images, tmp_path, monkeypatch):
    seen = []
    real = schedule.ema_momentum
    monkeypatch.setattr(schedule, "ema_momentum", lambda *args: seen.append(args[0]) or real(*args))
    run(images, tmp_path, "SOLVER.MAX_STEPS", "3")
    assert seen == [step / (2 * STEPS_PER_EPOCH) for step in range(3)]
    rates = [schedule.learning_rate(s, STEPS_PER_EPOCH, 2, base_lr=0.03, kind="cosine") for s in range(3)]
    assert [line["lr"] for line in lines(tmp_path, "loss")] == rates


def test_skipped_steps_are_counted_over_a_stop(images, tmp_path, monkeypatch):
    words = ("SOLVER.AMP", "fp16", "MODEL.QUEUE_SIZE", "16", "SOLVER.MAX_STEPS", "4")
    done = [0]
    real_embed = objectives.embed
    real_step = train.training_step

    def training_step(state, batch, step):
        weight = state.objective.encoder.conv1.weight
        hook = weight.register_hook(lambda grad: hook.remove() or grad * (torch.inf if step in (0, 2) else 1.0))
        done[0] += 1
        return real_step(state, batch, step)

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


def digest(model: torch.nn.Module) -> str:
    return tensor_digest(*model.state_dict().values())


def test_a_state_round_trips_and_other_bn_groups_are_reported(caplog):
    first = build_state(config("jcl"))
    with torch.no_grad():
        first.objective.encoder.conv1.weight += 1
    second = build_state(config("jcl", "MODEL.BN_GROUPS", "4"))
    assert digest(first.objective.model) != digest(second.objective.model)
    assert restore_checkpoint(second, build_checkpoint(first, config("jcl"), 3, 9, 0)) == 3
    assert digest(first.objective.model) == digest(second.objective.model)
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "computed over 2 groups and now over 4" in warning


def test_weights_that_are_not_finite_are_not_saved():
    poisoned = build_state(config("mocov2"))
    with torch.no_grad():
        poisoned.objective.encoder.conv1.weight[0] = float("nan")
    refused(lambda: build_checkpoint(poisoned, config("mocov2"), 1, 9, 0), "step 1", "nothing was saved")


@pytest.mark.parametrize(("changes", "name"), [({"optimizer": None}, "'optimizer'"), ({"state_dict": [1]}, "fit")])
def test_a_checkpoint_that_no_run_can_resume_from_is_one_line(changes, name):
    state = build_state(config("mocov2"))
    saved = {**build_checkpoint(state, config("mocov2"), 1, 9, 0), **changes}
    saved = {key: value for key, value in saved.items() if value is not None}
    refused(lambda: restore_checkpoint(state, saved), "the checkpoint", name, "choose another OUTPUT_DIR")
