"""Which device a rank gets, and what it says when there are too few."""

import warnings

import pytest
import torch
import torch.distributed as dist

from pretrain.common import distributed, interrupt
from pretrain.common.copies import AsyncHostCopy
from pretrain.common.errors import UserError
from tests.errors import refused
from tests.pretrain.ranks import run_ranks


@pytest.fixture
def gpus(monkeypatch):
    """Pretends to so many GPUs; returns the devices chosen."""
    chosen = []

    def pretend(count: int, local_rank: int, slurm_local_id: int | None = None) -> list:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.delenv("SLURM_LOCALID", raising=False)
        if slurm_local_id is not None:
            monkeypatch.setenv("SLURM_LOCALID", str(slurm_local_id))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


@pytest.mark.parametrize(
    ("count", "local_rank", "slurm", "index"), [(4, 3, 3, 3), (4, 3, None, 3), (1, 0, None, 0), (1, 3, 3, 0)]
)
def test_a_rank_takes_its_gpu(gpus, count, local_rank, slurm, index):
    """In the last row, SLURM shows each task only its own GPU."""
    chosen = gpus(count, local_rank, slurm)
    assert distributed.join(True) == torch.device("cuda", index) == chosen[0]
    assert distributed.join(False) == torch.device("cpu")


@pytest.mark.parametrize(("count", "local_rank", "slurm"), [(2, 2, 2), (1, 1, None), (1, 1, 0)])
def test_more_ranks_than_gpus(gpus, count, local_rank, slurm):
    """In the last row, torchrun is the one task of a machine."""
    chosen = gpus(count, local_rank, slurm)
    refused(lambda: distributed.join(True), f"local rank {local_rank}", f"at most {count} process")
    assert not chosen


def _each_rank_its_own_way() -> None:
    def read() -> int:
        if distributed.rank() > 0:
            raise UserError("no file at x")
        return 7

    with pytest.raises(UserError, match=r"^ranks 1, 2 of 3: no file at x; do all machines see the same files\?$"):
        distributed.on_every_rank(read)
    assert distributed.on_every_rank(distributed.rank) == distributed.rank()
    assert distributed.gather_objects(str(distributed.rank())) == ["0", "1", "2"]
    with pytest.raises(UserError, match=r"^another config$"):
        distributed.on_every_rank(_refuse)


def _refuse() -> None:
    raise UserError("another config")


def _rank_0_decides() -> None:
    assert distributed.on_first_rank(lambda: f"rank {distributed.rank()}") == "rank 0"

    def refuse() -> None:
        raise UserError(f"refused by rank {distributed.rank()}")

    def fail() -> None:
        raise OSError("the disk")

    with pytest.raises(UserError, match="refused by rank 0"):
        distributed.on_first_rank(refuse)
    expected = OSError if distributed.rank() == 0 else UserError
    with pytest.raises(expected, match="the disk"):
        distributed.on_first_rank(fail)
    distributed.check_agreement((7, "abc"), "the checkpoint")
    mine = (7, "abc") if distributed.rank() == 0 else (6, "abc")
    with pytest.raises(UserError, match=r"the checkpoint differs .* \(7, 'abc'\) on rank 0, \(6, 'abc'\) on rank 1"):
        distributed.check_agreement(mine, "the checkpoint")


def _average_gradients() -> None:
    module = torch.nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = distributed.data_parallel(module, torch.device("cpu"))
    wrapped(torch.full((1, 1), float(distributed.rank()))).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.item() == 1  # of 0, 1 and 2


def _in_every_way() -> None:
    _each_rank_its_own_way()
    _rank_0_decides()
    _average_gradients()


def test_ranks_agree_on_results_errors_and_gradients():
    run_ranks(_in_every_way, 3)


def test_a_single_process_decides_for_itself():
    assert distributed.on_first_rank(lambda: 5) == distributed.on_every_rank(lambda: 5) == 5
    assert distributed.gather_objects(3) == [3]
    distributed.check_agreement(object(), "anything")
    module = torch.nn.Linear(1, 1)
    assert distributed.data_parallel(module, torch.device("cpu")) is module


def test_a_request_to_stop_is_read_without_waiting_for_the_last_poll(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda asked: asked)
    stop = distributed.AgreedStop(torch.device("cpu"))
    monkeypatch.setattr(interrupt, "stop_requested", lambda: "preempted")
    with monkeypatch.context() as patch:
        patch.setattr(AsyncHostCopy, "read", lambda self: pytest.fail("waited for the device"))
        assert stop.poll() == ""
    monkeypatch.setattr(interrupt, "stop_requested", lambda: "")
    assert stop.poll() == "a signal to another process of this run"
