"""A converted file that was changed afterwards is no source: a conversion would give the damage fresh digests."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.common.backbone_file import load_backbone
from pretrain.common.errors import UserError
from pretrain.common.run_folder import begin
from pretrain.common.weights_file import check_digests, tensor_digest
from tests.transfer.test_convert import moco, resnet_state
from transfer.convert import convert
from transfer.resnet_names import PREFIX
from transfer.weights import read_weights

NAME = "res3.0.conv2.weight"  # square: a transposition keeps its shape
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda tensor: tensor.transpose(0, 1).contiguous(),
    "value": lambda tensor: tensor.clone().index_fill_(0, torch.tensor(3), 0.5),
    "bit": lambda tensor: (tensor.view(torch.int32) ^ torch.tensor([1], dtype=torch.int32)).view(torch.float32),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "s.pth"
    torch.save(resnet_state(), path)
    return path


def spoil(path: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Changes one tensor of a converted file and leaves its provenance as it was."""
    if path.suffix == ".pkl":
        content: Any = pickle.loads(path.read_bytes())
        content["model"][name] = change(torch.tensor(content["model"][name])).numpy()
        path.write_bytes(pickle.dumps(content))
    elif path.suffix == ".safetensors":
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(path, "pt") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        tensors[PREFIX + name] = change(tensors[PREFIX + name])
        save_file(tensors, path, metadata=metadata)
    else:
        content = torch.load(path)
        state = content.get("model", content)
        name = PREFIX + name if "model" in content else name
        state[name] = change(state[name])
        torch.save(content, path)


@pytest.mark.parametrize("suffix", [".pth", ".pkl", ".safetensors"])
@pytest.mark.parametrize("kind", CHANGES)
def test_digests_inside(tmp_path: Path, source: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"w{suffix}"
    convert(source, path)
    convert(path, tmp_path / "good.pth")
    spoil(path, NAME, CHANGES[kind])
    for back in (False, True):
        with pytest.raises(UserError, match=rf"{NAME} is not what was converted \(damaged or transposed\)"):
            convert(path, tmp_path / "out.pth", back=back)
    assert not (tmp_path / "out.pth").exists()


def test_digests_beside(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "plain.pth", back=True)
    convert(tmp_path / "plain.pth", tmp_path / "good.pth")
    spoil(tmp_path / "plain.pth", "layer2.0.conv2.weight", CHANGES["transposed"])
    with pytest.raises(UserError, match=r"layer2.0.conv2.weight is not what was converted"):
        convert(tmp_path / "plain.pth", tmp_path / "out.pth")
    (tmp_path / "plain.pth.json").write_text("{half")  # nothing to compare with
    convert(tmp_path / "plain.pth", tmp_path / "out.pth")


def test_digest_of_every_dtype() -> None:
    digests = {tensor_digest(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    assert len(digests) == 3
    with pytest.raises(UserError, match="lacks a, which it held"):
        check_digests({}, {"tensors": {"a": "0"}}, "w.pth")


def test_safetensors_hand_their_provenance_on(tmp_path: Path) -> None:
    state = resnet_state()
    torch.save(moco(state, state), tmp_path / "moco.pth")
    convert(tmp_path / "moco.pth", tmp_path / "w.safetensors")
    again = convert(tmp_path / "w.safetensors", tmp_path / "w.pth").provenance
    assert (again["epoch"], again["earlier_source"]) == (200, "moco.pth")


def test_choice_of_an_encoder_where_there_is_one(tmp_path: Path, source: Path) -> None:
    with pytest.raises(UserError, match="holds one encoder, not a query and a key"):
        load_backbone(source, "key")


def test_a_run_folder_falls_back_to_a_checkpoint_that_reads_whole(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "last_checkpoint").write_text("model_final.pth")
    with pytest.raises(UserError, match=r"run holds no checkpoint"):
        convert(run, tmp_path / "out.pth")
    begin(run, "transfer")
    with pytest.raises(UserError, match=r"run is a detector's run folder, but holds no checkpoint \(model_\*\.pth\)"):
        convert(run, tmp_path / "out.pth")
    (run / "model_final.pth").write_bytes(b"half")
    with pytest.raises(UserError, match=r"every checkpoint in .*run is damaged"):
        convert(run, tmp_path / "out.pth")
    (run / "model_0000001.pth").write_bytes(source.read_bytes())
    assert convert(run, tmp_path / "out.pth").provenance["source"] == "model_0000001.pth"
    assert "model_final.pth is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["file/w.pth", "file/deeper/w.pth", "folder.pth"])
def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path, source: Path, place: str) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder.pth").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*another folder|is a file, not a folder|is a folder; name a"):
        convert(source, tmp_path / place)


def test_weights_that_are_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model_final.pth").write_bytes(b"")
    with pytest.raises(UserError, match=r"is a folder; name a weights file in it \(model_final.pth\)"):
        read_weights(tmp_path)


def test_the_remedy_for_an_unsafe_pickle_is_the_conversion(tmp_path: Path) -> None:
    content = {"model": resnet_state(), "args": argparse.Namespace(lr=0.03)}
    torch.save(content, tmp_path / "x.pth")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content))
    for name in ("x.pth", "x.pkl"):
        with pytest.raises(UserError, match=rf"convert_to_d2.py {tmp_path / name} OUTPUT.pth --unsafe-pickle"):
            read_weights(tmp_path / name)
