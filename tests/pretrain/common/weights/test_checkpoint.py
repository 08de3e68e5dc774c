from unittest import mock

import pytest
import torch

from pretrain.common.weights import checkpoint
from pretrain.common.weights.backbone import read_backbone
from tests.errors import refused
from tests.pretrain.runs import load_newest


def _state(value: float) -> dict:
    return {"state_dict": {"module.w": torch.full((64, 64), value)}, "step": int(value), "config": "A: 1"}


def test_a_damaged_checkpoint_is_skipped_on_resume_and_without_a_good_one_the_run_ends(tmp_path, caplog):
    checkpoint.save(checkpoint.path_of_step(tmp_path, 1), _state(1))
    damaged = checkpoint.path_of_step(tmp_path, 2)
    damaged.write_bytes(checkpoint.path_of_step(tmp_path, 1).read_bytes()[:500])
    assert load_newest(tmp_path)[1]["step"] == 1
    (message,) = caplog.messages
    assert "trying the checkpoint before it" in message and damaged.name in message
    checkpoint.path_of_step(tmp_path, 1).unlink()
    refused(lambda: checkpoint.load_newest(tmp_path), "every checkpoint", tmp_path)
    refused(lambda: read_backbone(tmp_path / "nothing"), "nothing")
    (tmp_path / "empty").mkdir()
    refused(lambda: read_backbone(tmp_path / "empty"), tmp_path / "empty", "checkpoint_*.pth")


def test_the_newest_checkpoint_is_read_once(tmp_path):
    for step in (1, 2):
        checkpoint.save(checkpoint.path_of_step(tmp_path, step), _state(step))
    read = mock.Mock(wraps=checkpoint.read)
    newest = checkpoint.load_newest_on_all_ranks(tmp_path, checkpoint.list_checkpoints(tmp_path), read)
    assert newest is not None and newest[1]["step"] == 2
    read.assert_called_once_with(tmp_path / "checkpoint_00000002.pth")


def test_an_error_of_the_device_is_not_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", mock.Mock(side_effect=RuntimeError("CUDA error: an illegal memory access")))
    with pytest.raises(RuntimeError, match="CUDA error"):
        checkpoint.save(tmp_path / "c.pth", _state(1))
    assert not list(tmp_path.iterdir())


def test_prune_keeps_the_newest_up_to_the_one_just_saved_and_the_final(tmp_path):
    """Checkpoint 12 was damaged, so the run resumed from 8 and continued to 10."""
    for name in ("final", "00000004", "00000008", "00000010", "00000012"):
        checkpoint.save(tmp_path / f"checkpoint_{name}.pth", _state(1))
    checkpoint.prune(tmp_path, 2, checkpoint.path_of_step(tmp_path, 10))
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
    assert names == ["checkpoint_final.pth", "checkpoint_00000010.pth", "checkpoint_00000008.pth"]


@pytest.mark.parametrize("buffer", [torch.ones(1).expand(3, 4), torch.arange(12.0).reshape(4, 3).T, torch.zeros(4, 3)])
def test_a_momentum_buffer_lies_in_memory_as_its_parameter_does(buffer):
    """A fused step walks both in memory order, and would read out of bounds if their layouts differed."""
    parameter = torch.ones(3, 4, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9, fused=True)
    state = optimizer.state_dict() | {"state": {0: {"momentum_buffer": buffer}}}

    def restore():
        with checkpoint.translate_restore_errors("the checkpoint", optimizer, "remove it"):
            optimizer.load_state_dict(state)
        return optimizer.state[parameter]["momentum_buffer"]

    if buffer.shape != parameter.shape:
        refused(restore, "does not fit", "remove it")
    else:
        assert restore().stride() == parameter.stride() and torch.equal(restore(), buffer)
