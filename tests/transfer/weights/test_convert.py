"""Conversion in both directions: every depth and format, what the output records, and what is never overwritten."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.common.files import sha256
from pretrain.common.run.lease import claim
from pretrain.common.run.state import update_state
from pretrain.common.weights.backbone import read_backbone
from pretrain.common.weights.provenance import Provenance
from tests.errors import refused
from tests.resnets import moco, resnet_state
from tests.transfer import tiny_coco
from tools import convert_to_d2
from transfer.weights.convert import convert
from transfer.weights.load import check_weights_fit, read_weights

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of pretraining without a key encoder."""
    path = tmp_path_factory.mktemp("source") / "run.pth"
    torch.save({**moco(resnet_state(head=False), {}), "step": 1000, "config": "METHOD:\n  NAME: jcl\n"}, path)
    return path


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    """Convert ``source`` to w.pth; return its folder."""
    convert(source, source.parent / "converted" / "w.pth")
    return source.parent / "converted"


def test_the_statistics_of_the_pretraining_are_recorded(tmp_path: Path) -> None:
    """test_load.py covers detectors with other statistics, which are refused."""
    statistics = []
    views = ("{MEAN: [0.5, 0.4, 0.3], STD: [0.2, 0.2, 0.2]}", "{MEAN: x}", "{MEAN: [0.5, 0.4, 0.3]}")
    for config in ("METHOD: {NAME: jcl}", *(f"VIEWS: {value}" for value in views)):
        torch.save({"state_dict": resnet_state(), "config": config}, tmp_path / "source.pth")
        provenance = convert(tmp_path / "source.pth", tmp_path / "out.pth", overwrite=True).provenance
        assert provenance.input
        statistics.append((provenance.input.mean, provenance.input.std))
    assert statistics == [(None, None), ([127.5, 102.0, 76.5], [51.0, 51.0, 51.0]), (None, None), (None, None)]


def test_what_the_source_does_not_record_may_be_said(tmp_path: Path) -> None:
    r18 = resnet_state()
    torch.save({"state_dict": r18, "ema": {name: 2 * tensor for name, tensor in r18.items()}}, tmp_path / "s.pth")
    words = [str(tmp_path / "s.pth"), str(tmp_path / "w.pth"), "--prefix", "ema"]
    refused(lambda: convert_to_d2.main([*words, "--pixel-mean", "0", "0", "0"]), "--pixel-std")
    convert_to_d2.main([*words, "--pixel-mean", "0", "0", "0", "--pixel-std", "255", "255", "255"])
    weights = read_weights(tmp_path / "w.pth")
    assert torch.equal(weights.state["backbone.bottom_up.stem.conv1.weight"], 2 * r18["conv1.weight"])
    assert weights.provenance and weights.provenance.prefix == "ema."
    cfg = tiny_coco.config(tmp_path, "x")
    refused(lambda: check_weights_fit(weights, cfg), "MODEL.PIXEL_MEAN", "[0.0, 0.0, 0.0]")
    cfg = tiny_coco.config(tmp_path, "x", MODEL__PIXEL_MEAN=[0.0] * 3, MODEL__PIXEL_STD=[255.0] * 3)
    check_weights_fit(weights, cfg)
    again = (tmp_path / "w.pth", tmp_path / "again.pth")
    refused(lambda: convert(*again, pixel_mean=[1, 2, 3], pixel_std=[1, 2, 3]), "records MODEL.PIXEL_MEAN")


def test_what_is_not_recorded_is_not_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    torch.save(resnet_state(), tmp_path / "s.pth")
    summary = convert(tmp_path / "s.pth", tmp_path / "w.pth").summary()
    assert "not read: fc" in summary and "does not record the mean and std" in summary
    cfg = tiny_coco.config(tmp_path, "x", MODEL__PIXEL_MEAN=[0.0] * 3)
    check_weights_fit(read_weights(tmp_path / "w.pth"), cfg)
    assert len(caplog.messages) == 1 and "does not record MODEL.PIXEL_MEAN, MODEL.PIXEL_STD" in caplog.messages[0]


def test_folders_of_shards_say_how_to_merge_them(tmp_path: Path) -> None:
    for name, shard in (("fsdp", "__0_0.distcp"), ("deepspeed", "global_step9/mp_rank_00_model_states.pt")):
        (tmp_path / name / shard).parent.mkdir(parents=True)
        (tmp_path / name / shard).touch()
        for read in (read_backbone, lambda folder: convert(folder, tmp_path / "out.pth")):
            refused(lambda read=read, name=name: read(tmp_path / name), tmp_path / name, "shards", "merge")


@pytest.mark.core
@pytest.mark.parametrize(
    ("arch", "suffix"),
    [
        ("resnet18", ".pkl"),
        pytest.param("resnet34", ".pth", marks=pytest.mark.slow),
        pytest.param("resnet50", ".safetensors", marks=pytest.mark.slow),
        pytest.param("resnet101", ".pth", marks=pytest.mark.slow),
    ],
)
def test_round_trip(tmp_path: Path, arch: str, suffix: str) -> None:
    state = resnet_state(arch)
    torch.save(state, tmp_path / "source.pth")
    done = convert(tmp_path / "source.pth", tmp_path / f"d2{suffix}")
    assert set(done.differences) == {"res2", "res3", "res4", "res5"} and max(done.differences.values()) <= 1e-4
    back = convert(tmp_path / f"d2{suffix}", tmp_path / "back.pth", to_torchvision=True)
    assert back.provenance.sha256 == sha256(tmp_path / f"d2{suffix}")
    plain = torch.load(tmp_path / "back.pth")
    assert set(plain) == {name for name in state if not name.startswith("fc.")}
    for name, tensor in plain.items():
        assert torch.equal(tensor, state[name]), name


def test_provenance_is_in_the_file_and_next_to_it_and_handed_on(tmp_path: Path, source: Path, converted: Path) -> None:
    inside = torch.load(converted / "w.pth")["provenance"]
    assert inside["source"] == "run.pth" and inside["source_sha256"] == sha256(source)
    assert (inside["method"], inside["epoch"], inside["step"], inside["encoder"]) == ("jcl", 200, 1000, "query")
    assert inside["config"] == torch.load(source)["config"]
    assert inside["MODEL.RESNETS.STRIDE_IN_1X1"] is False and inside["MODEL.RESNETS.RES2_OUT_CHANNELS"] == 64
    sidecar = json.loads((converted / "w.pth.json").read_text())
    assert sidecar == {**inside, "file_sha256": sha256(converted / "w.pth")}
    for suffix in (".pkl", ".safetensors"):
        convert(source, tmp_path / f"w{suffix}")
        assert read_weights(tmp_path / f"w{suffix}").summary()["provenance"] == inside
    again = convert(tmp_path / "w.safetensors", tmp_path / "again.pth").provenance
    assert (again.epoch, again.earlier) == (200, Provenance.from_json(inside))
    assert again.to_json()["earlier_source"] == "run.pth"


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_tensors_with_a_common_storage_are_written_once_each(tmp_path: Path, suffix: str) -> None:
    """apex and FSDP keep all parameters in one tensor, and a network may use one norm twice."""
    state = resnet_state(head=False)
    state["layer1.0.bn1.weight"] = state["bn1.weight"]
    flat = torch.cat([tensor.reshape(-1).float() for tensor in state.values()] + [torch.zeros(10**6)])
    parts = flat.split([tensor.numel() for tensor in state.values()] + [10**6])
    views = {name: part.view(state[name].shape) for name, part in zip(state, parts, strict=False)}
    views["layer1.0.bn1.weight"] = views["bn1.weight"]
    torch.save(views, tmp_path / "s.pth")
    convert(tmp_path / "s.pth", tmp_path / f"w{suffix}", to_torchvision=True)
    written = read_backbone(tmp_path / f"w{suffix}").state_dict
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())
    assert (tmp_path / f"w{suffix}").stat().st_size < 4 * flat.numel() - 3 * 10**6


def test_cifar_stem_is_not_for_detectron2(tmp_path: Path) -> None:
    r18 = resnet_state()
    r18["conv1.weight"] = r18["conv1.weight"][..., :3, :3].clone()
    torch.save(r18, tmp_path / "c.pth")
    refused(lambda: convert(tmp_path / "c.pth", tmp_path / "out.pth"), "CIFAR stem")
    convert(tmp_path / "c.pth", tmp_path / "plain.pth", to_torchvision=True)
    assert torch.equal(torch.load(tmp_path / "plain.pth")["conv1.weight"], r18["conv1.weight"])


def test_existing_output(tmp_path: Path, source: Path, converted: Path) -> None:
    torch.save(resnet_state(seed=9), tmp_path / "other.pth")
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "w.pth").read_bytes()
    convert(source, tmp_path / "w.pth")  # equal content is no conflict
    refused(lambda: convert(tmp_path / "other.pth", tmp_path / "w.pth"), "--overwrite")
    assert (tmp_path / "w.pth").read_bytes() == before
    convert(tmp_path / "other.pth", tmp_path / "w.pth", overwrite=True)
    assert (tmp_path / "w.pth").read_bytes() != before
    assert (
        read_weights(tmp_path / "w.pth").summary()["provenance"]["source"] == "other.pth"
    )  # FILE.json has the new SHA-256
    (tmp_path / "folder.pth").mkdir()
    for output, named in (("w.onnx", "w.onnx"), ("folder.pth", "folder.pth"), ("other.pth/w.pth", "other.pth")):
        refused(lambda output=output: convert(source, tmp_path / output), tmp_path / named)


def test_command_line(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture) -> None:
    convert_to_d2.main([str(source), str(tmp_path / "w" / "out.pkl"), "--encoder", "query"])
    assert "run.pth (jcl resnet18 query, epoch 200)" in capsys.readouterr().out
    content = pickle.loads((tmp_path / "w" / "out.pkl").read_bytes())
    assert content["__author__"] == "pretrain-to-transfer" and content["matching_heuristics"] is True
    assert isinstance(content["model"]["res5.1.conv2.norm.running_mean"], np.ndarray)


def test_a_run_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """The newest one stands for the folder: test_provenance.py."""
    update_state(tmp_path, stage="transfer")
    refused(lambda: convert(tmp_path, tmp_path / "out.pth"), tmp_path, "model_*.pth")


def test_two_conversions_to_one_output_are_refused(tmp_path: Path, source: Path) -> None:
    with claim(tmp_path, "conversion", file="w.pth"):
        refused(lambda: convert(source, tmp_path / "w.pth"), "w.pth", "process")
        assert not (tmp_path / "w.pth").exists()
        convert(source, tmp_path / "other.pth")
    assert {path.name for path in tmp_path.iterdir()} == {"other.pth", "other.pth.json"}


@pytest.mark.parametrize("name", ["checkpoint_final.pth", "model_0000007.pth"])
def test_a_conversion_never_replaces_a_runs_checkpoint(tmp_path: Path, source: Path, name: str) -> None:
    update_state(tmp_path, stage="pretrain")
    (tmp_path / "checkpoint_final.pth").write_text("of the run")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    refused(lambda: convert(source, tmp_path / name, overwrite=True), tmp_path / name)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
