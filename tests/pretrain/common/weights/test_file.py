"""A weights file is read, or one line says what it is, whatever it contains."""

import argparse
import collections
import functools
import gzip
import os
import pickle
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from pretrain.common.errors import UserError
from pretrain.common.files import sha256, write_json
from pretrain.common.weights import formats
from pretrain.common.weights.file import Damaged, check_values, read, read_weights_file
from pretrain.common.weights.provenance import Provenance
from tests.errors import refused

WEIGHTS = {"conv1.weight": torch.arange(6.0).reshape(2, 3), "bn1.bias": torch.ones(2)}


@pytest.mark.parametrize("suffix", [".pth", ".pkl", ".safetensors"])
@pytest.mark.parametrize("data", [b"", b" \n", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"])
def test_what_is_no_weights_file_is_named(tmp_path: Path, suffix: str, data: bytes) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(data)
    with pytest.raises(Damaged, match="run git lfs pull" if len(data) > 2 else "empty|text"):
        read(path)
    refused(lambda: read(tmp_path), tmp_path, "folder")


class _Code:
    def __reduce__(self):
        return os.getcwd, ()


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_torch_file_may_hold_what_training_scripts_put_in_it(tmp_path: Path, is_zip: bool) -> None:
    grid = torch.arange(12.0).reshape(3, 4)
    tensors = [grid, grid.T, grid[1:, ::2], torch.tensor(3), torch.nn.Parameter(grid)]
    plain = {"a": [1, 2.5, "text", b"\xff", None, (1, "a"), 2**70, {1}], "b": collections.OrderedDict(a=1)}
    objects = [argparse.Namespace(lr=0.03, names=["a"]), np.float64(3.5), np.int64(3), torch.Size([1]), torch.float16]
    content = {"tensors": tensors, "plain": plain, "others": objects, "array": np.eye(2)}
    torch.save(content, tmp_path / "c.pth", _use_new_zipfile_serialization=is_zip)
    loaded = read(tmp_path / "c.pth")
    assert all(torch.equal(actual, expected) for actual, expected in zip(loaded["tensors"], tensors, strict=True))
    assert loaded["plain"] == plain and loaded["others"] == objects and np.array_equal(loaded["array"], np.eye(2))


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_each_value_of_a_pickle_is_read(tmp_path: Path, protocol: int) -> None:
    arrays = [np.arange(6, dtype="f4").reshape(2, 3), np.asfortranarray(np.eye(2)), np.zeros(0), np.array(["a"])]
    swapped = np.arange(3, dtype=">f4")[::-1]
    content = {"arrays": arrays, "epoch": np.int64(3), "names": ["a", b"\xff", b""], "swapped": swapped}
    (tmp_path / "c.pkl").write_bytes(pickle.dumps(content, protocol))
    loaded = read(tmp_path / "c.pkl")
    for actual, expected in zip(loaded["arrays"], arrays, strict=True):
        assert np.array_equal(actual, expected) and actual.dtype == expected.dtype
    assert (loaded["epoch"], loaded["names"]) == (3, content["names"])
    assert read_weights_file(tmp_path / "c.pkl").tensors["swapped"].tolist() == [2, 1, 0]


def test_a_flipped_bit_and_a_cut_file_are_damage(tmp_path: Path) -> None:
    """torch itself does not verify the checksums."""
    path = tmp_path / "c.pth"
    torch.save({"a": torch.full((100,), 7.0)}, path)
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[data.index(torch.full((100,), 7.0).numpy().tobytes()) + 30] ^= 1
    index = data.replace(b"PK\1\2", b"PK\1\0")  # the zip file's list of names
    for damaged in (flipped, index, data[:-1], data[: len(data) // 2], data[:10]):
        path.write_bytes(damaged)
        with pytest.raises(
            Damaged, match=r"c\.pth is damaged or not a checkpoint: [^.;]*; use an earlier or another copy$"
        ):
            read(path)


@pytest.mark.parametrize("thing", [_Code(), argparse.Namespace(hidden=_Code())])
@pytest.mark.parametrize("name", ["x.pth", "x.pkl"])
def test_code_in_a_pickle_is_refused(tmp_path: Path, name: str, thing: Any) -> None:
    path = tmp_path / name
    content = {"state_dict": {"a": np.zeros(1) if path.suffix == ".pkl" else torch.zeros(1)}, "args": thing}
    torch.save(content, path) if path.suffix == ".pth" else path.write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=str(path)) as caught:
        read_weights_file(path)
    assert not isinstance(caught.value, Damaged)  # no reason to resume from an earlier checkpoint


class _Options(argparse.Namespace):
    """An object of a class that no reader knows."""


class _Config(dict):
    """A dictionary of such a class."""


NET = nn.Linear(2, 2, bias=False)
OBJECTS = {  # a file with such objects -> the names of the tensors after the command of the error
    "module.pth": (nn.DataParallel(NET), "weight"),
    "modules.pth": ({"model": NET, "ema": NET, "epoch": 3}, "model.weight ema.weight"),
    "it's a module.pth": ({"state_dict": NET.state_dict(), "args": _Options(lr=0.1)}, "state_dict.weight"),
    "checkpoint_00000001.pth": (
        {"state_dict": NET.state_dict(), "hyper_parameters": _Config(lr=0.1, net=_Config(o=_Options()))},
        "state_dict.weight",
    ),
    "arrays.pkl": ({"model": {"a": np.ones(2, np.float32)}, "args": _Options()}, "model.a"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_command_of_the_error_resaves_the_tensors(tmp_path: Path, name: str) -> None:
    content, tensors = OBJECTS[name]
    path = tmp_path / name
    if path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    command = refused(lambda: read_weights_file(path), path, "python -c ").partition("python -c ")[2]
    code = shlex.split(command)[0]
    exec(code, {})  # in this process, where the classes are found, and which has imported torch
    saved = read_weights_file(path.with_name(f"plain_{path.stem}.pth"))
    assert " ".join(saved.tensors) == tensors
    assert all(torch.equal(tensor, next(iter(saved.tensors.values()))) for tensor in saved.tensors.values())
    assert saved.content.get("epoch", 3) == 3


@pytest.mark.parametrize("value", [np.array(["a"]), 3])
def test_a_file_without_tensors_is_described(tmp_path: Path, value: Any) -> None:
    torch.save({"a": value}, tmp_path / "w.pth")
    refused(lambda: read_weights_file(tmp_path / "w.pth"), "w.pth", "no tensors")


ONE = torch.ones(1)
CONTENTS = [  # what a file contains, and the names of the tensors that are read
    ({"model": {"module.a": ONE, "b": {"_orig_mod.c": ONE, "n": 3}}, "names": ["x"]}, "model.a model.b.c"),
    ({"module": {"d": ONE}, "loss": ONE, "optimizer": {"state": {0: {"exp_avg": ONE}}}}, "d loss"),
    ({"d": ONE, "opt_state": {"a": ONE}}, "d"),
    ({"models": [WEIGHTS, {"epoch": 3}], "losses": [0.1] * 3}, "models.0.conv1.weight models.0.bn1.bias"),
    ({"a": ONE, "history": [WEIGHTS]}, "a"),  # a list beside tensors contains no weights
    ((3, {"a": ONE}), "1.a"),
]


@pytest.mark.parametrize(("content", "names"), CONTENTS)
def test_tensors_of_dictionaries_and_lists_but_an_optimizers_are_read(tmp_path: Path, content: Any, names: str) -> None:
    torch.save(content, tmp_path / "w.pth")
    assert list(read_weights_file(tmp_path / "w.pth").tensors) == names.split()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["w.pkl", "W.PKL", "w.pth", "checkpoint"])
def test_the_content_decides_the_format_and_not_the_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    arrays = {key: tensor.numpy() for key, tensor in WEIGHTS.items()}
    torch.save(WEIGHTS, tmp_path / "zip")
    torch.save(WEIGHTS, tmp_path / "legacy", _use_new_zipfile_serialization=False, pickle_protocol=3)
    files = [(tmp_path / "zip").read_bytes(), (tmp_path / "legacy").read_bytes(), save(WEIGHTS)]
    for data in (*files, *(pickle.dumps(arrays, protocol) for protocol in (2, 4))):
        path.write_bytes(data)
        tensors = {key.removeprefix("model."): tensor for key, tensor in read_weights_file(path).tensors.items()}
        assert tensors.keys() == WEIGHTS.keys() and all(torch.equal(tensors[key], WEIGHTS[key]) for key in WEIGHTS)


@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated")
def test_files_of_other_formats_come_with_a_remedy(tmp_path: Path) -> None:
    refused(lambda: read("https://a.b/c.pth"), "https://a.b/c.pth", "download")
    np.save(tmp_path / "jax.npy", {"w": np.ones(1)}, allow_pickle=True)  # type: ignore[arg-type]
    np.savez(tmp_path / "bit.npz", w=np.ones(1))
    torch.jit.save(torch.jit.script(nn.Linear(1, 1)), tmp_path / "script.pt")
    torch.export.save(torch.export.export(nn.Linear(1, 1), (torch.zeros(1, 1),)), tmp_path / "exported.pt2")
    torch.save(WEIGHTS, tmp_path / "w.pth")
    for kind in ("zip", "tar"):
        shutil.make_archive(str(tmp_path / "w"), kind, tmp_path, "w.pth")
    remedies = {"jax.npy": "JAX", "bit.npz": "NumPy", "script.pt": "torch.jit.load"}
    remedies |= {"w.zip": "unpack it", "w.tar": "unpack it", "exported.pt2": "torch.export.load("}
    for name, data, remedy in (
        ("w.pth.gz", gzip.compress((tmp_path / "w.pth").read_bytes()), "decompress it first"),
        ("m.safetensors.index.json", b'{"metadata": {}, "weight_map": {"a": "m-1.safetensors"}}', "in several files"),
        ("page.pth", b"<!DOCTYPE html><html>", "<!DOCTYPE html><html>'; download"),
        ("keras.h5", b"\x89HDF\r\n\x1a\n\0\0", "Keras"),
        ("w.onnx", b"\x08\x08\x12\x07pytorch", "ONNX"),
        ("model.ckpt.index", b"\0\0\7\x08\1", "TensorFlow"),
    ):
        (tmp_path / name).write_bytes(data)
        remedies[name] = remedy
    for name, remedy in remedies.items():
        refused(functools.partial(read_weights_file, tmp_path / name), name, remedy)


def test_values_that_no_network_can_use() -> None:
    counter = check_values(torch.tensor(3.0), "bn1.num_batches_tracked", "w")
    assert counter.dtype == torch.int64 and check_values(torch.ones(1).half(), "a", "w").dtype == torch.float32
    refused(lambda: check_values(torch.tensor([-1.0]), "bn1.running_var", "w"), "w: bn1.running_var has ")
    for tensor, says in (
        (torch.tensor([1e300]).double(), "has 1 value not finite"),
        (torch.ones(2, dtype=torch.int8), "is torch.int8"),
        *((bad, "is not a dense tensor") for bad in (torch.ones(2).to_sparse(), torch.ones(2, device="meta"))),
    ):
        refused(functools.partial(check_values, tensor, "a", "w"), f"w: a {says}")


def test_provenance_inside_and_beside(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(WEIGHTS, path, metadata={"provenance": '{"source": "a.pth"}'})
    assert read_weights_file(path).provenance == Provenance("a.pth")
    save_file(WEIGHTS, path, metadata={"provenance": "another program's"})
    assert read_weights_file(path).provenance is None
    torch.save(WEIGHTS, tmp_path / "plain.pth")
    write_json(tmp_path / "plain.pth.json", {"source": "b.pth"})
    assert read_weights_file(tmp_path / "plain.pth").provenance is None  # written by another program
    write_json(tmp_path / "plain.pth.json", {"source": "b.pth", "file_sha256": sha256(tmp_path / "plain.pth")})
    assert read_weights_file(tmp_path / "plain.pth").provenance == Provenance("b.pth")


def test_a_file_that_changed_since_its_conversion_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(WEIGHTS, path)
    write_json(tmp_path / "w.pth.json", {"file_sha256": sha256(path)})
    torch.save({**WEIGHTS, "bn1.bias": torch.tensor([1.0, 1.0 + 2**-23])}, path)
    refused(lambda: read_weights_file(path), "w.pth has changed", "w.pth.json", "convert again")
    (tmp_path / "w.pth.json").write_text("{half")  # nothing to compare with
    assert read_weights_file(path).provenance is None


@pytest.mark.parametrize("suffix", [".pkl", ".pth"])
@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), MemoryError("too large")])
def test_a_failing_disk_or_memory_is_not_damage(tmp_path, monkeypatch, suffix, failure):
    path = tmp_path / f"w{suffix}"
    path.write_bytes(pickle.dumps({"a": 1}))
    monkeypatch.setattr(formats, "load_torch", mock.Mock(side_effect=failure))
    monkeypatch.setattr(Path, "read_bytes", mock.Mock(side_effect=failure))
    with pytest.raises(UserError, match=r"Input/output error|too large") as caught:
        read(path)
    assert not isinstance(caught.value, Damaged)
