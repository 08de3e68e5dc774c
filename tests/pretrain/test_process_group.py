"""Which device a rank gets, and what it says when there are too few."""

import pytest
import torch

from pretrain import distributed
from pretrain.common import process_group
from pretrain.common.errors import UserError
from tests.pretrain.ranks import run_ranks
from transfer.distributed import join


@pytest.fixture
def gpus(monkeypatch):
    """Pretends to so many GPUs; returns the devices chosen."""
    chosen = []

    def pretend(count: int, local_rank: int) -> list:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


@pytest.mark.parametrize(("count", "local_rank", "index"), [(4, 3, 3), (1, 0, 0), (1, 3, 0)])
def test_a_rank_takes_its_gpu_or_the_only_one_it_sees(gpus, count, local_rank, index):
    chosen = gpus(count, local_rank)
    assert process_group.join(True) == torch.device("cuda", index) == chosen[0]
    assert join("cuda") == torch.device("cuda", index)
    assert join("cpu") == process_group.join(False) == torch.device("cpu")


def test_more_ranks_than_gpus(gpus):
    chosen = gpus(2, 2)
    with pytest.raises(UserError, match="local rank 2 but 2 GPUs are visible; start at most 2 processes"):
        process_group.join(True)
    assert not chosen


def test_a_gpu_is_not_chosen_by_number():
    with pytest.raises(UserError, match=r"MODEL\.DEVICE is cuda:1; say cuda, and choose by CUDA_VISIBLE_DEVICES=1"):
        join("cuda:1")


def _rank_0_decides() -> None:
    assert process_group.on_first_rank(lambda: f"rank {distributed.rank()}") == "rank 0"

    def refuse() -> None:
        raise UserError(f"refused by rank {distributed.rank()}")

    def fail() -> None:
        raise OSError("the disk")

    with pytest.raises(UserError, match="refused by rank 0"):
        process_group.on_first_rank(refuse)
    expected = OSError if distributed.rank() == 0 else UserError
    with pytest.raises(expected, match="the disk"):
        process_group.on_first_rank(fail)
    process_group.refuse_disagreement((7, "abc"), "the checkpoint")
    mine = (7, "abc") if distributed.rank() == 0 else (6, "abc")
    with pytest.raises(UserError, match=r"the checkpoint differs .* \(7, 'abc'\) on rank 0, \(6, 'abc'\) on rank 1"):
        process_group.refuse_disagreement(mine, "the checkpoint")


def test_rank_0_decides_and_all_ranks_hear_its_error():
    run_ranks(_rank_0_decides, 2)


def test_a_single_process_decides_for_itself():
    assert process_group.on_first_rank(lambda: 5) == 5
    process_group.refuse_disagreement(object(), "anything")
