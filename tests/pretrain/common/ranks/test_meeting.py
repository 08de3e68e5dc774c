"""Ranks wait for one that works alone, whatever a collective's time-out is, and not for one that is lost."""

import datetime
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pretrain.common import distributed
from pretrain.common.errors import ProcessLost
from pretrain.common.ranks import process_group
from pretrain.common.ranks.agreement import on_first_rank
from pretrain.common.ranks.meeting import heartbeat, meet
from pretrain.common.ranks.process_group import enter_process_group
from tests.pretrain.ranks import call_on_ranks


def _wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_text()


def _rank_0_works_alone(folder: Path) -> None:
    """Let rank 0 work until the other ranks, which wait for it, have handled a signal that comes meanwhile."""
    dist.distributed_c10d._get_default_group().set_timeout(datetime.timedelta(seconds=1))
    rank = distributed.rank()
    handled = folder / f"handled{rank}"
    signal.signal(signal.SIGUSR1, lambda *_: handled.write_text(f"rank {rank}"))
    processes = dict(distributed.gather_objects((rank, os.getpid())))

    def work() -> list[str]:
        time.sleep(2)  # the others are in the meeting, and a collective would have timed out
        for other in (1, 2):
            os.kill(processes[other], signal.SIGUSR1)
        return [_wait_for(folder / f"handled{other}") for other in (1, 2)]

    assert on_first_rank(work) == ["rank 1", "rank 2"]


def test_the_others_handle_signals_while_rank_0_works_longer_than_a_collective_may(tmp_path: Path):
    call_on_ranks(_rank_0_works_alone, 3, tmp_path)


def _one_rank_is_lost(folder: Path) -> None:
    done = folder / "done"
    if distributed.rank() == 0:
        with pytest.raises(ProcessLost, match=r"^rank 1 of 2 has ended or hangs: no sign of life for 1 s;"):
            meet(poll_s=0.1, lost_after_s=1.0)
        done.touch()
    else:
        _wait_for(done)
        meet()  # rank 0 has come to this one


def test_a_rank_without_heartbeat_is_named(tmp_path: Path):
    call_on_ranks(_one_rank_is_lost, 2, tmp_path)


def _one_rank_is_slow() -> None:
    store = dist.distributed_c10d._get_default_store()
    with heartbeat(beat_s=0.1):
        if distributed.rank() == 1:
            while store.add("heartbeat/1", 0) < 60:
                time.sleep(0.05)
        meet(poll_s=0.1, lost_after_s=5.0)
        meet()
    assert store.num_keys() < 20  # keys of earlier meetings are removed


def test_a_rank_with_heartbeat_is_waited_for():
    call_on_ranks(_one_rank_is_slow, 2)


def _a_collective_hangs(folder: Path) -> None:
    process_group.STEP_TIMEOUT_S = 1.0
    process_group.shorten_timeout()
    if distributed.rank() == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            dist.all_reduce(torch.ones(1))
        (folder / "ended").touch()
        os._exit(0)  # a group with a failed collective cannot be left
    _wait_for(folder / "ended")
    os._exit(0)


def test_after_the_first_step_a_collective_that_hangs_ends_soon(tmp_path: Path):
    call_on_ranks(_a_collective_hangs, 2, tmp_path)
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("size", "variables", "expected"),
    [
        ("1", {}, None),
        ("2", {}, "run/nccl_trace_rank_"),
        ("2", {"TORCH_FR_DUMP_TEMP_FILE": "/mine"}, "/mine"),
        ("2", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}, None),
    ],
)
def test_collectives_that_time_out_are_recorded_in_the_run_folder(monkeypatch, tmp_path, size, variables, expected):
    names = ("FR_BUFFER_SIZE", "NCCL_DUMP_ON_TIMEOUT", "FR_DUMP_TEMP_FILE", "NCCL_DEBUG_INFO_TEMP_FILE")
    for name in names:
        monkeypatch.setenv(f"TORCH_{name}", "")  # so that its absence is restored
        monkeypatch.delenv(f"TORCH_{name}")
    for name, value in {"WORLD_SIZE": size, **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with enter_process_group("run", lambda: None):
        file = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
        assert file == (str(tmp_path / expected) if expected else None)  # an absolute path stays
        is_recorded = os.environ.get("TORCH_FR_BUFFER_SIZE") == "2000"
        assert is_recorded == (os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1") == (size == "2")
