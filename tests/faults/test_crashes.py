"""A crash of the machine after any file system call leaves the old state or the new one, synced or not."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pretrain.common.weights import checkpoint
from tests.faults.commands import Commands
from tests.faults.injection import Call, Fault
from tests.faults.stages import STAGES
from transfer.weights.load import read_weights

KEPT, DATA_LOST, NAMES_LOST = "everything is kept", "data are lost", "data and names are lost"


@dataclass
class File:
    """A file: its content now, and its content when it was last synced."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


class Disk:
    """A folder on a disk that keeps what was synced, and may lose unsynced data and new names."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._files: dict[str, File] = {}
        self._synced: dict[str, File] = {}  # under their names when the folder was last synced

    def apply(self, call: Call) -> None:
        name = Path(call.path).name
        if call.path == self._root and call.name == "fsync":
            self._synced = dict(self._files)
        elif call.name == "create":
            self._files[name] = File()
        elif call.name == "unlink":
            self._files.pop(name, None)  # it may be missing
        elif call.name == "rename":
            self._files[name] = self._files.pop(Path(call.source).name)
        elif call.name == "fsync":
            self._files[name].synced = bytes(self._files[name].data)
        elif call.name == "write":
            data = self._files[name].data
            data.extend(bytes(max(0, call.offset - len(data))))
            data[call.offset : call.offset + len(call.data)] = call.data
        else:
            assert call.name == "open" or call.path == self._root, f"{call} is not simulated"

    def write(self, folder: Path, kind: str) -> None:
        """Write into ``folder`` what a crash may leave."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, file in (self._synced if kind == NAMES_LOST else self._files).items():
            (folder / name).write_bytes(file.data if kind == KEPT else file.synced)


def crashes(calls: list[Call], root: Path, folder: Path) -> Iterator[tuple[int, str]]:
    """Write into ``folder`` each state that a crash may leave after each call; yield the call's number and the kind."""
    disk = Disk(root)
    for number, call in enumerate(calls, start=1):
        disk.apply(call)
        for kind in (KEPT, DATA_LOST, NAMES_LOST):
            disk.write(folder, kind)
            yield number, kind


def record(commands: Commands, tmp_path: Path, module: str, *argv: str) -> list[Call]:
    (tmp_path / "work").mkdir()
    ended = commands.run(module, *argv, under=tmp_path / "work", fault=Fault("record"))
    assert ended.status == 0, ended.text
    return ended.report.recorded


def main(_: list[str] | None = None) -> None:
    """Write three checkpoints, each of which must survive a crash; `Commands` runs this as a program."""
    for step in (1, 2, 3):
        content = {"step": step, "state_dict": {"w": torch.full((64,), float(step))}}
        checkpoint.save_step(Path.cwd(), step, content, keep=1)


@pytest.mark.core
def test_checkpoints(commands: Commands, tmp_path: Path) -> None:
    calls = record(commands, tmp_path, __name__)
    seen: set[int] = set()
    for number, kind in crashes(calls, tmp_path / "work", tmp_path / "crashed"):
        newest = checkpoint.load_newest(tmp_path / "crashed")
        step = newest[1]["step"] if newest else 0
        assert not newest or torch.equal(newest[1]["state_dict"]["w"], torch.full((64,), float(step)))
        assert step >= max(seen, default=0) - (kind != KEPT), f"after call {number}, {kind}"
        seen.add(step)
    assert seen == {0, 1, 2, 3}


def test_converted_weights(commands: Commands, data: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    calls = record(commands, tmp_path, STAGES["convert"].module, *STAGES["convert"].arguments(work, data))
    complete = read_weights(work / "weights.pth").sha256
    seen: set[bool] = set()
    for number, kind in crashes(calls, work, tmp_path / "crashed"):
        file = tmp_path / "crashed/weights.pth"
        if file.exists():
            assert read_weights(file).sha256 == complete, f"after call {number} of {len(calls)}, {kind}"
        seen.add(file.exists())
    assert seen == {True, False} and file.exists()  # the record is all that was written
