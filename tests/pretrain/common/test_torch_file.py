"""Files of `torch.save`: each value is torch's own, and a made file ends in an error instead of the process."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import resource
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.common import torch_file

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
NEW_DTYPES = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn]  # not in the format before torch 1.6


def with_attribute(tensor: Tensor) -> Tensor:
    tensor.note = "torch keeps it, and the reader leaves it out"  # type: ignore[attr-defined]
    return tensor


def a_checkpoint() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.rand(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    grid = torch.arange(12.0).reshape(3, 4)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6]).state_dict(),
        "types": [torch.tensor([0, 1, 3]).to(dtype) for dtype in DTYPES],
        "views": [grid, grid.T, grid[1:], grid[:, 1], grid[::2, ::3]],
        "empty": [torch.empty(0), torch.empty(0, 3), torch.tensor(3)],
        "parameter": torch.nn.Parameter(grid),
        "args": argparse.Namespace(lr=0.03, names=["a"]),
        "plain": [1, 2.5, "text", b"\xff", None, True, (1, "a"), 2**70, {1, 2}, collections.OrderedDict(a=1)],
        "of NumPy": [np.float64(3.5), np.int64(3)],
        "of torch": [torch.float16, torch.Size([1, 2]), torch.device("cuda:1")],
        "attributes": with_attribute(torch.ones(2)),
        "states": torch.get_rng_state(),
        (1, "b"): 3,
    }


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        one, two = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, wanted))
        assert torch.equal(one, two)
    elif isinstance(wanted, dict):
        assert type(found) is type(wanted) and list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted)
        for one, two in zip(found, wanted, strict=True):
            assert_same(one, two)
    else:
        assert found == wanted


@pytest.mark.parametrize("is_zip", [True, False])
def test_each_value_is_what_torch_reads(tmp_path: Path, is_zip: bool) -> None:
    path, content = tmp_path / "c.pth", a_checkpoint()
    if is_zip:
        content["types"] += [torch.tensor([0, 1, 3]).to(dtype) for dtype in NEW_DTYPES]
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    found, wanted = torch_file.load(path), torch.load(path, weights_only=False)
    assert_same(found, wanted)
    assert found["model"]._metadata == wanted["model"]._metadata
    grid, *views = found["views"]
    assert all(view.data_ptr() - grid.data_ptr() in (0, 4, 16) for view in views)  # of the same values, as they were
    grid.zero_()  # and may be written
    assert not views[0].any()


def test_other_protocols_are_read(tmp_path: Path) -> None:
    content = {"a": torch.ones(2), "b": torch.nn.Conv2d(1, 1, 1).state_dict(), "c": [1, "text"]}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        torch.save(content, tmp_path / "c.pth", pickle_protocol=protocol)
        assert_same(torch_file.load(tmp_path / "c.pth"), content)


@pytest.mark.parametrize("is_zip", [True, False])
def test_the_rest_is_read_without_the_tensors(tmp_path: Path, is_zip: bool) -> None:
    torch.save({"iteration": 7, "model": {"a": torch.ones(3)}}, tmp_path / "c", _use_new_zipfile_serialization=is_zip)
    assert torch_file.load(tmp_path / "c", with_tensors=False) == {"iteration": 7, "model": {"a": None}}


def test_parts_of_a_storage_are_read_as_torch_0_wrote_them(tmp_path: Path) -> None:
    """The key, the offset and the length of the part follow those of the storage."""
    buffer = io.BytesIO()
    for thing in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        pickle.dump(thing, buffer, 2)
    buffer.write(
        b"\x80\x02}U\x01actorch._utils\n_rebuild_tensor\n((U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04"
        b"(U\x011K\x01K\x02ttQK\x00K\x02\x85K\x01\x85tRs."
    )
    pickle.dump(["0"], buffer, 2)
    buffer.write((4).to_bytes(8, "little") + torch.arange(4.0).numpy().tobytes())
    (tmp_path / "c.pth").write_bytes(buffer.getvalue())
    assert_same(torch_file.load(tmp_path / "c.pth"), {"a": torch.tensor([1.0, 2.0])})
    assert_same(torch.load(tmp_path / "c.pth", weights_only=True), {"a": torch.tensor([1.0, 2.0])})


def saved(path: Path, content: Any, is_zip: bool = True) -> bytes:
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    return path.read_bytes()


def write_zip(path: Path, content: bytes, kind: int = zipfile.ZIP_STORED, **parts: bytes) -> None:
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("archive/data.pkl", content)
        for name, part in parts.items():
            archive.writestr(f"archive/{name.replace('__', '/')}", part)


def a_tensor(
    length: int = 4, size: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85", offset: bytes = b"K\x00"
) -> bytes:
    """The opcodes of a tensor whose values have the key 0."""
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpuJ" + length.to_bytes(4, "little") + b"tQ" + offset + size + stride + b"\x89"
        b"ccollections\nOrderedDict\n)RtR"
    )


def a_dictionary(value: bytes) -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00a" + value + b"s."


FOUR = torch.arange(4.0).numpy().tobytes()
MADE = {
    "a deep key": (b"\x80\x02}" + b"N" + b"\x85" * 1_000_000 + b"Ns.", "as a key"),
    "more than it has": (
        a_dictionary(a_tensor(size=b"J\x00\x00\x00\x7f\x85", stride=b"K\x00\x85")),
        "repeat their values",
    ),
    "beyond its end": (a_dictionary(a_tensor(offset=b"K\x01")), "out of bounds"),
    "before its start": (a_dictionary(a_tensor(offset=b"J\xff\xff\xff\xff")), "."),
    "a length that differs": (a_dictionary(a_tensor(length=2**28)), "data/0 has 16 bytes, not 268435456 x 4"),
    "a negative length": (a_dictionary(a_tensor(size=b"K\x00J\xff\xff\xff\xff\x86")), "impossible shape"),
    "a length that overflows": (
        a_dictionary(a_tensor(size=b"K\x00\x8a\x08" + b"\xff" * 7 + b"\x7f\x86")),
        "impossible shape",
    ),
    "a length that is none": (a_dictionary(a_tensor(size=b"\x88\x85")), "impossible shape"),
    "a quantized type": (
        a_dictionary(a_tensor().replace(b"FloatStorage", b"qint32")),
        "Unsupported class torch.qint32",
    ),
    "to be conjugated": (
        a_dictionary(a_tensor()[:-2] + b"}X\x04\x00\x00\x00conj\x88stR"),
        "Unsupported class of lazily conjugated",
    ),
    "no storage": (a_dictionary(b"N\x85Q"), "."),
    "another library": (a_dictionary(b"ctorch\nload\n"), "Unsupported class torch.load"),
    "uninitialized": (a_dictionary(b"ctorch\nFloatTensor\nM\x00\x10\x85R"), "Unsupported class torch.FloatTensor"),
    "a call of a type": (a_dictionary(b"ctorch\nfloat32\n)R"), "not callable"),
}


@pytest.mark.parametrize("kind", MADE)
def test_made_files_raise(tmp_path: Path, kind: str) -> None:
    content, message = MADE[kind]
    write_zip(tmp_path / "c.pth", content, data__0=FOUR)
    with pytest.raises(Exception, match=message):
        torch_file.load(tmp_path / "c.pth")
    write_zip(tmp_path / "c.pth", a_dictionary(a_tensor()), data__0=FOUR)
    assert_same(torch_file.load(tmp_path / "c.pth"), {"a": torch.arange(4.0)})  # without the fault


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_compressed_parts_are_not_opened(tmp_path: Path, kind: int) -> None:
    """Some hundred bytes would take gigabytes; torch never compresses."""
    write_zip(tmp_path / "c.pth", a_dictionary(a_tensor(2**26)), kind, data__0=bytes(2**28))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"data\.pkl is compressed"):
        torch_file.load(tmp_path / "c.pth")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_the_same_bytes_are_not_many_tensors(tmp_path: Path) -> None:
    """The content of each entry is the next entry, with all that it holds."""
    data, ends = FOUR * 2**16, []
    for i in range(64):
        name = f"archive/data/{i:03d}".encode()
        fields = (20, 0, 0, 0, 0, zlib.crc32(data), len(data), len(data), len(name), 0)
        ends.append((name, fields, len(data)))
        data = b"PK\3\4" + struct.pack("<5H3L2H", *fields) + name + data
    pickled = b"\x80\x02]" + b"".join(
        a_tensor(size // 4).replace(b"\x01\x00\x00\x000", b"\x03\x00\x00\x00" + name[-3:]) + b"a"
        for name, _, size in ends
    )
    write_zip(tmp_path / "c.pth", pickled + b".")
    with zipfile.ZipFile(tmp_path / "c.pth", "a") as archive:
        start = archive.start_dir
        for name, fields, size in ends:
            entry = zipfile.ZipInfo(name.decode())
            entry.CRC, entry.file_size, entry.compress_size = fields[5], size, size
            entry.header_offset = start + len(data) - size - 30 - len(name)
            archive.filelist.append(entry)
            archive.NameToInfo[entry.filename] = entry
        assert archive.fp is not None
        archive.fp.seek(start)
        archive.fp.write(data)
        archive.start_dir = start + len(data)
        archive._didModify = True  # type: ignore[attr-defined]
    with zipfile.ZipFile(tmp_path / "c.pth") as archive:
        assert sum(len(archive.read(name)) for name in archive.namelist()) > 50 * (tmp_path / "c.pth").stat().st_size
    with pytest.raises(ValueError, match="longer than the file"):
        torch_file.load(tmp_path / "c.pth")


def test_wrong_bytes_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "c.pth"
    data = bytearray(saved(path, {"a": torch.full((100,), 7.0)}))
    data[data.index(torch.full((100,), 7.0).numpy().tobytes()) + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
        torch_file.load(path)


def test_another_byte_order_is_refused(tmp_path: Path) -> None:
    write_zip(tmp_path / "c.pth", a_dictionary(a_tensor()), data__0=FOUR, byteorder=b"big")
    with pytest.raises(ValueError, match="another byte order"):
        torch_file.load(tmp_path / "c.pth")


def test_a_cut_file_has_no_uninitialized_memory(tmp_path: Path) -> None:
    """torch.load takes memory as it is for tensors that the list at the end does not name."""
    path = tmp_path / "c.pth"
    data = saved(path, {"a": torch.ones(4), "b": torch.ones(4)}, is_zip=False)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(Exception):  # noqa: B017
            torch_file.load(path)
    none_listed = data[: data.rindex(b"\x80\x02]")] + b"\x80\x02]."
    path.write_bytes(none_listed)
    assert set(torch.load(path, weights_only=True)) == {"a", "b"}
    with pytest.raises(ValueError, match="it lists other tensors than it holds"):
        torch_file.load(path)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), path)
    with pytest.raises(pickle.UnpicklingError, match="Unsupported class __torch__"):
        torch_file.load(path)
