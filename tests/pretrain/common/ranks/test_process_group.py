"""How a rank joins the process group, which device it gets, and when it leaves."""

import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.ranks import process_group
from pretrain.common.ranks.process_group import enter_process_group, init_process_group
from pretrain.common.run.stage import enter_run_folder
from pretrain.common.run.state import RunContext
from tests.errors import refused
from tests.pretrain.ranks import call_on_ranks
from transfer import distributed as fine_tuning

ROOT = Path(__file__).parents[4]


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
        refused(lambda: init_process_group("cuda"), f"local rank {local_rank}", f"at most {count} process")
    else:
        assert init_process_group("cuda") == torch.device("cuda", index) == chosen[0]
    assert init_process_group("cpu") == torch.device("cpu")


def test_a_gpu_that_another_process_holds_is_one_line(monkeypatch):
    busy = mock.Mock(side_effect=RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", busy)
    says = ("GPU 0 cannot be used (CUDA error", "busy or unavailable); nvidia-smi", "CUDA_VISIBLE_DEVICES")
    refused(lambda: init_process_group("auto"), *says)


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
        refused(lambda: init_process_group("auto"), named, reason, "--nv", "set DEVICE cpu")
        refused(lambda: init_process_group("cuda"), named, "set DEVICE cpu")
        refused(lambda: fine_tuning.join("cuda"), named, "set MODEL.DEVICE cpu")
    else:
        assert init_process_group("auto") == fine_tuning.join("cuda") == torch.device("cpu")
        refused(lambda: init_process_group("cuda"), "DEVICE is cuda", "no CUDA device")
    assert init_process_group("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("address", "rank", "says"),
    [*(("node7.invalid", rank, "export a MASTER_ADDR") for rank in "01"), ("127.0.0.1", "0", "1/2 clients")],
)
def test_ranks_that_cannot_meet_end(monkeypatch: pytest.MonkeyPatch, address: str, rank: str, says: str):
    """This happens at once if the address is wrong, and after some minutes if a rank is missing."""
    for name, value in {"MASTER_ADDR": address, "MASTER_PORT": "0", "WORLD_SIZE": "2", "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    refused(lambda: init_process_group("cpu", rendezvous_s=1.0), f"{address}:0", says)


def test_the_digest_of_the_code_covers_defaults_in_yaml(monkeypatch: pytest.MonkeyPatch):
    before = process_group.compute_code_digest()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "keys.yaml"))
    assert process_group.compute_code_digest() != before


def _refuse() -> None:
    assert dist.get_rank() == 0
    raise UserError("used already")


def _fail(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"), enter_process_group("run", init_process_group, "cpu"):
        raise RuntimeError("broken")
    assert dist.is_initialized()  # until exit; otherwise, the other rank would fail before this one has reported why

    with pytest.raises(UserError, match="used already"), enter_run_folder("test", folder, RunContext(), check=_refuse):
        pytest.fail("entered")
    with enter_process_group("run", init_process_group, "cpu"), enter_run_folder("test", folder, RunContext()):
        pass
    assert dist.is_initialized()  # it was not joined there


def _stop(folder: Path) -> None:
    with pytest.raises(Stopped), enter_process_group("run", init_process_group, "cpu"):
        dist.barrier()
        if dist.get_rank() == 0:  # it is still writing when the other rank is ready to leave
            time.sleep(0.5)
            (folder / "written").write_text("whole")
        raise Stopped("SIGTERM")
    assert (folder / "written").read_text() == "whole" and not dist.is_initialized()


def test_ranks_leave_together(tmp_path: Path) -> None:
    call_on_ranks(_fail, 2, tmp_path, device=None)
    call_on_ranks(_stop, 2, tmp_path, device=None)


HANGING = """
import time, torch.distributed as dist
from pretrain.common.command_line import run_command_line
from pretrain.common.errors import UserError
from pretrain.common.ranks.process_group import enter_process_group
dist.get_backend = lambda: "nccl"
dist.destroy_process_group = dist.distributed_c10d._abort_process_group = lambda: time.sleep(3600)

def main(_):
    with enter_process_group("run", dist.init_process_group, "gloo", store=dist.HashStore(), rank=0, world_size=1):
        print("the last line", end="")
        raise {error}("broken")

run_command_line(main)
"""


@pytest.mark.parametrize(("error", "status"), [("UserError", 2), ("RuntimeError", 1)])
def test_a_failed_rank_ends_although_nccl_would_wait_for_the_others(error: str, status: int) -> None:
    command = [sys.executable, "-c", HANGING.format(error=error)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.returncode == status and ended.stdout.endswith("the last line")
    assert ended.stderr.splitlines()[-1].endswith("error: broken" if status == 2 else "RuntimeError: broken")
