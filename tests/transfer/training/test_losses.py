"""Losses are read one iteration late, and one that is not finite ends the run before its weights are used."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from pretrain.common.run.metrics import read_metrics
from pretrain.common.run.state import RunContext
from tests.errors import refused
from tests.transfer.test_train_net import ENGINES, work
from transfer import step
from transfer.training.losses import SentLosses

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def break_loss(patch: pytest.MonkeyPatch, iteration: int, context: RunContext | None = None) -> None:
    """Let a loss of an iteration, and so its gradients, be NaN, and request a stop of ``context`` there."""
    compute = step.accumulate_losses
    batches = []

    def compute_and_break(model, batch, *args) -> dict[str, Tensor]:
        losses = compute(model, batch, *args)
        batches.append([image["file_name"] for image in batch])
        if len(batches) == iteration + 1:
            losses["loss_cls"] = losses["loss_cls"] * torch.nan
            if context:
                context.stop.make("SIGTERM")
        return losses

    patch.setattr(step, "accumulate_losses", compute_and_break)


CASES = {  # the iteration -> the checkpoints before it
    "the next iteration fails": (0, []),
    "a checkpoint and an evaluation are due": (1, []),
    "a stop": (2, ["model_0000001.pth"]),
    "the last iteration": (3, ["model_0000001.pth"]),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("iteration", "saved"), CASES.values(), ids=CASES)
def test_a_loss_that_is_not_finite_is_named_before_its_weights_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, iteration: int, saved: list[str]
) -> None:
    keys = {"SOLVER__MAX_ITER": 4, "SOLVER__CHECKPOINT_PERIOD": 2, "TEST__EVAL_PERIOD": 2, "SOLVER__BASE_LR": 0.001}
    keys |= {"SOLVER__WARMUP_ITERS": 0, "SOLVER__STEPS": (), "SEED": 1}
    context = RunContext() if iteration == 2 else None
    break_loss(monkeypatch, iteration, context)
    named = (f"diverged at iteration {iteration} (learning rate 0.001): ", "loss_cls nan", "SOLVER.BASE_LR")
    text = refused(lambda: work(tmp_path, engine, context=context, **keys), *named)
    images = re.search(r"images: (.*);", text)
    assert images and len(images[1].split(", ")) == 2 and all(map(Path.is_file, map(Path, images[1].split(", "))))
    out = tmp_path / "out"
    assert sorted(path.name for path in out.glob("*.pth")) == saved
    assert sum("bbox/AP50" in line for line in read_metrics(out)) == len(saved)  # evaluations


def test_losses_are_read_after_the_next_iterations_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    read = SentLosses.read

    def read_and_record(sent: SentLosses) -> tuple[dict[str, float], float]:
        events.append(f"read {sent.iteration}")
        return read(sent)

    monkeypatch.setattr(SentLosses, "read", read_and_record)
    hook = register_optimizer_step_post_hook(lambda *_: events.append("step"))
    try:
        work(tmp_path, "torchvision", SOLVER__MAX_ITER=4, SOLVER__CHECKPOINT_PERIOD=3, DATASETS__TEST=())
    finally:
        hook.remove()
    assert events == ["step", "step", "read 0", "step", "read 1", "read 2", "step", "read 3"]  # checkpoints after 3, 4
