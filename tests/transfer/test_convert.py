"""Conversion both ways: every depth and format, every source, every kind of damage."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from pretrain.common.backbone_file import load_backbone
from pretrain.common.errors import UserError
from pretrain.common.weights_file import sha256
from tools import convert_to_d2
from transfer import proof
from transfer.convert import convert
from transfer.resnet_names import PREFIX, names, to_detectron2, to_torchvision
from transfer.weights import read_weights

ARCHS = ("resnet18", "resnet34", "resnet50", "resnet101")


def resnet_state(arch: str = "resnet18", seed: int = 0, head: bool = True) -> dict[str, Tensor]:
    """A random ResNet whose BN has statistics of its own (defaults would hide a swap)."""
    torch.manual_seed(seed)
    model = getattr(torchvision.models, arch)(weights=None, num_classes=8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, std=0.1)
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)
            module.num_batches_tracked.fill_(7)
    return {k: v for k, v in model.state_dict().items() if head or not k.startswith("fc.")}


def moco(query: dict[str, Tensor], key: dict[str, Tensor], wrapper: str = "") -> dict[str, Any]:
    state = {f"module.encoder_q.{wrapper}{k}": v for k, v in query.items()}
    state |= {f"module.encoder_k.{wrapper}{k}": v for k, v in key.items()}
    state |= {"module.queue": torch.zeros(8, 16), "module.queue_ptr": torch.zeros(1, dtype=torch.long)}
    return {"epoch": 200, "arch": "resnet18", "state_dict": state, "optimizer": {"state": {}, "param_groups": []}}


@pytest.fixture
def r18() -> dict[str, Tensor]:
    return resnet_state()


@pytest.mark.parametrize("arch", ARCHS)
def test_names_are_a_bijection_onto_detectron2s(arch: str) -> None:
    table = names(arch)
    wanted = [name for name in getattr(torchvision.models, arch)().state_dict() if not name.startswith("fc.")]
    assert list(table) == wanted
    assert len(set(table.values())) == len(table)
    assert to_torchvision(to_detectron2({name: name for name in table}, arch)) == {name: name for name in table}


@pytest.mark.detectron2
@pytest.mark.parametrize("arch", ARCHS)
def test_names_are_those_of_detectron2(arch: str) -> None:
    from detectron2.modeling.backbone.resnet import BasicStem, ResNet

    stages = ResNet.make_default_stages(int(arch[6:]), norm="BN", **({"stride_in_1x1": False} if len(arch) > 8 else {}))
    theirs = ResNet(BasicStem(norm="BN"), stages, out_features=list(proof.STAGES)).state_dict()
    assert set(names(arch).values()) == set(theirs)


@pytest.mark.parametrize(
    ("arch", "suffix"),
    [
        ("resnet18", ".pkl"),
        ("resnet34", ".pth"),
        ("resnet50", ".safetensors"),
        pytest.param("resnet50", ".pkl", marks=pytest.mark.slow),
        pytest.param("resnet101", ".pth", marks=pytest.mark.slow),
    ],
)
def test_round_trip(tmp_path: Path, arch: str, suffix: str) -> None:
    state = resnet_state(arch)
    torch.save(state, tmp_path / "source.pth")
    done = convert(tmp_path / "source.pth", tmp_path / f"d2{suffix}")
    assert max(done.errors.values()) <= 1e-4
    assert set(done.errors) == {"res2", "res3", "res4", "res5"}
    back = convert(tmp_path / f"d2{suffix}", tmp_path / "back.pth", back=True)
    assert back.provenance["source_sha256"] == sha256(tmp_path / f"d2{suffix}")
    plain = torch.load(tmp_path / "back.pth")
    assert set(plain) == {name for name in state if not name.startswith("fc.")}
    for name, tensor in plain.items():
        assert torch.equal(tensor, state[name]), name


def test_provenance_is_inside_and_beside(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    content = {**moco(r18, r18), "step": 1000, "config": "METHOD:\n  NAME: jcl\n"}
    torch.save(content, tmp_path / "run.pth")
    convert(tmp_path / "run.pth", tmp_path / "w.pth")
    inside = torch.load(tmp_path / "w.pth")["provenance"]
    assert inside["source"] == "run.pth" and inside["source_sha256"] == sha256(tmp_path / "run.pth")
    assert (inside["method"], inside["epoch"], inside["step"], inside["encoder"]) == ("jcl", 200, 1000, "query")
    assert inside["config"] == content["config"]
    assert inside["MODEL.RESNETS.STRIDE_IN_1X1"] is False and inside["MODEL.RESNETS.RES2_OUT_CHANNELS"] == 64
    beside = json.loads((tmp_path / "w.pth.json").read_text())
    assert beside == {**inside, "file_sha256": sha256(tmp_path / "w.pth")}
    for suffix in (".pkl", ".safetensors"):
        convert(tmp_path / "run.pth", tmp_path / f"w{suffix}")
        assert read_weights(tmp_path / f"w{suffix}").provenance == inside


@pytest.mark.parametrize("encoder", ["query", "key"])
@pytest.mark.parametrize("wrapper", ["", "_orig_mod."])
def test_moco_checkpoint(tmp_path: Path, encoder: str, wrapper: str) -> None:
    both = {"query": resnet_state(seed=1), "key": resnet_state(seed=2)}
    torch.save(moco(both["query"], both["key"], wrapper), tmp_path / "c.pth.tar", _use_new_zipfile_serialization=False)
    found = load_backbone(tmp_path / "c.pth.tar", encoder)
    assert found.arch == "resnet18" and found.stem == "imagenet" and found.provenance["encoder"] == encoder
    assert torch.equal(found.state_dict["layer3.1.conv2.weight"], both[encoder]["layer3.1.conv2.weight"])
    assert not any(name.startswith("fc") for name in found.state_dict)


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "_orig_mod.module.", "encoder."])
def test_plain_state_dicts(tmp_path: Path, r18: dict[str, Tensor], prefix: str) -> None:
    torch.save(
        OrderedDict((prefix + k, v.half() if v.is_floating_point() else v) for k, v in r18.items()), tmp_path / "s.pth"
    )
    state = load_backbone(tmp_path / "s.pth").state_dict
    assert state["conv1.weight"].dtype == torch.float32
    assert torch.equal(state["bn1.running_var"], r18["bn1.running_var"].half().float())


def test_torchvision_detector_and_old_counterless_file(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    state = {f"backbone.body.{k}": v for k, v in r18.items() if not k.startswith("fc.") and "tracked" not in k}
    state |= {"backbone.fpn.inner_blocks.0.0.weight": torch.zeros(1), "rpn.head.x": torch.zeros(1)}
    torch.save({"model": state}, tmp_path / "d.pth")
    found = load_backbone(tmp_path / "d.pth").state_dict
    assert torch.equal(found["layer4.1.bn2.bias"], r18["layer4.1.bn2.bias"])
    assert found["bn1.num_batches_tracked"] == 0


def test_pickle_of_arrays_and_safetensors_sources(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    (tmp_path / "a.pkl").write_bytes(pickle.dumps({k: v.numpy() for k, v in r18.items()}))
    save_file(r18, tmp_path / "a.safetensors")
    for file in ("a.pkl", "a.safetensors"):
        assert torch.equal(load_backbone(tmp_path / file).state_dict["conv1.weight"], r18["conv1.weight"])


@pytest.mark.parametrize("name", ["x.pth", "x.pkl"])
def test_unsafe_pickles_are_refused_unless_allowed(tmp_path: Path, r18: dict[str, Tensor], name: str) -> None:
    import argparse

    content = {"state_dict": r18, "args": argparse.Namespace(lr=0.03)}
    if name.endswith("pth"):
        torch.save(content, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(
            pickle.dumps({"model": {k: v.numpy() for k, v in r18.items()}, "args": content["args"]})
        )
    with pytest.raises(UserError, match="--unsafe-pickle"):
        load_backbone(tmp_path / name)
    assert load_backbone(tmp_path / name, unsafe_pickle=True).arch == "resnet18"


DAMAGE = {
    "missing": (lambda s: s.pop("layer3.0.bn1.running_var"), "layer3.0.bn1.running_var"),
    "extra": (lambda s: s.update({"layer1.0.conv9.weight": torch.zeros(1)}), "layer1.0.conv9.weight"),
    "shape": (lambda s: s.update({"bn1.bias": torch.zeros(65)}), r"bn1.bias has shape \(65,\)"),
    "transposed": (
        lambda s: s.update({"layer2.0.conv1.weight": s["layer2.0.conv1.weight"].transpose(0, 1)}),
        "transposed",
    ),
    "nan": (
        lambda s: s["layer4.1.conv1.weight"].view(-1)[3:4].fill_(float("nan")),
        "layer4.1.conv1.weight has 1 values",
    ),
    "variance": (lambda s: s["bn1.running_var"].fill_(-1), "bn1.running_var has a variance below 0"),
    "integers": (lambda s: s.update({"bn1.bias": torch.zeros(64, dtype=torch.int32)}), "bn1.bias is torch.int32"),
    "block": (lambda s: [s.pop(k) for k in list(s) if k.startswith("layer4.1")], r"\(2, 2, 2, 1\) basic"),
    "prefix": (lambda s: [s.update({"net." + k: s.pop(k)}) for k in list(s)], "holds no ResNet"),
    "text": (lambda s: s.update({"bn1.bias": "text"}), "bn1.bias is a str"),
    "unknown head": (lambda s: s.update({"surprise.weight": torch.zeros(1)}), "surprise.weight"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, r18: dict[str, Any], kind: str) -> None:
    spoil, message = DAMAGE[kind]
    spoil(r18)
    torch.save(r18, tmp_path / "bad.pth")
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "bad.pth", tmp_path / "out.pth")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.pth"]


def test_wrong_arch_missing_key_encoder_and_truncation(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    torch.save({**moco(r18, r18), "arch": "resnet50"}, tmp_path / "a.pth")
    with pytest.raises(UserError, match="says arch resnet50, but its tensors are those of a resnet18"):
        load_backbone(tmp_path / "a.pth")
    torch.save({f"module.encoder_q.{k}": v for k, v in r18.items()}, tmp_path / "q.pth")
    with pytest.raises(UserError, match="holds no key encoder"):
        load_backbone(tmp_path / "q.pth", "key")
    for suffix in (".pth", ".pkl", ".safetensors"):
        (tmp_path / f"cut{suffix}").write_bytes((tmp_path / "q.pth").read_bytes()[:5000])
        with pytest.raises(UserError, match="damaged"):
            load_backbone(tmp_path / f"cut{suffix}")
    with pytest.raises(UserError, match=r"no run folder or checkpoint"):
        load_backbone(tmp_path / "absent.pth")


def test_tar_archive_is_an_error_of_one_line(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        info = tarfile.TarInfo("weights")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"data"))
    with pytest.raises(UserError, match="damaged"):
        load_backbone(tmp_path / "x.tar")


def test_cifar_stem_is_readable_but_not_for_detectron2(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    r18["conv1.weight"] = torch.randn(64, 3, 3, 3)
    torch.save(r18, tmp_path / "c.pth")
    assert load_backbone(tmp_path / "c.pth").stem == "cifar"
    with pytest.raises(UserError, match="CIFAR stem"):
        convert(tmp_path / "c.pth", tmp_path / "out.pth")
    convert(tmp_path / "c.pth", tmp_path / "plain.pth", back=True)
    assert torch.equal(torch.load(tmp_path / "plain.pth")["conv1.weight"], r18["conv1.weight"])


def test_existing_output(tmp_path: Path, r18: dict[str, Tensor]) -> None:
    torch.save(r18, tmp_path / "a.pth")
    torch.save(resnet_state(seed=9), tmp_path / "b.pth")
    convert(tmp_path / "a.pth", tmp_path / "w.pth")
    before = (tmp_path / "w.pth").read_bytes()
    convert(tmp_path / "a.pth", tmp_path / "w.pth")  # equal content is no conflict
    with pytest.raises(UserError, match="--overwrite"):
        convert(tmp_path / "b.pth", tmp_path / "w.pth")
    assert (tmp_path / "w.pth").read_bytes() == before
    convert(tmp_path / "b.pth", tmp_path / "w.pth", overwrite=True)
    assert (tmp_path / "w.pth").read_bytes() != before
    with pytest.raises(UserError, match=r"must end in \.pth"):
        convert(tmp_path / "a.pth", tmp_path / "w.onnx")


def test_proof_refuses_other_features(r18: dict[str, Tensor]) -> None:
    image = proof.test_image()
    plain = {k: v for k, v in r18.items() if not k.startswith("fc.")}
    source = proof.torchvision_stages(plain, "resnet18", image)
    spoilt = {
        **plain,
        "layer3.1.conv1.weight": plain["layer3.1.conv1.weight"].transpose(0, 1),
    }  # square: shape is right
    target = proof.plain_stages(to_detectron2(spoilt, "resnet18"), "resnet18", image)
    with pytest.raises(UserError, match="res4 differs"):
        proof.compare(source, target, "w.pth")


def test_detector_trained_with_stride_in_1x1_does_not_become_torchvisions(tmp_path: Path) -> None:
    state = to_detectron2(resnet_state("resnet50", head=False), "resnet50")
    torch.save({"model": {PREFIX + k: v for k, v in state.items()}}, tmp_path / "model_final.pth")
    mean = "PIXEL_MEAN: [103.53, 116.28, 123.675]\n  PIXEL_STD: [1.0, 1.0, 1.0]"
    text = f"INPUT:\n  FORMAT: BGR\nMODEL:\n  {mean}\n  RESNETS:\n    STRIDE_IN_1X1: true\n"
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    with pytest.raises(UserError, match="STRIDE_IN_1X1 True"):
        convert(tmp_path, tmp_path / "plain.pth", back=True)
    (tmp_path / "config.yaml").write_text(text.replace("true", "false"))
    assert convert(tmp_path, tmp_path / "plain.pth", back=True).provenance["INPUT.FORMAT"] == "BGR"


def test_command_line(tmp_path: Path, r18: dict[str, Tensor], capsys: pytest.CaptureFixture) -> None:
    torch.save(moco(r18, r18), tmp_path / "moco.pth.tar")
    convert_to_d2.main([str(tmp_path / "moco.pth.tar"), str(tmp_path / "w" / "out.pkl"), "--encoder", "key"])
    assert "moco.pth.tar (resnet18 key, epoch 200)" in capsys.readouterr().out
    content = pickle.loads((tmp_path / "w" / "out.pkl").read_bytes())
    assert content["__author__"] == "pretrain-to-transfer" and content["matching_heuristics"] is True
    assert isinstance(content["model"]["res5.1.conv2.norm.running_mean"], np.ndarray)
