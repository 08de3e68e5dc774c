"""Checkpoints that fit, and those that do not."""

import pytest
import torch

from pretrain.common.weights_file import tensor_digest
from pretrain.state import from_checkpoint, to_checkpoint
from tests.errors import refused
from tests.pretrain.runs import training
from tests.pretrain.test_steps import config

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def digest(model: torch.nn.Module) -> str:
    return tensor_digest(*model.state_dict().values())


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
    refused(lambda: to_checkpoint(poisoned, config("mocov2"), 1, 9, 0), "step 1", "nothing was saved")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"optimizer": None}, "'optimizer'"),
        ({"state_dict": [1]}, "fit"),
        ({"step": torch.inf}, "fit"),
    ],
)
def test_a_checkpoint_that_no_run_can_resume_from_is_one_line(changes, name):
    one = training(config("mocov2"))
    state = {**to_checkpoint(one, config("mocov2"), 1, 9, 0), **changes}
    state = {key: value for key, value in state.items() if value is not None}
    refused(lambda: from_checkpoint(one, state, lambda _: None), "the checkpoint", name, "choose another OUTPUT_DIR")
