"""Checkpoints that fit, and those that do not."""

import pytest
import torch

from pretrain.common.errors import UserError
from pretrain.state import digest, from_checkpoint, to_checkpoint
from tests.pretrain.runs import training
from tests.pretrain.test_steps import config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def test_a_state_round_trips_and_other_bn_groups_are_reported():
    lines: list[str] = []
    first, cfg = training(config("jcl")), config("jcl", "MODEL.BN_GROUPS", "4")
    with torch.no_grad():
        first.objective.encoder.conv1.weight += 1
    second = training(cfg)
    assert digest(first.objective.model) != digest(second.objective.model)
    assert from_checkpoint(second, to_checkpoint(first, config("jcl"), 3, 9, 0), lines.append) == 3
    assert digest(first.objective.model) == digest(second.objective.model)
    assert len(lines) == 1 and "batch-norm statistics over 2 parts of the batch and continues with 4" in lines[0]


def test_weights_that_are_not_finite_are_not_saved():
    poisoned = training(config("mocov2"))
    with torch.no_grad():
        poisoned.objective.encoder.conv1.weight[0] = float("nan")
    with pytest.raises(UserError, match="weights are not finite after step 1; nothing was saved"):
        to_checkpoint(poisoned, config("mocov2"), 1, 9, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"optimizer": None},
            "the checkpoint lacks 'optimizer', so no run can resume from it; choose another OUTPUT_DIR",
        ),
        ({"state_dict": [1]}, "the checkpoint does not fit this config: .*; choose another OUTPUT_DIR"),
        ({"step": -4}, "the checkpoint does not fit this config: its step is -4; choose another OUTPUT_DIR"),
        ({"step": float("inf")}, "the checkpoint does not fit this config: .*; choose another OUTPUT_DIR"),
        ({"bn_groups": torch.ones(2)}, "the checkpoint does not fit this config: .*; choose another OUTPUT_DIR"),
    ],
)
def test_a_checkpoint_that_no_run_can_resume_from_is_one_line(changes, says):
    one = training(config("mocov2"))
    state = {**to_checkpoint(one, config("mocov2"), 1, 9, 0), **changes}
    state = {key: value for key, value in state.items() if value is not None}
    with pytest.raises(UserError, match=says) as caught:
        from_checkpoint(one, state, lambda _: None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["encoder_q.conv1.weight", "encoder_k.bn1.running_var", "queue"])
def test_a_checkpoint_with_weights_that_are_not_finite_is_not_resumed(name):
    one, other = training(config("mocov2")), training(config("mocov2"))
    state = to_checkpoint(one, config("mocov2"), 1, 9, 0)
    state["state_dict"][f"module.{name}"].view(-1)[0] = float("inf")
    with pytest.raises(UserError, match=r"holds weights that are not finite.*; choose another OUTPUT_DIR"):
        from_checkpoint(other, state, lambda _: None)
