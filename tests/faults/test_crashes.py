"""A crash of the machine after any file system call leaves the old state or the new one, synced or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.common.weights import checkpoint
from tests.faults.commands import Commands
from tests.faults.replay import Call, Disk, crashes, read_calls
from tests.faults.stages import STAGES
from transfer.weights.load import read_weights


def recorded(commands: Commands, tmp_path: Path, module: str, *argv: str) -> list[Call]:
    (tmp_path / "work").mkdir()
    ended = commands.run(module, *argv, under=tmp_path / "work", log=tmp_path / "calls")
    assert ended.status == 0, ended.text
    return read_calls(tmp_path / "calls")


@pytest.mark.core
def test_checkpoints(commands: Commands, tmp_path: Path) -> None:
    calls = recorded(commands, tmp_path, "tests.faults.writers")
    seen: set[int] = set()
    for number, kind in crashes(calls, tmp_path / "work", tmp_path / "crashed"):
        found = checkpoint.load_latest(tmp_path / "crashed")
        step = found[1]["step"] if found else 0
        assert not found or torch.equal(found[1]["state_dict"]["w"], torch.full((64,), float(step)))
        assert step >= max(seen, default=0) - (kind != Disk.KINDS[0]), f"after call {number}, {kind}"
        seen.add(step)
    assert seen == {0, 1, 2, 3}


def test_converted_weights(commands: Commands, data: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    calls = recorded(commands, tmp_path, STAGES["convert"].module, *STAGES["convert"].arguments(work, data))
    whole, seen, disk = read_weights(work / "weights.pth").sha256, set(), Disk(work)
    for call in calls:
        disk.apply(call)
    disk.write(tmp_path / "again", Disk.KINDS[2])
    assert read_weights(tmp_path / "again/weights.pth").sha256 == whole  # the record is all that was written
    for number, kind in crashes(calls, work, tmp_path / "crashed"):
        file = tmp_path / "crashed/weights.pth"
        if file.exists():
            assert read_weights(file).sha256 == whole, f"after call {number} of {len(calls)}, {kind}"
        seen.add(file.exists())
    assert seen == {True, False}
