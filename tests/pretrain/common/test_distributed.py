"""Ranks: what they exchange and agree on."""

from typing import NoReturn, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pretrain.common import distributed
from pretrain.common.errors import UserError
from pretrain.common.ranks.agreement import check_agreement, on_every_rank, on_first_rank
from pretrain.model.momentum_encoder import BatchShuffle
from tests.pretrain.ranks import call_on_ranks


def test_three_ranks_exchange_and_agree():
    call_on_ranks(_on_three_ranks, 3)


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
        on_every_rank(read)
    assert on_every_rank(distributed.rank) == distributed.rank()
    with pytest.raises(UserError, match=r"^another config$"):
        on_every_rank(lambda: _raise(UserError("another config")))
    assert distributed.gather_objects(str(distributed.rank())) == ["0", "1", "2"]
    check_agreement((7, "abc"), "the checkpoint")
    step = (7, "abc") if distributed.rank() == 0 else (6, "abc")
    with pytest.raises(UserError, match=r"the checkpoint differs .* \(7, 'abc'\) on rank 0, \(6, 'abc'\) on rank 1"):
        check_agreement(step, "the checkpoint")


def _rank_0_decides() -> None:
    assert on_first_rank(lambda: f"rank {distributed.rank()}") == "rank 0"
    with pytest.raises(UserError, match="refused by rank 0"):
        on_first_rank(lambda: _raise(UserError(f"refused by rank {distributed.rank()}")))
    with pytest.raises(OSError if distributed.rank() == 0 else UserError, match="the disk"):
        on_first_rank(lambda: _raise(OSError("the disk")))


def test_a_single_process_keeps_its_rows_in_place():
    rows = torch.ones(3, 2)
    assert distributed.gather_uneven(rows) is rows
