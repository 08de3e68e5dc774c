"""A ResNet is found in every file that may hold one; whatever is wrong with it is named."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.common.weights.backbone import read_backbone
from tests.errors import refused
from tests.resnets import moco, resnet_state


@pytest.fixture
def r18() -> dict[str, Tensor]:
    return resnet_state()


@pytest.mark.parametrize("prefix", ["", "_orig_mod.module.", "encoder."])
def test_plain_state_dicts(tmp_path: Path, r18: dict[str, Tensor], prefix: str) -> None:
    half = OrderedDict((prefix + k, v.half() if v.is_floating_point() else v) for k, v in r18.items())
    torch.save(half, tmp_path / "s.pth")
    state = read_backbone(tmp_path / "s.pth").state_dict
    assert state["conv1.weight"].dtype == torch.float32
    assert torch.equal(state["bn1.running_var"], r18["bn1.running_var"].half().float())


def test_torchvision_detector_and_old_file_without_counters(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    state = {f"backbone.body.{k}": v for k, v in r18.items() if not k.startswith("fc.") and "tracked" not in k}
    state |= {"backbone.fpn.inner_blocks.0.0.weight": torch.zeros(1), "rpn.head.x": torch.zeros(1)}
    torch.save({"model": state}, tmp_path / "d.pth")
    found = read_backbone(tmp_path / "d.pth").state_dict
    assert torch.equal(found["layer4.1.bn2.bias"], r18["layer4.1.bn2.bias"])
    assert found["bn1.num_batches_tracked"] == 0


def test_cifar_stem(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    torch.save({**r18, "conv1.weight": torch.randn(64, 3, 3, 3)}, tmp_path / "c.pth")
    assert read_backbone(tmp_path / "c.pth").stem == "cifar"


DAMAGE = {
    "missing": (lambda s: s.pop("layer3.0.bn1.running_var"), "layer3.0.bn1.running_var"),
    "extra": (lambda s: s.update({"layer1.0.conv9.weight": torch.zeros(1)}), "layer1.0.conv9.weight"),
    "shape": (lambda s: s.update({"bn1.bias": torch.zeros(65)}), "bn1.bias has shape (65,)"),
    "integers": (lambda s: s.update({"bn1.bias": torch.zeros(64, dtype=torch.int32)}), "bn1.bias is torch.int32"),
    "block": (lambda s: [s.pop(k) for k in list(s) if k.startswith("layer4.1")], "(2, 2, 2, 1) basic"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, r18: dict[str, Any], kind: str) -> None:
    damage, name = DAMAGE[kind]
    damage(r18)
    torch.save(r18, tmp_path / "bad.pth")
    refused(lambda: read_backbone(tmp_path / "bad.pth"), "bad.pth", name)


def test_another_arch_and_an_encoder_that_is_not_there(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    torch.save({**moco(r18, r18), "arch": "resnet50"}, tmp_path / "a.pth")
    refused(lambda: read_backbone(tmp_path / "a.pth"), "resnet50", "resnet18")
    torch.save({f"module.encoder_q.{k}": v for k, v in r18.items()}, tmp_path / "q.pth")
    torch.save(r18, tmp_path / "s.pth")
    for file in ("q.pth", "s.pth"):
        refused(lambda file=file: read_backbone(tmp_path / file, "key"), file, "key")


def test_a_config_of_another_project_is_kept_as_it_is(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    torch.save({"state_dict": r18, "config": "METHOD: []", "epoch": "1", "arch": [1]}, tmp_path / "w.pth")
    provenance = read_backbone(tmp_path / "w.pth").provenance
    assert provenance["config"] == "METHOD: []" and not {"method", "epoch"} & set(provenance)
