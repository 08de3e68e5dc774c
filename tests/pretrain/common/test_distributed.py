import datetime
import os
import time

import torch
import torch.distributed as dist

from pretrain.common import distributed
from pretrain.common.batch_split import slice_bounds
from pretrain.common.errors import UserError
from pretrain.model.siamese import ExchangePlan
from tests.pretrain.ranks import run_ranks


def test_slices_cover_everything_once():
    for total in range(12):
        for ranks in (1, 2, 3, 5):
            bounds = [slice_bounds(total, r, ranks) for r in range(ranks)]
            assert [i for start, stop in bounds for i in range(start, stop)] == list(range(total))
            sizes = [stop - start for start, stop in bounds]
            assert max(sizes) - min(sizes) <= 1


def test_a_single_process_is_the_identity():
    x = torch.randn(6, 2)
    assert distributed.gather(x, [6]) is x
    order = torch.randperm(6)
    plan = ExchangePlan(order, 2, 3)
    assert torch.equal(plan.scatter(x), x[order])
    assert torch.equal(plan.collect(plan.scatter(x)), x)


def _exchange(total: int, many: int) -> None:
    rank, ranks = distributed.rank(), distributed.world_size()
    start, stop = slice_bounds(total, rank, ranks)
    everything = torch.arange(many * total, dtype=torch.uint8).view(many, total, 1)
    order = torch.randperm(many * total, generator=torch.Generator().manual_seed(5))
    plan = ExchangePlan(order, many, total)
    mine = everything[:, start:stop].flatten(0, 1)
    got = plan.scatter(mine)
    assert torch.equal(got, everything.flatten(0, 1)[order[many * start : many * stop]])
    assert torch.equal(plan.collect(got.float() * 2), mine.float() * 2)


def _gather(total: int) -> None:
    start, stop = slice_bounds(total, distributed.rank(), distributed.world_size())
    everything = torch.arange(float(total))[:, None].repeat(1, 3)
    mine = everything[start:stop].clone().requires_grad_()
    got = distributed.gather(mine, distributed.slice_sizes(total), with_grad=True)
    assert torch.equal(got, everything)
    seen: list[torch.Tensor] = []
    got.register_hook(seen.append)
    # Each rank's loss weighs every row by (rank + 1); the gradient of a row is the sum over ranks.
    (torch.full_like(everything, distributed.rank() + 1) * got).sum().backward()
    assert torch.equal(seen[0], torch.full_like(got, distributed.rank() + 1))  # autograd's own tensor is left alone
    assert torch.equal(mine.grad, torch.full_like(mine, sum(r + 1 for r in range(distributed.world_size()))))


def _one_after_another(path: str) -> None:
    os.environ["LOCAL_RANK"] = str((0, 1, 0)[distributed.rank()])  # ranks 0 and 1 on one machine, 2 on another
    with distributed.in_turns(), open(path, "a") as file:
        file.write(str(distributed.rank()))


def test_ranks_take_turns(tmp_path):
    run_ranks(_one_after_another, 3, str(tmp_path / "turns"))
    assert (tmp_path / "turns").read_text() == "021"
    with distributed.in_turns():  # a single process
        pass


def _a_long_turn() -> None:
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5))  # of a collective
    with distributed.in_turns():
        time.sleep(1.5 if distributed.rank() == 0 else 0)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=60))


def test_a_turn_may_take_longer_than_a_collective():
    run_ranks(_a_long_turn, 2)


def _an_error_in_turn() -> None:
    os.environ["LOCAL_RANK"] = str(distributed.rank())
    try:
        with distributed.in_turns():
            if distributed.rank() == 0:
                raise UserError("refused")
    except UserError:
        assert distributed.rank() == 0
    dist.barrier()


def test_an_error_in_its_turn_leaves_no_rank_waiting():
    run_ranks(_an_error_in_turn, 2)


def _all_cases() -> None:
    for total, many in ((4, 1), (5, 3), (7, 2), (1, 2)):
        _exchange(total, many)
    for total in (4, 5):
        _gather(total)
    assert distributed.mean_(torch.tensor([float(distributed.rank())])).item() == (distributed.world_size() - 1) / 2


def test_three_ranks_exchange_and_gather_uneven_shares():
    run_ranks(_all_cases, 3)
