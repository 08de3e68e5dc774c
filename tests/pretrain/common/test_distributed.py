"""Ranks: what they exchange, agree on and wait for, and which device each gets."""

from pathlib import Path
from typing import NoReturn, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pretrain.common import distributed
from pretrain.common.errors import UserError
from pretrain.model.momentum_encoder import BatchShuffle
from tests.errors import refused
from tests.pretrain.ranks import run_ranks
from transfer import distributed as fine_tuning


@pytest.mark.parametrize(
    ("count", "local_rank", "slurm", "index"),
    [
        *((4, 3, "3", 3), (4, 3, "", 3), (1, 0, "", 0), (1, 3, "3", 0), (4, 5, "5", 1)),
        *((2, 2, "", None), (1, 1, "", None), (1, 1, "0", None)),
    ],
)
def test_a_rank_takes_its_gpu_if_there_is_one(monkeypatch, count, local_rank, slurm, index):
    """(1, 3, "3"): SLURM shows each task only its own GPU; (4, 5, "5"): only the closest ones (--gpu-bind=closest);
    (1, 1, "0"): torchrun is the one task of a machine."""
    chosen: list[torch.device] = []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("SLURM_LOCALID", slurm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    if index is None:
        refused(lambda: distributed.init_process_group("cuda"), f"local rank {local_rank}", f"at most {count} process")
    else:
        assert distributed.init_process_group("cuda") == torch.device("cuda", index) == chosen[0]
    assert distributed.init_process_group("cpu") == torch.device("cpu")


def test_a_gpu_that_another_process_holds_is_one_line(monkeypatch):
    busy = mock.Mock(side_effect=RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", busy)
    says = ("GPU 0 cannot be used (CUDA error", "busy or unavailable); nvidia-smi", "CUDA_VISIBLE_DEVICES")
    refused(lambda: distributed.init_process_group("auto"), *says)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES=0"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab12"}, "GPU-ab12"),
        ({"SLURM_GPUS_ON_NODE": "8"}, "SLURM_GPUS_ON_NODE=8"),
        ({"SLURM_JOB_GPUS": "0"}, "SLURM_JOB_GPUS=0"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": "2"}, "SLURM_GPUS_ON_NODE=2"),
        ({}, ""),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_GPUS_ON_NODE": "0"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "8"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1", "SLURM_JOB_GPUS": "0,1"}, ""),
    ],
)
def test_a_job_with_gpus_that_torch_cannot_use_is_refused(monkeypatch, variables, named):
    no_driver = RuntimeError("Found no NVIDIA driver. Please install one.\nmore")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", mock.Mock(side_effect=no_driver))
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if named:
        reason = "(Found no NVIDIA driver);"
        refused(lambda: distributed.init_process_group("auto"), named, reason, "--nv", "set DEVICE cpu")
        refused(lambda: distributed.init_process_group("cuda"), named, "set DEVICE cpu")
        refused(lambda: fine_tuning.join("cuda"), named, "set MODEL.DEVICE cpu")
    else:
        assert distributed.init_process_group("auto") == fine_tuning.join("cuda") == torch.device("cpu")
        refused(lambda: distributed.init_process_group("cuda"), "DEVICE is cuda", "no CUDA device")
    assert distributed.init_process_group("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("address", "rank", "says"),
    [*(("node7.invalid", rank, "export a MASTER_ADDR") for rank in "01"), ("127.0.0.1", "0", "1/2 clients")],
)
def test_ranks_that_cannot_meet_end(monkeypatch: pytest.MonkeyPatch, address: str, rank: str, says: str):
    """This happens at once if the address is wrong, and after some minutes if a rank is missing."""
    for name, value in {"MASTER_ADDR": address, "MASTER_PORT": "0", "WORLD_SIZE": "2", "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    refused(lambda: distributed.init_process_group("cpu", rendezvous_s=1.0), f"{address}:0", says)


def test_three_ranks_exchange_and_agree():
    run_ranks(_on_three_ranks, 3)


def _on_three_ranks() -> None:
    for total, num_keys in ((3, 1), (6, 3), (12, 2)):
        _shuffle(total, num_keys)
    _gather()
    assert distributed.mean_(torch.tensor([float(distributed.rank())])).item() == 1
    _each_rank_its_own_way()
    _rank_0_decides()
    _gradients_are_views_of_the_exchanged_buffers()


def _gradients_are_views_of_the_exchanged_buffers() -> None:
    """Gradients equal DDP's default ones to the bit, also of micro-batches, and have no memory of their own."""
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    ours = distributed.data_parallel(networks[0])
    default = DistributedDataParallel(networks[1])
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(distributed.rank()))
    for _ in range(2):
        for module in (ours, default):
            module.zero_grad()
            for part, is_last in ((images[:2], False), (images[2:], True)):
                with distributed.average_gradients(module, is_last):
                    module(part).square().mean().backward()
        pairs = zip(ours.parameters(), default.parameters(), strict=True)
        assert all(torch.equal(cast(Tensor, a.grad), cast(Tensor, b.grad)) for a, b in pairs)
    owned = {cast(Tensor, parameter.grad).untyped_storage().data_ptr() for parameter in ours.parameters()}
    assert len(owned) == 1 and all(cast(Tensor, p.grad)._base is not None for p in ours.parameters())


def _shuffle(total: int, num_keys: int) -> None:
    everything = torch.arange(num_keys * total, dtype=torch.uint8).view(num_keys, total, 1)
    order = torch.randperm(num_keys * total, generator=torch.Generator().manual_seed(5))
    shuffle = BatchShuffle(order, num_keys)
    rows = everything[:, distributed.rank_slice(total)].flatten(0, 1)
    received = shuffle.shuffle(rows)
    assert torch.equal(received, everything.flatten(0, 1)[order[distributed.rank_slice(num_keys * total)]])
    assert torch.equal(shuffle.unshuffle([received.float() * 2]).flatten(0, 1), rows.float() * 2)


def _gather() -> None:
    rank = distributed.rank()
    everything = torch.arange(6.0)[:, None].repeat(1, 3)
    rows = everything[distributed.rank_slice(6)].clone().requires_grad_()
    gathered = distributed.gather(rows, with_grad=True)
    assert torch.equal(gathered, everything)
    gradients: list[torch.Tensor] = []
    gathered.register_hook(gradients.append)
    # Each rank's loss weighs every row by (rank + 1); the gradient of a row is the sum over ranks.
    (torch.full_like(everything, rank + 1) * gathered).sum().backward()
    assert torch.equal(gradients[0], torch.full_like(gathered, rank + 1))  # autograd's tensor is not modified
    assert rows.grad is not None and torch.equal(rows.grad, torch.full_like(rows, 1 + 2 + 3))
    assert torch.equal(distributed.gather_uneven(everything[:rank]), everything[[0, 0, 1]])


def _raise(error: Exception) -> NoReturn:
    raise error


def _each_rank_its_own_way() -> None:
    def read() -> int:
        return 7 if distributed.rank() == 0 else _raise(UserError("no file at x"))

    with pytest.raises(UserError, match=r"^ranks 1, 2 of 3: no file at x; do all machines see the same files\?$"):
        distributed.on_every_rank(read)
    assert distributed.on_every_rank(distributed.rank) == distributed.rank()
    with pytest.raises(UserError, match=r"^another config$"):
        distributed.on_every_rank(lambda: _raise(UserError("another config")))
    assert distributed.gather_objects(str(distributed.rank())) == ["0", "1", "2"]
    distributed.check_agreement((7, "abc"), "the checkpoint")
    step = (7, "abc") if distributed.rank() == 0 else (6, "abc")
    with pytest.raises(UserError, match=r"the checkpoint differs .* \(7, 'abc'\) on rank 0, \(6, 'abc'\) on rank 1"):
        distributed.check_agreement(step, "the checkpoint")


def _rank_0_decides() -> None:
    assert distributed.on_first_rank(lambda: f"rank {distributed.rank()}") == "rank 0"
    with pytest.raises(UserError, match="refused by rank 0"):
        distributed.on_first_rank(lambda: _raise(UserError(f"refused by rank {distributed.rank()}")))
    with pytest.raises(OSError if distributed.rank() == 0 else UserError, match="the disk"):
        distributed.on_first_rank(lambda: _raise(OSError("the disk")))


def test_a_single_process_keeps_its_rows_in_place():
    rows = torch.ones(3, 2)
    assert distributed.gather_uneven(rows) is rows


def test_the_digest_of_the_code_covers_defaults_in_yaml(monkeypatch: pytest.MonkeyPatch):
    before = distributed.compute_code_digest()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "keys.yaml"))
    assert distributed.compute_code_digest() != before
