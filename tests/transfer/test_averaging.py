"""A moving average of the weights: by its formula, saved and evaluated, the same through a resume, for both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pretrain.common import interrupt
from pretrain.common.errors import UserError
from tests.transfer.test_train_net import ENGINES, PLACES, stop_in, work
from transfer.averaging import AveragedWeights

KEYS: dict[str, Any] = {
    "SOLVER__CHECKPOINT_PERIOD": 1, "SOLVER__WARMUP_ITERS": 0, "SOLVER__STEPS": (), "SEED": 1, "TEST__EVAL_PERIOD": 0,
}  # fmt: skip


def saved(folder: Path, name: str = "model_final") -> dict[str, Any]:
    return torch.load(folder / f"out/{name}.pth")


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_the_average_of_the_weights_of_a_training_without_it(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, torch.Tensor] = {}
    original = AveragedWeights.__init__

    def noted(self: AveragedWeights, model: nn.Module, decay: float) -> None:
        original(self, model, decay)
        begun.update({name: p.detach().clone() for name, p in self._parameters.items()})

    monkeypatch.setattr(AveragedWeights, "__init__", noted)
    work(tmp_path / "plain", engine, **KEYS, SOLVER__MAX_ITER=3)
    work(tmp_path / "averaged", engine, **KEYS, SOLVER__MAX_ITER=3, SOLVER__EMA=0.15)
    plain = [saved(tmp_path / "plain", f"model_000000{i}")["model"] for i in range(3)]
    content = saved(tmp_path / "averaged")
    assert begun and content["trained"].keys() == begun.keys()
    for name, average in begun.items():
        for weights, decay in zip(plain, (1 / 10, 0.15, 0.15), strict=True):
            average = decay * average + (1 - decay) * weights[name]
        torch.testing.assert_close(content["model"][name], average)
        assert torch.equal(content["trained"][name], plain[2][name])
    for name in plain[2].keys() - begun.keys():
        if not name.endswith(("running_mean", "running_var")):  # of precise BN, for the averages
            assert torch.equal(content["model"][name], plain[2][name]), name
    assert "trained" not in saved(tmp_path / "plain")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_stopped_in_its_evaluation_resumes_to_the_same_bits(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The averages are in the model while it evaluates, and must leave it again."""
    keys = KEYS | {"SOLVER__EMA": 0.5, "TEST__EVAL_PERIOD": 2, "TEST__BEST": "bbox/AP", "SOLVER__MAX_ITER": 4}
    keys |= {"TEST__PRECISE_BN__ENABLED": True, "TEST__PRECISE_BN__NUM_ITER": 2}
    work(tmp_path / "whole", engine, **keys)
    with monkeypatch.context() as patch, pytest.raises(interrupt.Stopped):
        stop_in(patch, PLACES[engine][0], 1)
        work(tmp_path / "parts", engine, **keys)
    interrupt.clear()
    work(tmp_path / "parts", engine, "--resume", **keys)
    for name in ("model_final", "model_best"):
        whole, parts = saved(tmp_path / "whole", name), saved(tmp_path / "parts", name)
        for kind in ("model", "trained"):
            assert all(torch.equal(value, parts[kind][key]) for key, value in whole[kind].items()), (name, kind)
    with pytest.raises(UserError, match=r"a different config \(SOLVER\.EMA 0\.5 -> 0\.6\)"):
        work(tmp_path / "parts", engine, "--resume", **keys | {"SOLVER__EMA": 0.6})


def test_applied_twice_is_as_before() -> None:
    model = nn.Linear(2, 2)
    average = AveragedWeights(model, 0.9)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    average.update(0)
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), before + 0.9)
        assert torch.equal(average.saved(model.state_dict())["trained"]["weight"], before + 1)
    assert torch.equal(model.weight.detach(), before + 1)
    inside = average.saved(model.state_dict())
    torch.testing.assert_close(inside["model"]["weight"], before + 0.9)


def test_a_decay_of_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"SOLVER\.EMA is 1\.0; it must be at least 0 and below 1"):
        work(tmp_path, "torchvision", SOLVER__EMA=1.0)
