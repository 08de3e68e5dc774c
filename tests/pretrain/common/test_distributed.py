"""Ranks: what they exchange, agree on and wait for, and which device each gets."""

import datetime
import os
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from pretrain.common import distributed
from pretrain.common.batch_split import slice_bounds
from pretrain.common.errors import UserError
from pretrain.model.siamese import ExchangePlan
from tests.errors import refused
from tests.pretrain.ranks import run_ranks


@pytest.mark.parametrize(
    ("count", "local_rank", "slurm", "index"),
    [
        *((4, 3, "3", 3), (4, 3, "", 3), (1, 0, "", 0), (1, 3, "3", 0)),
        *((2, 2, "2", None), (1, 1, "", None), (1, 1, "0", None)),
    ],
)
def test_a_rank_takes_its_gpu_if_there_is_one(monkeypatch, count, local_rank, slurm, index):
    """(1, 3, "3"): SLURM shows each task only its own GPU; (1, 1, "0"): torchrun is the one task of a machine."""
    chosen: list[torch.device] = []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("SLURM_LOCALID", slurm)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    if index is None:
        refused(lambda: distributed.join(True), f"local rank {local_rank}", f"at most {count} process")
    else:
        assert distributed.join(True) == torch.device("cuda", index) == chosen[0]
    assert distributed.join(False) == torch.device("cpu")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_cannot_meet_end_at_once(monkeypatch: pytest.MonkeyPatch, rank: str):
    values = {"MASTER_ADDR": "node7.invalid", "MASTER_PORT": "29999", "WORLD_SIZE": "2", "RANK": rank}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    refused(lambda: distributed.join(False), "cannot meet at node7.invalid:29999", "export a MASTER_ADDR")


def test_a_missing_rank_is_awaited_for_minutes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "RENDEZVOUS_S", 1.0)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    refused(lambda: distributed.join(False), "cannot meet at 127.0.0.1:0", "1/2 clients")


def test_three_ranks_exchange_agree_and_take_turns(tmp_path):
    run_ranks(_on_three_ranks, 3, tmp_path / "turns")
    assert (tmp_path / "turns").read_text() == "021"


def _on_three_ranks(turns: Path) -> None:
    for total, many in ((4, 1), (5, 3), (7, 2), (1, 2)):
        _exchange(total, many)
    for total in (4, 5):
        _gather(total)
    assert distributed.mean_(torch.tensor([float(distributed.rank())])).item() == 1
    _each_rank_its_own_way()
    _rank_0_decides()
    _take_turns(turns)


def _exchange(total: int, many: int) -> None:
    start, stop = slice_bounds(total, distributed.rank(), distributed.world_size())
    everything = torch.arange(many * total, dtype=torch.uint8).view(many, total, 1)
    order = torch.randperm(many * total, generator=torch.Generator().manual_seed(5))
    plan = ExchangePlan(order, many, total)
    share = everything[:, start:stop].flatten(0, 1)
    received = plan.scatter(share)
    assert torch.equal(received, everything.flatten(0, 1)[order[many * start : many * stop]])
    assert torch.equal(plan.collect(received.float() * 2), share.float() * 2)


def _gather(total: int) -> None:
    start, stop = slice_bounds(total, distributed.rank(), distributed.world_size())
    everything = torch.arange(float(total))[:, None].repeat(1, 3)
    share = everything[start:stop].clone().requires_grad_()
    gathered = distributed.gather(share, distributed.slice_sizes(total), with_grad=True)
    assert torch.equal(gathered, everything)
    gradients: list[torch.Tensor] = []
    gathered.register_hook(gradients.append)
    # Each rank's loss weighs every row by (rank + 1); the gradient of a row is the sum over ranks.
    (torch.full_like(everything, distributed.rank() + 1) * gathered).sum().backward()
    assert torch.equal(gradients[0], torch.full_like(gathered, distributed.rank() + 1))  # autograd's own is left alone
    assert torch.equal(share.grad, torch.full_like(share, 1 + 2 + 3))


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


def _take_turns(path: Path) -> None:
    """Each takes longer than a collective may; an error in the first leaves no rank waiting."""
    rank = distributed.rank()
    os.environ["LOCAL_RANK"] = str((0, 1, 0)[rank])  # ranks 0 and 1 on one machine, 2 on another
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5))  # of a collective
    try:
        with distributed.in_turns(), open(path, "a") as file:
            file.write(str(rank))
            time.sleep(1.5 if rank == 0 else 0)
            if rank == 0:
                raise UserError("refused")
    except UserError:
        assert rank == 0
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=60))
    dist.barrier()
