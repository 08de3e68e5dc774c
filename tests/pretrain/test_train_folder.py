"""A run folder belongs to one run: who may enter it, what a fresh start finds, what a resumed run needs."""

import json
import time

import pytest
import torch

from pretrain import learner, train
from pretrain.common import checkpoint, interrupt
from pretrain.common.errors import UserError
from pretrain.common.lock import claim
from pretrain.common.run_folder import begin
from tests.pretrain.runs import STEPS_PER_EPOCH, run


@pytest.fixture(scope="module")
def stopped(images, tmp_path_factory):
    """A run stopped after its second step."""
    output = tmp_path_factory.mktemp("runs") / "stopped"
    calls = iter([""] * 2 + ["preempted"] * 99)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupt, "stop_requested", lambda: next(calls))
        with pytest.raises(interrupt.Stopped):
            run(images, output)
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


def test_the_folder_is_released_after_an_error(images, tmp_path):
    for _ in range(2):
        with pytest.raises(UserError, match="/nowhere"):
            run(images, tmp_path, "DATA.TRAIN", "folder:/nowhere")
    assert not list(tmp_path.glob(".*owner*"))


def test_another_stages_folder_is_refused(images, tmp_path):
    begin(tmp_path, "linear")
    with pytest.raises(UserError, match="is the run folder of linear, not of pretrain; choose another OUTPUT_DIR"):
        run(images, tmp_path)


def test_a_fresh_start_leaves_nothing_of_another_run(images, tmp_path):
    begin(tmp_path, "pretrain")
    for name in ("results.json", "metrics.json", "events.out.tfevents.1.host"):
        (tmp_path / name).write_text('{"iteration": 0, "loss": 99.0}\n')
    with pytest.raises(UserError, match="not finite"):  # ends before it writes results of its own
        run(images, tmp_path, "SOLVER.BASE_LR", "1e30", "SOLVER.CHECKPOINT_PERIOD", "1000")
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "events.out.tfevents.1.host").exists()
    assert "99.0" not in (tmp_path / "metrics.json").read_text()


def test_what_only_probes_read_may_change_on_resume(images, stopped, tmp_path):
    folder = _copy_of(stopped, tmp_path / "run")
    words = ("PROBE.KNN_K", "3", "DATA.VAL", f"folder:{images}", "DATA.PROBE_TRAIN", f"folder:{images}")
    assert run(images, folder, *words, "LINEAR.EPOCHS", "5")["steps"] == 2 * STEPS_PER_EPOCH
    assert "resumed from checkpoint_00000002.pth" in (folder / "log.txt").read_text()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": None}, r"00000002.pth keeps no config, so no run of pretraining wrote it"),
        (
            {"config": "SOLVER: {GONE: 1}"},
            r"the config in .*00000002.pth is not one of this version \(Non-existent.*GONE",
        ),
        ({"optimizer": None}, r"the checkpoint lacks 'optimizer', so no run can go on from it; choose another OUTPUT_"),
        ({"random_states": [1]}, r"the checkpoint does not fit this config: .*; choose another OUTPUT_DIR"),
        ({"state_dict": [1]}, r"the checkpoint does not fit this config: .*; choose another OUTPUT_DIR"),
    ],
)
def test_a_checkpoint_that_no_run_can_go_on_from_is_one_line(images, stopped, tmp_path, changes, says):
    folder = _copy_of(stopped, tmp_path / "run", **changes)
    with pytest.raises(UserError, match=says) as caught:
        run(images, folder)
    assert "\n" not in str(caught.value)


def test_the_weights_a_run_began_with_are_not_needed_on_resume(images, stopped, tmp_path, monkeypatch):
    weights = tmp_path / "start.pth"
    weights.write_bytes(next(stopped.glob("checkpoint_*.pth")).read_bytes())
    words = ("MODEL.WEIGHTS", str(weights))
    read = []
    real = learner.load_backbone
    monkeypatch.setattr(learner, "load_backbone", lambda path: read.append(path) or real(path))
    calls = iter([""] * 2 + ["preempted"] * 99)
    with monkeypatch.context() as patch:
        patch.setattr(interrupt, "stop_requested", lambda: next(calls))
        with pytest.raises(interrupt.Stopped):
            run(images, tmp_path / "run", *words)
    assert read == [str(weights)]
    weights.unlink()
    assert run(images, tmp_path / "run", *words)["steps"] == 2 * STEPS_PER_EPOCH


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

    monkeypatch.setattr(train.Learner, "step", taking(2.0, train.Learner.step))
    monkeypatch.setattr(checkpoint, "save", taking(1000.0, checkpoint.save))
    monkeypatch.setattr(train.knn, "evaluate", taking(1000.0, lambda *_: {"top1": 0.0, "train_images": 1}))
    run(images, tmp_path, "PROBE.KNN_PERIOD", "1", "SOLVER.CHECKPOINT_PERIOD", "1")
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    rates = [(line["images_per_second"], line["eta_seconds"]) for line in lines if "loss" in line]
    assert rates == [(4.0, 2.0 * (11 - step)) for step in range(2 * STEPS_PER_EPOCH)]


def test_both_schedules_run_over_the_epochs_where_max_steps_ends_the_run(images, tmp_path, monkeypatch):
    seen = []
    real = train.Learner.step

    def step(self, batch, step, progress, *rest):
        seen.append((progress, rest[1]))
        return real(self, batch, step, progress, *rest)

    monkeypatch.setattr(train.Learner, "step", step)
    run(images, tmp_path, "SOLVER.MAX_STEPS", "3")
    steps = 2 * STEPS_PER_EPOCH
    assert [progress for progress, _ in seen] == [step / steps for step in range(3)]
    assert [rate for _, rate in seen] == [0.03 * train.schedule.cosine(step / steps) for step in range(3)]


def test_skipped_steps_are_counted_over_a_stop_and_many_in_a_row_end_the_run(images, tmp_path, monkeypatch):
    assert learner._MAX_SKIPPED == 50
    words = ("SOLVER.AMP", "fp16", "MODEL.QUEUE_SIZE", "16", "SOLVER.CHECKPOINT_PERIOD", "1")
    overflow = [0, 2]  # the steps whose gradients overflow
    done = [0]
    real, real_init = train.Learner.step, train.Learner.__init__

    def init(self, *args, **keys):
        real_init(self, *args, **keys)
        self.amp_dtype = None  # half precision is slow on a CPU; the scaler alone decides what is skipped

    def step(self, *args):
        weight = self.encoder.conv1.weight
        hook = weight.register_hook(lambda grad: grad * (torch.inf if args[1] in overflow else 1.0))
        objective = real(self, *args)
        hook.remove()
        done[0] += 1
        return objective

    monkeypatch.setattr(train.Learner, "step", step)
    monkeypatch.setattr(train.Learner, "__init__", init)
    with monkeypatch.context() as patch:
        patch.setattr(interrupt, "stop_requested", lambda: "preempted" if done[0] >= 2 else "")
        with pytest.raises(interrupt.Stopped):
            run(images, tmp_path / "run", *words, "SOLVER.MAX_STEPS", "4")
    results = run(images, tmp_path / "run", *words, "SOLVER.MAX_STEPS", "4")
    assert results["skipped_steps"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.json").read_text().splitlines()]
    scales = [line["loss_scale"] for line in lines if "loss" in line]
    assert scales == [2.0**15, 2.0**15, 2.0**14, 2.0**14]
    assert "fp16: 2 of 4 steps were skipped" in (tmp_path / "run/log.txt").read_text()

    overflow[:] = range(100)
    monkeypatch.setattr(learner, "_MAX_SKIPPED", 3)
    with pytest.raises(
        UserError, match=r"fp16: the 3 steps up to step 2 were all skipped.* loss scale of 1.64e\+04; set"
    ):
        run(images, tmp_path / "all", *words)
