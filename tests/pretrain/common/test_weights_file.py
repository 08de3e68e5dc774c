"""Whatever a weights file is: its backbone is read, or it ends in one line that says what it is."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from pretrain.common.backbone_file import check_tensors, load_backbone
from pretrain.common.errors import UserError
from pretrain.common.weights_file import read_file, read_provenance, state_tensors
from tests.transfer.test_convert import resnet_state
from transfer.convert import convert
from transfer.weights import detector_config, read_weights

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"


@pytest.fixture(scope="module")
def good() -> dict[str, Tensor]:
    return resnet_state()


@pytest.mark.parametrize("suffix", [".pth", ".pkl", ".safetensors"])
@pytest.mark.parametrize("data, message", [(b"", "it is empty"), (POINTER, "it holds text, 'version https://git-lfs")])
def test_what_is_no_weights_file_is_named(tmp_path: Path, suffix: str, data: bytes, message: str) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(data)
    for read in (read_file, read_weights, load_backbone, lambda path: convert(path, tmp_path / "out.pth")):
        with pytest.raises(UserError, match=f"is damaged or not a .*: {message}"):
            read(path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("loop.pth", "loop.pth: Too many levels of symbolic links"),
        ("a" * 300, ": File name too long"),
        ("a\0b", ": embedded null"),
        ("pipe", ": it is a device, a pipe or a socket"),
        ("oops.pth", r"oops.pth; did you mean 'loop\.pth'"),
        (os.fsdecode(b"odd\xff.pth"), "no .* at .*odd"),
    ],
)
def test_a_path_that_leads_nowhere_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    os.mkfifo(tmp_path / "pipe")
    for read in (read_weights, load_backbone, lambda path: convert(path, tmp_path / "out.pth")):
        with pytest.raises(UserError, match=message):
            read(tmp_path / name)


_CONVERT = """
import sys
from transfer.convert import convert
from transfer.weights import read_weights
convert(sys.argv[1], sys.argv[2])
print(ascii(read_weights(sys.argv[2]).provenance["source"]))
"""


def test_a_path_that_is_not_utf8_is_read(tmp_path: Path, good: dict[str, Tensor]) -> None:
    """In a process of its own: pytest's parallel workers cannot send a report that has such a name in it."""
    torch.save(good, tmp_path / "plain.pth")
    source, output = (os.fsencode(tmp_path) + name for name in (b"/odd\xff.pth", b"/odd\xff/out.pth"))
    os.rename(tmp_path / "plain.pth", source)
    command = [sys.executable, "-c", _CONVERT, source, output]
    ended = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, [rb"'odd\udcff.pth'"])


NOT_DENSE = {
    "sparse": (lambda t: t.to_sparse(), "conv1.weight is a tensor of layout torch.sparse_coo; save it again"),
    "meta": (lambda t: t.to("meta"), r"conv1.weight is a tensor without values \(meta\); save it again"),
    "float8": (lambda t: t.to(torch.float8_e4m3fn), "conv1.weight is torch.float8_e4m3fn, not floating point of 16"),
    "complex": (lambda t: t.to(torch.complex64), "conv1.weight is torch.complex64, not floating point of 16"),
    "large": (lambda t: t.double() * 1e300, "conv1.weight has .* that are not finite"),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_tensors_that_are_no_weights_are_named(tmp_path: Path, good: dict[str, Tensor], kind: str) -> None:
    change, message = NOT_DENSE[kind]
    if kind == "sparse":
        torch.save({**good, "conv1.weight": change(good["conv1.weight"].flatten(1))}, tmp_path / "w.pth")
    else:
        torch.save({**good, "conv1.weight": change(good["conv1.weight"])}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=message):
        load_backbone(tmp_path / "w.pth")


def test_values_beyond_float32_are_not_finite_for_a_detector_either(tmp_path: Path, good: dict[str, Tensor]) -> None:
    torch.save(good, tmp_path / "s.pth")
    convert(tmp_path / "s.pth", tmp_path / "w.pth")
    content = torch.load(tmp_path / "w.pth")
    content["model"]["backbone.bottom_up.stem.conv1.weight"] = good["conv1.weight"].double() * 1e300
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"stem\.conv1\.weight has values that are not finite"):
        read_weights(tmp_path / "w.pth")


@pytest.mark.parametrize("array", [np.array([None]), np.array(["a"]), np.array(["2020-01-01"], "M8[D]")])
def test_arrays_that_no_tensor_can_hold_are_named(array: np.ndarray) -> None:
    with pytest.raises(
        UserError, match=f"w.pkl: a is an array of {array.dtype}, which no tensor can hold".replace("[", r"\[")
    ):
        state_tensors({"a": array}, "w.pkl")


def test_arrays_of_any_byte_order_are_read() -> None:
    arrays = {"a": np.arange(3, dtype=">f4"), "b": np.arange(3, dtype="<f8")[::-1]}
    tensors = state_tensors(arrays, "w.pkl")
    assert [tensors[name].tolist() for name in "ab"] == [[0, 1, 2], [2, 1, 0]]


CONFIGS = ["METHOD: []", "[" * 5000, "a: 2020-99-99", f"a: {'9' * 5000}", "{", "", "METHOD: {NAME: [moco]}", "&a [*a]"]


@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_of_another_version_is_kept_as_it_is(tmp_path: Path, good: dict[str, Tensor], text: str) -> None:
    torch.save({"state_dict": good, "config": text, "epoch": 10**400, "arch": [1]}, tmp_path / "w.pth")
    provenance = load_backbone(tmp_path / "w.pth").provenance
    assert provenance["config"] == text and not {"method", "epoch"} & set(provenance)
    (tmp_path / "config.yaml").write_text(text)
    assert detector_config(tmp_path / "w.pth") == {}


def test_provenance_nested_too_deeply(tmp_path: Path) -> None:
    for content, metadata in (({}, {"provenance": "[" * 100_000}), ({"provenance": nested()}, {})):
        with pytest.raises(UserError, match="its provenance is damaged"):
            read_provenance(content, metadata, "w")


def nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("suffix", [".pkl", ".safetensors", ".pth"])
@pytest.mark.parametrize(
    "failure, message",
    [
        (OSError(5, "Input/output error"), r"cannot read .*: Input/output error"),
        (MemoryError("too large"), "not enough memory to read"),
    ],
)
def test_a_failing_disk_or_memory_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, failure: BaseException, message: str
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise failure

    path = tmp_path / f"w{suffix}"
    path.write_bytes(pickle.dumps({"a": 1}))
    monkeypatch.setattr("safetensors.safe_open", fail)
    monkeypatch.setattr("torch.load", fail)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(UserError, match=message) as caught:
        read_file(path)
    assert "damaged" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("suffix", [".pth", ".pkl", ".safetensors"])
def test_a_file_with_any_bytes_wrong_is_read_or_refused(tmp_path: Path, suffix: str) -> None:
    rng = random.Random(suffix)
    state = {"conv1.weight": torch.arange(6.0).reshape(2, 3), "bn1.bias": torch.ones(2)}
    path = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        path.write_bytes(save(state, metadata={"provenance": "{}"}))
    elif suffix == ".pkl":
        path.write_bytes(pickle.dumps({"model": {k: v.numpy() for k, v in state.items()}, "__author__": "a"}, 2))
    else:
        torch.save({"model": state, "provenance": {"tensors": {}}}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    for _ in range(300):
        spoiled = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            spoiled[rng.randrange(min(len(data), 600))] = rng.choice([0, 1, 46, 82, 99, 128, 255, rng.randrange(256)])
        path.write_bytes(spoiled[: rng.choice([len(data), rng.randrange(len(data))])])
        try:
            content, metadata = read_file(path)
            read_provenance(content, metadata, path)
            check_tensors(state_tensors(content, path), "resnet18", "imagenet", path)
        except UserError as error:
            assert "\n" not in str(error)
