import os

import pytest
import torch

from pretrain.common import checkpoint
from pretrain.common.errors import UserError
from tests.errors import refused


def _state(value: float) -> dict:
    return {"state_dict": {"module.w": torch.full((64, 64), value)}, "step": int(value), "config": "A: 1"}


def test_round_trip_with_weights_only(tmp_path):
    checkpoint.save(tmp_path / "c.pth", _state(3))
    assert torch.load(tmp_path / "c.pth", weights_only=True)["step"] == 3
    assert checkpoint.read(tmp_path / "c.pth")["config"] == "A: 1"
    assert [p.name for p in tmp_path.iterdir()] == ["c.pth"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_damage_is_an_error_when_named_and_a_fallback_on_resume(tmp_path, damage):
    checkpoint.save(checkpoint.path_of_step(tmp_path, 1), _state(1))
    bad = checkpoint.path_of_step(tmp_path, 2)
    checkpoint.save(bad, _state(2))
    data = bytearray(bad.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF  # inside the tensor: only a checksum can tell
    elif damage == "empty":
        data = bytearray()
    else:
        data = bytearray(b"<html>not found</html>")
    bad.write_bytes(data)
    with pytest.raises(UserError, match="is damaged or not a checkpoint"):
        checkpoint.read(bad)
    messages = []
    found = checkpoint.newest(tmp_path, messages.append)
    assert found is not None and found[1]["step"] == 1
    assert len(messages) == 1 and "trying the checkpoint before it" in messages[0] and bad.name in messages[0]


def test_an_error_of_the_device_is_not_a_full_disk(tmp_path, monkeypatch):
    def fail(*_args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        checkpoint.save(tmp_path / "c.pth", _state(1))
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path):
    checkpoint.path_of_step(tmp_path, 1).write_bytes(b"x")
    with pytest.raises(UserError, match="every checkpoint"):
        checkpoint.newest(tmp_path, lambda _: None)
    assert checkpoint.newest(tmp_path / "nowhere", lambda _: None) is None


def test_a_full_disk_keeps_the_earlier_file(tmp_path, monkeypatch):
    path = checkpoint.path_of_step(tmp_path, 1)
    checkpoint.save(path, _state(1))

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device; free space"):
        checkpoint.save(path, _state(2))
    assert checkpoint.read(path)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_prune_keeps_the_newest_and_the_final(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(checkpoint.path_of_step(tmp_path, step), _state(step))
    checkpoint.save(tmp_path / checkpoint.FINAL, _state(3))
    checkpoint.prune(tmp_path, 2, checkpoint.path_of_step(tmp_path, 3))
    assert [p.name for p in checkpoint.all_in(tmp_path)] == [
        "checkpoint_final.pth", "checkpoint_00000003.pth", "checkpoint_00000002.pth",
    ]  # fmt: skip
    assert checkpoint.resolve(tmp_path).name == "checkpoint_final.pth"
    assert checkpoint.resolve(tmp_path / "checkpoint_00000002.pth").name == "checkpoint_00000002.pth"


def test_prune_drops_what_is_newer_than_the_checkpoint_just_saved(tmp_path):
    for step in (4, 8, 12):
        checkpoint.save(checkpoint.path_of_step(tmp_path, step), _state(step))
    checkpoint.path_of_step(tmp_path, 12).write_bytes(b"PK\3\4 cut off")
    found = checkpoint.newest(tmp_path, lambda _: None)
    assert found is not None and found[1]["step"] == 8
    saved = checkpoint.path_of_step(tmp_path, 10)  # the run fell back to 8 and continued
    checkpoint.save(saved, _state(10))
    checkpoint.prune(tmp_path, 2, saved)
    assert [p.name for p in checkpoint.all_in(tmp_path)] == ["checkpoint_00000010.pth", "checkpoint_00000008.pth"]


def test_resolve_says_what_is_missing(tmp_path):
    refused(lambda: checkpoint.resolve(tmp_path), tmp_path, "checkpoint_*.pth")
    refused(lambda: checkpoint.resolve(tmp_path / "nothing"), "nothing")


@pytest.mark.parametrize("buffer", [torch.ones(1).expand(3, 4), torch.arange(12.0).reshape(4, 3).T, torch.zeros(4, 3)])
def test_a_momentum_buffer_lies_in_memory_as_its_parameter_does(buffer):
    """A fused step goes through both as they lie there, and would read beyond one of another shape."""
    parameter = torch.ones(3, 4, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9, fused=True)
    state = optimizer.state_dict() | {"state": {0: {"momentum_buffer": buffer}}}

    def restore():
        with checkpoint.restoring("the checkpoint", optimizer, "remove it"):
            optimizer.load_state_dict(state)
        return optimizer.state[parameter]["momentum_buffer"]

    if buffer.shape != parameter.shape:
        refused(restore, "momentum_buffer", "remove it")
    else:
        assert restore().stride() == parameter.stride() and torch.equal(restore(), buffer)
